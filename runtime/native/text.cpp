#include "text.h"

#include <algorithm>

namespace sidecar {

namespace {

constexpr const char * replacement = "\xEF\xBF\xBD";  // U+FFFD

// How many bytes follow a character's first one; -1 where it cannot be one.
int n_following(unsigned char first) {
    if (first < 0x80) return 0;
    if (first >= 0xC2 && first <= 0xDF) return 1;
    if (first >= 0xE0 && first <= 0xEF) return 2;
    if (first >= 0xF0 && first <= 0xF4) return 3;
    return -1;
}

// Whether `byte` may come second: some would spell a shorter character, a surrogate, or one beyond U+10FFFF.
bool may_be_second(unsigned char first, unsigned char byte) {
    switch (first) {
        case 0xE0: return byte >= 0xA0 && byte <= 0xBF;
        case 0xED: return byte >= 0x80 && byte <= 0x9F;
        case 0xF0: return byte >= 0x90 && byte <= 0xBF;
        case 0xF4: return byte >= 0x80 && byte <= 0x8F;
        default: return byte >= 0x80 && byte <= 0xBF;
    }
}

// Length of the longest tail of `text` that is the beginning of `stop`, and not all of it.
size_t n_begun(const std::string & text, const std::string & stop) {
    for (size_t n = std::min(stop.size() - 1, text.size()); n > 0; --n) {
        if (text.compare(text.size() - n, n, stop, 0, n) == 0) return n;
    }
    return 0;
}

}  // namespace

TextStream::TextStream(std::vector<std::string> stop) : stop_(std::move(stop)) {
    stop_.erase(std::remove(stop_.begin(), stop_.end(), std::string()), stop_.end());
}

std::string TextStream::push(const std::string & piece) {
    for (const char byte : piece) add(static_cast<unsigned char>(byte));
    size_t n_begins = 0;
    size_t first_stop = std::string::npos;
    for (const std::string & stop : stop_) {
        first_stop = std::min(first_stop, held_.find(stop));
        n_begins = std::max(n_begins, n_begun(held_, stop));
    }
    stopped_ = first_stop != std::string::npos;
    return release(stopped_ ? first_stop : held_.size() - n_begins);
}

std::string TextStream::finish(bool cut) {
    if (stopped_) return {};
    if (!cut && n_missing_ > 0) held_ += replacement;
    return release(held_.size());
}

void TextStream::add(unsigned char byte) {
    if (n_missing_ > 0) {
        const bool fits = character_.size() == 1 ? may_be_second(static_cast<unsigned char>(character_[0]), byte)
                                                 : byte >= 0x80 && byte <= 0xBF;
        if (fits) {
            character_ += static_cast<char>(byte);
            if (--n_missing_ == 0) held_ += character_;
            return;
        }
        held_ += replacement;
        n_missing_ = 0;
    }
    const int n = n_following(byte);
    if (n < 0) {
        held_ += replacement;
    } else if (n == 0) {
        held_ += static_cast<char>(byte);
    } else {
        character_.assign(1, static_cast<char>(byte));
        n_missing_ = static_cast<size_t>(n);
    }
}

std::string TextStream::release(size_t n) {
    std::string text = held_.substr(0, n);
    held_.erase(0, n);
    n_released_ += text.size();
    return text;
}

}  // namespace sidecar
