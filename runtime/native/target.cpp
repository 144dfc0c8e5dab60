#include "target.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bus_error.h"

namespace sidecar {

Target::Target(llama_context * ctx, std::vector<int32_t> layers) : ctx_(ctx), layers_(std::move(layers)) {
    const LlamaApi & llama = api();
    const llama_model * model = llama.get_model(ctx);
    recurrent_ = llama.model_is_recurrent(model) || llama.model_is_hybrid(model);
    n_ctx_ = int32_t(llama.n_ctx(ctx));
    n_batch_ = int32_t(llama.n_batch(ctx));
    vocab_ = llama.model_get_vocab(model);
    n_vocab_ = llama.vocab_n_tokens(vocab_);
    n_slots_ = int32_t(llama.n_rs_seq(ctx));
    for (const int32_t layer : layers_) {
        if (layer > llama.model_n_layer(model)) {
            throw std::invalid_argument("the drafter reads the input of layer " + std::to_string(layer) + ", the target has " +
                                        std::to_string(llama.model_n_layer(model)));
        }
        if (layer == LAST_HIDDEN) {
            llama.set_embeddings_nextn(ctx, true, false);
        } else {
            llama.set_embeddings_layer_inp(ctx, uint32_t(layer), true);
        }
    }
    batch_ = llama.batch_init(ctx);
    if (batch_ == nullptr) {
        throw LibraryError("llama.cpp could not make a batch for the target");
    }
}

Target::~Target() { api().batch_free(batch_); }

void Target::decode(const llama_token * tokens, int32_t n, Outputs outputs, bool may_rewind) {
    if (n < 1 || n > n_batch_ || n_past_ + n > n_ctx_) {
        throw std::logic_error("decode of " + std::to_string(n) + " rows at position " + std::to_string(n_past_) +
                               " does not fit n_batch " + std::to_string(n_batch_) + ", n_ctx " + std::to_string(n_ctx_));
    }
    if (dirty_) {
        throw LibraryError("the target's state is unknown after a failed decode: clear it first");
    }
    settle();
    checkpoint_.clear();
    since_.clear();
    if (may_rewind && recurrent_ && n - 1 > n_slots_) {
        copy_recurrent(checkpoint_);
        checkpoint_past_ = n_cells_;
        since_.assign(tokens, tokens + n);
    }
    run(tokens, n, outputs);
    n_past_ = n_cells_;
}

void Target::rewind(int32_t n_standing) {
    const int32_t n_removed = n_cells_ - n_standing;
    const bool by_slots = !recurrent_ || (n_removed <= n_slots_ && n_removed < n_last_rows_);
    const bool by_checkpoint = !checkpoint_.empty() && n_standing >= checkpoint_past_;
    if (n_standing < 0 || n_standing > n_past_ || (n_removed > 0 && !by_slots && !by_checkpoint)) {
        throw std::logic_error("cannot rewind from " + std::to_string(n_cells_) + " to " + std::to_string(n_standing) +
                               " positions: the last decode had " + std::to_string(n_last_rows_) + " rows, " +
                               std::to_string(n_slots_) + " rollback slots");
    }
    n_past_ = n_standing;
}

void Target::settle() {
    const int32_t n_removed = n_cells_ - n_past_;
    if (n_removed == 0) {
        return;
    }
    if (recurrent_ && (n_removed > n_slots_ || n_removed >= n_last_rows_)) {
        decode_again();
        return;
    }
    if (!api().memory_seq_rm(api().get_memory(ctx_), 0, n_past_, -1)) {
        dirty_ = true;
        throw LibraryError("llama.cpp refused to remove " + std::to_string(n_removed) + " rejected positions");
    }
    n_cells_ = n_past_;
    n_last_rows_ = 0;  // a second removal before the next decode would fail
}

std::vector<uint8_t> Target::state() {
    settle();
    std::vector<uint8_t> bytes(api().state_seq_get_size(ctx_, 0, 0));
    if (api().state_seq_get_data(ctx_, bytes.data(), bytes.size(), 0, 0) != bytes.size()) {
        throw LibraryError("llama.cpp could not save the sequence's state");
    }
    count_state(bytes.size());
    return bytes;
}

void Target::restore(const std::vector<uint8_t> & state, int32_t n_past) {
    reset(false);  // what is restored is all that will be read: zeros would take longer than the state itself
    dirty_ = true;
    count_state(state.size());
    if (api().state_seq_set_data(ctx_, state.data(), state.size(), 0, 0) == 0) {
        throw LibraryError("llama.cpp could not take over a sequence's state of " + std::to_string(state.size()) + " bytes");
    }
    const llama_pos n_held = api().memory_seq_pos_max(api().get_memory(ctx_), 0) + 1;
    if (n_held != n_past) {
        throw LibraryError("a sequence's state has " + std::to_string(n_held) + " positions, " + std::to_string(n_past) +
                           " were expected");
    }
    n_past_ = n_cells_ = n_past;
    dirty_ = false;
}

std::vector<uint8_t> Target::mark() {
    settle();
    std::vector<uint8_t> state;
    if (recurrent_) copy_recurrent(state);
    return state;
}

void Target::go_back(int32_t n, const std::vector<uint8_t> & mark) {
    if (!recurrent_) {
        rewind(n);
        settle();
        return;
    }
    restore_recurrent(mark, n);
    n_past_ = n;
    n_last_rows_ = 0;
    checkpoint_.clear();
    since_.clear();
}

void Target::clear() { reset(true); }

void Target::reset(bool zero) {
    api().memory_clear(api().get_memory(ctx_), zero);
    n_past_ = n_cells_ = n_last_rows_ = n_outputs_ = 0;
    checkpoint_.clear();
    since_.clear();
    dirty_ = false;
}

const float * Target::logits(int32_t i) {
    const int32_t output = i - first_output_;
    if (output >= 0 && output < n_outputs_ && logits_ == nullptr) {
        logits_ = api().get_logits_ith(ctx_, first_output_);
        traffic_.n_syncs += 1;
    }
    if (output < 0 || output >= n_outputs_ || logits_ == nullptr) {
        throw LibraryError("llama.cpp has no logits for row " + std::to_string(i));
    }
    return logits_ + size_t(output) * size_t(n_vocab_);
}

const float * Target::hidden_rows(int32_t n) {
    if (layers_.size() == 1) return layer_rows(layers_[0]);
    const size_t width = hidden_width();
    gathered_.resize(size_t(n) * width);
    float * column = gathered_.data();
    for (const int32_t layer : layers_) {
        const float * rows = layer_rows(layer);
        const size_t n_embd = layer_width(layer);
        for (int32_t i = 0; i < n; ++i) std::copy_n(rows + size_t(i) * n_embd, n_embd, column + size_t(i) * width);
        column += n_embd;
    }
    return gathered_.data();
}

Traffic Target::traffic() const {
    Traffic traffic = traffic_;
    traffic.n_graphs_reused = api().perf_context(ctx_).n_reused;
    return traffic;
}

void Target::count_state(size_t n_bytes) {
    traffic_.state_bytes += int64_t(n_bytes);
    traffic_.n_syncs += 1;
}

const float * Target::layer_rows(int32_t layer) {
    traffic_.n_syncs += 1;
    const float * rows = layer == LAST_HIDDEN ? api().get_embeddings_nextn(ctx_)
                                              : api().get_embeddings_layer_inp(ctx_, uint32_t(layer));
    if (rows == nullptr) {
        throw LibraryError("llama.cpp has no hidden rows for the last decode");
    }
    return rows;
}

size_t Target::layer_width(int32_t layer) const {
    const llama_model * model = api().get_model(ctx_);
    return size_t(layer == LAST_HIDDEN ? api().model_n_embd_out(model) : api().model_n_embd(model));
}

size_t Target::hidden_width() const {
    size_t width = 0;
    for (const int32_t layer : layers_) width += layer_width(layer);
    return width;
}

void Target::run(const llama_token * tokens, int32_t n, Outputs outputs) {
    const LlamaApi & llama = api();
    logits_ = nullptr;
    n_outputs_ = 0;
    llama.batch_clear(batch_);
    for (int32_t i = 0; i < n; ++i) {
        const llama_pos pos = n_cells_ + i;
        const int32_t entry = llama.batch_add_token(batch_, 0, tokens[i]);
        if (entry != i) {
            throw LibraryError("llama.cpp refused token " + std::to_string(tokens[i]) + " (code " +
                               std::to_string(entry) + ")");
        }
        llama.batch_set_pos(batch_, entry, &pos);
        llama.batch_set_output_logits(batch_, entry,
                                      outputs == Outputs::all || (outputs == Outputs::last && i == n - 1));
    }
    dirty_ = true;
    const int32_t code = llama.process(ctx_, PROCESS_DECODE, batch_);
    check_mapped_files();
    if (code != 0) {
        throw LibraryError("llama.cpp failed to decode " + std::to_string(n) + " rows at position " +
                           std::to_string(n_cells_) + " (code " + std::to_string(code) + ")");
    }
    dirty_ = false;
    n_cells_ += n;
    n_last_rows_ = n;
    n_outputs_ = outputs == Outputs::all ? n : outputs == Outputs::last ? 1 : 0;
    first_output_ = n - n_outputs_;
    traffic_.n_decodes += 1;
    traffic_.logits_bytes += int64_t(n_outputs_) * n_vocab_ * int64_t(sizeof(float));
    traffic_.hidden_bytes += int64_t(size_t(n) * hidden_width() * sizeof(float));
}

// Back to the checkpoint, and forward to what stands.
void Target::decode_again() {
    const int32_t n_again = n_past_ - checkpoint_past_;
    restore_recurrent(checkpoint_, checkpoint_past_);
    if (n_again > 0) {
        run(since_.data(), n_again, Outputs::none);
    }
    n_restores_ += 1;
}

void Target::copy_recurrent(std::vector<uint8_t> & to) {
    to.resize(api().state_seq_get_size(ctx_, 0, STATE_PARTIAL_ONLY));
    if (api().state_seq_get_data(ctx_, to.data(), to.size(), 0, STATE_PARTIAL_ONLY) != to.size()) {
        throw LibraryError("llama.cpp could not save the recurrent state (" + std::to_string(to.size()) + " bytes)");
    }
    count_state(to.size());
}

// Puts back the recurrent state that n positions left, and drops the cells behind them.
void Target::restore_recurrent(const std::vector<uint8_t> & state, int32_t n) {
    dirty_ = true;  // until all of it has worked
    if (api().state_seq_set_data(ctx_, state.data(), state.size(), 0, STATE_PARTIAL_ONLY) == 0 ||
        !api().memory_seq_rm(api().get_memory(ctx_), 0, n, -1)) {
        throw LibraryError("llama.cpp could not restore the recurrent state at position " + std::to_string(n));
    }
    count_state(state.size());
    n_cells_ = n;
    dirty_ = false;
}

}  // namespace sidecar
