#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace sidecar {

namespace {

constexpr float never = -std::numeric_limits<float>::infinity();

class Chain final : public Chooser {
  public:
    Chain(llama_sampler * chain, llama_sampler * grammar) : chain_(chain), grammar_(grammar) {}

    llama_token choose(const float * logits, int32_t n_vocab, llama_token) override {
        llama_token token = draw(logits, n_vocab, false);
        if (grammar_ != nullptr && !allows(token)) token = draw(logits, n_vocab, true);
        api().sampler_accept(chain_, token);
        if (grammar_ != nullptr) api().sampler_accept(grammar_, token);
        return token;
    }

  private:
    llama_token draw(const float * logits, int32_t n_vocab, bool by_grammar) {
        candidates_.fill(logits, n_vocab);
        if (by_grammar) candidates_.apply(grammar_);
        candidates_.apply(chain_);
        return candidates_.selected();
    }

    bool allows(llama_token token) const {
        llama_token_data one{token, 1.0f, 0.0f};
        llama_token_data_array array{&one, 1, -1, false};
        api().sampler_apply(grammar_, &array);
        return one.logit > never;
    }

    llama_sampler * chain_;
    llama_sampler * grammar_;  // or null
    Candidates candidates_;
};

}  // namespace

void Candidates::fill(const float * logits, int32_t n_vocab) {
    tokens_.resize(size_t(n_vocab));
    for (int32_t i = 0; i < n_vocab; ++i) tokens_[size_t(i)] = {i, logits[i], 0.0f};
    array_ = {tokens_.data(), tokens_.size(), -1, false};
}

void Candidates::apply(llama_sampler * sampler) {
    if (std::none_of(begin(), end(), [](const llama_token_data & token) { return token.logit > never; })) {
        throw LibraryError("no token is left to choose: the grammar or the logit biases exclude the whole vocabulary");
    }
    api().sampler_apply(sampler, &array_);
}

llama_token Candidates::selected() const {
    if (array_.selected < 0 || array_.selected >= int64_t(array_.size) || !(array_.data[array_.selected].logit > never)) {
        throw LibraryError("no token is left to choose: the samplers exclude every token that the grammar allows");
    }
    return array_.data[array_.selected].id;
}

std::unique_ptr<Chooser> chain_chooser(llama_sampler * chain, llama_sampler * grammar) {
    if (chain == nullptr) throw std::invalid_argument("the sampler chain is null");
    return std::make_unique<Chain>(chain, grammar);
}

llama_token LogprobsChooser::choose(const float * logits, int32_t n_vocab, llama_token drafted) {
    const llama_token token = inner_.choose(logits, n_vocab, drafted);
    const float largest = logits[argmax(logits, n_vocab)];
    double sum = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) sum += std::exp(double(logits[i]) - double(largest));
    const double log_sum = double(largest) + std::log(sum);
    const auto logprob = [&](llama_token i) { return float(double(logits[i]) - log_sum); };

    TokenLogprobs entry{token, logprob(token), {}};
    const int32_t n_top = std::min(n_top_, n_vocab);
    if (n_top > 0) {
        order_.resize(size_t(n_vocab));
        std::iota(order_.begin(), order_.end(), 0);
        std::partial_sort(order_.begin(), order_.begin() + n_top, order_.end(), [logits](int32_t a, int32_t b) {
            return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
        });
        for (int32_t i = 0; i < n_top; ++i) entry.top.emplace_back(order_[size_t(i)], logprob(order_[size_t(i)]));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.push_back(std::move(entry));
    return token;
}

std::vector<TokenLogprobs> LogprobsChooser::found() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return found_;
}

}  // namespace sidecar
