// A drafter for tests: it knows the text that the target will write and is right for the first n_right guesses of every
// draft, wrong after them. n_right 0 is the liar, a large n_right the oracle.
#include <stdexcept>

#include "../drafter.h"

namespace sidecar {

namespace {

class Scripted final : public Drafter {
  public:
    explicit Scripted(const DrafterOptions & options)
        : script_(options.script), n_right_(options.n_right), hidden_rows_(options.hidden_rows) {
        if (script_.empty()) throw std::invalid_argument("the scripted drafter needs a script");
    }

    void begin() override { n_observed_ = 0; }

    void observe(int32_t pos, const llama_token *, const float *, int32_t n) override { n_observed_ = pos + n; }

    void go_back(int32_t n, const std::vector<uint8_t> &) override { n_observed_ = n; }

    void restore(const std::vector<llama_token> & tokens, const std::vector<uint8_t> &) override { n_observed_ = int32_t(tokens.size()); }

    void propose(llama_token, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        for (int32_t i = 0; i < n; ++i) {
            const size_t pos = size_t(n_observed_) + 1 + size_t(i);
            if (pos >= script_.size()) return;
            const llama_token right = script_[pos];
            const llama_token wrong = right == 0 ? 1 : right - 1;
            out.push_back(i < n_right_ ? right : wrong);
            picker.take(out.back());
        }
    }

    // It asks for them all the same, so that its rounds cost the target what a real drafter's do.
    std::vector<int32_t> layers() const override { return hidden_rows_ ? std::vector<int32_t>{LAST_HIDDEN} : std::vector<int32_t>(); }

  private:
    std::vector<llama_token> script_;
    int32_t n_right_;
    bool hidden_rows_;
    int32_t n_observed_ = 0;
};

const Registered registered("scripted", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<Scripted>(options);
});

}  // namespace

}  // namespace sidecar
