"""Pace chooses the draft depth, round by round: as fast as drafting can be here, and never slower than plain decoding.

The model. A round with k drafts emits E(k) tokens on average and takes

    T(k) = v(k+1) + first + (k-1) c          T(0) = a plain round

v(n) being the seconds of a verification of n rows, `first` those of the first draft (one head decode over the rows
accepted before and the last token) and c those of each further draft. What each *token* costs besides (choosing it,
showing it) is the same at every depth and drops out. With a_i the chance that the i-th draft stands when those before it
do, E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 .. a_k. All depths' speeds E(k) / T(k) are compared, each round: costs need not
be convex (one more row may cost more than the two after it), so there is no climbing from depth to depth.

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
from collections.abc import Sequence
from statistics import median

from .costs import Costs

PRIOR = 0.75  # chance that a draft stands before any was seen: trained heads reach 0.6 to 0.9
PRIOR_ROUNDS = 3.0  # how many rounds that opinion weighs: little, the text shall decide
MEMORY = 48  # rounds after which an observation has faded: short for code that turns to prose, long for 0.75 against 0.80
STAY = 1.01  # another depth must be this much faster: each change of width makes llama.cpp rebuild its graph

PATIENCE = 3.0  # tokens behind plain decoding before a stretch may end: two wrong rounds where rows are dear
LOOK_SHARE = 0.015  # of the time may be lost by looking
MAX_CREDIT = 10.0  # tokens won by drafting that later looks may spend before they run into debt: three looks
MIN_WAIT, MAX_WAIT = 16, 512  # plain tokens between looks: doubled with each failure in a row
BEST = 0.95  # the highest acceptance worth hoping for: where even this would not pay nothing is tried

RATE, CLIP = 0.1, 1.25  # how far one comparison moves a cost (as a power), and the largest factor it may name
N_PAIRED = 5  # rounds on either side of a change of depth that are compared
N_REFERENCE = 3  # of them on the side before, at least
CHECK_BELOW = 1.25  # a speed-up smaller than this could be a wrong cost: compare with single rows in place
CHECK_EVERY = 96  # rounds between such checks, which then cost less than 1 %
FIRST_CHECK = 8


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
        self.costs = costs
        self.drafting = False
        self.switch_s = switch_s
        self._depth = 1

        # Acceptance by position: drafts whose predecessors all stood, and those of them that stood.
        self._tried = [0.0] * self.max_depth
        self._stood = [0.0] * self.max_depth
        self._fade()

        # Costs: the target's seconds by depth, and the drafter's over what was calibrated, in units of the target's.
        self._target_s = [costs.plain_s, *costs.verify_s[1 : self.max_depth + 1]]
        self._draft_scale = 1.0
        self._last_depth = 0
        self._slowness: deque[float] = deque(maxlen=N_PAIRED)  # measured over expected, at the last depth
        self._reference = 1.0  # their median before the depth last changed
        self._n_to_pair = 0
        self._n_checks = 0  # single rows still to decode in place
        self._next_check = FIRST_CHECK

        # The stretch of drafting: what plain decoding would have emitted in its time, less what it emitted itself.
        self._n_rounds = 0
        self._lost = 0.0
        self._behind = 0.0  # the same, since the stretch was last level with plain decoding

        # Between stretches.
        self._debt = 0.0  # tokens lost and not yet paid off; below 0: won
        self._wait = 0.0  # plain tokens before the next look, debt or no debt
        self._n_failures = 0  # losing stretches in a row
        if self._worth_a_look():
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
        return expected_tokens(self.acceptance[:depth]) * self._target_s[0] / self._round_s(depth)

    # Telling

    def plain_in_place(self) -> None:
        """Tells that plain rounds run in the context that drafts, for want of another: they cost its single row."""
        self._target_s[0] = self.costs.verify_s[0]

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
        elif self._n_checks:  # any other round without drafts had no room for them, and says nothing
            self._n_checks -= 1
            self._compare(0, verify_s * self.costs.plain_s / self.costs.verify_s[0])

    def _observe_plain(self, verify_s: float) -> None:
        self._compare(0, verify_s)
        self._fade()
        self._wait -= 1
        self._debt -= LOOK_SHARE
        if self._wait <= 0 and self._debt <= 0 and self._worth_a_look():
            self._begin_stretch()

    def _observe_drafts(self, n_drafted: int, n_accepted: int, draft_s: float, verify_s: float) -> None:
        surprise = draft_s / verify_s * self._target_s[n_drafted] / self._draft_s(n_drafted)
        if self._n_rounds:
            self._draft_scale *= _step(surprise)
        else:  # the first draft also caught up on all the tokens decoded plainly
            self._lost += max(0.0, surprise - 1) * self._draft_s(n_drafted) / self._target_s[0]
        self._compare(n_drafted, verify_s)
        self._fade()
        for i in range(min(n_accepted + 1, n_drafted)):
            self._tried[i] += 1
            self._stood[i] += i < n_accepted
        lost = self._round_s(n_drafted) / self._target_s[0] - (1 + n_accepted)
        self._lost += lost
        self._behind = max(0.0, self._behind + lost)
        self._n_rounds += 1
        self._next_check -= 1
        self._choose()

    # Inside

    def _choose(self) -> None:
        self._depth, speedup = self._fastest(self.acceptance)
        if speedup < 1 and self._behind >= PATIENCE:
            self._end_stretch()
        elif speedup < CHECK_BELOW and self._next_check <= 0:
            self._n_checks, self._next_check = N_REFERENCE, CHECK_EVERY

    def _fastest(self, acceptance: Sequence[float]) -> tuple[int, float]:
        """The fastest depth from 1 on, and its speed over plain decoding's."""
        best_depth, best_speed = 1, 0.0
        n_expected = chance = 1.0
        for depth, accepted in enumerate(acceptance, 1):
            chance *= accepted
            n_expected += chance
            speed = n_expected / self._round_s(depth) * (STAY if depth == self._depth else 1)
            if speed > best_speed:
                best_depth, best_speed = depth, speed
        return best_depth, best_speed * self._target_s[0]

    def _worth_a_look(self) -> bool:
        return self._fastest([BEST] * self.max_depth)[1] > 1

    def _begin_stretch(self) -> None:
        self.drafting = True
        self._n_rounds = 0
        self._lost = 2 * self.switch_s / self.costs.plain_s  # there and back
        self._behind = 0.0
        # As calibrated, in the units that the target's seconds have come to: the machine may have been busy when it changed.
        self._draft_scale = self._target_s[0] / self.costs.plain_s
        self._depth = self._fastest(self.acceptance)[0]

    def _end_stretch(self) -> None:
        self.drafting = False
        self._n_failures = self._n_failures + 1 if self._lost > 0 else 0
        self._wait = min(MIN_WAIT * 2**self._n_failures, MAX_WAIT)
        self._debt = max(self._debt + self._lost, -MAX_CREDIT)

    def _fade(self) -> None:
        """What is known fades with every round, drafted or plain. Where nothing is left the prior stands in, and fades in turn:
        one that stayed would tip close decisions."""
        self._tried = [n * (1 - 1 / MEMORY) for n in self._tried]
        self._stood = [n * (1 - 1 / MEMORY) for n in self._stood]
        missing = max(0.0, PRIOR_ROUNDS - self._tried[0])
        self._tried[0] += missing
        self._stood[0] += missing * PRIOR

    def _draft_s(self, depth: int) -> float:
        return self.costs.draft_s(depth) * self._draft_scale

    def _round_s(self, depth: int) -> float:
        return self._target_s[depth] + self._draft_s(depth)

    def _compare(self, depth: int, seconds: float) -> None:
        """Learns what a decode at this depth costs, from the rounds just after a change of depth and those before it."""
        if depth != self._last_depth:
            if len(self._slowness) >= N_REFERENCE:
                self._reference = median(self._slowness)
                self._n_to_pair = N_PAIRED
            self._slowness.clear()
            self._last_depth = depth
        slowness = seconds / self._target_s[depth]
        self._slowness.append(slowness)
        if self._n_to_pair:
            self._n_to_pair -= 1
            self._target_s[depth] *= _step(slowness / self._reference)


def expected_tokens(acceptance: Sequence[float]) -> float:
    """E(k): tokens a round emits on average, the target's own included.

    Args:
        acceptance: (k,) the chance that each draft stands when all before it do.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    n_expected = chance = 1.0
    for accepted in acceptance:
        chance *= accepted
        n_expected += chance
    return n_expected


def _step(surprise: float) -> float:
    return float(min(max(surprise, 1 / CLIP), CLIP) ** RATE)
