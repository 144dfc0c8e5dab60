// How often what the look-up found was right, by the length of the match: the chance that the next token follows it too.
//
// It is counted whether or not what was found is verified, since the text shows it anyway: so nothing has to be tried to know.
// A length seldom seen takes after the next shorter one. What was seen fades.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "ngram.h"

namespace sidecar {

class MatchChances {
  public:
    static constexpr double prior = 0.1, prior_weight = 2;  // of the shortest match, before any was seen: too little to pay
    static constexpr double kept = 1 - 1.0 / 64;            // of what was seen, each time more is

    // The chance that one more token follows a match of this length.
    double chance(int32_t n_matched) const {
        double chance = prior;
        for (size_t i = 0; i <= index(n_matched); ++i) {
            chance = (right_[i] + prior_weight * chance) / (seen_[i] + prior_weight);
        }
        return chance;
    }

    // Of what was found after n_matched tokens, n_compared could be compared with the text, and the first n_right were right.
    void count(int32_t n_matched, int32_t n_compared, int32_t n_right) {
        for (size_t i = 0; i < n_lengths; ++i) {
            seen_[i] *= kept;
            right_[i] *= kept;
        }
        for (int32_t i = 0; i < n_compared; ++i) {
            seen_[index(n_matched + i)] += 1;
            right_[index(n_matched + i)] += i < n_right;
        }
    }

  private:
    static constexpr size_t n_lengths = Ngram::longest - Ngram::shortest + 1;
    static size_t index(int32_t n_matched) {
        return size_t(std::clamp(n_matched, Ngram::shortest, Ngram::longest) - Ngram::shortest);
    }

    std::array<double, n_lengths> seen_{}, right_{};
};

}  // namespace sidecar
