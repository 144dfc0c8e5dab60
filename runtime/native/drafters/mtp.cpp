// The MTP drafter: the checkpoint's own head or heads on a context of their own (ctx_type MTP).
//
// The cell at position p+1 encodes the pair (h_p, x_{p+1}): x is the token there, h the target's hidden row one position
// before; cell 0 is (zeros, x_0). A draft step's own hidden row is the h of the next step.
//
// Cells are of two sorts. A head's first n_true_ were made from the target's hidden rows and stay. Those after them were made
// from the head's own rows while drafting and are dropped before the next decode. Rows that the target has handed over
// but the head has not decoded wait in rows_; propose() decodes them together with `last` in one pass. While nobody drafts
// they only pile up, so that a pause in drafting costs nothing until it ends; where it lasts, the oldest are given up.
//
// Of several heads (MiMo, Step, HY-V3) step i is head i's, and no draft is deeper than there are heads. Each head has keys and
// values of its own in the same cells, so it decodes all rows that are new to it: those that wait, then the drafted ones. To
// go back to an earlier position for the next head leaves the others' keys and values as they are: llama.cpp gives the cells
// that it has just freed to the rows that follow. A head that no draft reached lags behind, and its rows wait for it.
//
// A compact head knows some of the target's tokens only (sidecars/compact.py). Its rows are mapped where tokens enter the
// batch and where drafts leave it; everything between speaks of the target's ids.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../draft_context.h"
#include "../drafter.h"

namespace sidecar {

namespace {

constexpr size_t max_queued = 1024;  // rows that may wait: 4 MB at a width of 1,024
constexpr size_t max_behind = 128;   // rows decoded one by one, without drafts, before the head gives up knowing all of them

class Mtp final : public Drafter {
  public:
    explicit Mtp(const DrafterOptions & options)
        : ctx_(options.ctx, "mtp"), rows_(ctx_.n_embd()), n_true_(size_t(std::max(1, api().model_n_layer_nextn(ctx_.model())))),
          vocab_(options.vocab), n_vocab_(std::min(options.n_vocab, ctx_.n_vocab())) {
        if (vocab_ != nullptr && int32_t(vocab_->ids().size()) != ctx_.n_vocab()) {
            throw std::invalid_argument("the compact head has " + std::to_string(ctx_.n_vocab()) + " rows and " +
                                        std::to_string(vocab_->ids().size()) + " ids");
        }
        choose_hidden_rows();
    }

    void begin() override {
        begin_at(0, 0);
        n_alone_ = 0;
    }

    void observe(int32_t pos, const llama_token * tokens, const float * hidden, int32_t n) override {
        const size_t n_embd = rows_.width();
        n_alone_ = n == 1 ? n_alone_ + 1 : 0;
        for (int32_t i = 0; i < n; ++i) {
            if (pos + i > rows_.end()) throw std::logic_error("the mtp drafter was not shown every position");
            if (pos + i == rows_.end()) {
                push(tokens[i]);
                if (std::min(n_alone_, size_t(rows_.end() - n_true_[0])) >= max_behind) begin_at(rows_.end(), max_behind / 2);
                if (rows_.size() == max_queued) catch_up();
            }
            std::memcpy(carry_.data(), hidden + size_t(i) * n_embd, n_embd * sizeof(float));
        }
    }

    void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        push(last);
        n_alone_ = 0;
        drafted_.clear();
        drafted_rows_.clear();
        n = std::min(n, max_depth());
        for (int32_t i = 0; i < n; ++i) {
            const int32_t row = i == 0 || is_chain() ? decode(size_t(i), true) : decode_draft();
            if (i + 1 < n) {
                const float * hidden = ctx_.hidden_row(row);
                drafted_rows_.insert(drafted_rows_.end(), hidden, hidden + rows_.width());
            }
            const llama_token * ids = vocab_ == nullptr ? nullptr : vocab_->ids().data();
            const int32_t picked = ctx_.pick(picker, row, n_vocab_, ids);
            drafted_.push_back(ids == nullptr ? picked : ids[picked]);
        }
        out.insert(out.end(), drafted_.begin(), drafted_.end());
        forget();
    }

    std::vector<int32_t> layers() const override { return {LAST_HIDDEN}; }

    DraftContext * context() override { return &ctx_; }

    int32_t max_depth() const override { return is_chain() ? int32_t(n_true_.size()) : INT32_MAX; }

    void catch_up() override {
        n_alone_ = 0;
        drafted_.clear();
        for (size_t head = 0; head < n_true_.size(); ++head) {
            if (n_true_[head] < rows_.end()) decode(head, false);
        }
        forget();
    }

    // The cell at position n is that of (h of n-1, token n), which stands; carry_ comes with the token.
    void go_back(int32_t n, const std::vector<uint8_t> &) override {
        const llama_pos end = n + 1;
        for (llama_pos & n_true : n_true_) n_true = std::min(n_true, end);
        if (ctx_.go_back(end)) {
            rows_.go_back(end);
            tokens_.resize(rows_.size());
        } else {
            begin_at(end, 0);
        }
        n_alone_ = 0;
    }

    std::vector<uint8_t> state() override {
        ByteWriter out;
        ctx_.put(out);
        rows_.put(out);
        out.put(tokens_);
        out.put(n_true_);
        out.put(uint64_t(n_alone_));
        out.put(carry_);
        return out.take();
    }

    void restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> & state) override {
        begin_at(llama_pos(tokens.size()), 0);
        if (state.empty()) return;
        ByteReader in(state);
        std::vector<llama_pos> n_true;
        uint64_t n_alone = 0;
        ctx_.get(in);
        rows_.get(in);
        in.get(tokens_);
        in.get(n_true);
        in.get(n_alone);
        in.get(carry_);
        in.finish();
        const auto [least, most] = std::minmax_element(n_true.begin(), n_true.end());
        if (n_true.size() != n_true_.size() || tokens_.size() != rows_.size() || carry_.size() != rows_.width() ||
            rows_.end() != llama_pos(tokens.size()) || *least < rows_.first() || *most > rows_.end()) {
            throw std::invalid_argument("a saved state is not that of this mtp head");
        }
        n_true_ = n_true;
        n_alone_ = size_t(n_alone);
    }

  private:
    // llama.cpp can hand out hidden rows of the output rows alone ("masked") or of all. Its graphs differ: some crop the
    // rows to the outputs and must be masked, or llama.cpp reads beyond them and ends the process; others (qwen35, glm4moe) keep
    // all and, masked, silently return the FIRST rows of a batch. So this looks: two cells in one decode, output on the second,
    // against the same cells one by one. Only a row that is surely the first one's is taken for it: rows of a damaged head may
    // be no numbers, and tell nothing.
    void choose_hidden_rows() {
        ctx_.hand_out_rows(true);
        if (ctx_.n_batch() < 2) return;  // one row at a time: there is nothing to confuse
        const auto decode_last = [this] {
            const float * row = ctx_.hidden_row(decode(0, true));
            return std::vector<float>(row, row + rows_.width());
        };
        const auto push_first = [this] {
            begin();
            carry_.assign(rows_.width(), 1.0f);
            push(0);
        };
        const auto push_second = [this] {
            for (size_t i = 0; i < rows_.width(); i += 2) carry_[i] = -1.0f;  // the two cells must differ in either input
            push(1);
        };
        push_first();
        const std::vector<float> first = decode_last();
        push_second();
        const std::vector<float> second = decode_last();
        push_first();
        push_second();
        const std::vector<float> found = decode_last();
        const double between = distance(first, second);
        if (distance(found, first) < 1e-3 * between && between > 0.0) ctx_.hand_out_rows(false);
    }

    static double distance(const std::vector<float> & a, const std::vector<float> & b) {
        double sum = 0.0;
        for (size_t i = 0; i < a.size(); ++i) sum += double(a[i] - b[i]) * double(a[i] - b[i]);
        return sum;
    }

    bool is_chain() const { return n_true_.size() > 1; }

    // Begins anew with the last n_kept of n cells, which must be waiting: the way back from plain decoding stays short however
    // long that lasted. It costs the text before them, so drafts may be worse.
    void begin_at(llama_pos n, size_t n_kept) {
        const llama_pos first = n - llama_pos(n_kept);
        if (n_kept == 0) {
            rows_.clear(first);
            tokens_.clear();
            carry_.assign(rows_.width(), 0.0f);
        } else {
            drop(size_t(first - rows_.first()));
        }
        ctx_.clear(first);
        std::fill(n_true_.begin(), n_true_.end(), first);
    }

    // Queues the cell (carry, token).
    void push(llama_token token) {
        tokens_.push_back(token);
        rows_.push(carry_.data());
    }

    void drop(size_t n) {
        tokens_.erase(tokens_.begin(), tokens_.begin() + ptrdiff_t(n));
        rows_.pop(n);
    }

    // Drops what every head has decoded; a head that lags too far behind decodes now.
    void forget() {
        const llama_pos n_done = *std::min_element(n_true_.begin(), n_true_.end());
        drop(size_t(n_done - rows_.first()));
        if (rows_.size() >= max_behind) catch_up();
    }

    // Decodes all cells that wait for a head, and the drafted ones of a chain, in batches; with `wants_output` the last cell has
    // logits and a hidden row. Returns its row's index.
    int32_t decode(size_t head, bool wants_output) {
        if (is_chain()) api().set_nextn_layer_offset(ctx_.get(), int32_t(head));
        ctx_.trim(n_true_[head]);
        const size_t n_cells = rows_.size() + drafted_.size();
        size_t next = size_t(n_true_[head] - rows_.first());
        int32_t n = 0;
        while (next < n_cells) {
            n = int32_t(std::min(n_cells - next, size_t(ctx_.n_batch())));
            ctx_.start();
            for (int32_t i = 0; i < n; ++i, ++next) add(next, wants_output && next + 1 == n_cells);
            ctx_.decode();
        }
        n_true_[head] = rows_.end();
        return n - 1;
    }

    // Decodes the last drafted token with the head's own hidden row.
    int32_t decode_draft() {
        ctx_.start();
        add(rows_.size() + drafted_.size() - 1, true);
        ctx_.decode();
        return 0;
    }

    // Adds cell i to the batch, counted from the oldest that waits; the drafted ones come after those.
    void add(size_t i, bool wants_output) {
        const bool is_true = i < rows_.size();
        const size_t j = i - rows_.size();
        const llama_token token = is_true ? tokens_[i] : drafted_[j];
        const float * row = is_true ? rows_.row(i) : drafted_rows_.data() + j * rows_.width();
        ctx_.add(vocab_ == nullptr ? token : vocab_->row_of(token), row, rows_.width(), wants_output);
    }

    DraftContext ctx_;
    WaitingRows rows_;
    std::vector<llama_token> tokens_;  // of the waiting rows
    std::vector<llama_pos> n_true_;    // of each head
    size_t n_alone_ = 0;               // rows that came one by one, without drafts
    std::vector<float> carry_;         // (n_embd,): the hidden row before the next cell
    std::vector<llama_token> drafted_;
    std::vector<float> drafted_rows_;  // (drafted_.size() - 1, n_embd): the hidden row before each drafted token but the last
    const DraftVocab * const vocab_;   // of a compact head, else null
    const int32_t n_vocab_;            // logits that may be proposed
};

const Registered registered("mtp", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<Mtp>(options);
});

}  // namespace

}  // namespace sidecar
