"""Pace chooses the draft depth, round by round: as fast as drafting can be here, and never slower than plain decoding.

The model. A round with k drafts emits E(k) tokens on average and takes

    T(k) = v(k+1) + first + (k-1) c + (E(k)-1) u + o          T(0) = plain + o

v(n) being the seconds of a verification of n rows, `first` those of the first draft, c those of each further one, u what the
first draft takes longer for each draft accepted the round before (the head decodes those rows together with the last token),
and o all else in a round. What each *token* costs besides (choosing it, showing it) is the same at every depth and drops out.
With a_i the chance that the i-th draft stands when those before it do, E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 .. a_k. All depths'
speeds E(k) / T(k) are compared, each round: costs need not be convex (one more row may cost more than the two after it), so
there is no climbing from depth to depth.

Acceptance is counted by position and fades. A position that was seldom reached takes after the one before it (where that
draft stood the text is easy), and is trusted at least as much as any at the start: so what has faded is tried again, and a
text that turns easy finds its way to greater depths by itself.

Costs come from a calibration; of real rounds only *ratios* are learned, since a machine that is busy for an hour is slow
at every width. Two are fair: draft to verification in one round, and the rounds just before to those just after a change
of depth. Each moves an estimate a little, however far off it is; a stall of a second says no more than one of a quarter.

Stretches of drafting and of plain decoding alternate. A drafting stretch ends when it fails on two counts: the model says
that plain decoding is faster, and the tokens really emitted have fallen PATIENCE behind it. What the stretch lost
is a debt that plain decoding pays off with LOOK_SHARE of its time; then the next stretch looks whether the text has changed.

Has no clock and does no I/O: equal observations give equal depths. Knows nothing of sessions, models or files.
Speed as acceptance over cost follows Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Protocol

from .costs import Costs, expected_tokens

PRIOR = 0.75  # chance that a draft stands before any was seen: trained heads reach 0.6 to 0.9
PRIOR_ROUNDS = 3.0  # how many rounds that opinion weighs: little, the text shall decide
MEMORY = 48  # rounds after which an observation has faded: short for code that turns to prose, long for 0.75 against 0.80
STAY = 0.02  # rounds that staying must have cost before the depth changes, or what the change costs where that is more

PATIENCE = 3.0  # tokens behind plain decoding before a stretch may end: two wrong rounds where rows are dear
LOOK_SHARE = 0.015  # of the time may be lost by looking
MAX_DEBT = 30.0  # tokens: it still looks every 2,000
MAX_CREDIT = 10.0  # tokens won by drafting that later looks may spend before they run into debt: three looks
MIN_WAIT, MAX_WAIT = 16, 512  # plain tokens between looks: doubled with each failure in a row
CATCH_UP_ROWS = (
    50  # that many rows' seconds are what the drafter's catching up is thought to cost before it was seen
)
BEST = 0.98  # the highest acceptance worth hoping for: where even this would not pay nothing is tried

RATE = 0.05  # how far one round moves the drafter's cost (as a power)
CLIP = 1.25  # the largest factor that one round or comparison may name
N_FAR = 4  # rounds in a row that name a larger factor: that is the cost now
STALL = 10.0  # times what a draft was expected to take: what is beyond befell it
N_PAIRED = 4  # rounds on either side of a change of depth that are compared
MAX_GAIN = 0.3  # of what a comparison says is believed at once
VARIANCE = 0.3  # of the ratio of their medians, over the square of their mean deviations' sum
DOUBT = 0.02  # by how much calibrated costs are off: a comparison counts by this against its rounds' spread
CHECK_BELOW = 1.25  # a speed-up smaller than this could be a wrong cost: compare with single rows in place
CHECK_EVERY = 96  # rounds between such checks, which then cost less than 1 %
FIRST_CHECK = 8


class Pacing(Protocol):
    """What a session asks before each of its rounds and tells after it: see `Pace`."""

    drafting: bool
    switch_s: float

    def depth(self) -> int: ...

    def plain_in_place(self) -> None: ...

    def observe(self, n_drafted: int, n_accepted: int, draft_s: float, verify_s: float) -> None: ...


class Pace:
    """The depth of each round of one session.

    Before each round ask `drafting` and `depth()`, after it call `observe`. `drafting` says where the round belongs: in the
    context that drafts, or (False) in the plain one. While drafting, depth() is 0 now and then: one row, decoded in place.

    Args:
        costs: what rounds cost here, for depths up to `costs.max_depth`. A session that has no plain context to move to
            passes `replace(costs, plain_s=costs.verify_s[0])`.
        max_depth: drafts per round at most (default: all that `costs` covers).
        switch_s: seconds of moving to the other context, one way; the attribute may be set once they are known.

    Raises:
        ValueError: max_depth is not between 1 and what the costs cover.

    >>> costs = Costs(plain_s=1.0, verify_s=(1.0, 1.1, 1.2), first_draft_s=0.05, draft_step_s=0.05)
    >>> pace = Pace(costs)
    >>> pace.depth()
    2
    >>> while pace.drafting:                        # a drafter that is always wrong
    ...     pace.observe(pace.depth(), 0, draft_s=0.1, verify_s=1.2)
    >>> pace.depth()
    0
    """

    def __init__(self, costs: Costs, max_depth: int | None = None, *, switch_s: float = 0.0) -> None:
        self.max_depth = costs.max_depth if max_depth is None else max_depth
        if not 1 <= self.max_depth <= costs.max_depth:
            raise ValueError(f"max_depth {max_depth} is not between 1 and the {costs.max_depth} of the costs")
        self._believe(costs)
        self._calibrated_draft_s = [costs.draft_s(depth) for depth in range(self.max_depth + 1)]
        self.drafting = False
        self.switch_s = switch_s
        self._depth = 1

        # Acceptance by position: drafts whose predecessors all stood, and those of them that stood.
        self._tried = [0.0] * self.max_depth
        self._stood = [0.0] * self.max_depth
        self._fade(1)

        self._n_stood = 0  # drafts of the last round that stood: the next one's drafter catches up on them
        # What real rounds say about the costs.
        self._far: list[float] = []  # surprises in a row that the drafter's cost is far off, to the same side
        self._last_depth = 0
        self._slowness: deque[float] = deque(maxlen=N_PAIRED)  # measured over expected, at the last depth
        self._before: deque[float] | None = (
            None  # the same before the depth changed, until the two are compared
        )
        self._n_checks = 0  # single rows still to decode in place
        self._next_check = FIRST_CHECK

        # The stretch of drafting: what plain decoding would have emitted in its time, less what it emitted itself.
        self._n_rounds = 0
        self._regret = 0.0  # rounds that a faster depth would have saved since this one was last the fastest
        self._lost = 0.0
        self._behind = 0.0  # the same, since the stretch was last level with plain decoding

        # Between stretches.
        self._n_plain = 0  # plain tokens since the last stretch
        self._wait = 0  # of them before the next look, debt or no debt
        self._debt = 0.0  # tokens lost and not yet paid off when it began; below 0: won
        # Tokens that the last stretch lost by catching up on plain ones.
        self._catch_up = CATCH_UP_ROWS * costs.catch_up_s / costs.plain_s
        self._n_failures = 0  # losing stretches in a row
        if self._may_pay:
            self._begin_stretch()

    # Asking

    def depth(self) -> int:
        """How many tokens to draft in the next round. Asking changes nothing."""
        return self._depth if self.drafting and not self._n_checks else 0

    @property
    def acceptance(self) -> list[float]:
        """By position: the chance that a draft stands when all before it do."""
        chances = [self._stood[0] / self._tried[0]]
        for tried, stood in zip(self._tried[1:], self._stood[1:], strict=True):
            chances.append((stood + PRIOR_ROUNDS * max(chances[-1], PRIOR)) / (tried + PRIOR_ROUNDS))
        return chances

    def speedup(self, depth: int) -> float:
        """Expected speed at `depth` over plain decoding's."""
        n_expected = expected_tokens(self.acceptance[:depth])
        return n_expected * self._plain_s() / self._round_s(depth, n_expected - 1)

    # Telling

    def plain_in_place(self) -> None:
        """Tells that plain rounds run in the context that drafts, for want of another: they cost its single row."""
        self._believe(replace(self.costs, plain_s=self.costs.verify_s[0]))

    def observe(self, n_drafted: int, n_accepted: int, draft_s: float, verify_s: float) -> None:
        """Tells what a round did.

        Args:
            n_drafted, n_accepted: drafts made, and how many of them stood.
            draft_s, verify_s: seconds of the drafter, its catch-up included, and of the target's decode.

        Raises:
            ValueError: more accepted than drafted, or more drafted than `max_depth`.
        """
        if not 0 <= n_accepted <= n_drafted <= self.max_depth:
            raise ValueError(
                f"{n_accepted} of {n_drafted} drafts stood, at a depth of at most {self.max_depth}"
            )
        verify_s = max(verify_s, 1e-9)  # a clock may be too coarse for a small model
        if n_drafted:
            self._observe_drafts(n_drafted, n_accepted, draft_s, verify_s)
        elif not self.drafting:
            self._observe_plain(verify_s)
        else:
            self._n_stood += 1
            if self._n_checks:  # any other round without drafts had no room for them, and says nothing
                self._n_checks -= 1
                self._compare(0, verify_s * self.costs.plain_s / self.costs.verify_s[0])

    def _observe_plain(self, verify_s: float) -> None:
        self._compare(0, verify_s)
        self._n_plain += 1
        if self._n_plain >= self._wait and self._may_pay:
            next_look = 2 * self.switch_s / self.costs.plain_s + self._catch_up
            if self._debt + next_look <= LOOK_SHARE * self._n_plain:
                self._debt -= LOOK_SHARE * self._n_plain
                self._begin_stretch()

    def _observe_drafts(self, n_drafted: int, n_accepted: int, draft_s: float, verify_s: float) -> None:
        expected_s = self._draft_s(n_drafted, self._n_stood)
        draft_s *= (
            self._target_s[n_drafted] / verify_s
        )  # as on the machine that the target's seconds speak of
        if self._n_rounds:
            self._learn_draft(draft_s / expected_s)
            draft_s = min(draft_s, STALL * expected_s)
        else:  # the first draft also caught up on all the tokens decoded plainly, which says nothing about the text
            self._catch_up = max(0.0, draft_s - expected_s) / self._plain_s()
            self._lost += self._catch_up
            draft_s = expected_s
        self._compare(n_drafted, verify_s)
        self._fade(1)
        for i in range(min(n_accepted + 1, n_drafted)):
            self._tried[i] += 1
            self._stood[i] += i < n_accepted
        round_s = self._target_s[n_drafted] + draft_s + self.costs.overhead_s
        lost = round_s / self._plain_s() - (1 + n_accepted)
        self._n_stood = n_accepted
        self._lost += lost
        self._behind = max(0.0, self._behind + lost)
        self._n_rounds += 1
        self._next_check -= 1
        self._choose()

    # Inside

    def _choose(self) -> None:
        speedups = self._speedups()
        best = max(speedups)
        # Staying costs more and more; a change is due when that comes to what it costs.
        regret = best / speedups[self._depth - 1] - 1
        self._regret = self._regret + regret if regret else 0.0
        if self._regret > max(STAY, self.costs.change_s / self._target_s[self._depth]):
            self._depth, self._regret = 1 + speedups.index(best), 0.0
        if best < 1 and self._behind >= PATIENCE:
            self._end_stretch()
        elif best < CHECK_BELOW and self._next_check <= 0:
            self._n_checks, self._next_check = 1 + N_PAIRED, CHECK_EVERY

    def _speedups(self) -> list[float]:
        """Expected speed at depths 1, 2, ... over plain decoding's."""
        speedups = []  # `speedup` for all depths in one pass: each round asks
        plain_s, catch_up_s = self._plain_s(), self.costs.catch_up_s
        draft_scale, overhead_s = self._draft_scale, self.costs.overhead_s
        n_stood, chance = 0.0, 1.0
        for accepted, target_s, draft_s in zip(
            self.acceptance, self._target_s[1:], self._calibrated_draft_s[1:], strict=True
        ):
            chance *= accepted
            n_stood += chance
            round_s = target_s + draft_scale * (draft_s + n_stood * catch_up_s) + overhead_s
            speedups.append((1 + n_stood) * plain_s / round_s)
        return speedups

    def _believe(self, costs: Costs) -> None:
        """Starts from these costs."""
        self.costs = costs
        # The target's seconds by depth, and the drafter's over what was calibrated, in units of the target's.
        self._target_s = [costs.plain_s, *costs.verify_s[1 : self.max_depth + 1]]
        self._draft_scale = 1.0
        # By what was calibrated: what a stretch has learned may come of a busy minute, and plain decoding cannot unlearn it.
        self._may_pay = any(costs.speedup([BEST] * depth) > 1 for depth in range(1, self.max_depth + 1))

    def _begin_stretch(self) -> None:
        self.drafting = True
        self._fade(self._n_plain)
        self._n_plain = self._n_rounds = 0
        self._lost = 2 * self.switch_s / self.costs.plain_s  # there and back
        self._behind = 0.0
        self._n_stood = 0
        # As calibrated, in the units that the target's seconds have come to: the machine may have been busy when it changed.
        self._draft_scale = self._target_s[0] / self.costs.plain_s
        self._far = []
        speedups = self._speedups()
        self._depth, self._regret = 1 + speedups.index(max(speedups)), 0.0

    def _end_stretch(self) -> None:
        self.drafting = False
        self._n_failures = self._n_failures + 1 if self._lost > 0 else 0
        self._wait = min(MIN_WAIT * 2**self._n_failures, MAX_WAIT)
        self._debt = min(max(self._debt + self._lost, -MAX_CREDIT), MAX_DEBT)

    def _fade(self, n_rounds: int) -> None:
        """What is known fades with every round, drafted or plain. Where nothing is left the prior stands in, and fades in turn:
        one that stayed would tip close decisions."""
        kept = (1 - 1 / MEMORY) ** n_rounds
        self._tried = [n * kept for n in self._tried]
        self._stood = [n * kept for n in self._stood]
        missing = max(0.0, PRIOR_ROUNDS - self._tried[0])
        self._tried[0] += missing
        self._stood[0] += missing * PRIOR

    def _draft_s(self, depth: int, n_stood: float) -> float:
        return (self._calibrated_draft_s[depth] + n_stood * self.costs.catch_up_s) * self._draft_scale

    def _round_s(self, depth: int, n_stood: float) -> float:
        return self._target_s[depth] + self._draft_s(depth, n_stood) + self.costs.overhead_s

    def _plain_s(self) -> float:
        return self._target_s[0] + self.costs.overhead_s

    def _learn_draft(self, surprise: float) -> None:
        """Learns what drafts cost, little by little; where N_FAR rounds in a row say that it is something else, at once."""
        self._draft_scale *= _clipped(surprise) ** RATE
        if 1 / CLIP < surprise < CLIP or (self._far and (surprise > 1) != (self._far[0] > 1)):
            self._far = []
            return
        self._far.append(surprise)
        if len(self._far) == N_FAR:
            self._draft_scale *= median(self._far)
            self._far = []

    def _compare(self, depth: int, seconds: float) -> None:
        """Learns what a decode at this depth costs, from the rounds just after a change of depth and those before it."""
        if depth != self._last_depth:
            self._before = self._slowness if len(self._slowness) == N_PAIRED else None
            self._slowness = deque(maxlen=N_PAIRED)
            self._last_depth = depth
            return  # it also made new graphs
        self._slowness.append(seconds / self._target_s[depth])
        if self._before is not None and len(self._slowness) == N_PAIRED:
            before, after = median(self._before), median(self._slowness)
            distances = [x / before - 1 for x in self._before] + [x / after - 1 for x in self._slowness]
            spread = sum(abs(distance) for distance in distances) / N_PAIRED
            variance = VARIANCE * spread**2
            gain = DOUBT**2 / (DOUBT**2 + variance)
            self._target_s[depth] *= _clipped(after / before) ** min(gain, MAX_GAIN)
            self._before = None


def _clipped(surprise: float) -> float:
    return min(max(surprise, 1 / CLIP), CLIP)
