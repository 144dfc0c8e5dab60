// A text: rounds one after another until it ends. What it has emitted, what of that can be shown, and what it cost.
//
// Order of calls: begin() takes the first token, which the prompt paid for; rounds() emits more until it returns nothing and
// wants_plain_context() is false, too: the text has ended, and finish() has what was held back. A round that needs something from
// outside first does nothing but say so: the caller gives it and calls again. Python is entered once a round, and not even that
// where nobody waits for the pieces: after a decode the weights have pushed everything else out of the processor's caches, and
// each call costs its misses.
//
// One thread at a time calls all this; any other may meanwhile read tokens(), chosen(), text(), pieces() and counts().
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "pacing.h"
#include "session.h"
#include "text.h"
#include "turns.h"

namespace sidecar {

struct Counts {
    int32_t n_rounds = 0, n_drafted = 0, n_accepted = 0;
    std::vector<int32_t> drafted_at, accepted_at;  // by position
    int32_t n_ngram_rounds = 0, n_ngram_drafted = 0, n_ngram_accepted = 0;  // of these: what the look-up found
    int32_t n_tokens = 0;               // of the text
    int32_t n_known = 0, n_chosen = 0;  // of the tokens chosen, the end of text included, how many the head had a row for
    double draft_s = 0.0, verify_s = 0.0, accept_s = 0.0;
    Traffic traffic;  // of the rounds
};

// Where an emitted token came from.
enum class Origin : uint8_t {
    plain,      // the target's own, nothing having been drafted in its place
    drafted,    // the drafter's, which stood
    ngram,      // the same of what the look-up found
    corrected,  // the target's own, in place of a draft that did not stand
};

// An emitted token with its text: all characters that it completes, so that those of all tokens are the text.
struct Piece {
    std::string text;
    llama_token token;
    Origin origin;
};

class Generation {
  public:
    enum class End { none, stop, length, cancelled };

    struct Limits {
        int32_t n_ctx;  // positions: llama.cpp's contexts may hold more
        int32_t max_tokens, depth;
        bool ignore_eog;
        std::vector<std::string> stop;
        std::unordered_map<llama_token, std::string> preserved;  // control tokens that the text has, and their bytes in it
    };

    // What it is given must outlive its last round; `pacing` may be null. The session is named anew each time, so that a text
    // that is kept keeps no session.
    Generation(Chooser & chooser, Pacing * pacing, Limits limits);

    // The text's first token; returns what of it can be shown. In the model's turn.
    std::string begin(Session & session, llama_token first);

    // One round, or as many as begin within `seconds`, in as many turns as Turns wants, the last of which the caller passes on; what
    // can be shown of them, which may be nothing yet. No value when the text has ended or the next round needs something first. Some
    // times a second `look` is called between two rounds, in the first one's turn, which it passes on. What it, the session, the
    // chooser or `pacing` throw leaves whole() as it then is, the turn having been passed.
    std::optional<std::string> rounds(Session & session, Turns & turns, double seconds, const std::function<void()> & look);

    // What was held back, once the text has ended.
    std::string finish();

    // Whether the next round would be cheaper in a context without rollback slots, which the session lacks: see
    // Session::set_plain_context.
    bool wants_plain_context() const { return wants_plain_context_; }
    End end() const { return end_; }
    bool whole() const { return whole_; }  // false after a round that failed: what the session holds is uncertain

    std::vector<llama_token> tokens() const;  // emitted
    std::vector<llama_token> chosen() const;  // emitted, and the token that ended the text
    std::string text() const;                 // what has been shown
    Counts counts() const;
    // The emitted tokens from the `from`th on, as far as all their text is shown; after finish() all of them, what a stop string has
    // cut off left out.
    std::vector<Piece> pieces(size_t from) const;

  private:
    std::optional<std::string> round(Session & session);
    void place(Session & session, bool plain);
    void compare(const Found & found, const std::vector<llama_token> & emitted);
    int32_t take(Session & session, const Round & round, Origin draft, std::string & shown);
    const std::string & piece(Session & session, llama_token token) const;

    Chooser & chooser_;
    Pacing * const pacing_;
    const Limits limits_;
    TextStream stream_;
    bool asked_for_context_ = false;
    bool whole_ = true;
    bool wants_plain_context_ = false;
    End end_ = End::none;

    mutable std::mutex mutex_;  // for what other threads read
    std::vector<llama_token> chosen_;  // the first counts_.n_tokens of them are text
    std::string text_;
    std::vector<Origin> origins_;    // (n_tokens)
    std::vector<size_t> text_ends_;  // (n_tokens): in bytes of the text
    bool finished_ = false;
    Counts counts_;
};

}  // namespace sidecar
