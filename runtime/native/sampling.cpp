#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

namespace sidecar {

namespace {

constexpr float never = -std::numeric_limits<float>::infinity();
constexpr const char * nothing_left = "no token is left to choose: the grammar and the logit biases exclude the whole vocabulary";

// Whether a grammar lets this token come next.
bool allows(llama_sampler * grammar, llama_token token) {
    llama_token_data one{token, 1.0f, 0.0f};
    llama_token_data_array array{&one, 1, -1, false};
    api().sampler_apply(grammar, &array);
    return one.logit > never;
}

class Chain final : public Chooser {
  public:
    Chain(llama_sampler * chain, llama_sampler * grammar) : chain_(chain), grammar_(grammar) {}

    llama_token choose(const float * logits, int32_t n_vocab, llama_token) override {
        llama_token token = draw(logits, n_vocab, false);
        if (grammar_ != nullptr && !allows(grammar_, token)) token = draw(logits, n_vocab, true);
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

    llama_sampler * chain_;
    llama_sampler * grammar_;  // or null
    Candidates candidates_;
};

// Of what samplers have left.
void softmax(const Candidates & candidates, Distribution & out) {
    out.clear();
    float largest = never;
    for (const llama_token_data & one : candidates) largest = std::max(largest, one.logit);
    if (!(largest > never)) throw LibraryError(nothing_left);
    double sum = 0.0;
    for (const llama_token_data & one : candidates) {
        if (!(one.logit > never)) continue;
        out.emplace_back(one.id, std::exp(double(one.logit) - double(largest)));
        sum += out.back().second;
    }
    for (auto & [token, p] : out) p /= sum;
}

class Speculative final : public Chooser, public Picker {
  public:
    Speculative(llama_sampler * chain, bool remembers, llama_sampler * grammar, uint32_t seed, RuleChoice * rules)
        : chain_(chain), grammar_(grammar), rules_(rules), remembers_(remembers), random_(seed) {}
    ~Speculative() override { forget_draft(); }

    Picker * picker() override { return this; }

    void observe(int32_t n_tokens, double seconds) override {
        if (rules_ != nullptr) rules_->observe(n_tokens, seconds);
    }

    // Drafting

    void begin() override {
        forget_draft();
        rejects_ = rules_ == nullptr || rules_->rejects();
        if (rejects_ && remembers_) drafting_ = api().sampler_clone(chain_);
    }

    int32_t pick(const float * logits, int32_t n, const llama_token * ids) override {
        if (!rejects_) return argmax(logits, n);
        candidates_.fill(logits, n, ids);
        llama_sampler * chain = drafting_ != nullptr ? drafting_ : chain_;
        if (candidates_.any()) candidates_.apply(chain);
        if (!candidates_.any()) {  // biases leave nothing of what the head knows: a guess that will hardly stand
            const int32_t best = argmax(logits, n);
            take(ids == nullptr ? best : ids[best]);
            return best;
        }
        Distribution q;
        softmax(candidates_, q);
        const llama_token token = draw(q);
        drafts_.push_back(std::move(q));
        if (drafting_ != nullptr) api().sampler_accept(drafting_, token);
        return ids == nullptr ? token : int32_t(std::find(ids, ids + n, token) - ids);
    }

    void take(llama_token token) override {
        if (!rejects_) return;
        drafts_.push_back({{token, 1.0}});
        if (drafting_ != nullptr) api().sampler_accept(drafting_, token);
    }

    // Choosing

    llama_token choose(const float * logits, int32_t n_vocab, llama_token drafted) override {
        look(logits, n_vocab);
        const llama_token token = drafted >= 0 && rejects_ ? judge(drafted, n_vocab) : draw(p_);
        api().sampler_accept(chain_, token);
        if (grammar_ != nullptr) api().sampler_accept(grammar_, token);
        return token;
    }

  private:
    void forget_draft() {
        if (drafting_ != nullptr) api().sampler_free(drafting_);
        drafting_ = nullptr;
        drafts_.clear();
        n_judged_ = 0;
    }

    // p_ of a row. With a grammar, what the chain leaves and the grammar allows; the rest of the chain's mass is shared out as the
    // chain does among all that the grammar allows.
    void look(const float * logits, int32_t n_vocab) {
        candidates_.fill(logits, n_vocab);
        candidates_.apply(chain_);
        softmax(candidates_, p_);
        if (grammar_ == nullptr) return;
        double excluded = 0.0;
        for (auto & [token, p] : p_) {
            if (allows(grammar_, token)) continue;
            excluded += p;
            p = 0.0;
        }
        if (excluded <= 0.0) return;
        candidates_.fill(logits, n_vocab);
        candidates_.apply(grammar_);
        candidates_.apply(chain_);
        Distribution allowed;
        softmax(candidates_, allowed);
        dense_.resize(size_t(n_vocab), 0.0);
        for (const auto & [token, p] : p_) dense_[size_t(token)] += p;
        for (const auto & [token, p] : allowed) dense_[size_t(token)] += excluded * p;
        allowed.insert(allowed.end(), p_.begin(), p_.end());
        p_.clear();
        for (const auto & [token, p] : allowed) {
            if (dense_[size_t(token)] > 0.0) p_.emplace_back(token, dense_[size_t(token)]);
            dense_[size_t(token)] = 0.0;
        }
    }

    // The drafted token, or at a rejection another.
    llama_token judge(llama_token drafted, int32_t n_vocab) {
        static const Distribution nothing;
        const Distribution & q = n_judged_ < drafts_.size() ? drafts_[n_judged_++] : nothing;
        dense_.resize(size_t(n_vocab), 0.0);
        for (const auto & [token, share] : q) dense_[size_t(token)] += share;
        if (!(dense_[size_t(drafted)] > 0.0)) throw std::logic_error("a drafter proposed a token that its picker did not take");
        double p_drafted = 0.0;
        for (const auto & [token, p] : p_) p_drafted += token == drafted ? p : 0.0;
        const bool stands = uniform() * dense_[size_t(drafted)] < p_drafted;
        Distribution rest;
        double sum = 0.0;
        for (const auto & [token, p] : p_) {
            const double share = p - dense_[size_t(token)];
            if (stands || !(share > 0.0)) continue;
            rest.emplace_back(token, share);
            sum += share;
        }
        for (const auto & [token, share] : q) dense_[size_t(token)] = 0.0;
        if (stands) return drafted;
        for (auto & [token, share] : rest) share /= sum;
        return draw(rest.empty() ? p_ : rest);  // empty where p and q are equal but for rounding
    }

    double uniform() { return double(random_() >> 11) * 0x1.0p-53; }  // in [0, 1)

    llama_token draw(const Distribution & from) {
        double left = uniform();
        for (const auto & [token, p] : from) {
            if ((left -= p) < 0.0) return token;
        }
        return from.back().first;  // the sum of all rounds to a little less than 1
    }

    llama_sampler * chain_;
    llama_sampler * grammar_;   // or null
    RuleChoice * rules_;        // or null
    const bool remembers_;
    std::mt19937_64 random_;
    bool rejects_ = true;                // in the running round
    llama_sampler * drafting_ = nullptr;  // of a chain that remembers: a copy that the draft is told to; owned
    std::vector<Distribution> drafts_;   // of each drafted token: what it was drawn from
    size_t n_judged_ = 0;
    Distribution p_;
    std::vector<double> dense_;  // (n_vocab,): zero between calls
    Candidates candidates_;
};

}  // namespace

double RuleChoice::Rule::rate() const {
    std::vector<double> sorted = seconds;
    std::nth_element(sorted.begin(), sorted.begin() + ptrdiff_t(sorted.size() / 2), sorted.end());
    return n_tokens / n_rounds / sorted[sorted.size() / 2];
}

void RuleChoice::observe(int32_t n_tokens, double seconds) {
    constexpr double fading = 0.98;
    Rule & rule = rules_[now_];
    rule.n_tokens = fading * rule.n_tokens + n_tokens;
    rule.n_rounds = fading * rule.n_rounds + 1.0;
    if (rule.seconds.size() < size_t(n_trial)) rule.seconds.push_back(seconds);
    rule.seconds[rule.next++ % size_t(n_trial)] = seconds;
    if (--n_left_ > 0) return;
    const Rule & other = rules_[1 - now_];
    if (!is_trial_ || other.seconds.empty()) {  // the other one's turn to be tried
        now_ = 1 - now_;
        is_trial_ = true;
        n_left_ = n_trial;
    } else {
        if (other.rate() > rule.rate()) now_ = 1 - now_;
        is_trial_ = false;
        n_left_ = n_stay;
    }
}

void Candidates::fill(const float * logits, int32_t n, const llama_token * ids) {
    tokens_.resize(size_t(n));
    for (int32_t i = 0; i < n; ++i) tokens_[size_t(i)] = {ids == nullptr ? i : ids[i], logits[i], 0.0f};
    array_ = {tokens_.data(), tokens_.size(), -1, false};
}

bool Candidates::any() const {
    return std::any_of(begin(), end(), [](const llama_token_data & token) { return token.logit > never; });
}

void Candidates::apply(llama_sampler * sampler) {
    if (!any()) {
        throw LibraryError(nothing_left);
    }
    api().sampler_apply(sampler, &array_);
}

llama_token Candidates::selected() const {
    if (array_.selected < 0 || array_.selected >= int64_t(array_.size) || !(array_.data[array_.selected].logit > never)) {
        throw LibraryError(nothing_left);
    }
    return array_.data[array_.selected].id;
}

std::unique_ptr<Chooser> speculative_chooser(llama_sampler * chain, bool remembers, llama_sampler * grammar, uint32_t seed,
                                             RuleChoice * rules) {
    if (chain == nullptr) throw std::invalid_argument("the sampler chain is null");
    return std::make_unique<Speculative>(chain, remembers, grammar, seed, rules);
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

std::vector<TokenLogprobs> LogprobsChooser::found(size_t start) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {found_.begin() + std::ptrdiff_t(std::min(start, found_.size())), found_.end()};
}

}  // namespace sidecar
