// The DFlash drafter (arXiv:2602.06036): each mask of the block becomes the token that its row of logits says.
//
// DFlash2 has a selector instead: of every position it hands out k candidates and the score of each after each candidate of the
// position before, and the best path is walked from the known token on.
#include <algorithm>
#include <limits>

#include "../block_drafter.h"

namespace sidecar {

namespace {

class DFlash final : public BlockDrafter {
  public:
    explicit DFlash(const DrafterOptions & options)
        : BlockDrafter(options, "dflash"), top_k_(std::max(0, api().model_dflash_selector_top_k(ctx_.model()))) {
        if (top_k_ > 0) ctx_.hand_out_rows(false);  // the lattice comes in place of hidden rows
    }

  private:
    bool wants_logits() const override { return top_k_ == 0; }

    void read(int32_t first, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        if (top_k_ == 0) {
            for (int32_t i = 0; i < n; ++i) out.push_back(ctx_.pick(picker, first + i, n_vocab_));
            return;
        }
        // A row holds k token ids, then k scores for each candidate of the position before it.
        const float * lattice = ctx_.hidden_rows();
        ptrdiff_t candidate = 0;  // the known token is the only one of its position
        for (int32_t i = 0; i < n; ++i) {
            const float * row = lattice + size_t(first + i) * ctx_.n_embd();
            const float * scores = row + top_k_ + candidate * top_k_;
            ids_.resize(size_t(top_k_));
            scores_.assign(scores, scores + top_k_);
            for (int32_t j = 0; j < top_k_; ++j) {
                ids_[size_t(j)] = llama_token(row[j]);
                const bool can_be = ids_[size_t(j)] >= 0 && ids_[size_t(j)] < n_vocab_;
                if (!can_be) scores_[size_t(j)] = -std::numeric_limits<float>::infinity();
            }
            if (*std::max_element(scores_.begin(), scores_.end()) == -std::numeric_limits<float>::infinity()) return;
            candidate = picker.pick(scores_.data(), top_k_, ids_.data());
            out.push_back(ids_[size_t(candidate)]);
        }
    }

    int32_t top_k_;
    std::vector<llama_token> ids_;  // of a position's candidates
    std::vector<float> scores_;
};

const Registered registered("dflash", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<DFlash>(options);
});

}  // namespace

}  // namespace sidecar
