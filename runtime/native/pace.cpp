#include "pace.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace sidecar {

namespace {

constexpr double prior = 0.75;      // chance that a draft stands before any was seen: trained heads reach 0.6 to 0.9
constexpr double prior_rounds = 3;  // how many rounds that opinion weighs: little, the text shall decide
// Rounds after which an observation has faded: short for code that turns to prose, long for 0.75 against 0.80.
constexpr double memory = 48;
constexpr double kept = 1 - 1 / memory;  // of an observation, after a round
// Rounds that staying must have cost before the depth changes, or what the change costs where that is more.
constexpr double stay = 0.02;

constexpr double patience = 3;          // tokens behind plain decoding before a stretch may end: two wrong rounds where rows are dear
constexpr double look_share = 0.010;  // of the time may be lost by looking
constexpr double max_debt = 30;       // tokens: it still looks every 2,000
constexpr double max_credit = 8;     // tokens won by drafting that later looks may spend before they run into debt: three looks
// That many rows' seconds are what the drafter's catching up is thought to cost before it was seen.
constexpr double catch_up_rows = 50;
constexpr double best_acceptance = 0.98;  // the highest worth hoping for: where even this would not pay nothing is tried

constexpr double rate = 0.05;         // how far one round moves the drafter's cost (as a power)
constexpr double change_rate = 0.25;  // and one change the cost of changes
constexpr double clip = 1.25;         // the largest factor that one round or comparison may name
constexpr double stall = 10;          // times what a draft was expected to take: what is beyond befell it
constexpr double calibrated = 0.06;   // a calibrated cost is off by that share (standard deviation)
constexpr double in_place = 0.05;     // so is the ratio of a single row in the context that drafts to a plain one
constexpr double drift = 0.002;       // and by so much more after a round
constexpr double variance = 0.3;      // of the ratio of two groups' medians, over the square of their mean deviations' sum
constexpr double least_spread = 0.01; // of few rounds: chance may make it smaller
constexpr double settle_s = 0.001;    // after a change of depth, until what its rounds need is in the caches: some of a small model's
constexpr double most_settling = 7;   // of those rounds
constexpr double hope = 1.5;          // standard deviations by which a depth may be better than it looks, to be worth a try
constexpr double try_share = 0.01;    // of the rounds may be lost by tries

constexpr double shortest_s = 1e-9;  // a clock may be too coarse for a small model

double clipped(double surprise) { return std::min(std::max(surprise, 1 / clip), clip); }

}  // namespace

Pace::Pace(PaceCosts costs, int32_t max_depth, double switch_s, bool has_drafter)
    : costs_(std::move(costs)), has_drafter_(has_drafter), switch_s_(switch_s) {
    const int32_t covered = int32_t(costs_.verify_s.size()) - 1;
    if (max_depth < 1 || max_depth > covered) {
        throw std::invalid_argument("max_depth " + std::to_string(max_depth) + " is not between 1 and the " +
                                    std::to_string(covered) + " of the costs");
    }
    calibrated_draft_s_ = {0};
    for (int32_t depth = 1; depth <= max_depth; ++depth) {
        calibrated_draft_s_.push_back(costs_.first_draft_s + (depth - 1) * costs_.draft_step_s);
    }
    tallies_.resize(size_t(max_depth));
    found_stood_.resize(size_t(max_depth) + 1);
    fade(1);
    believe();
    catch_up_ = catch_up_rows * costs_.catch_up_s / costs_.plain_s;
    if (may_pay_) begin_stretch();
}

// Asking

std::vector<double> Pace::acceptance() const {
    std::vector<double> chances(tallies_.size());
    chances[0] = tallies_[0].stood / tallies_[0].tried;
    for (size_t i = 1; i < chances.size(); ++i) {
        const auto [tried, stood] = tallies_[i];
        chances[i] = (stood + prior_rounds * std::max(chances[i - 1], prior)) / (tried + prior_rounds);
    }
    return chances;
}

double Pace::speedup(int32_t depth) const {
    if (depth < 0 || depth > max_depth()) {
        throw std::out_of_range("depth " + std::to_string(depth) + " is not between 0 and " + std::to_string(max_depth()));
    }
    return depth == 0 ? 1 : speedups(acceptance())[size_t(depth - 1)];
}

int32_t Pace::depth_found(int32_t n_found, int32_t n_matched) const {
    if (drafting_ && n_tries_ > 0) return 0;  // a try needs its rounds in a row
    const bool is_paid = drafting_ || stays_ || missed_s_ >= 2 * switch_s_;
    return best_found(n_found, n_matched, is_paid ? 0 : 2 * switch_s_).depth;
}

// The depth at which verifying what was found is faster than any round without, after so many seconds of getting there.
Pace::FoundRound Pace::best_found(int32_t n_found, int32_t n_matched, double change_s) const {
    FoundRound best{0, drafting_ ? speedups(acceptance())[size_t(depth_ - 1)] : 1, plain_round_s()};
    double n_stood = 0, chance = 1;
    for (int32_t depth = 1; depth <= std::min(n_found, max_depth()); ++depth) {
        chance *= matches_.chance(n_matched + depth - 1);
        n_stood += chance;
        double seconds = target_s_[size_t(depth)] + costs_.overhead_s + change_s;
        if (depth != last_depth_) seconds += 2 * costs_.change_s;  // there and back
        if (drafting_) seconds += (1 + n_stood) * costs_.catch_up_s * draft_scale_;  // the drafter decodes these rows later
        const double speed = (1 + n_stood) * plain_round_s() / seconds;
        if (speed > best.speed) best = {depth, speed, seconds};
    }
    return best;
}

// Telling

void Pace::plain_in_place() {
    costs_.plain_s = costs_.verify_s[0];
    believe();
}

void Pace::delayed(double seconds) { owe(seconds / costs_.plain_s); }

void Pace::observe(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s) {
    if (n_accepted < 0 || n_accepted > n_drafted || n_drafted > max_depth()) {
        throw std::invalid_argument(std::to_string(n_accepted) + " of " + std::to_string(n_drafted) +
                                    " drafts stood, at a depth of at most " + std::to_string(max_depth()));
    }
    draft_s = std::max(draft_s, shortest_s);
    verify_s = std::max(verify_s, shortest_s);
    emitted(1 + n_accepted);
    was_found_ = false;
    if (n_drafted > 0) {
        observe_drafts(n_drafted, n_accepted, draft_s, verify_s);
    } else if (!drafting_) {
        if (stays_) {
            stay_lost_s_ += costs_.verify_s[0] - costs_.plain_s;
            stays_ = stay_lost_s_ < 2 * switch_s_;
            compare(0, verify_s * costs_.plain_s / costs_.verify_s[0], in_place);
        } else {
            compare(0, verify_s);
        }
        observe_plain();
    } else {
        n_stood_ += 1;
        // A drafter that was asked and found nothing worth drafting (DSpark's confidence) has cost its time. Any other round without
        // drafts had no room for them, and says nothing.
        if (depth() > 0 && draft_s > expected_draft_s(1, double(n_stood_ - 1), 0) / 2) {
            observe_none(draft_s);
        } else if (n_tries_ > 0 && tried_depth_ == 0) {
            n_tries_ -= 1;
            compare(0, verify_s * costs_.plain_s / costs_.verify_s[0], in_place);
        }
    }
}

void Pace::observe_found(int32_t n_drafted, int32_t n_accepted, double verify_s) {
    if (n_accepted < 0 || n_accepted > n_drafted || n_drafted < 1 || n_drafted > max_depth()) {
        throw std::invalid_argument(std::to_string(n_accepted) + " of " + std::to_string(n_drafted) +
                                    " found tokens stood, at a depth of at most " + std::to_string(max_depth()));
    }
    emitted(1 + n_accepted);
    n_verified_ = n_verified_ * kept + 1;
    n_alone_ = n_alone_ * kept + (was_found_ ? 0 : 1);
    was_found_ = true;
    compare(n_drafted, std::max(verify_s, shortest_s));
    if (drafting_) {
        n_stood_ += 1 + n_accepted;
    } else {
        stays_ = true;
        stay_lost_s_ = missed_s_ = 0;
    }
}

void Pace::compare_found(int32_t n_matched, int32_t n_compared, int32_t n_right) {
    const FoundRound best = best_found(max_depth(), n_matched, 0);
    if (!drafting_ && !stays_ && best.depth > 0) {
        missed_s_ += n_right > 0 ? plain_round_s() * (1 - 1 / best.speed) : plain_round_s() - best.seconds;
        missed_s_ = std::max(0.0, missed_s_);
    }
    matches_.count(n_matched, n_compared, n_right);
    if (best.depth == 0) return;
    n_emitted_found_ += n_last_;
    n_found_ = n_found_ * kept + 1;
    double n_stood = 0, chance = 1;
    for (int32_t depth = 1; depth <= max_depth(); ++depth) {
        chance *= matches_.chance(n_matched + depth - 1);
        n_stood += chance;
        found_stood_[size_t(depth)] = found_stood_[size_t(depth)] * kept + n_stood;
    }
}

// A draft that nobody made is a first draft that did not stand, verified in one row.
void Pace::observe_none(double draft_s) {
    fade(1);
    tallies_[0].tried += 1;
    n_draft_rows_ = n_stood_;  // observe() has counted the round's own token
    n_stood_ = 0;
    const double lost = (costs_.verify_s[0] + std::min(draft_s, stall * expected_draft_s(1, 0, 0))) / costs_.plain_s - 1;
    lost_ += lost;
    behind_ = std::max(0.0, behind_ + lost);
    n_rounds_ += 1;
    choose();
}

void Pace::observe_plain() {
    n_plain_ += 1;
    if (n_plain_ < wait_ || !may_pay_) return;
    const double next_look = 2 * switch_s_ / costs_.plain_s + catch_up_;
    const double paid = look_share * double(n_plain_);
    if (debt_ + next_look <= paid) {
        debt_ -= paid;
        begin_stretch();
    }
}

void Pace::observe_drafts(int32_t n_drafted, int32_t n_accepted, double draft_s, double verify_s) {
    const double expected_s = expected_draft_s(n_drafted, double(n_stood_), count_draft_changes(n_drafted));
    draft_s *= target_s_[size_t(n_drafted)] / verify_s;  // as on the machine that the target's seconds speak of
    if (n_rounds_ > 0) {
        learn_draft(draft_s / expected_s);
        draft_s = std::min(draft_s, stall * expected_s);
    } else {  // the first draft also caught up on all the tokens decoded plainly, which says nothing about the text
        catch_up_ = std::max(0.0, draft_s - expected_s) / plain_round_s();
        lost_ += catch_up_;
        draft_s = expected_s;
    }
    compare(n_drafted, verify_s);
    fade(1);
    for (int32_t i = 0; i < std::min(n_accepted + 1, n_drafted); ++i) {
        tallies_[size_t(i)].tried += 1;
        tallies_[size_t(i)].stood += i < n_accepted;
    }
    const double taken_s = target_s_[size_t(n_drafted)] + draft_s + costs_.overhead_s;
    const double lost = taken_s / plain_round_s() - (1 + n_accepted);
    n_stood_ = n_accepted;
    lost_ += lost;
    behind_ = std::max(0.0, behind_ + lost);
    n_rounds_ += 1;
    may_lose_ += try_share;
    choose();
}

// Inside

void Pace::emitted(int32_t n_tokens) {
    n_emitted_ = n_emitted_ * kept + n_tokens;
    n_emitted_found_ *= kept;
    n_last_ = n_tokens;
}

void Pace::choose() {
    std::vector<double> speeds = speedups(acceptance());
    if (behind_ >= patience && *std::max_element(speeds.begin(), speeds.end()) < 1) {
        end_stretch();
        return;
    }
    if (n_tries_ > 0) {
        n_tries_ -= 1;
        return;
    }
    speeds = with_found(speeds);
    const auto best = std::max_element(speeds.begin() + 1, speeds.end());
    // Staying costs more and more; a change is due when that comes to what it costs.
    const double regret = *best / speeds[size_t(depth_)] - 1;
    regret_ = regret > 0 ? regret_ + regret : 0;
    if (regret_ > std::max(stay, costs_.change_s / target_s_[size_t(depth_)])) {
        depth_ = int32_t(best - speeds.begin());
        regret_ = 0;
    }
    if (slowness_.full()) {
        look_for_better(speeds);
    }
}

// Tries a depth, 0 included, that may be better than the present one for all that is known of their costs: for a few rounds,
// which are then compared with those before and after.
void Pace::look_for_better(const std::vector<double> & speeds) {
    const double now = speeds[size_t(depth_)];
    double best = now, loss_of_best = 0;
    for (int32_t depth = 0; depth <= max_depth(); ++depth) {
        if (depth == depth_) continue;
        const double speed = speeds[size_t(depth)];
        const double hoped = speed * (1 + hope * std::sqrt(doubt_[size_t(depth)] + doubt_[size_t(depth_)]));
        const double loss = (n_settle() + n_paired) * std::max(0.0, now / speed - 1) + 2 * costs_.change_s / target_s_[size_t(depth_)];
        if (hoped > best && loss <= may_lose_) {
            best = hoped;
            loss_of_best = loss;
            tried_depth_ = depth;
            n_tries_ = n_settle() + n_paired;
        }
    }
    may_lose_ -= loss_of_best;
}

// Starts from the calibrated costs. Whether drafting may pay at all is judged by them: what a stretch has learned may come of a
// busy minute, and plain decoding cannot unlearn it.
void Pace::believe() {
    target_s_.assign(costs_.verify_s.begin(), costs_.verify_s.begin() + max_depth() + 1);
    target_s_[0] = costs_.plain_s;
    doubt_.assign(target_s_.size(), calibrated * calibrated);
    draft_scale_ = 1;
    const std::vector<double> hoped = speedups(std::vector<double>(tallies_.size(), best_acceptance));
    may_pay_ = has_drafter_ && *std::max_element(hoped.begin(), hoped.end()) > 1;
}

void Pace::begin_stretch() {
    drafting_ = true;
    stays_ = false;
    fade(n_plain_);
    n_plain_ = n_rounds_ = 0;
    lost_ = 2 * switch_s_ / costs_.plain_s;  // there and back
    behind_ = 0;
    n_stood_ = 0;
    // As calibrated, in the units that the target's seconds have come to: the machine may have been busy when it changed.
    draft_scale_ = target_s_[0] / costs_.plain_s;
    far_.clear();
    n_tries_ = 0;
    const std::vector<double> speeds = with_found(speedups(acceptance()));
    depth_ = int32_t(std::max_element(speeds.begin() + 1, speeds.end()) - speeds.begin());
    regret_ = 0;
}

void Pace::end_stretch() {
    drafting_ = false;
    n_failures_ = lost_ > 0 ? n_failures_ + 1 : 0;
    wait_ = int32_t(std::min(std::ldexp(double(min_wait), n_failures_), double(max_wait)));
    owe(lost_);
}

void Pace::owe(double tokens) { debt_ = std::min(std::max(debt_ + tokens, -max_credit), max_debt); }

// What is known fades with every round, drafted or plain. Where nothing is left the prior stands in, and fades in turn: one that
// stayed would tip close decisions.
void Pace::fade(int64_t n_rounds) {
    const double left = std::pow(kept, double(n_rounds));
    for (auto & [tried, stood] : tallies_) {
        tried *= left;
        stood *= left;
    }
    auto & [tried, stood] = tallies_[0];
    const double missing = std::max(0.0, prior_rounds - tried);
    tried += missing;
    stood += missing * prior;
}

// (max_depth,) Expected speed at depths 1, 2, ... over plain decoding's, where drafts stand with these chances by position.
std::vector<double> Pace::speedups(const std::vector<double> & acceptance) const {
    std::vector<double> speeds(acceptance.size());
    double n_stood = 0, chance = 1;
    for (size_t i = 0; i < speeds.size(); ++i) {
        chance *= acceptance[i];
        n_stood += chance;
        const double n_changes = 2 * acceptance[0] * (i == 0 ? 1 - acceptance[0] : 1);
        const double draft_s = expected_draft_s(int32_t(i + 1), n_stood, n_changes);
        speeds[i] = (1 + n_stood) * plain_round_s() / (target_s_[i + 1] + draft_s + costs_.overhead_s);
    }
    return speeds;
}

// (max_depth + 1,) From speeds at depths 1, 2, ... those at depths 0, 1, ... of all text, part of which is found: there a round
// verifies as many tokens found as are fastest, if that is faster than its own. One of another depth than the round before needs
// new graphs, there and back.
std::vector<double> Pace::with_found(const std::vector<double> & speeds) const {
    std::vector<double> mixed = {1};
    mixed.insert(mixed.end(), speeds.begin(), speeds.end());
    if (n_found_ <= 0) return mixed;
    const double share = n_emitted_found_ / n_emitted_;
    const double change_s = 2 * costs_.change_s * n_alone_ / n_verified_;
    std::vector<double> found_s(mixed.size()), changed_s(mixed.size());  // a token, by the depth at which what is found is verified
    for (size_t depth = 1; depth < mixed.size(); ++depth) {
        const double n_tokens = 1 + found_stood_[depth] / n_found_;
        found_s[depth] = (target_s_[depth] + costs_.overhead_s) / n_tokens + costs_.catch_up_s * draft_scale_;
        changed_s[depth] = found_s[depth] + change_s / n_tokens;
    }
    for (size_t own = 0; own < mixed.size(); ++own) {
        const double own_s = plain_round_s() / mixed[own];
        double fastest_s = own_s;
        for (size_t depth = 1; depth < mixed.size(); ++depth) {
            fastest_s = std::min(fastest_s, depth == own ? found_s[depth] : changed_s[depth]);
        }
        mixed[own] = plain_round_s() / ((1 - share) * own_s + share * fastest_s);
    }
    return mixed;
}

// Seconds of the drafter, as learned, in a round that follows on one in which n_stood drafts stood, n_changes of its decodes
// having other rows than the one before.
double Pace::expected_draft_s(int32_t depth, double n_stood, double n_changes) const {
    return (calibrated_draft_s_[size_t(depth)] + n_stood * costs_.catch_up_s + n_changes * costs_.draft_change_s) * draft_scale_;
}

// Decodes of the drafter in this round that have not as many rows as the one before: the first catches up, single rows follow.
int32_t Pace::count_draft_changes(int32_t n_drafted) {
    const int64_t n_first = 1 + n_stood_;
    const int32_t n_changes = int32_t(n_first != n_draft_rows_) + int32_t(n_drafted > 1 && n_first != 1);
    n_draft_rows_ = n_drafted > 1 ? 1 : n_first;
    return n_changes;
}

// Learns what drafts cost, little by little; where n_far rounds in a row say that it is something else, at once.
void Pace::learn_draft(double surprise) {
    draft_scale_ *= std::pow(clipped(surprise), rate);
    const bool is_near = 1 / clip < surprise && surprise < clip;
    if (is_near || (!far_.empty() && (surprise > 1) != (*far_.begin() > 1))) {
        far_.clear();
        return;
    }
    far_.push(surprise);
    if (far_.full()) {
        draft_scale_ *= far_.median();
        far_.clear();
    }
}

// The first rounds at another depth that say nothing of what it costs: one makes new graphs.
int32_t Pace::n_settle() const { return 1 + int32_t(std::min(settle_s / plain_round_s(), most_settling)); }

// Learns what the first decode at another depth takes longer: after a long stretch at one depth more than in calibration, where
// depths change all the time.
void Pace::learn_change(double seconds) {
    const double most = target_s_[0];
    costs_.change_s += change_rate * (std::min(std::max(seconds, 0.0), most) - costs_.change_s);
}

// Learns what a decode at this depth costs, from the rounds just after a change of depth and those before it.
void Pace::compare(int32_t depth, double seconds, double share_off) {
    for (double & doubt : doubt_) doubt += drift * drift;
    if (depth != last_depth_) {
        before_ = slowness_;
        depth_before_ = last_depth_;
        off_before_ = last_off_;
        if (before_.full() && depth > 0 && depth_before_ > 0) learn_change(seconds / before_.median() - target_s_[size_t(depth)]);
        slowness_.clear();
        last_depth_ = depth;
        last_off_ = share_off;
        n_settling_ = n_settle() - 1;
        return;
    }
    if (n_settling_ > 0) {
        n_settling_ -= 1;
        return;
    }
    slowness_.push(seconds / target_s_[size_t(depth)]);
    if (!before_.full() || !slowness_.full()) return;
    const double before = before_.median(), after = slowness_.median();
    double spread = 0;
    for (const double slowness : before_) spread += std::abs(slowness / before - 1);
    for (const double slowness : slowness_) spread += std::abs(slowness / after - 1);
    spread = std::max(spread / n_paired, least_spread);
    // What two depths' costs are thought to be is moved towards what was seen, each by its doubt against all doubt there is.
    double & doubt = doubt_[size_t(depth)];
    double & doubt_before = doubt_[size_t(depth_before_)];
    const double all = doubt + doubt_before + variance * spread * spread + off_before_ * off_before_ + last_off_ * last_off_;
    const double seen = clipped(after / before);
    target_s_[size_t(depth)] *= std::pow(seen, doubt / all);
    target_s_[size_t(depth_before_)] *= std::pow(seen, -doubt_before / all);
    doubt *= 1 - doubt / all;
    doubt_before *= 1 - doubt_before / all;
    before_.clear();
}

}  // namespace sidecar
