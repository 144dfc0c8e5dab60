// The n-gram drafter: prompt look-up by itself, for models without a head; drafts cost nothing and read nothing of the target.
//
// It drafts wherever anything matched, as a fixed depth asks. With pace the look-up is the session's, which weighs each match.
#include "../drafter.h"
#include "../ngram.h"

namespace sidecar {

namespace {

class NgramDrafter final : public Drafter {
  public:
    void begin() override { ngram_.clear(); }
    void observe(int32_t pos, const llama_token * tokens, const float *, int32_t n) override { ngram_.observe(pos, tokens, n); }
    void go_back(int32_t n, const std::vector<uint8_t> &) override { ngram_.go_back(n); }
    void propose(llama_token last, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        const size_t first = out.size();
        ngram_.find(last, n, out);
        for (size_t i = first; i < out.size(); ++i) picker.take(out[i]);
    }
    std::vector<int32_t> layers() const override { return {}; }

  private:
    Ngram ngram_;
};

const Registered registered("ngram", [](const DrafterOptions &) -> std::unique_ptr<Drafter> {
    return std::make_unique<NgramDrafter>();
});

}  // namespace

}  // namespace sidecar
