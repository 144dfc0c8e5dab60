// Prompt look-up: what followed the last time the text ended as it does now (Saxena, "Prompt Lookup Decoding", 2023).
//
// Where a text copies from its prompt or from itself, as edits, quotes and code do, that is often what follows again. It costs a
// look into a table. Whether to believe it is for who asks: see Pace. Knows no model and no vocabulary.
//
// Order of calls: clear() for an empty text, observe() with the tokens that stand, then find().
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "llama_api.h"

namespace sidecar {

class Ngram {
  public:
    static constexpr int32_t shortest = 2, longest = 8;  // tokens of a match
    static constexpr int32_t n_looks = 32;               // places that are compared, the latest first

    void clear();

    // n tokens that stand at positions pos .. pos+n-1; pos is the number observed before.
    void observe(int32_t pos, const llama_token * tokens, int32_t n);

    // Forgets the tokens from position n on.
    void go_back(int32_t n);

    // Appends up to n tokens that followed the longest match of the text's end, `last` after what was observed; of equal ones the
    // latest. Returns the match's length, 0 where nothing matched. A text that repeats itself is continued beyond its end.
    int32_t find(llama_token last, int32_t n, std::vector<llama_token> & out) const;

  private:
    static uint64_t key(llama_token before, llama_token token) { return uint64_t(uint32_t(before)) << 32 | uint32_t(token); }

    std::vector<llama_token> text_;
    std::unordered_map<uint64_t, int32_t> latest_;  // pair of tokens -> position of its second one, the latest
    std::vector<int32_t> earlier_;                  // (text_.size(),) by position of a pair's second token: the time before; or -1
};

}  // namespace sidecar
