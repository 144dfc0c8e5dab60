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
    // What a round did: drafts made, those that stood, seconds of the drafter (its catch-up included) and of the target's decode.
    virtual void observe(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s) = 0;
};

}  // namespace sidecar
