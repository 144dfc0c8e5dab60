// The MTP drafter: one chained head on a context of its own (ctx_type MTP).
//
// The cell at position p+1 encodes the pair (h_p, x_{p+1}): x is the token there, h the target's hidden row one position
// before; cell 0 is (zeros, x_0). A draft step's own hidden row is the h of the next step.
//
// Cells are of two sorts. The first n_true_ were made from the target's hidden rows and stay. Those after them were made
// from the head's own rows while drafting and are dropped before the next decode. Rows that the target has handed over
// but the head has not decoded wait in rows_; propose() decodes them together with `last` in one pass. While nobody drafts
// they only pile up, so that a pause in drafting costs nothing until it ends; where it lasts, the oldest are given up.
//
// A compact head knows some of the target's tokens only (sidecars/compact.py). Its rows are mapped where tokens enter the
// batch and where drafts leave it; everything between speaks of the target's ids.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../accept.h"
#include "../drafter.h"

namespace sidecar {

namespace {

constexpr size_t max_queued = 1024;  // rows that may wait: 4 MB at a width of 1,024
constexpr size_t max_behind = 128;   // rows decoded one by one, without drafts, before the head gives up knowing all of them

class Mtp final : public Drafter {
  public:
    explicit Mtp(const DrafterOptions & options) : ctx_(options.ctx), ids_(options.ids) {
        if (ctx_ == nullptr) throw std::invalid_argument("the mtp drafter needs a draft context");
        const llama_model * model = api().get_model(ctx_);
        n_embd_ = size_t(api().model_n_embd_out(model));
        const int32_t n_rows = api().vocab_n_tokens(api().model_get_vocab(model));
        n_vocab_ = std::min(options.n_vocab, n_rows);
        if (!ids_.empty()) map_rows(options.n_vocab, n_rows);
        n_batch_ = int32_t(api().n_batch(ctx_));
        batch_ = api().batch_init(ctx_);
        if (batch_ == nullptr) throw LibraryError("llama.cpp could not make a batch for the drafter");
        try {
            choose_hidden_rows();
        } catch (...) {
            api().batch_free(batch_);
            throw;
        }
    }

    ~Mtp() override { api().batch_free(batch_); }

    void begin() override {
        api().memory_clear(api().get_memory(ctx_), true);
        n_true_ = n_cells_ = 0;
        tokens_.clear();
        rows_.clear();
        carry_.assign(n_embd_, 0.0f);
    }

    void observe(int32_t pos, const llama_token * tokens, const float * hidden, int32_t n) override {
        for (int32_t i = 0; i < n; ++i) {
            const int32_t n_known = n_true_ + int32_t(tokens_.size());
            if (pos + i > n_known) throw std::logic_error("the mtp drafter was not shown every position");
            if (pos + i == n_known) {
                push(tokens[i]);
                if (n == 1 && tokens_.size() == max_behind) begin_at(max_behind / 2);
                if (tokens_.size() == max_queued) catch_up();
            }
            std::memcpy(carry_.data(), hidden + size_t(i) * n_embd_, n_embd_ * sizeof(float));
        }
    }

    void propose(llama_token last, int32_t n, std::vector<llama_token> & out) override {
        push(last);
        while (tokens_.size() > size_t(n_batch_)) decode(false);
        int32_t row = decode(true);
        for (int32_t i = 0; i < n; ++i) {
            const llama_token drafted = read_draft(row);
            out.push_back(drafted);
            if (i + 1 < n) row = decode_draft(drafted, row);
        }
    }

    bool needs_hidden_rows() const override { return true; }

    void catch_up() override {
        while (!tokens_.empty()) decode(false);
    }

    void set_row(int32_t row, llama_token token) override {
        if (ids_.empty()) return;
        if (token < 0 || size_t(token) >= row_of_.size() || row < 0 || size_t(row) >= ids_.size()) {
            throw std::invalid_argument("row " + std::to_string(row) + " cannot be for token " + std::to_string(token));
        }
        if (row_of_[ids_[row]] == row) row_of_[ids_[row]] = 0;
        ids_[row] = token;
        row_of_[token] = row;
    }

  private:
    void map_rows(int32_t n_vocab, int32_t n_rows) {
        if (int32_t(ids_.size()) != n_rows) {
            throw std::invalid_argument("the compact head has " + std::to_string(n_rows) + " rows and " +
                                        std::to_string(ids_.size()) + " ids");
        }
        row_of_.assign(n_vocab, 0);
        n_vocab_ = n_rows;
        for (int32_t row = 0; row < n_rows; ++row) {
            if (ids_[row] < 0 || ids_[row] >= n_vocab) {
                throw std::invalid_argument("row " + std::to_string(row) + " of the compact head has id " +
                                            std::to_string(ids_[row]) + " of " + std::to_string(n_vocab));
            }
            row_of_[ids_[row]] = row;
        }
    }

    // llama.cpp can hand out hidden rows of the output rows alone ("masked") or of all. Its graphs differ: some crop the
    // rows to the outputs and must be masked; others (qwen35, glm4moe) keep all and, masked, silently return the FIRST
    // rows of a batch. So this looks: two cells in one decode, output on the second, against the same cells one by one.
    void choose_hidden_rows() {
        api().set_embeddings_nextn(ctx_, true, true);
        if (n_batch_ < 2) return;  // one row at a time: there is nothing to confuse
        const auto push_both = [this](bool apart) {
            begin();
            carry_.assign(n_embd_, 1.0f);
            push(0);
            if (apart) decode(false);
            for (size_t i = 0; i < n_embd_; i += 2) carry_[i] = -1.0f;  // the two cells must differ in either input
            push(1);
        };
        push_both(true);
        const float * row = hidden_row(decode(true));
        const std::vector<float> alone(row, row + n_embd_);
        push_both(false);
        const float * together = hidden_row(decode(true));
        double distance = 0.0, size = 0.0;
        for (size_t i = 0; i < n_embd_; ++i) {
            distance += double(alone[i] - together[i]) * double(alone[i] - together[i]);
            size += double(alone[i]) * double(alone[i]);
        }
        if (!(distance <= 1e-3 * size)) api().set_embeddings_nextn(ctx_, true, false);
    }

    // The head's own hidden row (n_embd,) of a row of the last decode; owned by the context.
    const float * hidden_row(int32_t row) const {
        const float * hidden = api().get_embeddings_nextn_ith(ctx_, row);
        if (hidden == nullptr) throw LibraryError("llama.cpp has no hidden row for the draft step");
        return hidden;
    }

    // Forgets all cells and all queued ones but the last n, where it begins anew: the way back from plain decoding stays short
    // however long that lasted. It costs the text before them, so drafts may be worse.
    void begin_at(size_t n) {
        const size_t n_dropped = tokens_.size() - n;
        api().memory_clear(api().get_memory(ctx_), true);
        n_true_ = n_cells_ = n_true_ + int32_t(n_dropped);
        tokens_.erase(tokens_.begin(), tokens_.begin() + ptrdiff_t(n_dropped));
        rows_.erase(rows_.begin(), rows_.begin() + ptrdiff_t(n_dropped) * ptrdiff_t(n_embd_));
    }

    // Queues the cell (carry, token).
    void push(llama_token token) {
        tokens_.push_back(token);
        rows_.insert(rows_.end(), carry_.begin(), carry_.end());
    }

    // Decodes the oldest queued cells, a batch at most; with `wants_output` the last of them has logits and a hidden row.
    // Returns its row's index.
    int32_t decode(bool wants_output) {
        if (n_cells_ > n_true_) {
            if (!api().memory_seq_rm(api().get_memory(ctx_), 0, n_true_, -1)) {
                throw LibraryError("llama.cpp refused to remove drafted cells");
            }
            n_cells_ = n_true_;
        }
        const int32_t n = std::min(int32_t(tokens_.size()), n_batch_);
        api().batch_clear(batch_);
        for (int32_t i = 0; i < n; ++i) {
            add(tokens_[i], rows_.data() + size_t(i) * n_embd_, n_cells_ + i, wants_output && i == n - 1);
        }
        process(n);
        n_true_ = n_cells_;
        tokens_.erase(tokens_.begin(), tokens_.begin() + n);
        rows_.erase(rows_.begin(), rows_.begin() + ptrdiff_t(n) * ptrdiff_t(n_embd_));
        return n - 1;
    }

    // Decodes one drafted token with the head's own hidden row of `row`.
    int32_t decode_draft(llama_token token, int32_t row) {
        api().batch_clear(batch_);
        add(token, hidden_row(row), n_cells_, true);
        process(1);
        return 0;
    }

    void add(llama_token token, const float * hidden, llama_pos pos, bool wants_output) {
        const int32_t entry = api().batch_add_token(batch_, 0, ids_.empty() ? token : row_of_[token]);
        if (entry < 0 || !api().batch_set_embd_token(batch_, entry, {hidden, 1, n_embd_})) {
            throw LibraryError("llama.cpp refused token " + std::to_string(token) + " for the drafter");
        }
        api().batch_set_pos(batch_, entry, &pos);
        api().batch_set_output_logits(batch_, entry, wants_output);
    }

    void process(int32_t n) {
        const int32_t code = api().process(ctx_, PROCESS_DECODE, batch_);
        if (code != 0) {
            throw LibraryError("llama.cpp failed to decode " + std::to_string(n) + " draft rows at position " +
                               std::to_string(n_cells_) + " (code " + std::to_string(code) + ")");
        }
        n_cells_ += n;
    }

    llama_token read_draft(int32_t row) const {
        const float * logits = api().get_logits_ith(ctx_, row);
        if (logits == nullptr) throw LibraryError("llama.cpp has no logits for the draft step");
        const int32_t best = argmax(logits, n_vocab_);
        return ids_.empty() ? best : ids_[best];
    }

    llama_context * ctx_;
    llama_batch_ext * batch_;
    size_t n_embd_;
    int32_t n_vocab_, n_batch_;  // n_vocab_: logits that may be proposed
    std::vector<llama_token> ids_;  // of a compact head: the target's id of each row
    std::vector<int32_t> row_of_;   // of a compact head: the row that each of the target's ids is fed as

    int32_t n_true_ = 0, n_cells_ = 0;
    std::vector<llama_token> tokens_;  // queued cells
    std::vector<float> rows_;          // (tokens_.size(), n_embd)
    std::vector<float> carry_;         // (n_embd,): the hidden row before the next cell
};

const Registered registered("mtp", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<Mtp>(options);
});

}  // namespace

}  // namespace sidecar
