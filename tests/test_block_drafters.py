"""DFlash, DFlash2 and DSpark: every draft is the reference's in every form of the file, and the text is plain's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafts
import models
import pytest
from native_rounds import drafts_at_depths, native_run

from llama_sidecar.runtime import LoadError, Model, _native, load, reference
from llama_sidecar.sidecars import open_sidecar
from llama_sidecar.sidecars.errors import BadRows, MissingTensors, WrongKey

PROMPT = list(b"hello world, this is where it starts")
N = 32
FORMS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash with a vocabulary of its own": {"own": True},
    "dflash with embeddings of its own": {"own": "embeddings"},
    "dflash with some tokens": {"own": True, "n_rows": 100},
    "dflash, causal": {"causal": True},
    "dflash with a sliding window": {"window": 8},
    "dflash with sections": {"sections": True},
    "dflash without values": {"no_values": True},
    "dflash with four layers, one of them twice": {"layers": (0, 1, 1, 3)},
    "dflash2": {"selector": True},
    "dspark": {"markov": True},
    "dspark with the anchor unused": {"markov": True, "anchor": False},
    "dspark with confidence": {"markov": True, "confidence": True},
    "dspark with some tokens": {"markov": True, "own": True, "n_rows": 100},
}


@pytest.fixture(scope="module")
def mains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: drafts.write_target(tmp_path_factory.mktemp(arch), arch) for arch in drafts.TARGETS}


def plain_ids(model: Model, prompt: list[int] = PROMPT, n: int = N) -> list[int]:
    with model.session(spec_type="none") as session:
        generation = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens


@pytest.mark.parametrize("arch", drafts.TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_file_drafts_as_the_reference_does(
    form: str, arch: str, mains: dict[str, Path], tmp_path: Path
) -> None:
    sidecar = drafts.write_dflash(tmp_path, **FORMS[form])
    with load(mains[arch], sidecar, ctx=256, threads=1, depth=16) as model:
        assert model.kind == form[:6].rstrip("2, ")
        assert model.depth == (6 if model.kind == "dspark" and FORMS[form].get("anchor", True) else 5)
        for depth in (2, model.depth):
            expected, expected_drafts = reference.generate(model, PROMPT, N, depth)
            found, found_drafts, _ = native_run(model, PROMPT, N, depth)
            assert found == expected == plain_ids(model)
            assert found_drafts == expected_drafts
            assert len(found_drafts[0]) == depth


@pytest.mark.parametrize("arch", drafts.TARGETS)
def test_drafts_of_which_some_stand_leave_nothing_in_the_target(
    arch: str, mains: dict[str, Path], tmp_path: Path
) -> None:
    """Case 13, with a DSpark head that knows what follows what in the text."""
    text = drafts.greedy_text(mains[arch], PROMPT, 80)
    sidecar = drafts.write_dflash(tmp_path, markov=True, text=text, scale=0.2)
    with load(mains[arch], sidecar, ctx=256, threads=1, depth=4) as model:
        expected, expected_drafts = reference.generate(model, PROMPT, N, 4)
        found, found_drafts, n_accepted = native_run(model, PROMPT, N, 4)
        assert (found, found_drafts) == (expected, expected_drafts)
        assert 0 < n_accepted < sum(map(len, found_drafts))
        states = []
        for spec_type in ("auto", "none"):
            with model.session(spec_type=spec_type) as session:
                generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
                generation.read()
                states.append((generation.tokens, session._native.state()))
        assert states[0] == states[1]


@pytest.mark.parametrize("form", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("n_prompt", [1, 63, 64, 65, 130])
def test_a_drafter_that_catches_up_late_drafts_as_one_that_caught_up_at_once(
    form: str, n_prompt: int, mains: dict[str, Path], tmp_path: Path
) -> None:
    prompt, depths = (PROMPT * 4)[:n_prompt], (0, 0, 0, 3, 0, 2, 5)
    sidecar = drafts.write_dflash(tmp_path, **FORMS[form])
    with load(mains["qwen35"], sidecar, ctx=256, threads=1, depth=5) as model:
        late, at_once = (drafts_at_depths(model, prompt, depths, catches_up=c) for c in (False, True))
    assert late == at_once


def test_plain_rounds_for_long_and_the_end_of_the_context(mains: dict[str, Path], tmp_path: Path) -> None:
    """Case 19, and the rows that are given up."""
    sidecar = drafts.write_dflash(tmp_path, markov=True)
    with load(mains["qwen3"], sidecar, ctx=200, threads=1, depth=6) as model:
        expected = plain_ids(model, n=200 - len(PROMPT) + 1)
        with model.session() as session:
            native, chooser = session._native, _native.greedy_chooser()
            native.feed(PROMPT, True)
            text = [native.first(chooser)]
            for _ in range(140):
                text += native.step(chooser, 0, True).tokens
            while native.n_past < 200:
                text += native.step(chooser, 6, True).tokens
        assert text == expected


def test_confidence_ends_a_draft(mains: dict[str, Path], tmp_path: Path) -> None:
    sidecar = drafts.write_dflash(tmp_path, markov=True, confidence=True)
    lengths = {}
    for least in (0.0, 0.6, 1.0):
        with load(mains["llama"], sidecar, ctx=256, threads=1, depth=6, min_confidence=least) as model:
            found, found_drafts, _ = native_run(model, PROMPT, N, 6)
            assert found == plain_ids(model)
            lengths[least] = sum(map(len, found_drafts))
    assert lengths[0.0] > lengths[0.6] > lengths[1.0] == 0


def test_a_confidence_that_is_none_and_a_file_that_has_none(mains: dict[str, Path], tmp_path: Path) -> None:
    sidecar = drafts.write_dflash(tmp_path, markov=True)
    with pytest.raises(LoadError, match="min_confidence -1 is not between 0 and 1"):
        load(mains["llama"], sidecar, min_confidence=-1)
    with pytest.raises(LoadError, match=rf"{sidecar} .* no confidence"):
        load(mains["llama"], sidecar, min_confidence=0.5)


def test_a_target_that_does_not_hand_out_its_layers_is_refused_by_both_names(
    tmp_path: Path, mains: dict[str, Path]
) -> None:
    pair = models.write_pair(tmp_path, recurrent=False)
    sidecar = drafts.write_dflash(tmp_path)
    with pytest.raises(LoadError, match=rf"{sidecar}.*layers 1, 2, 3.*{pair.main} \(glm4moe\)"):
        load(pair.main, sidecar)
    after_the_last = drafts.write_dflash(tmp_path, layers=(1, 4))
    with pytest.raises(LoadError, match=r"that of layer 4 of"):
        load(mains["qwen35"], after_the_last)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"block_size": 1}, WrongKey, "block_size is 1"),
        ({"n_rows": 100}, MissingTensors, r"output\.weight"),
        ({"own": True, "n_rows": 140}, BadRows, "ids from 1 to 279"),
    ],
    ids=["block of one", "ids without output", "ids beyond"],
)
def test_what_llama_cpp_would_end_the_process_for(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = drafts.write_dflash(tmp_path, **options)
    with pytest.raises(error, match=words):
        open_sidecar(path)
