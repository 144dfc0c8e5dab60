"""Compact heads in use: cheaper drafts, the same text, and tokens outside the head's vocabulary stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
import pytest

from llama_sidecar.runtime import Model, heads, load

PROMPT = list(b"hello world, this is where it starts")
N = 48


@pytest.fixture(scope="module", params=[True, False], ids=["R", "T"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> models.Pair:
    import gguf

    folder = tmp_path_factory.mktemp("pair")
    return models.write_pair(folder, recurrent=request.param, type=gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def compact(pair: models.Pair) -> Iterator[Model]:
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:
        yield model


def run(model: Model, **options: object) -> tuple[list[int], float | None]:
    with model.session(**options) as session:  # type: ignore[arg-type]
        generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens, generation.stats.coverage


def test_text_is_the_same_with_half_of_the_vocabulary(compact: Model) -> None:
    plain, no_coverage = run(compact, spec_type="none")
    tokens, coverage = run(compact)
    assert tokens == plain
    assert no_coverage is None
    assert compact.draft_vocab is not None and coverage is not None
    assert coverage == sum(t in set(compact.draft_vocab.ids) for t in tokens) / len(tokens)
    assert 0 < coverage < 1, "both sorts of token must occur for the test to mean anything"


def test_drafts_are_the_full_head_s_best_among_the_rows(pair: models.Pair, compact: Model) -> None:
    """Fed with tokens it has, the compact head's first draft is the arg-max of the full head's logits over its rows."""
    from llama_sidecar.runtime import _native
    from llama_sidecar.runtime.reference import contexts

    assert compact.draft_vocab is not None
    ids = compact.draft_vocab.ids
    prompt = [ids[i] for i in range(3, 60, 3)]
    with compact.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(prompt, True)
        last = native.first(chooser)
        if last not in ids:
            native.map_token(last, 0)
        drafts = native.step(chooser, 1, True).drafts
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab="full") as full:
        target, head = contexts(full, depth=1)
        target.decode(prompt, 0, [len(prompt) - 1])
        fed = last if last in ids else ids[0]
        hidden = [[0.0] * head.n_embd, *(target.hidden(i) for i in range(len(prompt)))]
        head.decode([*prompt, fed], 0, [len(prompt)], hidden)
        logits = head.logits(len(prompt))
        target.close()
        head.close()
    assert drafts == [ids[int(logits[ids].argmax())]]


def test_stand_ins_are_found_once_and_shared(compact: Model) -> None:
    assert compact.draft_vocab is not None
    tokens, _ = run(compact)
    known = compact.draft_vocab.nearest()
    inside = set(compact.draft_vocab.ids)
    outside = set(tokens) - inside
    assert outside and outside <= set(known)
    assert all(0 <= row < len(inside) for row in known.values())
    assert compact.draft_vocab.find_nearest(outside) == {t: known[t] for t in outside}
    assert compact.draft_vocab.find_nearest(inside) == {}


def test_the_default_drafts_a_small_vocabulary_whole_and_says_so(pair: models.Pair) -> None:
    with load(pair.main, ctx=256, threads=1, depth=3) as model:
        assert model.draft_vocab is None
        assert "256 tokens is drafted whole" in model.draft_vocab_why


def test_learning_counts_what_is_written_and_not_without_being_asked(pair: models.Pair) -> None:
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:
        run(model)
        assert heads.counts_for(model.main).sum() == 0
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128, learn=True) as model:
        tokens, _ = run(model)
        counts = heads.counts_for(model.main)
        assert counts.sum() == len(tokens)
        assert all(counts[t] == tokens.count(t) for t in set(tokens))


def test_an_unusable_cache_means_the_full_head_and_a_reason(
    pair: models.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(blocked / "cache"))
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128, learn=True) as model:
        assert model.draft_vocab is None
        assert "compact head" in model.draft_vocab_why
        assert run(model)[0] == run(model, spec_type="none")[0]
