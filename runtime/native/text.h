// Turns tokens' bytes into text as they come: never half a UTF-8 character, never a part of a stop string. Bytes that are no
// UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 15, section 3.9), as Python's "replace" has it.
#pragma once

#include <string>
#include <vector>

namespace sidecar {

class TextStream {
  public:
    explicit TextStream(std::vector<std::string> stop = {});

    // Adds a token's bytes; returns the text that can be shown now. Sets stopped() when a stop string is complete.
    std::string push(const std::string & piece);

    // What was held back, at the end of a text that no stop string ended; without the character that the end has `cut`.
    std::string finish(bool cut);

    bool stopped() const { return stopped_; }

    // Bytes of all whole characters so far, shown or held: where the text of the last token pushed ends, were it all shown.
    size_t n_whole() const { return n_released_ + held_.size(); }

  private:
    void add(unsigned char byte);
    std::string release(size_t n);

    std::vector<std::string> stop_;
    std::string held_;         // whole characters that may not be shown yet
    std::string character_;    // of one that is not whole yet
    size_t n_missing_ = 0;     // bytes of it
    size_t n_released_ = 0;
    bool stopped_ = false;
};

}  // namespace sidecar
