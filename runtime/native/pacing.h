// Who chooses the depth of each round: asked before it, told after it. See pace.h; calibration has another, in Python.
#pragma once

#include <cstdint>

namespace sidecar {

class Pacing {
  public:
    virtual ~Pacing() = default;

    // Where the next round belongs: in the context that drafts, or (false) in the plain one. While drafting, depth() is 0 now
    // and then: one row, decoded in place.
    virtual bool drafting() const = 0;
    // How many tokens to draft in the next round. Asking changes nothing.
    virtual int32_t depth() const = 0;
    // Plain rounds run in the context that drafts, for want of another.
    virtual void plain_in_place() = 0;
    // Moving from one context to the other took that long.
    virtual void switched(double seconds) = 0;
    // Making the plain context, which only rounds without drafts need, took that long.
    virtual void delayed(double /*seconds*/) {}
    // What a round did: drafts made, those that stood, seconds of the drafter (its catch-up included) and of the target's decode.
    virtual void observe(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s) = 0;

    // The look-up (ngram.h) found n_found tokens after a match of n_matched: how many of them the next round is to verify in
    // place of drafts; 0: what depth() says. Asking changes nothing.
    virtual int32_t depth_found(int32_t /*n_found*/, int32_t /*n_matched*/) const { return 0; }
    // Told after observe's place in such a round: tokens verified, those that stood, seconds of the target's decode.
    virtual void observe_found(int32_t /*n_drafted*/, int32_t /*n_accepted*/, double /*verify_s*/) {}
    // What was found before any round: how many of its tokens could be compared with what the round emitted, and were right.
    virtual void compare_found(int32_t /*n_matched*/, int32_t /*n_compared*/, int32_t /*n_right*/) {}
};

}  // namespace sidecar
