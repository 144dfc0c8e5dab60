// Which drafted tokens stand. It is decided here and nowhere else, from the target's rows alone.
//
// Mostly by sample-and-match, as llama.cpp does it: at each row the target's own choice is taken by the full sampler, and the
// draft stands while it is the same. So every emitted token is the target's own, at any temperature, and one emitted
// token takes the draws of one plain step: a seeded speculative run is the seeded plain run. The other rule, speculative
// sampling, and what chooses by temperature, penalties and grammars are in sampling.h.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "llama_api.h"
#include "picker.h"
#include "target.h"

namespace sidecar {

// The target's own choice from one row.
class Chooser {
  public:
    virtual ~Chooser() = default;
    // The token for a row of the target's logits (n_vocab,). `drafted` is the draft there, or -1. What it returns is emitted.
    virtual llama_token choose(const float * logits, int32_t n_vocab, llama_token drafted) = 0;

    // Takes the tokens of the drafts that it is to judge; null: the drafter's best ones. Owned by the chooser.
    virtual Picker * picker() { return nullptr; }

    // A round with drafts has emitted so many tokens in so many seconds.
    virtual void observe(int32_t /*n_tokens*/, double /*seconds*/) {}
};

// The first token of the largest logit, as llama.cpp's greedy sampler chooses.
std::unique_ptr<Chooser> greedy_chooser();
// For benchmarks: the draft stands with probability p_accept, whatever the target says. The text is meaningless.
std::unique_ptr<Chooser> coin_chooser(double p_accept, uint64_t seed);
// For measuring: chooses these tokens one after another, whatever the logits are, and the last of them for ever.
std::unique_ptr<Chooser> forced_chooser(std::vector<llama_token> tokens);

// First index of the largest of n floats; NaN never wins. n >= 1.
int32_t argmax(const float * values, int32_t n);

// Walks the rows of the target's last decode, which was [last, drafts...]: appends to `out` the accepted drafts and
// then the target's own next token. Stops at the first row whose choice is not the draft, or that ends the text
// (unless `ignore_eog`). Returns how many drafts were accepted.
int32_t accept(Target & target, const std::vector<llama_token> & drafts, Chooser & chooser, bool ignore_eog,
               std::vector<llama_token> & out);

}  // namespace sidecar
