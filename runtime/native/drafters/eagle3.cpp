// The EAGLE3 drafter: one block over a token's embedding and g, which an encoder makes of three of the target's layers.
//
// The cell at position p encodes the pair (x_{p+1}, g_p): the token one position on, and g of the target's rows at p. So the
// cell of the newest row waits for the next token, and the first draft comes from (last, g). A draft step's own hidden row
// stands in for g at the next position.
//
// Rows that the target has handed over wait, as an MTP head's do (mtp.cpp), and only those that stand are ever encoded. One
// decode makes their cells together with the first draft: llama.cpp's graph computes the output of every row of a batch and
// hands out the first ones where not all are wanted, so all are.
#include <algorithm>
#include <stdexcept>

#include "../draft_context.h"
#include "../drafter.h"

namespace sidecar {

namespace {

constexpr size_t max_waiting = 64;  // rows; where they came one by one, without drafts, the drafter gives up knowing all of them

class Eagle3 final : public Drafter {
  public:
    explicit Eagle3(const DrafterOptions & options)
        : ctx_(options.ctx, "eagle3"), layers_(target_layers(options)),
          rows_(layers_.size() * size_t(options.n_embd)), max_waiting_(std::min(max_waiting, size_t(ctx_.n_batch()))),
          n_vocab_(std::min(options.n_vocab, ctx_.n_vocab())) {
        ctx_.hand_out_rows(true);
    }

    void begin() override {
        ctx_.clear();
        rows_.clear();
        tokens_.clear();
        n_alone_ = 0;
    }

    void observe(int32_t pos, const llama_token * tokens, const float * hidden, int32_t n) override {
        if (pos != rows_.end()) throw std::logic_error("the eagle3 drafter was not shown every position");
        n_alone_ = n == 1 ? n_alone_ + 1 : 0;
        for (int32_t i = 0; i < n; ++i) {
            if (tokens_.size() < rows_.size()) tokens_.push_back(tokens[i]);
            rows_.push(hidden + size_t(i) * rows_.width());
            if (rows_.size() < max_waiting_) continue;
            if (n_alone_ >= rows_.size()) {
                give_up(std::max<size_t>(max_waiting_ / 2, 1));  // the newest row has no token yet
            } else {
                catch_up();
            }
        }
    }

    void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        if (rows_.size() == 0) return;
        if (tokens_.size() < rows_.size()) tokens_.push_back(last);
        int32_t row = decode(true);
        for (int32_t i = 0; i < n; ++i) {
            const llama_token drafted = ctx_.pick(picker, row, n_vocab_);
            out.push_back(drafted);
            if (i + 1 < n) {
                ctx_.start();
                ctx_.add(drafted, ctx_.hidden_row(row), ctx_.n_embd(), true);
                ctx_.decode();
                row = 0;
            }
        }
    }

    std::vector<int32_t> layers() const override { return layers_; }

    DraftContext * context() override { return &ctx_; }

    void catch_up() override {
        if (!tokens_.empty()) decode(false);
    }

    // The cell at position n-1 is that of (token n, g of n-1), which stands.
    void go_back(int32_t n, const std::vector<uint8_t> &) override {
        ctx_.go_back(n) ? rows_.go_back(n) : rows_.clear(n);
        tokens_.resize(std::min(tokens_.size(), rows_.size()));
        n_alone_ = 0;
    }

    std::vector<uint8_t> state() override {
        ByteWriter out;
        ctx_.put(out);
        rows_.put(out);
        out.put(tokens_);
        out.put(uint64_t(n_alone_));
        return out.take();
    }

    void restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> & state) override {
        begin();
        rows_.clear(llama_pos(tokens.size()));
        ctx_.clear(rows_.first());
        if (state.empty()) return;
        ByteReader in(state);
        uint64_t n_alone = 0;
        ctx_.get(in);
        rows_.get(in);
        in.get(tokens_);
        in.get(n_alone);
        in.finish();
        if (tokens_.size() > rows_.size() || rows_.end() != llama_pos(tokens.size())) {
            throw std::invalid_argument("a saved state is not that of this eagle3 head");
        }
        n_alone_ = size_t(n_alone);
    }

  private:
    // The layer after the last one stands for the target's last hidden row.
    std::vector<int32_t> target_layers(const DrafterOptions & options) const {
        const int32_t * ids = api().model_target_layer_ids(ctx_.model());
        std::vector<int32_t> layers(ids, ids + api().model_target_layer_ids_n(ctx_.model()));
        if (layers.empty()) throw std::invalid_argument("the draft context's model is no eagle3 drafter");
        std::replace(layers.begin(), layers.end(), options.n_layers, LAST_HIDDEN);
        return layers;
    }

    void give_up(size_t n_kept) {
        const size_t n_dropped = rows_.size() - n_kept;
        rows_.pop(n_dropped);
        tokens_.erase(tokens_.begin(), tokens_.begin() + ptrdiff_t(n_dropped));
        ctx_.clear(rows_.first());
    }

    // Encodes and decodes the waiting rows whose next token is known; with `wants_output` their logits and hidden rows can be had.
    // Returns the last one's index.
    int32_t decode(bool wants_output) {
        const size_t n = tokens_.size();
        ctx_.trim(rows_.first());
        ctx_.start();
        for (size_t i = 0; i < n; ++i) ctx_.add(-1, rows_.row(i), rows_.width(), true);
        ctx_.encode();
        const float * encoded = ctx_.hidden_rows();
        ctx_.start();
        for (size_t i = 0; i < n; ++i) ctx_.add(tokens_[i], encoded + i * ctx_.n_embd(), ctx_.n_embd(), wants_output);
        ctx_.decode();
        rows_.pop(n);
        tokens_.clear();
        n_alone_ = 0;
        return int32_t(n) - 1;
    }

    DraftContext ctx_;
    std::vector<int32_t> layers_;
    WaitingRows rows_;
    std::vector<llama_token> tokens_;  // the token after each waiting row; the newest row may have none yet
    size_t max_waiting_;
    size_t n_alone_ = 0;  // waiting rows that came one by one, without drafts
    int32_t n_vocab_;
};

const Registered registered("eagle3", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<Eagle3>(options);
});

}  // namespace

}  // namespace sidecar
