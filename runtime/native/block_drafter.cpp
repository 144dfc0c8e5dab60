#include "block_drafter.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace sidecar {

namespace {

constexpr size_t max_waiting = 64;  // rows; where they came one by one, without drafts, the drafter gives up knowing all of them

std::vector<int32_t> target_layers(const llama_model * model, const char * kind) {
    const int32_t * ids = api().model_target_layer_ids(model);
    std::vector<int32_t> layers(ids, ids + api().model_target_layer_ids_n(model));
    if (layers.empty()) throw std::invalid_argument(std::string("the draft context's model is no ") + kind + " drafter");
    return layers;
}

}  // namespace

BlockDrafter::BlockDrafter(const DrafterOptions & options, const char * kind)
    : ctx_(options.ctx, kind), n_vocab_(std::min(options.n_vocab, ctx_.n_vocab())), layers_(target_layers(ctx_.model(), kind)),
      rows_(layers_.size() * size_t(options.n_embd)), max_waiting_(std::min(max_waiting, size_t(ctx_.n_batch()))),
      mask_(api().vocab_mask(api().model_get_vocab(ctx_.model()))) {
    const std::string size = meta("dflash.block_size");
    if (!size.empty()) block_size_ = std::atoi(size.c_str());
    if (mask_ < 0 || block_size_ < 2) {
        throw std::invalid_argument(std::string("the ") + kind + " drafter's file has no mask token or no block size");
    }
    api().set_causal_attn(ctx_.get(), meta("dflash.attention.causal") == "true");
}

void BlockDrafter::begin() {
    ctx_.clear();
    rows_.clear();
    n_alone_ = 0;
}

void BlockDrafter::observe(int32_t pos, const llama_token *, const float * hidden, int32_t n) {
    if (pos != rows_.end()) throw std::logic_error("the block drafter was not shown every position");
    n_alone_ = n == 1 ? n_alone_ + 1 : 0;
    for (int32_t i = 0; i < n; ++i) {
        rows_.push(hidden + size_t(i) * rows_.width());
        if (rows_.size() < max_waiting_) continue;
        if (n_alone_ >= rows_.size()) {
            give_up(max_waiting_ / 2);
        } else {
            inject();
        }
    }
}

void BlockDrafter::propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) {
    n = std::min({n, max_depth(), ctx_.n_batch() - first_});
    if (n < 1) return;
    inject();
    ctx_.trim(rows_.first());
    ctx_.start();
    for (int32_t i = 0; i < n + first_; ++i) ctx_.add(i == 0 ? last : mask_, nullptr, 0, wants_logits());
    ctx_.decode();
    read(first_, n, picker, out);
}

void BlockDrafter::catch_up() { inject(); }

void BlockDrafter::go_back(int32_t n, const std::vector<uint8_t> &) {
    ctx_.go_back(n) ? rows_.go_back(n) : rows_.clear(n);
    n_alone_ = 0;
}

std::vector<uint8_t> BlockDrafter::state() {
    ByteWriter out;
    ctx_.put(out);
    rows_.put(out);
    out.put(uint64_t(n_alone_));
    return out.take();
}

void BlockDrafter::restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> & state) {
    begin();
    rows_.clear(llama_pos(tokens.size()));
    ctx_.clear(rows_.first());
    if (state.empty()) return;
    ByteReader in(state);
    uint64_t n_alone = 0;
    ctx_.get(in);
    rows_.get(in);
    in.get(n_alone);
    in.finish();
    if (rows_.end() != llama_pos(tokens.size())) throw std::invalid_argument("a saved state is not that of this drafter");
    n_alone_ = size_t(n_alone);
}

std::string BlockDrafter::meta(const char * key) const {
    char value[64] = {};
    return api().model_meta_val_str(ctx_.model(), key, value, sizeof value) < 0 ? "" : value;
}

void BlockDrafter::inject() {
    if (rows_.size() == 0) return;
    ctx_.trim(rows_.first());
    ctx_.start();
    for (size_t i = 0; i < rows_.size(); ++i) ctx_.add(-1, rows_.row(i), rows_.width(), false);
    ctx_.decode();
    rows_.pop(rows_.size());
    n_alone_ = 0;
}

// Begins anew with the last rows: see mtp.cpp.
void BlockDrafter::give_up(size_t n_kept) {
    rows_.pop(rows_.size() - n_kept);
    ctx_.clear(rows_.first());
}

}  // namespace sidecar
