#include "draft_context.h"

#include <stdexcept>

#include "bus_error.h"

namespace sidecar {

namespace {

constexpr int32_t patience = 32;  // drafts that must want the backend's choice in a row before it is set up again

}  // namespace

DraftContext::DraftContext(llama_context * ctx, const char * kind) : ctx_(ctx), n_wanted_(patience) {
    if (ctx == nullptr) throw std::invalid_argument(std::string("the ") + kind + " drafter needs a draft context");
    model_ = api().get_model(ctx);
    n_embd_ = size_t(api().model_n_embd_out(model_));
    n_batch_ = int32_t(api().n_batch(ctx));
    n_vocab_ = api().vocab_n_tokens(api().model_get_vocab(model_));
    batch_ = api().batch_init(ctx);
    if (batch_ == nullptr) throw LibraryError("llama.cpp could not make a batch for the drafter");
}

DraftContext::~DraftContext() {
    if (sampler_ != nullptr) api().sampler_free(sampler_);  // the context may be gone already
    api().batch_free(batch_);
}

void DraftContext::hand_out_rows(bool masked) {
    api().set_embeddings_nextn(ctx_, true, masked);
    rows_ = masked ? Rows::of_outputs : Rows::all;
}

void DraftContext::pick_on_backend(bool wanted) {
    n_wanted_ = wanted ? n_wanted_ + 1 : 0;
    if (!wanted || !can_pick_) drop_sampler();
    if (!can_pick_ || sampler_ != nullptr || n_wanted_ < patience) return;
    sampler_ = api().sampler_chain_init({true});
    api().sampler_chain_add(sampler_, api().sampler_init_greedy());
    can_pick_ = api().set_sampler(ctx_, 0, sampler_);
    if (!can_pick_) drop_sampler();
}

void DraftContext::drop_sampler() {
    if (sampler_ == nullptr) return;
    api().set_sampler(ctx_, 0, nullptr);
    api().sampler_free(sampler_);
    sampler_ = nullptr;
}

void DraftContext::clear(llama_pos first) {
    api().memory_clear(api().get_memory(ctx_), true);
    first_ = n_cells_ = first;
}

void DraftContext::trim(llama_pos n) {
    if (n_cells_ <= n) return;
    if (!api().memory_seq_rm(api().get_memory(ctx_), 0, n, -1)) {
        throw LibraryError("llama.cpp refused to remove drafted cells");
    }
    n_cells_ = n;
}

std::vector<uint8_t> DraftContext::state(uint32_t flags) {
    std::vector<uint8_t> bytes(api().state_seq_get_size(ctx_, 0, flags));
    if (api().state_seq_get_data(ctx_, bytes.data(), bytes.size(), 0, flags) != bytes.size()) {
        throw LibraryError("llama.cpp could not save the drafter's state (" + std::to_string(bytes.size()) + " bytes)");
    }
    count_state(bytes.size());
    return bytes;
}

void DraftContext::set_state(const std::vector<uint8_t> & state, uint32_t flags) {
    count_state(state.size());
    if (api().state_seq_set_data(ctx_, state.data(), state.size(), 0, flags) == 0) {
        throw LibraryError("llama.cpp could not take over the drafter's state (" + std::to_string(state.size()) + " bytes)");
    }
}

void DraftContext::count_state(size_t n_bytes) {
    traffic_.state_bytes += int64_t(n_bytes);
    traffic_.n_syncs += 1;
}

bool DraftContext::go_back(llama_pos n) {
    const bool has_all = n >= first_ && api().memory_seq_pos_min(api().get_memory(ctx_), 0) <= first_;
    has_all ? trim(n) : clear(n);
    return has_all;
}

void DraftContext::put(ByteWriter & out) {
    out.put(first_);
    out.put(n_cells_);
    out.put(state(0));
}

void DraftContext::get(ByteReader & in) {
    std::vector<uint8_t> cells;
    llama_pos first = 0, n_cells = 0;
    in.get(first);
    in.get(n_cells);
    in.get(cells);
    if (first < 0 || n_cells < first || n_cells > INT32_MAX / 2) throw std::invalid_argument("a saved state has cells at impossible positions");
    clear(first);
    set_state(cells, 0);
    n_cells_ = n_cells;
}

void DraftContext::start() {
    api().batch_clear(batch_);
    n_added_ = n_outputs_ = 0;
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
    n_outputs_ += wants_output;
    if (row != nullptr) traffic_.fed_bytes += int64_t(width * sizeof(float));
}

void DraftContext::decode() {
    process(PROCESS_DECODE);
    n_cells_ += n_added_;
}

void DraftContext::encode() { process(PROCESS_ENCODE); }

const float * DraftContext::hidden_row(int32_t i) {
    traffic_.n_syncs += 1;
    const float * row = api().get_embeddings_nextn_ith(ctx_, i);
    if (row == nullptr) throw LibraryError("llama.cpp has no hidden row for the draft step");
    return row;
}

const float * DraftContext::hidden_rows() {
    traffic_.n_syncs += 1;
    const float * rows = api().get_embeddings_nextn(ctx_);
    if (rows == nullptr) throw LibraryError("llama.cpp has no hidden rows for the drafter");
    return rows;
}

int32_t DraftContext::pick(Picker & picker, int32_t i, int32_t n_vocab, const llama_token * ids) {
    traffic_.n_syncs += 1;
    if (sampler_ != nullptr) {
        const llama_token best = api().get_sampled_token_ith(ctx_, i);
        can_pick_ = best >= 0;  // without the operation, which llama.cpp does not tell at setting up, and of a row of NaN there is none
        return best >= 0 && best < n_vocab ? best : 0;
    }
    const float * logits = api().get_logits_ith(ctx_, i);
    if (logits == nullptr) throw LibraryError("llama.cpp has no logits for the draft step");
    return picker.pick(logits, n_vocab, ids);
}

Traffic DraftContext::traffic() const {
    Traffic traffic = traffic_;
    traffic.n_graphs_reused = api().perf_context(ctx_).n_reused;
    return traffic;
}

void DraftContext::process(int32_t type) {
    const int32_t code = api().process(ctx_, type, batch_);
    check_mapped_files();
    if (code != 0) {
        throw LibraryError("llama.cpp failed to decode " + std::to_string(n_added_) + " draft rows at position " +
                           std::to_string(n_cells_) + " (code " + std::to_string(code) + ")");
    }
    // An encoder hands out every row, and no logits.
    const bool decodes = type == PROCESS_DECODE;
    const int64_t n_rows = !decodes || rows_ == Rows::all ? n_added_ : rows_ == Rows::of_outputs ? n_outputs_ : 0;
    // A greedy sampler of the backend hands out the logits as well as the token.
    const size_t per_output = size_t(n_vocab_) * sizeof(float) + (sampler_ != nullptr ? sizeof(llama_token) : 0);
    traffic_.n_decodes += 1;
    traffic_.hidden_bytes += n_rows * int64_t(n_embd_ * sizeof(float));
    if (decodes) traffic_.logits_bytes += n_outputs_ * int64_t(per_output);
}

}  // namespace sidecar
