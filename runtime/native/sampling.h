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
    void fill(const float * logits, int32_t n_vocab);
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
    // Of every token chosen so far. From any thread.
    std::vector<TokenLogprobs> found() const;

  private:
    Chooser & inner_;
    const int32_t n_top_;
    std::vector<int32_t> order_;
    mutable std::mutex mutex_;
    std::vector<TokenLogprobs> found_;
};

}  // namespace sidecar
