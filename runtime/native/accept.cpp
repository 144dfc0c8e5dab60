#include "accept.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

namespace sidecar {

namespace {

struct Greedy : Chooser {
    llama_token choose(const float * logits, int32_t n_vocab, llama_token) override { return argmax(logits, n_vocab); }
};

struct Coin : Chooser {
    std::mt19937_64 random;
    std::bernoulli_distribution heads;
    Coin(double p, uint64_t seed) : random(seed), heads(p) {}
    llama_token choose(const float * logits, int32_t n_vocab, llama_token drafted) override {
        const llama_token own = argmax(logits, n_vocab);  // the same work as a real choice
        if (drafted < 0) {
            return own;
        }
        if (heads(random)) {
            return drafted;
        }
        return own != drafted ? own : (own + 1) % n_vocab;
    }
};

struct Forced : Chooser {
    std::vector<llama_token> tokens;
    size_t next = 0;
    explicit Forced(std::vector<llama_token> t) : tokens(std::move(t)) {
        if (tokens.empty()) throw std::invalid_argument("forced_chooser needs a token");
    }
    llama_token choose(const float *, int32_t, llama_token) override {
        return tokens[std::min(next++, tokens.size() - 1)];
    }
};

struct Best : Picker {
    void begin() override {}
    int32_t pick(const float * logits, int32_t n, const llama_token *) override { return argmax(logits, n); }
    void take(llama_token) override {}
};

}  // namespace

Picker & best_picker() {
    static Best best;
    return best;
}

std::unique_ptr<Chooser> greedy_chooser() { return std::make_unique<Greedy>(); }
std::unique_ptr<Chooser> coin_chooser(double p_accept, uint64_t seed) { return std::make_unique<Coin>(p_accept, seed); }
std::unique_ptr<Chooser> forced_chooser(std::vector<llama_token> tokens) { return std::make_unique<Forced>(std::move(tokens)); }

int32_t argmax(const float * values, int32_t n) {
    // One pass for the maximum with a compiler vector (GCC and Clang), then a search in the block that holds it.
    using Lanes = float __attribute__((vector_size(16)));
    constexpr int32_t width = sizeof(Lanes) / sizeof(float);
    constexpr int32_t block = 4096;
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    int32_t best_start = 0;
    float best = lowest;
    for (int32_t start = 0; start < n; start += block) {
        const int32_t end = std::min(start + block, n);
        Lanes even = {lowest, lowest, lowest, lowest};
        Lanes odd = even;
        int32_t i = start;
        for (; i + 2 * width <= end; i += 2 * width) {
            Lanes a, b;
            std::memcpy(&a, values + i, sizeof(a));
            std::memcpy(&b, values + i + width, sizeof(b));
            even = a > even ? a : even;  // a comparison with NaN is false: it never wins
            odd = b > odd ? b : odd;
        }
        float block_best = lowest;
        for (int32_t k = 0; k < width; ++k) block_best = std::max({block_best, even[k], odd[k]});
        for (; i < end; ++i) block_best = values[i] > block_best ? values[i] : block_best;
        if (block_best > best) {
            best = block_best;
            best_start = start;
        }
    }
    for (int32_t i = best_start; i < n; ++i) {
        if (values[i] == best) return i;
    }
    return 0;  // every value is NaN
}

int32_t accept(Target & target, const std::vector<llama_token> & drafts, Chooser & chooser, bool ignore_eog,
               std::vector<llama_token> & out) {
    const int32_t n_drafts = int32_t(drafts.size());
    const int32_t n_vocab = target.n_vocab();
    for (int32_t i = 0; i < n_drafts; ++i) {
        const llama_token chosen = chooser.choose(target.logits(i), n_vocab, drafts[i]);
        out.push_back(chosen);
        if (chosen != drafts[i]) return i;
        if (!ignore_eog && api().vocab_is_eog(target.vocab(), chosen)) return i + 1;
    }
    out.push_back(chooser.choose(target.logits(n_drafts), n_vocab, -1));
    return n_drafts;
}

}  // namespace sidecar
