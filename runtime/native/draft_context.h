// A drafter's own context: batches of cells in, logits and hidden rows out. What the cells mean is the drafter's business.
//
// Order of calls: start(), then add(...) for each cell, then decode() or encode(); the outputs are those of the last of these.
// Cells lie at positions without gaps, so that the context holds positions first .. n_cells()-1; trim() takes back the last ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bytes.h"
#include "llama_api.h"
#include "picker.h"
#include "traffic.h"

namespace sidecar {

class DraftContext {
  public:
    // Does not own `ctx`, which decodes nothing any more once this is gone. Throws std::invalid_argument when it is null; `kind` says whose context is missing.
    DraftContext(llama_context * ctx, const char * kind);
    ~DraftContext();
    DraftContext(const DraftContext &) = delete;
    DraftContext & operator=(const DraftContext &) = delete;

    // Forgets all cells; the next one lies at position `first`.
    void clear(llama_pos first = 0);
    // Forgets the cells from position n on.
    void trim(llama_pos n);
    // The same, however many they are. False where those before n are not all there (see Target::has_all_cells()): none are left
    // then, and the next one lies at n.
    bool go_back(llama_pos n);

    // The cells, as llama.cpp serialises them: all of them (flags 0) or what cannot be trimmed (STATE_PARTIAL_ONLY); and back,
    // where n_cells() is the caller's business. Throws LibraryError when it refuses.
    std::vector<uint8_t> state(uint32_t flags);
    void set_state(const std::vector<uint8_t> & state, uint32_t flags);
    // All cells with their number, for a saved session.
    void put(ByteWriter & out);
    void get(ByteReader & in);

    void start();
    // The same, the first cell lying at position n: for a context that shares the cells of another, which looks after them.
    void start_at(llama_pos n) {
        n_cells_ = n;
        start();
    }
    // Whether decodes hand out hidden rows of the output rows alone (`masked`) or of all; drafters that take none leave it out.
    void hand_out_rows(bool masked);

    // With `wanted` pick() takes the best token as the backend finds it, where the logits are (they come to the host all the same), and every
    // pick must be of best_picker(). Asked before each draft; it comes back late, since each change reserves buffers anew. Does
    // nothing where the backend cannot.
    void pick_on_backend(bool wanted);
    bool picks_on_backend() const { return sampler_ != nullptr; }

    // The next cell is of a token, of a row of `width` floats, or of both: token < 0 or row null leaves one out. Copies the row.
    void add(llama_token token, const float * row, size_t width, bool wants_output);
    // Computes the batch as cells that stay, or as rows that leave none. Throws LibraryError when llama.cpp refuses.
    void decode();
    void encode();

    // The hidden row (n_embd,) of row i of the last batch, or all of them in order; owned by the context.
    const float * hidden_row(int32_t i);
    const float * hidden_rows();
    // What `picker` takes of the first n_vocab logits of row i, which are for the tokens `ids` (null: 0 .. n_vocab-1); its index.
    int32_t pick(Picker & picker, int32_t i, int32_t n_vocab, const llama_token * ids = nullptr);

    llama_context * get() const { return ctx_; }
    const llama_model * model() const { return model_; }
    llama_pos n_cells() const { return n_cells_; }
    int32_t n_batch() const { return n_batch_; }
    size_t n_embd() const { return n_embd_; }  // of a hidden row
    int32_t n_vocab() const { return n_vocab_; }
    Traffic traffic() const;

  private:
    enum class Rows { none, of_outputs, all };

    void process(int32_t type);
    void drop_sampler();
    void count_state(size_t n_bytes);

    llama_context * ctx_;
    const llama_model * model_ = nullptr;
    llama_batch_ext * batch_ = nullptr;
    int32_t n_batch_ = 0, n_vocab_ = 0;
    size_t n_embd_ = 0;
    llama_pos first_ = 0, n_cells_ = 0;
    int32_t n_added_ = 0, n_outputs_ = 0;  // cells of the batch, and how many of them want an output
    Rows rows_ = Rows::none;               // that a decode hands out
    llama_sampler * sampler_ = nullptr;    // of the backend, or null
    int32_t n_wanted_;                     // drafts in a row that wanted one
    bool can_pick_ = true;
    Traffic traffic_;
};

// Hidden rows that the target has handed over and the drafter has not used yet: those of positions first() .. end()-1.
class WaitingRows {
  public:
    explicit WaitingRows(size_t width) : width_(width) {}

    void clear(llama_pos first = 0) {
        first_ = first;
        rows_.clear();
    }
    void push(const float * row) { rows_.insert(rows_.end(), row, row + width_); }
    // Drops those of position n and on; the next one pushed lies there.
    void go_back(llama_pos n) {
        if (n <= first_) {
            clear(n);
        } else {
            rows_.resize(size_t(n - first_) * width_);
        }
    }
    // Drops the oldest n.
    void pop(size_t n) {
        rows_.erase(rows_.begin(), rows_.begin() + ptrdiff_t(n * width_));
        first_ += llama_pos(n);
    }

    void put(ByteWriter & out) const {
        out.put(first_);
        out.put(rows_);
    }
    void get(ByteReader & in) {
        in.get(first_);
        in.get(rows_);
        if (first_ < 0 || rows_.size() % width_ != 0 || size() > size_t(INT32_MAX - first_)) {
            throw std::invalid_argument("a saved state has rows of another width, or more than there are positions");
        }
    }

    const float * row(size_t i) const { return rows_.data() + i * width_; }
    size_t size() const { return rows_.size() / width_; }
    size_t width() const { return width_; }
    llama_pos first() const { return first_; }
    llama_pos end() const { return first_ + llama_pos(size()); }

  private:
    size_t width_;
    llama_pos first_ = 0;
    std::vector<float> rows_;  // (size(), width)
};

}  // namespace sidecar
