"""Lossless, for drafters of every kind: properties over samplers, seeds, prompts, depths and batches, and the cases that broke others.

Cases 13, 15, 18-20, 23, 25 and 26 of the project's list, for every kind of drafter; what `reject` promises instead of equal ids is
tested in test_sampling_reject.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kind_models import ALWAYS, HYBRID, KINDS, ON_TARGETS, PROMPT, open_kind, write_kind

from llama_sidecar.runtime import Generation, Model, Scripted, Session, _native
from llama_sidecar.runtime.sampling import MAX_SEED

BATCHES = (1, 3, 512)
DEPTH, N = 4, 40
GRAMMAR = 'root ::= "{" [0-9a-f]+ "}"'
ModelOf = Callable[..., Model]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelOf]:
    """`model_of(kind, batch=...)`: written and loaded at first use."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def written(kind: str, target: str | None) -> tuple[Path, dict[str, Any]]:
            return write_kind(kind, tmp_path_factory.mktemp(kind.replace(", ", "-")), target)

        @functools.cache
        def opened(kind: str, batch: int = 512, target: str | None = None, **options: Any) -> Model:
            return stack.enter_context(open_kind(*written(kind, target), batch=batch, **options))

        yield opened


def write(session: Session, prompt: list[int] = PROMPT, n: int = N, **options: Any) -> Generation:
    text = session.generate(prompt, max_tokens=n, **{"temperature": 0, "ignore_eos": True, **options})
    text.read()
    return text


def plain(model: Model, prompt: list[int] = PROMPT, n: int = N, **options: Any) -> list[int]:
    with model.session(spec_type="none") as session:
        return write(session, prompt, n, **options).tokens


def assert_right_for(n_right: int, accepted_per_position: list[float]) -> None:
    """The first drafts always stand and those after them never: a liar's acceptance is exactly 0."""
    n = len(accepted_per_position)
    assert accepted_per_position == [float(i < n_right) for i in range(n)] and n > 1


# Properties

samplers = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.6, 1.3]), "seed": st.integers(0, MAX_SEED)},
    optional={
        "top_k": st.sampled_from([0, 1, 3, 40]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "typical_p": st.sampled_from([0.4, 0.95]),
        "repeat_penalty": st.sampled_from([0.8, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "repeat_last_n": st.sampled_from([-1, 0, 3, 64]),
        "dry_multiplier": st.sampled_from([0.5, 4.0]),
        "dry_allowed_length": st.integers(1, 3),
        "logit_bias": st.dictionaries(st.integers(20, 70), st.sampled_from([-3.0, 2.0, 6.0]), max_size=4),
        "grammar": st.just(GRAMMAR),
    },
)
prompts = st.lists(st.integers(20, 70), min_size=1, max_size=40)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    kind=st.sampled_from(KINDS),
    batch=st.sampled_from(BATCHES),
    n_right=st.one_of(st.none(), st.integers(0, DEPTH)),  # of a scripted drafter; None: the model's own
    depth=st.integers(1, DEPTH),
    sampler=samplers,
    prompt=prompts,
    before=st.one_of(st.none(), prompts),  # written earlier on the same session
    n=st.integers(1, 20),
    ignore_eos=st.booleans(),
)
def test_greedy_and_seeded_texts_are_plain_token_for_token(
    model_of: ModelOf,
    kind: str,
    batch: int,
    n_right: int | None,
    depth: int,
    sampler: dict[str, Any],
    prompt: list[int],
    before: list[int] | None,
    n: int,
    ignore_eos: bool,
) -> None:
    """Whatever is drafted, and whatever the session wrote before."""
    model = model_of(kind, batch=batch)
    options = {**sampler, "n": n, "ignore_eos": ignore_eos}
    with model.session(spec_type="none") as session:
        expected = write(session, prompt, **options)
    scripted = None if n_right is None else Scripted([*prompt, *expected.tokens], n_right)
    with model.session(depth=depth, scripted=scripted) as session:
        if before is not None:
            write(session, before, n=5)
        found = write(session, prompt, **options)
    assert found.tokens == expected.tokens
    assert found.finish_reason == expected.finish_reason and found.text == expected.text


# Cases, for every kind


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "target"), ON_TARGETS)
def test_a_state_after_rewinds_is_that_of_a_run_that_never_speculated(
    model_of: ModelOf, kind: str, target: str, temperature: float
) -> None:
    """Case 13: after drafts that are right for the first j, of the model's own drafter, and of drafts judged by `reject`."""
    model, options = model_of(kind, target=target), {"temperature": temperature, "seed": 5}
    with model.session(spec_type="none") as session:
        expected = write(session, **options).tokens
        state = session._native.state()
    for n_right in [*range(DEPTH + 1), None]:
        scripted = None if n_right is None else Scripted(PROMPT + expected, n_right)
        with model.session(scripted=scripted) as session:
            found = write(session, **options)
            assert found.tokens == expected and session._native.state() == state
            if n_right is not None:
                assert_right_for(n_right, found.stats.accepted_per_position)
    with model.session() as session:
        text = write(session, accept="reject", **options).tokens
        left = session._native.state()
    with model.session(spec_type="none") as session:
        session._native.feed(PROMPT, True)
        for token in text[:-1]:
            session._native.feed([token], True)
        assert session._native.state() == left


@pytest.mark.parametrize("kind", HYBRID)
@pytest.mark.parametrize("n_slots", [0, 1, 2])
def test_fewer_rollback_slots_than_the_depth(model_of: ModelOf, kind: str, n_slots: int) -> None:
    """Case 14: a checkpoint stands in, and the drafter goes on as if there had been slots."""
    model = model_of(kind, target="qwen35")
    with model.session(spec_type="none") as session:
        expected = write(session).tokens
        state = session._native.state()
    for n_right in [*range(DEPTH + 1), None]:
        scripted = None if n_right is None else Scripted(PROMPT + expected, n_right)
        with model.session(depth=DEPTH, n_slots=n_slots, scripted=scripted) as session:
            text = write(session)
            assert text.tokens == expected and session._native.state() == state
            if n_right is not None and n_right + n_slots < DEPTH:
                assert session.n_restores > 0
    with model.session(depth=DEPTH) as session:
        with_slots = write(session).stats
    assert (text.stats.n_drafted, text.stats.n_accepted) == (with_slots.n_drafted, with_slots.n_accepted)


@pytest.mark.parametrize("kind", ALWAYS)
@pytest.mark.parametrize("n_prompt", [17, 33])
def test_prompt_pieces_do_not_change_the_drafts(model_of: ModelOf, kind: str, n_prompt: int) -> None:
    """Case 15: a prompt of 2 x 8 + 1 (and 4 x 8 + 1) tokens in batches of 8 gives the drafts of one batch."""
    seen = []
    for batch in (8, 64):
        with model_of(kind, batch=batch).session() as session:
            native, chooser = session._native, _native.greedy_chooser()
            for start in range(0, n_prompt, batch):
                native.feed(PROMPT[:n_prompt][start : start + batch], start + batch >= n_prompt)
            native.first(chooser)
            seen.append([native.step(chooser, 2, True).drafts for _ in range(8)])
    assert seen[0] == seen[1] and sum(map(len, seen[0])) >= 8


def test_a_short_prompt_after_a_long_one(model_of: ModelOf, kind: str) -> None:
    """Case 18: also the same drafts as a fresh session's, by how many stand."""
    model = model_of(kind)
    with model.session() as session:
        write(session, PROMPT)
        again = write(session, PROMPT[:5])
    with model.session() as session:
        fresh = write(session, PROMPT[:5])
    assert again.tokens == fresh.tokens == plain(model, PROMPT[:5])
    assert again.stats.n_accepted == fresh.stats.n_accepted


def test_drafts_end_where_the_context_does(model_of: ModelOf, kind: str) -> None:
    """Case 19: a context of 64, a prompt of 56, and drafts as deep as can be."""
    model, prompt = model_of(kind, ctx=64, depth=16), [*PROMPT, *PROMPT[:16]]
    expected = plain(model, prompt, 30)
    with model.session() as session:
        text = write(session, prompt, 30)
    assert text.tokens == expected and len(expected) == 64 - 56 + 1
    assert text.finish_reason == "length"


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_small_batches_clamp_the_draft(model_of: ModelOf, kind: str, batch: int) -> None:
    """Case 20: n_batch 1, and n_batch = depth."""
    model = model_of(kind, batch=batch)
    with model.session() as session:
        assert write(session).tokens == plain(model)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "accept": "reject"}]
)
def test_a_grammar_of_one_sentence_is_that_sentence(
    model_of: ModelOf, kind: str, options: dict[str, Any]
) -> None:
    """Case 23: whatever the kind drafts, and where illegal tokens are drafted everywhere."""
    model, only = model_of(kind), "123+45"
    for scripted in (None, Scripted([19] * 256, 0), Scripted([*PROMPT, *only.encode(), 0], DEPTH)):
        with model.session(scripted=scripted) as session:
            text = session.generate(PROMPT, max_tokens=N, grammar=f'root ::= "{only}"', **options)
            assert text.read() == only and text.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "accept"),
    # A compact head's rows are other tokens' after the first text, and so are the drafts that `reject` judges.
    [(kind, accept) for kind in KINDS for accept in ("match", "reject")[: 1 if "compact" in kind else 2]],
)
def test_the_same_seed_twice_is_the_same_text(model_of: ModelOf, kind: str, accept: str) -> None:
    """Case 25: by both rules; and by `match` it is plain decoding's."""
    options = {"temperature": 1.0, "seed": 11, "accept": accept}
    model = model_of(kind)
    texts = []
    for _ in range(2):
        with model.session() as session:
            texts.append(write(session, **options).tokens)
    assert texts[0] == texts[1]
    if accept == "match":
        assert texts[0] == plain(model, **options)


def test_a_drafters_context_does_not_change_plain_logits(model_of: ModelOf, kind: str) -> None:
    """Case 26."""
    rows = []
    for depth in (0, DEPTH, 0):
        with model_of(kind).session(depth=depth) as session:
            session._native.feed(PROMPT, True)
            rows.append(session._native.logits(len(PROMPT) - 1))
    assert rows[0] == rows[1] == rows[2]
