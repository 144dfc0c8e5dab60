"""Pace in a session: the depth follows what drafts cost and how many stand, and the text never does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import PairOf

from llama_sidecar.runtime import Model, _native, load
from llama_sidecar.runtime.costs import Costs, costs_for, costs_key, recall, remember
from llama_sidecar.runtime.pace import Pace

PROMPT = list(b"hello world, this is where it starts")
CHEAP = {"plain_s": 1.0, "verify_s": (1.0, 1.1, 1.2, 1.3, 1.4), "first_draft_s": 0.05, "draft_step_s": 0.05}
DEAR = {"plain_s": 1.0, "verify_s": (1.0, 3.0, 4.0, 5.0, 6.0), "first_draft_s": 1.0, "draft_step_s": 1.0}
SLOTS = {"plain_s": 1.0, "verify_s": (1.1, 1.3, 2.3, 3.3, 4.3), "first_draft_s": 0.05, "draft_step_s": 0.05}


@pytest.fixture(params=["R", "T"])
def model(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of(request.param, "Q8_0").main, ctx=256, threads=1) as loaded:
        yield loaded


def pretend(model: Model, costs: dict[str, object]) -> None:
    """Lets the model's sessions believe in these costs."""
    remember(Costs(**costs, key=costs_key(model)))  # type: ignore[arg-type]


def ids(model: Model, n: int = 100, **options: object) -> tuple[list[int], list[int]]:
    """Greedy ids, and rounds by depth."""
    with model.session(**options) as session:  # type: ignore[arg-type]
        generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens, generation.stats.rounds_per_depth


def test_auto_is_the_default_and_named_depths_are_kept(model: Model) -> None:
    pretend(model, CHEAP)
    with model.session() as paced, model.session(depth=2) as fixed, model.session(spec_type="none") as plain:
        assert isinstance(paced.pace, Pace)
        assert (paced.depth, fixed.pace, fixed.depth, plain.pace, plain.depth) == (4, None, 2, None, 0)


def test_a_recurrent_session_has_as_many_slots_as_pay(model: Model) -> None:
    """In one of attention alone rows are taken back for nothing."""
    pretend(model, SLOTS)
    with model.session() as paced, model.session(depth=3) as fixed:
        recurrent = paced._native.recurrent
        assert paced.depth == (1 if recurrent else 4) and fixed.depth == 3
        if recurrent:
            assert (paced._native.n_slots, fixed._native.n_slots) == (1, 3)
    plain, _ = ids(model, spec_type="none")
    assert ids(model)[0] == plain


def test_a_drafter_that_is_always_wrong_is_left_and_tried_again_and_changes_no_text(model: Model) -> None:
    """The tiny models' random heads are never right; a recurrent target then moves to its plain context and back."""
    pretend(model, CHEAP)
    plain, _ = ids(model, n=200, spec_type="none")
    tokens, rounds = ids(model, n=200)
    assert tokens == plain
    assert rounds[0] > 100, "most of the text is written plainly"
    assert sum(rounds[1:]) > 0, "after a first try"


class Late(_native.Pacing):
    """Decodes plainly for `n_plain` rounds and then drafts two tokens a round."""

    def __init__(self, n_plain: int) -> None:
        super().__init__()
        self._n_plain = n_plain

    def drafting(self) -> bool:
        return self._n_plain <= 0

    def depth(self) -> int:
        return 2 if self.drafting() else 0

    def switched(self, seconds: float) -> None:
        pass

    def plain_in_place(self) -> None:
        pass

    def observe(self, *_: object) -> None:
        self._n_plain -= 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_prompt_after_plain_rounds_is_fed_where_drafts_are_possible(pair_of: PairOf, goes_on: bool) -> None:
    """The plain context decodes one row at a time: a further prompt, which may go on with the text, leaves it first."""
    with load(pair_of("R", "Q8_0").main, ctx=1024, threads=1, depth=2, flash_attn="off") as model:
        with model.session() as session, model.session(spec_type="none") as plain:
            session.pace = Late(10**6)
            text = session.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
            text.read()
            assert session._native.is_plain
            longer = [*(PROMPT + text.tokens if goes_on else []), *b" and then a long way on"]
            session.pace = Late(5)
            second = session.generate(longer, max_tokens=40, temperature=0, ignore_eos=True)
            second.read()
            expected = plain.generate(longer, max_tokens=40, temperature=0, ignore_eos=True)
            expected.read()
        assert second.tokens == expected.tokens
        assert second.stats.n_drafted > 0 and (second.stats.n_reused > 0) == goes_on


@pytest.mark.parametrize("n_plain", [127, 128, 129, 500])
def test_after_a_long_pause_the_head_begins_anew(pair_of: PairOf, n_plain: int) -> None:
    """It gives up the oldest rows, and drafts on from the others."""
    with load(pair_of("R", "Q8_0").main, ctx=1024, threads=1, depth=2, flash_attn="off") as model:
        plain, _ = ids(model, n=n_plain + 50, spec_type="none")
        with model.session() as session:
            session.pace = Late(n_plain)
            generation = session.generate(PROMPT, max_tokens=n_plain + 50, temperature=0, ignore_eos=True)
            generation.read()
        assert generation.stats.n_drafted > 0
        assert generation.tokens == plain


def test_where_drafting_cannot_pay_nothing_is_drafted(model: Model) -> None:
    pretend(model, DEAR)
    tokens, rounds = ids(model)
    assert rounds == [99]
    assert tokens == ids(model, spec_type="none")[0]


def test_a_depth_asked_for_in_a_call_overrules_pace(model: Model) -> None:
    pretend(model, DEAR)
    with model.session() as session:
        generation = session.generate(PROMPT, max_tokens=30, temperature=0, ignore_eos=True, depth=2)
        generation.read()
    assert generation.stats.n_drafted > 0


def test_costs_are_measured_once_and_remembered(model: Model) -> None:
    key = costs_key(model)
    found = costs_for(model, budget_s=0.3)
    assert recall(key) == found == costs_for(model)
    assert found.max_depth == 4


def test_our_kernels_write_the_same_text_at_every_depth(pair_of: PairOf) -> None:
    """With flash attention off their rows are equal to the bit at every width, also beyond 256 cells."""
    with load(
        pair_of("R", "Q8_0").main, ctx=512, threads=2, depth=4, kernels="ours", flash_attn="off"
    ) as loaded:
        plain, _ = ids(loaded, n=300, spec_type="none")
        assert ids(loaded, n=300)[0] == plain
