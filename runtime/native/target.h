// The target: the main model's context, decoded so that any tail of the last verification can be taken back.
//
// It holds one sequence. Positions 0 .. n_past()-1 are the tokens that stand. What was decoded beyond them (rejected
// drafts) stays in the context until just before the next decode: the rewind is deferred, so that a stop string may
// still shorten the last block, and so that llama.cpp sees exactly one removal per decode (a second one on a recurrent
// state fails, facts about llama_memory_seq_rm).
//
// How a tail is removed is decided in here, by what the model's memory can do:
//   - attention only: the KV cells are dropped;
//   - recurrent or hybrid, no more rows than rollback slots and than the last decode had less one: a rollback slot;
//   - otherwise: the recurrent state kept by the checkpoint that decode() made, and the standing rows decoded again.
#pragma once

#include <cstdint>
#include <vector>

#include "llama_api.h"
#include "traffic.h"

namespace sidecar {

// Which rows of a decode have logits.
enum class Outputs { none, last, all };

// In place of a layer's number: the hidden row after the last layer, as an MTP head takes it (h_nextn).
constexpr int32_t LAST_HIDDEN = -1;

class Target {
  public:
    // Takes no ownership: `ctx` must outlive the target. The context hands out, of every decoded token, the inputs of
    // `layers` side by side; it is fixed for the context's life, since changing it rebuilds llama.cpp's buffers. A layer whose
    // input the model's graph does not hand out ends the process in llama.cpp: the caller has asked runtime/layer_inputs.py.
    Target(llama_context * ctx, std::vector<int32_t> layers);
    ~Target();
    Target(const Target &) = delete;
    Target & operator=(const Target &) = delete;

    // Decodes n tokens at positions n_past() .. n_past()+n-1, after the deferred rewind. All of them then stand.
    // `may_rewind` says that a tail of this block may be taken back; a checkpoint is made when slots do not cover it.
    // Needs n >= 1, n <= n_batch, n_past()+n <= n_ctx. Throws LibraryError when llama.cpp refuses; a recurrent state
    // is then unknown, dirty() is true, and only clear() helps.
    void decode(const llama_token * tokens, int32_t n, Outputs outputs, bool may_rewind = false);

    // From now on only the first n_standing positions stand. It may be called again, with fewer, before the next decode.
    // Throws std::logic_error when that is more than the last decode plus its checkpoint can take back.
    void rewind(int32_t n_standing);

    // Applies the deferred rewind now, so that the context holds the standing positions and no more.
    void settle();

    // KV cache and recurrent state of the standing positions, as llama.cpp serialises a sequence. Settles first.
    std::vector<uint8_t> state();
    // Takes over such a state of n_past positions, from any context of the same model and KV types.
    void restore(const std::vector<uint8_t> & state, int32_t n_past);

    // What go_back() needs to come back to here, beside cells that it can drop by position: the recurrent state of the standing
    // positions; nothing for a target without one. Settles first.
    std::vector<uint8_t> mark();
    // From now on only the first n positions stand, however long ago they were decoded; `mark` is what mark() said there. Any n up
    // to n_past() where the target is not recurrent, and has_all_cells().
    void go_back(int32_t n, const std::vector<uint8_t> & mark);

    // Forgets everything; also mends a dirty target.
    void clear();

    // Logits (n_vocab,) of row i of the last decode, which must be an output row; the first call waits for the backend. Owned by
    // the context, valid until the next decode.
    const float * logits(int32_t i);
    // Hidden rows (n, width) of the first n rows of the last decode, in its order; the width is n_embd for each layer.
    // Valid until the next decode or the next call.
    const float * hidden_rows(int32_t n);

    llama_context * context() const { return ctx_; }
    const llama_vocab * vocab() const { return vocab_; }
    int32_t n_past() const { return n_past_; }
    bool dirty() const { return dirty_; }
    int32_t n_ctx() const { return n_ctx_; }
    int32_t n_batch() const { return n_batch_; }
    int32_t n_vocab() const { return n_vocab_; }
    int32_t n_slots() const { return n_slots_; }
    bool recurrent() const { return recurrent_; }
    // Whether no cell of an earlier position has been given to a later one, as llama.cpp may do outside a sliding window once a
    // state was restored.
    bool has_all_cells() const { return api().memory_seq_pos_min(api().get_memory(ctx_), 0) <= 0; }
    int64_t n_restores() const { return n_restores_; }
    Traffic traffic() const;  // of all decodes here

  private:
    const float * layer_rows(int32_t layer);
    size_t layer_width(int32_t layer) const;
    size_t hidden_width() const;
    void reset(bool zero);  // `zero` also fills llama.cpp's buffers with zeros
    void run(const llama_token * tokens, int32_t n, Outputs outputs);
    void count_state(size_t n_bytes);
    void decode_again();
    void copy_recurrent(std::vector<uint8_t> & to);
    void restore_recurrent(const std::vector<uint8_t> & state, int32_t n);

    llama_context * ctx_;
    const llama_vocab * vocab_;
    llama_batch_ext * batch_;
    std::vector<int32_t> layers_;
    std::vector<float> gathered_;  // hidden rows of several layers
    bool recurrent_;
    int32_t n_ctx_, n_batch_, n_vocab_, n_slots_;

    int32_t n_past_ = 0;       // positions that stand
    int32_t n_cells_ = 0;      // positions the context holds, >= n_past_
    int32_t n_last_rows_ = 0;  // rows of the last decode: what rollback slots can speak about
    bool dirty_ = false;
    int32_t first_output_ = 0, n_outputs_ = 0;  // rows of the last decode that have logits
    const float * logits_ = nullptr;            // (n_outputs_, n_vocab_), once somebody has asked
    Traffic traffic_;

    std::vector<uint8_t> checkpoint_;        // recurrent state before the last decode; empty: none
    std::vector<llama_token> since_;         // tokens decoded since that checkpoint
    int32_t checkpoint_past_ = 0;            // positions it covers
    int64_t n_restores_ = 0;                 // how often a checkpoint was needed
};

}  // namespace sidecar
