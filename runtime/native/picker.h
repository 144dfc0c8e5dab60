// How a drafter takes tokens from its own logits: the best ones, or draws that are remembered with their probabilities, for a rule
// of acceptance that weighs them (sampling.h).
//
// A drafter asks for every token of a draft in its order, and proposes what it got and nothing else.
#pragma once

#include <cstdint>

#include "llama_api.h"

namespace sidecar {

class Picker {
  public:
    virtual ~Picker() = default;

    // A draft begins, behind the tokens that stand.
    virtual void begin() = 0;

    // Takes the draft's next token from n logits; returns its index. `ids` are their tokens (null: 0 .. n-1). A logit of -inf is
    // never taken while there is another.
    virtual int32_t pick(const float * logits, int32_t n, const llama_token * ids) = 0;

    // The draft's next token is this one, with no logits to take it from.
    virtual void take(llama_token token) = 0;
};

// The first of the largest logits. One for all: it remembers nothing.
Picker & best_picker();

}  // namespace sidecar
