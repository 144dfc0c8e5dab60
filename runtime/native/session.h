// The round: draft, verify, accept, for one sequence. No Python runs in here, and the caller holds no GIL.
//
// Order of calls:
//   clear()            an empty sequence
//   feed(...)          the prompt, in pieces of at most target().n_batch() tokens; the last piece asks for logits
//   first(chooser)     the first token, from the last piece's logits
//   step(...)          a round at a time; each returns 1 .. depth+1 tokens
//   keep(n)            optional, before the next step or feed: only the first n tokens of the last step were used
// After any number of steps feed() may follow again: its first token must be the last one emitted (`last()`), which
// the target has not decoded yet. After an exception only clear() or restore() may follow.
// save() may come between any two of them, and restore() puts another session of the same model where it was.
// A prompt that begins as what is held needs to be fed from there on alone: go_back(n), then feed().
//
// The design's source is ARCHITECTURE.md, "The round": one head decode over the rows accepted in the previous round
// plus `last`, then a decode per further depth; the target's rewind is deferred to its next decode.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "accept.h"
#include "drafter.h"
#include "ngram.h"
#include "target.h"

namespace sidecar {

struct Round {
    std::vector<llama_token> tokens;  // emitted: the accepted drafts, then the target's own
    std::vector<llama_token> drafts;  // proposed; the first n_accepted of them stand
    int32_t n_accepted = 0;
    double draft_s = 0.0;   // the drafter, catch-up included
    double verify_s = 0.0;  // the target's decode, rewind included
    double accept_s = 0.0;  // choosing tokens
};

// Where a sequence stands: the target's state of all tokens but the last, and what the drafter has made of them.
struct Saved {
    std::vector<uint8_t> target, drafter;
};

// Where a recurrent sequence can go back to: a position, and what target and drafter need for it beside their cells.
struct Checkpoint {
    int32_t pos;
    std::vector<uint8_t> target, drafter;
};

// What the look-up found after a match of n_matched tokens, 0 for none.
struct Found {
    std::vector<llama_token> tokens;
    int32_t n_matched = 0;
};

class Session {
  public:
    // `ctx` is not owned. Without a drafter every step decodes one row. `vocab` is that of a drafter with a compact head, else null;
    // not owned, must outlive the session. `looks_up` keeps what look_up() needs.
    // `picks_on_backend` lets the drafter's backend take the best token of each row, wherever drafts are just that.
    // `n_checkpoints` may be kept at a time.
    Session(llama_context * ctx, std::unique_ptr<Drafter> drafter, DraftVocab * vocab = nullptr, bool looks_up = false,
            bool picks_on_backend = false, int32_t n_checkpoints = 0);

    void clear();
    void feed(const std::vector<llama_token> & tokens, bool wants_logits);
    llama_token first(Chooser & chooser);

    // From now on every row whose logits choose a token is decoded in one of these numbers of rows (ascending), so that where
    // they agree to the bit it does not matter in which. Rows that are missing are filled up and taken back at once. A prompt's
    // last token is then decoded by itself. None: as many as there are. Throws std::invalid_argument for more rows than a
    // decode here can have, or than can be taken back without a checkpoint.
    void set_widths(std::vector<int32_t> widths);
    // The least rows of a decode: as many positions must be free for a step.
    int32_t min_width() const { return widths_.empty() ? 1 : widths_.front(); }

    // One round with at most `depth` drafts; fewer where the context's end or its batch is near, or as set_widths() says.
    // Needs n_past() + min_width() <= n_ctx.
    // With `found`, from look_up() just before, those are its drafts, and the drafter is not asked.
    Round step(Chooser & chooser, int32_t depth, bool ignore_eog = false, const std::vector<llama_token> & found = {});
    // At most n tokens that followed the last time the sequence ended as now, as far as a step could verify them.
    Found look_up(int32_t n);
    void keep(int32_t n);
    // Gives it a second context of the same model, without rollback slots, for use_plain(). Not owned. Once, at any time.
    void set_plain_context(llama_context * ctx);
    bool has_plain_context() const { return plain_target_ != nullptr; }

    // Moves the sequence to the context without rollback slots, where one row is cheaper and only depth 0 is possible, or
    // back; copies its state once. Does nothing without such a context, or when the sequence is there already.
    void use_plain(bool plain);
    bool is_plain() const { return target_ == plain_target_.get(); }

    // Lets the drafter do now what it would otherwise do in the next step: after a prompt, so that its cost shows there.
    void catch_up();

    // Notes a token that the text has now; whether the drafter can be fed it, and can propose it, as itself.
    bool see(llama_token token);

    // Gets a compact head rows for those of the tokens noted, and of these, that it has none for. A step that drafts does so itself.
    void adopt(const std::vector<llama_token> & tokens = {});

    // A token's bytes, remembered; nothing for control tokens.
    const std::string & piece(llama_token token);
    bool is_eog(llama_token token) const;

    // Ends the running text after its current round. Set from any thread.
    std::atomic<bool> cancelled{false};

    // Settles what the last step has left open: keep() may not follow. The last token goes with the caller: last().
    Saved save();
    // Goes on behind `tokens`, of which the last is not decoded yet, with what save() said there; `saved.drafter` may be empty,
    // and is of the same kind otherwise. Throws what Target::restore and Drafter::restore throw.
    void restore(const Saved & saved, const std::vector<llama_token> & tokens);

    // Goes back to a position of at most n < n_past(), and returns which: fed from there on, the sequence is as if it had never been further. The
    // token at n must be the next fed, or come again on the way there, since the drafter keeps what it has made of it.
    // Any n will do where the target's cells can be dropped; a recurrent one has its checkpoints, and its beginning.
    int32_t go_back(int32_t n);
    // Remembers where the sequence stands, for go_back(). Nothing where it needs none, or may keep none. Of too many the one is
    // dropped that lies closest behind another: so wherever a prompt turns off, not much of what can be kept is lost.
    void checkpoint();
    const std::vector<Checkpoint> & checkpoints() const { return checkpoints_; }

    // For measuring: decodes these rows behind the sequence, all of them output; it then ends with them. No drafter sees them.
    void decode(const std::vector<llama_token> & rows);

    // The row of the last decode whose logits follow the last token of a prompt.
    int32_t last_row() const { return int32_t(block_.size()) - 1; }

    // For benchmarks: the seconds of each of `repeats` decodes of n_rows of `tokens` (in their order, over and over), all
    // rows output, as a verification decodes them. One width in a row, so that llama.cpp re-uses its graph: the first
    // one builds it. Follows the sequence as it stands; begins a new one where the context ends. Only clear() may follow.
    std::vector<double> time_rows(const std::vector<llama_token> & tokens, int32_t n_rows, int32_t repeats);

    llama_token last() const { return last_; }
    int32_t n_past() const { return target_->n_past(); }
    Target & target() { return *target_; }
    Traffic traffic() const;  // of all decodes since it was made

  private:
    void observe_block();
    void decode_block();
    int32_t widest(int32_t n) const;
    int32_t most_drafts(const Target & target, int32_t depth) const;

    Target main_target_;
    std::unique_ptr<Target> plain_target_;  // or null
    Target * target_;                       // where the sequence is
    std::unique_ptr<Drafter> drafter_;
    std::unique_ptr<Ngram> ngram_;          // or null
    DraftVocab * const vocab_;             // of a compact head, else null
    std::vector<llama_token> seen_;        // since its rows were looked after
    bool lacks_rows_ = false;              // for some of seen_
    const bool picks_on_backend_;
    const int32_t n_checkpoints_;
    std::vector<Checkpoint> checkpoints_;  // ascending
    llama_token last_ = -1;
    std::vector<int32_t> widths_;

    // The last decode as far as the drafter has not seen it: its rows lie in the target's buffers until the next one.
    std::vector<llama_token> block_;
    int32_t block_pos_ = 0;
    int32_t n_emitted_ = 0;  // of block_, behind its first token: what the last step emitted

    std::unordered_map<llama_token, std::string> pieces_;
};

}  // namespace sidecar
