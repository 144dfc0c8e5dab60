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

namespace sidecar {

class DraftContext {
  public:
    // Does not own `ctx`. Throws std::invalid_argument when it is null; `kind` says whose context is missing.
    DraftContext(llama_context * ctx, const char * kind);
    ~DraftContext();
    DraftContext(const DraftContext &) = delete;
    DraftContext & operator=(const DraftContext &) = delete;

    // Forgets all cells; the next one lies at position `first`.
    void clear(llama_pos first = 0);
    // Forgets the cells from position n on.
    void trim(llama_pos n);

    // All cells, as llama.cpp serialises them, and back. Throws LibraryError when it refuses.
    void put(ByteWriter & out) const;
    void get(ByteReader & in);

    void start();
    // The same, the first cell lying at position n: for a context that shares the cells of another, which looks after them.
    void start_at(llama_pos n) {
        n_cells_ = n;
        start();
    }
    // The next cell is of a token, of a row of `width` floats, or of both: token < 0 or row null leaves one out. Copies the row.
    void add(llama_token token, const float * row, size_t width, bool wants_output);
    // Computes the batch as cells that stay, or as rows that leave none. Throws LibraryError when llama.cpp refuses.
    void decode();
    void encode();

    // The hidden row (n_embd,) of row i of the last batch, or all of them in order; owned by the context.
    const float * hidden_row(int32_t i) const;
    const float * hidden_rows() const;
    // What `picker` takes of the first n_vocab logits of row i, which are for the tokens `ids` (null: 0 .. n_vocab-1); its index.
    int32_t pick(Picker & picker, int32_t i, int32_t n_vocab, const llama_token * ids = nullptr) const;

    llama_context * get() const { return ctx_; }
    const llama_model * model() const { return model_; }
    llama_pos n_cells() const { return n_cells_; }
    int32_t n_batch() const { return n_batch_; }
    size_t n_embd() const { return n_embd_; }  // of a hidden row
    int32_t n_vocab() const { return n_vocab_; }

  private:
    void process(int32_t type);

    llama_context * ctx_;
    const llama_model * model_ = nullptr;
    llama_batch_ext * batch_ = nullptr;
    int32_t n_batch_ = 0, n_vocab_ = 0;
    size_t n_embd_ = 0;
    llama_pos n_cells_ = 0;
    int32_t n_added_ = 0;
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
