// Pace chooses the draft depth, round by round: as fast as drafting can be here, and never slower than plain decoding.
//
// The model. A round with k drafts emits E(k) tokens on average and takes
//
//     T(k) = v(k+1) + first + (k-1) c + (E(k)-1) u + G(k) g + o          T(0) = plain + o
//
// v(n) being the seconds of a verification of n rows, `first` those of the first draft, c those of each further one, u what the
// first draft takes longer for each draft accepted the round before (the head decodes those rows together with the last token),
// g what a decode of the drafter takes longer whose rows are not as many as those of its decode before (llama.cpp makes a new
// graph): for a drafter of single steps G(1) = 2 a_1 (1 - a_1) of them, or 2 a_1, there and back, where single rows follow on the
// first draft; for one that drafts in one pass g is 0. o is all else in a round. What each *token* costs besides (choosing it, showing it) is the same at every depth and drops out.
// With a_i the chance that the i-th draft stands when those before it do, E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 .. a_k. All
// depths' speeds E(k) / T(k) are compared, each round: costs need not be convex (one more row may cost more than the two after
// it), so there is no climbing from depth to depth.
//
// Acceptance is counted by position and fades. A position that was seldom reached takes after the one before it (where that
// draft stood the text is easy), and is trusted at least as much as any at the start: so what has faded is tried again, and a
// text that turns easy finds its way to greater depths by itself.
//
// Costs come from a calibration; of real rounds only *ratios* are learned, since a machine that is busy for an hour is slow
// at every width. Two are fair: draft to verification in one round, and the rounds just before to those just after a change
// of depth. Each cost has a doubt, which a comparison moves it by (as a Kalman filter does) and makes smaller; a stall of a second
// says no more than one of a quarter, and rounds that find the caches cold nothing. A depth that may be the best for all that is known is tried for a few rounds, plain
// decoding among them; what such tries lose is bounded.
//
// Stretches of drafting and of plain decoding alternate. A drafting stretch ends when it fails on two counts: the model says
// that plain decoding is faster, and the tokens really emitted have fallen `patience` behind it. What the stretch lost
// is a debt that plain decoding pays off with `look_share` of its time; then the next stretch looks whether the text has changed.
//
// What the look-up finds (ngram.h) costs nothing to draft. A round verifies as many of its tokens as are fastest by the chances
// that match_chances.h has counted, if that is faster than the best round without. Where plain decoding has a context of its own
// the gain must pay the way there and back, at once or with what has been missed before; after such a round the sequence stays
// until staying has cost as much. Where text is found again and again, drafting at the depth at which what is found is verified
// saves the new graphs between: depths are compared by what both kinds of rounds take together.
//
// Has no clock and does no I/O: equal observations give equal depths. Knows nothing of sessions, models or files, and is not
// for two threads at once. Speed as acceptance over cost follows Leviathan et al., "Fast Inference from Transformers via
// Speculative Decoding" (2023).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "match_chances.h"
#include "pacing.h"

namespace sidecar {

// Seconds of a round's parts, positive and finite. costs.py measures them.
struct PaceCosts {
    double plain_s;                // a decode of one row in a session that never drafts
    std::vector<double> verify_s;  // (n,) decodes of 1 .. n rows, all of them output, in a session that drafts
    double first_draft_s;          // the first draft of a round that follows on one in which no draft stood
    double draft_step_s;           // each further draft
    double catch_up_s;             // what the first draft takes longer for each draft of the round before that stood; may be 0
    double draft_change_s;         // what a decode of the drafter takes longer that has not as many rows as its last; may be 0
    double overhead_s;             // everything else in a round, whatever it emits; may be 0
    double change_s;               // what the first round at another depth takes longer; may be 0
};

// The last N numbers, oldest first.
template <size_t N>
class Latest {
  public:
    void push(double value) {
        if (full()) {
            std::move(values_.begin() + 1, values_.end(), values_.begin());
            n_ -= 1;
        }
        values_[n_++] = value;
    }
    void clear() { n_ = 0; }
    bool empty() const { return n_ == 0; }
    bool full() const { return n_ == N; }
    const double * begin() const { return values_.data(); }
    const double * end() const { return values_.data() + n_; }

    // Of N numbers: only when full().
    double median() const {
        std::array<double, N> sorted = values_;
        std::sort(sorted.begin(), sorted.end());
        return (sorted[(N - 1) / 2] + sorted[N / 2]) / 2;
    }

  private:
    std::array<double, N> values_{};
    size_t n_ = 0;
};

class Pace final : public Pacing {
  public:
    static constexpr int32_t min_wait = 16, max_wait = 512;  // plain tokens between looks: doubled with each failure in a row
    static constexpr int n_far = 4;     // rounds in a row that find the drafter's cost far off: it is what they say
    static constexpr int n_paired = 4;  // rounds on either side of a change of depth that are compared
    static constexpr double first_tries = 0.4;  // rounds that tries of other depths may lose at once

    // max_depth: drafts per round at most; throws std::invalid_argument unless 1 <= max_depth < costs.verify_s.size().
    // switch_s: seconds of moving to the other context, one way; switched() tells when they are known.
    // Without a drafter (`has_drafter`) it decodes plainly, but for what the look-up finds.
    Pace(PaceCosts costs, int32_t max_depth, double switch_s = 0, bool has_drafter = true);

    // Asking. Changes nothing.

    bool drafting() const override { return drafting_ || stays_; }
    int32_t depth_found(int32_t n_found, int32_t n_matched) const override;
    int32_t depth() const override { return !drafting_ ? 0 : n_tries_ > 0 ? tried_depth_ : depth_; }
    int32_t max_depth() const { return int32_t(tallies_.size()); }
    double switch_s() const { return switch_s_; }
    // Seconds of a plain decode, as believed: the calibration's, or a single row's after plain_in_place().
    double plain_s() const { return costs_.plain_s; }
    // (max_depth,) By position: the chance that a draft stands when all before it do.
    std::vector<double> acceptance() const;
    // Expected speed at `depth` over plain decoding's; throws std::out_of_range unless 0 <= depth <= max_depth.
    double speedup(int32_t depth) const;

    // Telling.

    void plain_in_place() override;
    void switched(double seconds) override { switch_s_ = seconds; }
    void delayed(double seconds) override;
    // Throws std::invalid_argument unless 0 <= n_accepted <= n_drafted <= max_depth.
    void observe(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s) override;
    void observe_found(int32_t n_drafted, int32_t n_accepted, double verify_s) override;
    void compare_found(int32_t n_matched, int32_t n_compared, int32_t n_right) override;

  private:
    // Of one position: drafts whose predecessors all stood, and those of them that stood.
    struct Tally {
        double tried = 0, stood = 0;
    };

    // A round that verifies `depth` tokens found: how much faster than plain decoding it is, and its seconds.
    struct FoundRound {
        int32_t depth;
        double speed, seconds;
    };

    FoundRound best_found(int32_t n_found, int32_t n_matched, double change_s) const;
    void believe();
    void observe_drafts(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s);
    void observe_plain();
    void observe_none(double draft_s);
    void choose();
    void look_for_better(const std::vector<double> & speeds);
    void begin_stretch();
    void end_stretch();
    void owe(double tokens);
    void fade(int64_t n_rounds);
    void learn_draft(double surprise);
    void learn_change(double seconds);
    void compare(int32_t depth, double seconds, double share_off = 0);
    std::vector<double> speedups(const std::vector<double> & acceptance) const;
    std::vector<double> with_found(const std::vector<double> & speeds) const;
    void emitted(int32_t n_tokens);
    double expected_draft_s(int32_t depth, double n_stood, double n_changes) const;
    int32_t count_draft_changes(int32_t n_drafted);
    int32_t n_settle() const;
    double plain_round_s() const { return target_s_[0] + costs_.overhead_s; }

    PaceCosts costs_;
    std::vector<double> calibrated_draft_s_;  // (max_depth + 1,)
    // The target's seconds by depth (max_depth + 1,), and the drafter's over what was calibrated, in units of the target's.
    std::vector<double> target_s_;
    std::vector<double> doubt_;  // (max_depth + 1,) how far off target_s_ may be: variance of the share
    double draft_scale_ = 1;
    const bool has_drafter_;
    bool may_pay_ = false;

    bool drafting_ = false;
    int32_t depth_ = 1;  // of this stretch's rounds
    double switch_s_;

    MatchChances matches_;
    // Of late, faded: what was found and worth verifying, how many of its tokens were expected to stand at each depth
    // (max_depth + 1,), tokens of all rounds and of those rounds; rounds that verified it, and those of them behind another.
    double n_found_ = 0;
    std::vector<double> found_stood_;
    double n_emitted_ = 0, n_emitted_found_ = 0;
    double n_verified_ = 1, n_alone_ = 1;
    int32_t n_last_ = 0;       // tokens of the last round
    bool was_found_ = false;  // it verified what was found
    bool stays_ = false;      // decodes plainly where it could verify what is found
    double stay_lost_s_ = 0;  // what that has cost
    double missed_s_ = 0;     // what verifying would have gained over the last plain rounds, were it not for the way there and back

    std::vector<Tally> tallies_;  // (max_depth,)
    int64_t n_draft_rows_ = 0;    // of the drafter's last decode
    int64_t n_stood_ = 0;         // drafts of the last round that stood: the next one's drafter catches up on them

    // What real rounds say about the costs.
    Latest<n_far> far_;  // surprises in a row that the drafter's cost is far off, to the same side
    int32_t last_depth_ = 0;
    int32_t n_settling_ = 0;         // rounds at it that are still to be passed over
    double last_off_ = 0;        // by how much its seconds may be off in themselves
    Latest<n_paired> slowness_;  // measured over expected, at the last depth
    Latest<n_paired> before_;    // the same before the depth changed, until the two are compared
    int32_t depth_before_ = 0;   // of those
    double off_before_ = 0;
    int32_t tried_depth_ = 0;    // the depth that is tried
    int32_t n_tries_ = 0;        // rounds of it that are still to come
    double may_lose_ = first_tries;  // rounds that tries may lose

    // The stretch of drafting.
    int64_t n_rounds_ = 0;
    double regret_ = 0;  // rounds that a faster depth would have saved since this one was last the fastest
    double lost_ = 0;    // what plain decoding would have emitted in its time, less what it emitted itself
    double behind_ = 0;  // the same, since the stretch was last level with plain decoding

    // Between stretches.
    int64_t n_plain_ = 0;     // plain tokens since the last stretch
    int32_t wait_ = 0;        // of them before the next look, debt or no debt
    double debt_ = 0;         // tokens lost and not yet paid off when it began; below 0: won
    double catch_up_;         // tokens that the last stretch lost by catching up on plain ones
    int32_t n_failures_ = 0;  // losing stretches in a row
};

}  // namespace sidecar
