// The draft model: a smaller model of the same vocabulary, decoded a token at a time (Leviathan et al., "Fast Inference
// from Transformers via Speculative Decoding", 2023; Chen et al., "Accelerating Large Language Model Decoding with Speculative
// Sampling", 2023).
//
// It reads nothing of the target but its tokens. Its cells are those of the tokens that stand, then those of the draft before:
// as far as the text came out as drafted they stay, and only what differs is decoded, together with the last token. A model with
// recurrent layers cannot drop cells: its state is kept before the first draft, and what stands since is decoded again.
//
// Its vocabulary may lack some of the target's last ids, which no text has; such a token is fed as token 0.
#include <algorithm>
#include <stdexcept>

#include "../draft_context.h"
#include "../drafter.h"

namespace sidecar {

namespace {

class DraftModel final : public Drafter {
  public:
    explicit DraftModel(const DrafterOptions & options)
        : ctx_(options.ctx, "model"), n_vocab_(std::min(options.n_vocab, ctx_.n_vocab())),
          recurrent_(api().model_is_recurrent(ctx_.model()) || api().model_is_hybrid(ctx_.model())) {}

    void begin() override {
        ctx_.clear();
        text_.clear();
        n_true_ = 0;
        drafted_.clear();
        state_.clear();
    }

    void observe(int32_t pos, const llama_token * tokens, const float *, int32_t n) override {
        if (size_t(pos) > text_.size()) throw std::logic_error("the draft model was not shown every position");
        text_.resize(size_t(pos));
        text_.insert(text_.end(), tokens, tokens + n);
        // A prompt is taken in piece by piece; tokens that come one by one are plain decoding's, and wait until it ends.
        if (n > 1 && n_waiting() >= size_t(ctx_.n_batch())) catch_up();
    }

    void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        if (n < 1) return;
        text_.push_back(last);
        const int32_t row = decode(true);
        drafted_.assign(1, ctx_.pick(picker, row, n_vocab_));
        if (recurrent_ && n > 1) state_ = ctx_.state(STATE_PARTIAL_ONLY);
        while (int32_t(drafted_.size()) < n) {
            ctx_.start();
            ctx_.add(drafted_.back(), nullptr, 0, true);
            ctx_.decode();
            drafted_.push_back(ctx_.pick(picker, 0, n_vocab_));
        }
        out.insert(out.end(), drafted_.begin(), drafted_.end());
    }

    void catch_up() override {
        if (n_waiting() > 0) decode(false);
    }

    std::vector<int32_t> layers() const override { return {}; }

    DraftContext * context() override { return &ctx_; }

    // Tokens that stand and have lost their cells wait again.
    void go_back(int32_t n, const std::vector<uint8_t> & mark) override {
        drop_drafts();
        text_.resize(size_t(n));
        if (n_true_ <= text_.size()) return;
        if (!recurrent_) {
            n_true_ = text_.size();
            ctx_.trim(n);
        } else if (mark.empty()) {
            n_true_ = 0;
            ctx_.clear();
        } else {
            n_true_ = text_.size();
            restore(mark);
        }
    }

    std::vector<uint8_t> mark() override {
        if (!recurrent_) return {};
        drop_drafts();
        catch_up();
        return ctx_.state(STATE_PARTIAL_ONLY);
    }

  private:
    size_t n_waiting() const { return text_.size() - n_true_; }

    // Decodes the tokens that stand and have no cells; with `wants_output` the last one has logits, and its row's index is returned.
    int32_t decode(bool wants_output) {
        keep_right_drafts();
        int32_t n = 0;
        while (n_true_ < text_.size()) {
            n = int32_t(std::min(n_waiting(), size_t(ctx_.n_batch())));
            ctx_.start();
            for (int32_t i = 0; i < n; ++i, ++n_true_) {
                const llama_token token = text_[n_true_] < ctx_.n_vocab() ? text_[n_true_] : 0;
                ctx_.add(token, nullptr, 0, wants_output && n_true_ + 1 == text_.size());
            }
            ctx_.decode();
        }
        return n - 1;
    }

    // Drops the cells of drafts that do not stand, or with recurrent layers those of all. The last draft has no cell, and of
    // those that stand the last token's logits are wanted again: it is decoded anew.
    void keep_right_drafts() {
        const size_t n_cells = size_t(ctx_.n_cells());
        if (n_cells == n_true_) return;
        size_t n_right = 0;
        while (!recurrent_ && n_true_ + 1 < text_.size() && n_true_ < n_cells && text_[n_true_] == drafted_[n_right]) {
            n_true_ += 1;
            n_right += 1;
        }
        drop_drafts();
    }

    // Drops all cells but those of the tokens that stand.
    void drop_drafts() {
        if (size_t(ctx_.n_cells()) > n_true_) {
            if (recurrent_) {
                restore(state_);
            } else {
                ctx_.trim(llama_pos(n_true_));
            }
        }
        drafted_.clear();
    }

    // Puts a state back that had n_true_ cells behind it; cells of attention are dropped by position.
    void restore(const std::vector<uint8_t> & state) {
        ctx_.set_state(state, STATE_PARTIAL_ONLY);
        ctx_.trim(llama_pos(n_true_));
    }

    DraftContext ctx_;
    int32_t n_vocab_;  // logits that may be proposed
    bool recurrent_;
    std::vector<llama_token> text_;     // that stand, by position
    size_t n_true_ = 0;                 // of those: have cells
    std::vector<llama_token> drafted_;  // the last draft: its cells follow, the last one left out
    std::vector<uint8_t> state_;        // before the last draft
};

const Registered registered("model", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<DraftModel>(options);
});

}  // namespace

}  // namespace sidecar
