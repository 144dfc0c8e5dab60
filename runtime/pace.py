"""Pace chooses the draft depth, round by round: as fast as drafting can be here, and never slower than plain decoding.

Python's view of it: made from measured `Costs`. How it chooses is native/pace.h's, where the native loop asks it; how deep it
may go at all is chosen here, once. Has no clock and does no I/O: equal observations give equal depths. Knows nothing of
sessions or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import _native
from .costs import Costs, expected_tokens

HIGH_ACCEPTANCE = (
    0.95  # as high as trained heads reach on code: a depth that does not pay then hardly ever does
)
LEAST_GAIN = 1.01  # for which rollback slots are given up
MOST_SAVED = 0.1  # of a decode, by fewer slots: what is seen of their cost may be off


def for_slots_that_pay(costs: Costs, *, drafts: bool, looks_up: bool) -> Costs:
    """What rounds cost a recurrent model with as many rollback slots as pay, which may be fewer than these were measured with.

    Such a model keeps a state for each row that may be taken back, at every decode: a small one's decodes take longer for each.
    What one row takes longer than in a plain session is put down to the slots and all else that drafting needs, in equal parts.

    Args:
        costs: the depths to choose from, measured with `costs.slots` slots.
        drafts: whether there is a drafter.
        looks_up: whether drafts are found in the text, which costs nothing. Of the two the one that wants more slots counts.

    >>> costs = Costs(plain_s=1.0, verify_s=(1.06, 1.3, 1.9), first_draft_s=0.3, draft_step_s=0.3)
    >>> for_slots_that_pay(costs, drafts=True, looks_up=False).verify_s
    (1.04, 1.28)
    """
    slot_s = max(0.0, costs.verify_s[0] - costs.plain_s) / (costs.slots + 1)

    def with_slots(n: int) -> Costs:
        saved_s = (costs.slots - n) * slot_s
        left = (max(s - saved_s, s * (1 - MOST_SAVED)) for s in costs.verify_s[: n + 1])
        return replace(costs, verify_s=tuple(left), n_slots=n)

    def drafted(costs: Costs, acceptance: list[float]) -> float:
        return 1 / costs.seconds_per_token(acceptance)

    def found(costs: Costs, acceptance: list[float]) -> float:
        return expected_tokens(acceptance) / (costs.verify_s[len(acceptance)] + costs.overhead_s)

    def n_best(speed: Callable[[Costs, list[float]], float]) -> int:
        chances = [[HIGH_ACCEPTANCE] * depth for depth in range(1, costs.max_depth + 1)]
        speeds = [max(speed(with_slots(n), a) for a in chances[:n]) for n in range(1, costs.max_depth + 1)]
        best = max(speeds)
        return 1 + speeds.index(best) if best > LEAST_GAIN * speeds[-1] else costs.max_depth

    wanted = [n_best(speed) for speed, counts in ((drafted, drafts), (found, looks_up)) if counts]
    return with_slots(max(wanted, default=costs.max_depth))


class Pace(_native.Pace):
    """The depth of each round of one session.

    Before each round ask `drafting()` and `depth()`, after it call `observe`. `drafting()` says where the round belongs: in the
    context that drafts, or (False) in the plain one. While drafting, depth() is 0 now and then: one row, decoded in place.

    Methods:
        depth(): how many tokens to draft in the next round. Asking changes nothing.
        observe(n_drafted, n_accepted, draft_s, verify_s): tells what a round did: drafts made, how many of them stood, seconds
            of the drafter, its catch-up included, and of the target's decode.
        depth_found(n_found, n_matched), observe_found(...), compare_found(...): the same for what the look-up finds (ngram.h).
        plain_in_place(): tells that plain rounds run in the context that drafts, for want of another: they cost its single row.
        delayed(seconds): tells how long making the plain context took: looks pay that off, too.
        speedup(depth): expected speed at a depth over plain decoding's.
        acceptance: (max_depth,) the chance that a draft stands when all before it do.

    Args:
        costs: what rounds cost here, for depths up to `costs.max_depth`.
        max_depth: drafts per round at most (default: all that `costs` covers).
        switch_s: seconds of moving to the other context, one way; the attribute may be set once they are known.
        has_drafter: without one it decodes plainly, but for what the look-up finds.

    Raises:
        ValueError: max_depth is not between 1 and what the costs cover; of `observe`: more drafts stood than were made, or
            more were made than `max_depth`.

    >>> costs = Costs(plain_s=1.0, verify_s=(1.0, 1.1, 1.2), first_draft_s=0.05, draft_step_s=0.05)
    >>> pace = Pace(costs)
    >>> pace.depth()
    2
    >>> while pace.drafting():                       # a drafter that is always wrong
    ...     pace.observe(pace.depth(), 0, draft_s=0.1, verify_s=1.2)
    >>> pace.depth()
    0
    """

    def __init__(
        self,
        costs: Costs,
        max_depth: int | None = None,
        *,
        switch_s: float = 0.0,
        has_drafter: bool = True,
    ) -> None:
        super().__init__(
            max_depth=costs.max_depth if max_depth is None else max_depth,
            plain_s=costs.plain_s,
            verify_s=costs.verify_s,
            first_draft_s=costs.first_draft_s,
            draft_step_s=costs.draft_step_s,
            catch_up_s=costs.catch_up_s,
            draft_change_s=costs.draft_change_s,
            overhead_s=costs.overhead_s,
            change_s=costs.change_s,
            switch_s=switch_s,
            has_drafter=has_drafter,
        )
        self._costs = costs

    @property
    def costs(self) -> Costs:
        """What rounds are thought to cost, before anything was learned from them."""
        return replace(self._costs, plain_s=self.plain_s)
