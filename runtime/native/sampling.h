// How the target's tokens are chosen where the largest logit is not all: llama.cpp's sampler chains, a grammar, log-probabilities.
//
// What a chain or a grammar remembers (penalties, DRY, a grammar's stacks, random numbers) moves on with each token that is
// chosen, and accept() ends at the first that is not the draft. So they never see a draft that does not stand: at every row they
// have the history of plain decoding, and nothing is to be taken back. A text that ends inside a block ends its chooser too.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "accept.h"

namespace sidecar {

// One row of logits as llama.cpp's samplers take it: they reorder it, shorten it and change its logits.
class Candidates {
  public:
    // `ids` are the tokens that the n logits belong to; null: 0 .. n-1.
    void fill(const float * logits, int32_t n, const llama_token * ids = nullptr);
    // Whether any token has a logit above -inf.
    bool any() const;
    // Throws LibraryError when no token with a logit above -inf is left to a sampler, for some divide by what is left.
    void apply(llama_sampler * sampler);
    // What a chain that ends with a choice has chosen. Throws LibraryError when it chose nothing, or a token of logit -inf.
    llama_token selected() const;

    const llama_token_data * begin() const { return tokens_.data(); }
    const llama_token_data * end() const { return tokens_.data() + array_.size; }

  private:
    std::vector<llama_token_data> tokens_;
    llama_token_data_array array_{};
};

// llama.cpp's sampler chain, which ends with a choice (dist, greedy). With a grammar, the choice is made again among what the
// grammar allows where the first one is not allowed, as llama.cpp does: looking at the whole vocabulary takes long. Neither
// is owned: both must outlive the chooser. `grammar` may be null.
std::unique_ptr<Chooser> chain_chooser(llama_sampler * chain, llama_sampler * grammar);

// Some tokens and their probabilities, which sum to 1; every other token has none.
using Distribution = std::vector<std::pair<llama_token, double>>;

// Which of two rules accepts drafts faster: tried in turns, a few rounds each, then the faster one for many. It looks at the past
// alone, so it changes no distribution. Kept by a session from text to text.
class RuleChoice {
  public:
    // Whether the next round accepts by speculative sampling, else by sample-and-match.
    bool rejects() const { return now_ == 1; }
    // A round by that rule has emitted so many tokens in so many seconds.
    void observe(int32_t n_tokens, double seconds);

  private:
    static constexpr int32_t n_trial = 16, n_stay = 240;
    struct Rule {
        double n_tokens = 0.0, n_rounds = 0.0;  // older ones counting less
        std::vector<double> seconds;            // of its last n_trial rounds: a round that was held up says nothing
        size_t next = 0;                        // to be overwritten
        double rate() const;                    // tokens per second
    };
    Rule rules_[2];
    int now_ = 1;  // mostly the one that accepts more, so that pace does not give up drafting for the other's sake
    bool is_trial_ = true;
    int32_t n_left_ = n_trial;  // rounds until the next change
};

// Speculative sampling (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm 1): drafts
// are drawn from the drafter's distribution q, after the same samplers as the target's p; a drafted token x stands with probability
// min(1, p(x) / q(x)), and at the first that does not the token is drawn from the positive part of p - q, normalised. Exact in
// distribution; the same seed gives other draws than plain decoding.
//
// `chain` has no choice at its end; `remembers` says that its samplers look at earlier tokens. With a grammar p is what chain_chooser
// draws from. `rules`, or null for this rule alone, may turn single rounds into sample-and-match. Nothing is owned; all must outlive
// the chooser.
std::unique_ptr<Chooser> speculative_chooser(llama_sampler * chain, bool remembers, llama_sampler * grammar, uint32_t seed,
                                             RuleChoice * rules);

struct TokenLogprobs {
    llama_token token;
    float logprob;                                  // of the token, in the target's own distribution
    std::vector<std::pair<llama_token, float>> top;  // the likeliest tokens and theirs, best first
};

// Chooses as another chooser does, and writes down how likely each chosen token was to the target, before any sampler.
class LogprobsChooser final : public Chooser {
  public:
    // `inner` is not owned and must outlive it; n_top >= 0.
    LogprobsChooser(Chooser & inner, int32_t n_top) : inner_(inner), n_top_(n_top) {}
    llama_token choose(const float * logits, int32_t n_vocab, llama_token drafted) override;
    Picker * picker() override { return inner_.picker(); }
    void observe(int32_t n_tokens, double seconds) override { inner_.observe(n_tokens, seconds); }
    // Of the tokens chosen so far from the `start`th on. From any thread.
    std::vector<TokenLogprobs> found(size_t start) const;

  private:
    Chooser & inner_;
    const int32_t n_top_;
    std::vector<int32_t> order_;
    mutable std::mutex mutex_;
    std::vector<TokenLogprobs> found_;
};

}  // namespace sidecar
