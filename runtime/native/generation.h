// A text: rounds one after another until it ends. What it has emitted, what of that can be shown, and what it cost.
//
// begin() takes the first token, which the prompt paid for; each round() then emits more. A round that needs something from
// outside first does nothing but say so (`needs()`): the caller gives it and calls again. Python is entered once a round and no
// more: after a decode the weights have pushed everything else out of the processor's caches, and each call costs its misses.
//
// One thread calls begin(), round() and finish(); any thread may read.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pacing.h"
#include "session.h"
#include "text.h"

namespace sidecar {

struct Counts {
    int32_t n_rounds = 0, n_drafted = 0, n_accepted = 0;
    std::vector<int32_t> drafted_at, accepted_at;  // by position
    int32_t n_known = 0, n_chosen = 0;  // of the tokens chosen, the end of text included, how many the head had a row for
    double draft_s = 0.0, verify_s = 0.0, accept_s = 0.0;
};

class Generation {
  public:
    enum class End { none, stop, length, cancelled };
    enum class Need {
        nothing,
        rows,           // the head has no rows for some of seen(): give it some
        plain_context,  // rounds without drafts would be cheaper in a context without rollback slots: see Session::set_plain_context
    };

    struct Limits {
        int32_t n_ctx;  // positions: llama.cpp's contexts may hold more
        int32_t max_tokens, depth;
        bool ignore_eog;
        std::vector<std::string> stop;
    };

    // All that it is given must outlive its last round; `pacing` may be null.
    Generation(Session & session, Chooser & chooser, Pacing * pacing, Limits limits);

    // Tokens of the prompt that are new to the session.
    void see(const std::vector<llama_token> & tokens);

    // The text's first token; returns what of it can be shown.
    std::string begin(llama_token first);

    // A round; what can be shown of it, which may be nothing yet. No value when the text has ended or the round needs something
    // first. In the model's turn, as begin().
    std::optional<std::string> round();

    // What was held back, once the text has ended.
    std::string finish();

    Need needs() const { return need_; }
    End end() const { return end_; }
    bool whole() const { return whole_; }  // false after a round that failed: what the session holds is uncertain

    // Tokens seen since the last call, for rows of the head.
    std::vector<llama_token> take_seen();

    std::vector<llama_token> tokens_from(size_t n) const;  // emitted, the first n left out
    std::vector<llama_token> chosen() const;               // emitted, and the token that ended the text
    std::string text() const;                              // what has been shown
    Counts counts() const;

  private:
    void place(bool plain);
    int32_t take(const std::vector<llama_token> & tokens, std::string & shown);

    Session & session_;
    Chooser & chooser_;
    Pacing * const pacing_;
    const Limits limits_;
    TextStream stream_;
    std::vector<llama_token> seen_;
    bool lacks_rows_ = false;  // for some of seen_
    bool asked_for_context_ = false;
    bool whole_ = true;
    Need need_ = Need::nothing;
    End end_ = End::none;

    mutable std::mutex mutex_;  // for what other threads read
    std::vector<llama_token> chosen_;
    size_t n_tokens_ = 0;  // of chosen_ that are text
    std::string text_;
    Counts counts_;
};

}  // namespace sidecar
