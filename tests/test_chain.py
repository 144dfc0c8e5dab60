"""MTP with several heads (MiMo, Step, HY-V3): head i makes draft i, and no draft is deeper than there are heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoints import make_checkpoint

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Model, _native, load, reference

PROMPT = list(range(20, 70))
N = 40
CHAINS = [("mimo2", "joined"), ("step35", "plain"), ("hy_v3", "two")]


@pytest.fixture(scope="module", params=CHAINS, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("chain")
    result = convert(make_checkpoint(folder, *request.param), folder / "out", "Q8_0", "Q8_0")
    assert result.main
    with load(result.main, ctx=256, threads=1, depth=16, draft_vocab="full") as loaded:
        yield loaded


def run(model: Model, depths: list[int], *, catches_up: bool = False) -> tuple[list[int], list[list[int]]]:
    """The ids, and the drafts of rounds of these depths."""
    with model.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(PROMPT, True)
        text, drafts = [native.first(chooser)], []
        for depth in depths:
            if catches_up:
                native.catch_up()
            step = native.step(chooser, depth, True)
            text += step.tokens
            drafts.append(step.drafts)
    return text, drafts


def plain_ids(model: Model, n: int) -> list[int]:
    with model.session(spec_type="none") as session:
        generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens


def test_every_draft_is_the_references_at_every_depth(model: Model) -> None:
    n_heads = model.weights.n_layer_nextn or model.head_weights.n_layer_nextn
    assert n_heads > 1
    for depth in range(1, n_heads + 1):
        expected, expected_drafts = reference.generate(model, PROMPT, N, depth)
        text, drafts = run(model, [depth] * (len(expected_drafts) - depth))
        assert drafts == expected_drafts[: len(drafts)]
        assert text == expected[: len(text)] == plain_ids(model, len(text))


def test_the_depth_is_that_of_the_heads_at_most(model: Model) -> None:
    n_heads = model.head_weights.n_layer_nextn
    assert model.depth == n_heads
    assert [len(d) for d in run(model, [16, 1, 16])[1]] == [n_heads, 1, n_heads]
    with model.session(depth=9) as session:
        assert session.depth == n_heads


def test_heads_that_lag_behind_draft_as_heads_that_do_not(model: Model) -> None:
    depths = [1, 0, 1, 2, 1, 1, 16, 0, 0, 2, 16, 1, 16]
    assert run(model, depths) == run(model, depths, catches_up=True)


def test_heads_that_lag_for_long_catch_up_and_the_text_is_plain(model: Model) -> None:
    text, drafts = run(model, [1] * 140 + [16] * 3)
    assert len(drafts[-1]) == model.depth
    assert text == plain_ids(model, len(text))
