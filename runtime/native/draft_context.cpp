#include "draft_context.h"

#include <stdexcept>


namespace sidecar {

DraftContext::DraftContext(llama_context * ctx, const char * kind) : ctx_(ctx) {
    if (ctx == nullptr) throw std::invalid_argument(std::string("the ") + kind + " drafter needs a draft context");
    model_ = api().get_model(ctx);
    n_embd_ = size_t(api().model_n_embd_out(model_));
    n_batch_ = int32_t(api().n_batch(ctx));
    n_vocab_ = api().vocab_n_tokens(api().model_get_vocab(model_));
    batch_ = api().batch_init(ctx);
    if (batch_ == nullptr) throw LibraryError("llama.cpp could not make a batch for the drafter");
}

DraftContext::~DraftContext() { api().batch_free(batch_); }

void DraftContext::clear(llama_pos first) {
    api().memory_clear(api().get_memory(ctx_), true);
    n_cells_ = first;
}

void DraftContext::trim(llama_pos n) {
    if (n_cells_ <= n) return;
    if (!api().memory_seq_rm(api().get_memory(ctx_), 0, n, -1)) {
        throw LibraryError("llama.cpp refused to remove drafted cells");
    }
    n_cells_ = n;
}

void DraftContext::put(ByteWriter & out) const {
    std::vector<uint8_t> cells(api().state_seq_get_size(ctx_, 0, 0));
    if (api().state_seq_get_data(ctx_, cells.data(), cells.size(), 0, 0) != cells.size()) {
        throw LibraryError("llama.cpp could not save the drafter's cells");
    }
    out.put(n_cells_);
    out.put(cells);
}

void DraftContext::get(ByteReader & in) {
    std::vector<uint8_t> cells;
    llama_pos n_cells = 0;
    in.get(n_cells);
    in.get(cells);
    if (n_cells < 0 || n_cells > INT32_MAX / 2) throw std::invalid_argument("a saved state has an impossible number of cells");
    clear();
    if (api().state_seq_set_data(ctx_, cells.data(), cells.size(), 0, 0) == 0) {
        throw LibraryError("llama.cpp could not take over the drafter's cells (" + std::to_string(cells.size()) + " bytes)");
    }
    n_cells_ = n_cells;
}

void DraftContext::start() {
    api().batch_clear(batch_);
    n_added_ = 0;
}

void DraftContext::add(llama_token token, const float * row, size_t width, bool wants_output) {
    const llama_embd embd{row, 1, width};
    const int32_t entry = token < 0 ? api().batch_add_embd(batch_, 0, embd) : api().batch_add_token(batch_, 0, token);
    if (entry < 0 || (token >= 0 && row != nullptr && !api().batch_set_embd_token(batch_, entry, embd))) {
        throw LibraryError("llama.cpp refused " + (token < 0 ? "a hidden row" : "token " + std::to_string(token)) +
                           " for the drafter");
    }
    const llama_pos pos = n_cells_ + n_added_;
    const llama_pos sections[4] = {pos, pos, pos, 0};  // a row without a token has four positions where rope has sections
    api().batch_set_pos(batch_, entry, sections);
    api().batch_set_output_logits(batch_, entry, wants_output);
    n_added_ += 1;
}

void DraftContext::decode() {
    process(PROCESS_DECODE);
    n_cells_ += n_added_;
}

void DraftContext::encode() { process(PROCESS_ENCODE); }

const float * DraftContext::hidden_row(int32_t i) const {
    const float * row = api().get_embeddings_nextn_ith(ctx_, i);
    if (row == nullptr) throw LibraryError("llama.cpp has no hidden row for the draft step");
    return row;
}

const float * DraftContext::hidden_rows() const {
    const float * rows = api().get_embeddings_nextn(ctx_);
    if (rows == nullptr) throw LibraryError("llama.cpp has no hidden rows for the drafter");
    return rows;
}

int32_t DraftContext::pick(Picker & picker, int32_t i, int32_t n_vocab, const llama_token * ids) const {
    const float * logits = api().get_logits_ith(ctx_, i);
    if (logits == nullptr) throw LibraryError("llama.cpp has no logits for the draft step");
    return picker.pick(logits, n_vocab, ids);
}

void DraftContext::process(int32_t type) {
    const int32_t code = api().process(ctx_, type, batch_);
    if (code != 0) {
        throw LibraryError("llama.cpp failed to decode " + std::to_string(n_added_) + " draft rows at position " +
                           std::to_string(n_cells_) + " (code " + std::to_string(code) + ")");
    }
}

}  // namespace sidecar
