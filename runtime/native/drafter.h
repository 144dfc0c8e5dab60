// A drafter guesses the next tokens. This header is the manual.
//
// It can change what a round costs, never what it says: accept.cpp decides from the target alone.
//
// Order of calls, for one sequence:
//   begin()                      an empty sequence, also after an earlier one
//   observe(...) once or more    the target has decoded these tokens and they stand: the prompt, piece by piece, then
//                                after each round its accepted rows; positions follow one another without a gap
//   propose(last, n, picker, out)        `last` is sampled but not decoded yet; its position is the number of observed tokens
//   observe(...)                 now begins with `last`, then the accepted drafts
//   go_back(...)                 the next token to observe is an earlier one again, and so may be those after it
// A drafter that fails throws LibraryError; the round is then lost and the session must begin anew.
//
// Adding one: one file in drafters/ with a Registered object; the stem is the kind's name in sidecars/kinds/.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "draft_vocab.h"
#include "llama_api.h"
#include "picker.h"
#include "target.h"

namespace sidecar {

class DraftContext;

class Drafter {
  public:
    virtual ~Drafter() = default;

    virtual void begin() = 0;

    // n tokens that stand at positions pos .. pos+n-1, and the target's hidden rows (n, n_embd for each of layers()) there.
    // Both are only valid during the call.
    virtual void observe(int32_t pos, const llama_token * tokens, const float * hidden, int32_t n) = 0;

    // Appends up to n guesses for the positions after `last` to `out`, as `picker` takes them; fewer, or none, is fine, but how many
    // must not depend on what was taken.
    virtual void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) = 0;

    // The layers of the target whose inputs a hidden row consists of, side by side; LAST_HIDDEN is what follows the last one.
    // Fixed from the start.
    virtual std::vector<int32_t> layers() const = 0;

    // The most guesses that one propose() makes.
    virtual int32_t max_depth() const { return INT32_MAX; }

    // Whether it attends to the target's own cache, which must then hold the standing positions and no more at propose().
    virtual bool reads_cache() const { return false; }

    // Its context, where it has one.
    virtual DraftContext * context() { return nullptr; }

    // Does now what it would otherwise do at the next propose() for the tokens it has observed.
    virtual void catch_up() {}

    // Of the tokens observed the first n stand, and the next to be observed is that of position n, the same as before: what was made
    // of the pair (hidden row n-1, token n) may stay. Costs no decode. `mark` is what mark() said when n were observed, or empty: a
    // drafter that needs one and has none begins anew.
    virtual void go_back(int32_t n, const std::vector<uint8_t> & mark) = 0;

    // What go_back() needs to come back to here, beside cells that it can drop by position: recurrent states. May compute.
    virtual std::vector<uint8_t> mark() { return {}; }

    // What begin() and observe() have made of the tokens so far, for restore(): changes nothing. Empty where it is not worth keeping.
    virtual std::vector<uint8_t> state() { return {}; }

    // Stands for begin() and observe(0, tokens ...): takes over a state() of the same kind behind these tokens. With an empty one a
    // drafter that reads hidden rows begins anew behind them, and its first drafts are worse; this default is for one that
    // reads none. Throws std::invalid_argument for bytes that are no state, LibraryError when llama.cpp refuses them.
    virtual void restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> & /*state*/) {
        begin();
        if (!tokens.empty()) observe(0, tokens.data(), nullptr, int32_t(tokens.size()));
    }
};

struct DrafterOptions {
    llama_context * ctx = nullptr;     // the drafter's own context; not owned, must outlive the drafter
    int32_t n_vocab = 0;               // the target's: no other id may be proposed
    int32_t n_layers = 0, n_embd = 0;  // the target's
    float min_confidence = 0.0f;       // of a drafter that knows it: a less likely token ends the draft
    DraftVocab * vocab = nullptr;      // of a compact head, else null; not owned, must outlive the drafter
    std::vector<llama_token> script;   // for the scripted drafter: the whole sequence, by position
    bool hidden_rows = true;           // for the scripted drafter: it asks for the target's, as a head does
    int32_t n_right = 0;               // for the scripted drafter: how many guesses of a draft are right
};

using MakeDrafter = std::unique_ptr<Drafter> (*)(const DrafterOptions &);

// A static object of this type in a drafter's file makes it known under its kind's name.
struct Registered {
    Registered(const char * kind, MakeDrafter make);
};

// Throws std::invalid_argument that lists the known kinds.
std::unique_ptr<Drafter> make_drafter(const std::string & kind, const DrafterOptions & options);
std::vector<std::string> drafter_kinds();

}  // namespace sidecar
