// The DSpark drafter: DFlash with a Markov head, which llama.cpp's graph chains from each of the block's tokens to the next, and
// perhaps a confidence head, which says of each how likely it is to stand.
//
// In most exports the known token's own row predicts the first token (sample_from_anchor). A draft ends before the first token
// whose confidence is below `min_confidence`.
#include "../block_drafter.h"

namespace sidecar {

namespace {

class DSpark final : public BlockDrafter {
  public:
    explicit DSpark(const DrafterOptions & options)
        : BlockDrafter(options, "dspark"), min_confidence_(options.min_confidence) {
        if (meta("dflash.sample_from_anchor") != "false") set_first(0);
        if (meta("dflash.has_confidence_head") == "false") min_confidence_ = 0.0f;
        if (min_confidence_ > 0.0f) ctx_.hand_out_rows(true);  // they come in place of hidden rows
    }

  private:
    void read(int32_t first, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        for (int32_t i = first; i < first + n; ++i) {
            if (min_confidence_ > 0.0f && !(ctx_.hidden_row(i)[0] >= min_confidence_)) return;
            out.push_back(ctx_.pick(picker, i, n_vocab_));
        }
    }

    float min_confidence_;
};

const Registered registered("dspark", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<DSpark>(options);
});

}  // namespace

}  // namespace sidecar
