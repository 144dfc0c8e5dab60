"""EAGLE3: every draft is the reference's, the text is plain's, and what cannot be drafted for is refused before llama.cpp sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import drafts
import models
import numpy as np
import pytest
from native_rounds import drafts_at_depths, moved_rounds, native_run

from llama_sidecar.runtime import LoadError, Model, _native, load, reference
from llama_sidecar.sidecars import open_sidecar
from llama_sidecar.sidecars.errors import BadRows, PairMismatch

PROMPT = list(b"hello world, this is where it starts")
N = 48
LAYERS = (1, 2, 3)


@pytest.fixture(scope="module", params=drafts.TARGETS)
def main(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a fitted drafter beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    path = drafts.write_target(folder, request.param)
    for other in folder.glob("mtp-*"):
        other.unlink()
    fc = drafts.fitted_fc(path, PROMPT, LAYERS, ahead=2)
    drafts.write_eagle3(folder, layers=LAYERS, scale=0.2, fc=fc)
    return path


@pytest.fixture(scope="module")
def model(main: Path) -> Iterator[Model]:
    with load(main, ctx=256, threads=1, depth=4) as loaded:
        assert loaded.kind == "eagle3"
        yield loaded


def plain_ids(model: Model, n: int = N) -> list[int]:
    with model.session(spec_type="none") as session:
        generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_native_loop_reference_loop_and_plain_agree_in_tokens_and_in_every_draft(
    model: Model, depth: int
) -> None:
    expected, expected_drafts = reference.generate(model, PROMPT, N, depth)
    found, found_drafts, n_accepted = native_run(model, PROMPT, N, depth)
    assert found == expected == plain_ids(model)
    assert found_drafts == expected_drafts
    assert n_accepted > N // 4  # otherwise this would test rejections alone


@pytest.mark.parametrize(
    "options",
    [
        {"own": True},
        {"own": True, "n_rows": 100},
        {"own": "embeddings"},
        {"norm_before_fc": True},
        {"norm_before_residual": True},
        {"layers": (0, 0, 3)},
    ],
    ids=str,
)
def test_every_form_of_the_file_drafts_as_the_reference_does(
    main: Path, tmp_path: Path, options: dict
) -> None:
    sidecar = drafts.write_eagle3(tmp_path, **options)
    with load(main, sidecar, ctx=256, threads=1, depth=3) as model:
        expected, expected_drafts = reference.generate(model, PROMPT, N, 3)
        assert native_run(model, PROMPT, N, 3)[:2] == (expected, expected_drafts)
        if options.get("n_rows"):
            assert {token % 2 for round_ in expected_drafts for token in round_} == {1}  # its rows' tokens


def test_nothing_of_a_draft_stays_in_the_target(model: Model) -> None:
    """Case 13, with drafts of which some stand: the state's bytes are those of a run that never speculated."""
    states = []
    for spec_type in ("auto", "none"):
        with model.session(spec_type=spec_type) as session:
            generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
            generation.read()
            states.append((generation.tokens, session._native.state()))
    assert states[0] == states[1]


@pytest.mark.parametrize("n_prompt", [1, 2, 63, 64, 65, 130])
def test_a_drafter_that_catches_up_late_drafts_as_one_that_caught_up_at_once(
    main: Path, n_prompt: int, tmp_path: Path
) -> None:
    prompt, depths = (PROMPT * 4)[:n_prompt], (0, 0, 0, 3, 0, 2, 3)
    sidecar = drafts.write_eagle3(
        tmp_path
    )  # of full random weights: its drafts depend on all that came before
    with load(main, sidecar, ctx=256, threads=1, depth=3) as model:
        late, at_once = (drafts_at_depths(model, prompt, depths, catches_up=c) for c in (False, True))
    assert late == at_once


@pytest.mark.parametrize("batch", [7, 64, 256])
def test_prompt_pieces_do_not_change_the_drafts(model: Model, batch: int) -> None:
    """Case 15."""
    prompt = (PROMPT * 4)[:137]
    with model.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        for start in range(0, len(prompt), batch):
            native.feed(prompt[start : start + batch], start + batch >= len(prompt))
        native.first(chooser)
        found = [native.step(chooser, 3, True).drafts for _ in range(4)]
    assert found == native_run(model, prompt, N, 3)[1][:4]


def test_plain_rounds_for_long_cost_the_text_before_them_and_nothing_else(model: Model) -> None:
    with model.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(PROMPT, True)
        text = [native.first(chooser)]
        for _ in range(150):
            text += native.step(chooser, 0, True).tokens
        step = native.step(chooser, 3, True)
    assert len(step.drafts) == 3
    assert text + step.tokens == plain_ids(model, 151 + len(step.tokens))


def test_a_second_prompt_and_the_end_of_the_context(main: Path) -> None:
    """Cases 18 and 19."""
    with load(main, ctx=64, threads=1, depth=16) as model:
        expected = plain_ids(model, 64 - len(PROMPT) + 1)
        for _ in range(2):
            generation = model.generate(PROMPT, temperature=0, ignore_eos=True)
            generation.read()
            assert generation.finish_reason == "length"
            assert generation.tokens == expected


@pytest.mark.parametrize("n_ctx", [1, 2, 5])
def test_a_context_of_a_few_cells(main: Path, tmp_path: Path, n_ctx: int) -> None:
    sidecars = [
        drafts.write_eagle3(tmp_path),
        drafts.write_dflash(tmp_path),
        drafts.write_dflash(tmp_path, markov=True),
    ]
    for sidecar in sidecars:
        with load(main, sidecar, ctx=n_ctx, threads=1, depth=3) as model:
            texts = []
            for spec_type in ("auto", "none"):
                with model.session(spec_type=spec_type) as session:
                    generation = session.generate(PROMPT[:1], temperature=0, ignore_eos=True)
                    generation.read()
                    texts.append(generation.tokens)
            assert len(texts[0]) == n_ctx
            assert texts[0] == texts[1]


def test_a_target_that_does_not_hand_out_its_layers_is_refused_by_both_names(tmp_path: Path) -> None:
    pair = models.write_pair(tmp_path, recurrent=False)
    sidecar = drafts.write_eagle3(tmp_path)
    with pytest.raises(LoadError, match=rf"{sidecar}.*layers 1, 2, 3.*{pair.main} \(glm4moe\)"):
        load(pair.main, sidecar)
    pair.sidecar.unlink()
    with load(pair.main, ctx=64, threads=1) as model:
        assert model.kind is None
        assert "does not hand out" in model.speculation.why


def test_the_layer_after_the_last_is_the_hidden_row_where_there_is_one(main: Path, tmp_path: Path) -> None:
    sidecar = drafts.write_eagle3(tmp_path, layers=(1, 2, 4))
    if "qwen35" not in str(main):
        with pytest.raises(LoadError, match=r"that of layer 4 of"):
            load(main, sidecar)
        return
    with load(main, sidecar, ctx=256, threads=1, depth=3) as model:
        expected, expected_drafts = reference.generate(model, PROMPT, N, 3)
        assert native_run(model, PROMPT, N, 3)[:2] == (expected, expected_drafts)


def test_a_borrowed_output_must_have_the_same_rows(main: Path, tmp_path: Path) -> None:
    sidecar = drafts.write_eagle3(tmp_path, n_padding=1)
    with pytest.raises(PairMismatch, match="borrows the output"):
        load(main, sidecar)


def test_rows_of_one_token_each(tmp_path: Path) -> None:
    for wrong, words in ((np.full(100, 3), "twice"), (np.arange(100) * 3, "ids from 0 to 297")):
        path = drafts.write_eagle3(tmp_path, own=True, n_rows=100, d2t=wrong.astype(np.int64))
        with pytest.raises(BadRows, match=words):
            open_sidecar(path)


def test_moving_to_the_plain_context_and_back_changes_nothing(tmp_path: Path) -> None:
    """A recurrent target's plain rounds, without rollback slots: the drafter sees the rows of both contexts."""
    main = drafts.write_target(tmp_path, "qwen35")
    sidecar = drafts.write_eagle3(tmp_path)
    depths = (3, 3, 0, 0, 3, 0, 0, 0, 3)
    with load(main, sidecar, ctx=256, threads=1, depth=3) as model:
        stays, moves = (moved_rounds(model, PROMPT, depths, moves=m) for m in (False, True))
    assert stays == moves


def test_pace_may_choose_the_depth(main: Path) -> None:
    with load(main, ctx=256, threads=1) as model:
        assert model.paced
        expected = plain_ids(model)
        generation = model.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
        assert generation.tokens == expected
