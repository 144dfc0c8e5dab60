// Gemma 4's assistant: an MTP head of several layers without keys and values of its own. They attend to the target's cache.
//
// Every draft of a round stands at the position of the last token, which has no cell yet: the target's cache holds what is before
// it and nothing else. The first pair is (the target's hidden row before it, the last token); each further one is the assistant's own
// projected row and the token just drafted. So there is nothing to catch up on, to keep and to rewind.
//
// llama.cpp lets the two contexts share their cells; to clear or trim them here would clear or keep the target's.
#include <algorithm>
#include <stdexcept>

#include "../draft_context.h"
#include "../drafter.h"

namespace sidecar {

namespace {

class Gemma4Assistant final : public Drafter {
  public:
    explicit Gemma4Assistant(const DrafterOptions & options)
        : ctx_(options.ctx, "gemma4-assistant"), n_vocab_(std::min(options.n_vocab, ctx_.n_vocab())) {
        if (ctx_.n_embd() != size_t(options.n_embd)) {
            throw std::invalid_argument("the assistant takes hidden rows of " + std::to_string(ctx_.n_embd()) +
                                        ", the target's have " + std::to_string(options.n_embd));
        }
        ctx_.hand_out_rows(true);
        begin();
    }

    void begin() override {
        pos_ = 0;
        row_.assign(ctx_.n_embd(), 0.0f);
    }

    void observe(int32_t pos, const llama_token *, const float * hidden, int32_t n) override {
        if (pos != pos_) throw std::logic_error("the assistant was not shown every position");
        pos_ += n;
        row_.assign(hidden + size_t(n - 1) * ctx_.n_embd(), hidden + size_t(n) * ctx_.n_embd());
    }

    void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        const float * row = row_.data();
        for (int32_t i = 0; i < n; ++i) {
            ctx_.start_at(pos_);
            ctx_.add(last, row, ctx_.n_embd(), true);
            ctx_.decode();
            if (i + 1 < n) row = ctx_.hidden_row(0);
            last = ctx_.pick(picker, 0, n_vocab_);
            out.push_back(last);
        }
    }

    // The row before the next token comes with it.
    void go_back(int32_t n, const std::vector<uint8_t> &) override { pos_ = n; }

    std::vector<uint8_t> state() override {
        ByteWriter out;
        out.put(row_);
        return out.take();
    }

    void restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> & state) override {
        begin();
        pos_ = int32_t(tokens.size());
        if (state.empty()) return;  // the row before is not known: one draft is worse for it
        ByteReader in(state);
        in.get(row_);
        in.finish();
        if (row_.size() != ctx_.n_embd()) throw std::invalid_argument("a saved state is not that of this assistant");
    }

    std::vector<int32_t> layers() const override { return {LAST_HIDDEN}; }
    DraftContext * context() override { return &ctx_; }
    bool reads_cache() const override { return true; }

  private:
    DraftContext ctx_;
    int32_t n_vocab_;
    llama_pos pos_ = 0;       // of the last token: how many the target has decoded before it
    std::vector<float> row_;  // (n_embd,) the target's hidden row there
};

const Registered registered("gemma4-assistant", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<Gemma4Assistant>(options);
});

}  // namespace

}  // namespace sidecar
