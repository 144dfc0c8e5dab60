// What DFlash and DSpark have in common: a block of tokens, the known one and masks, is filled in one decode.
//
// The drafter's cells are not made of tokens: the target's rows are injected, which writes the keys and values of every layer
// and computes nothing else. The block attends to those and to itself. Its own cells are dropped before the next injection.
// Rows wait until a draft is asked for, so that only those that stand are ever injected.
#pragma once

#include <vector>

#include "draft_context.h"
#include "drafter.h"

namespace sidecar {

class BlockDrafter : public Drafter {
  public:
    void begin() override;
    void observe(int32_t pos, const llama_token * tokens, const float * hidden, int32_t n) override;
    void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) override;
    void catch_up() override;
    void go_back(int32_t n, const std::vector<uint8_t> & mark) override;
    std::vector<uint8_t> state() override;
    void restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> & state) override;
    std::vector<int32_t> layers() const override { return layers_; }
    int32_t max_depth() const override { return block_size_ - first_; }
    DraftContext * context() override { return &ctx_; }

  protected:
    // `kind` is for messages; `first` is the block's first row that predicts a token: 0 is the known token's.
    BlockDrafter(const DrafterOptions & options, const char * kind);
    void set_first(int32_t first) { first_ = first; }

    // Whether llama.cpp computes logits for the block's rows.
    virtual bool wants_logits() const { return true; }
    // Appends at most n guesses, read from the rows first, first + 1, ... of the block just decoded.
    virtual void read(int32_t first, int32_t n, Picker & picker, std::vector<llama_token> & out) = 0;

    // A key of the drafter's file as llama.cpp spells it; empty where it has none.
    std::string meta(const char * key) const;

    DraftContext ctx_;
    int32_t n_vocab_;  // logits that may be proposed

  private:
    void inject();
    void give_up(size_t n_kept);

    std::vector<int32_t> layers_;
    WaitingRows rows_;
    size_t max_waiting_;
    size_t n_alone_ = 0;  // waiting rows that came one by one, without drafts
    llama_token mask_;
    int32_t block_size_ = 16;
    int32_t first_ = 1;
};

}  // namespace sidecar
