"""A draft model: every draft is what it would itself write, the text is the main model's, and only a vocabulary must fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import drafts
import gguf
import models
import pytest
from click.testing import CliRunner
from conftest import PairOf
from native_rounds import drafts_at_depths, moved_rounds

from llama_sidecar.runtime import LoadError, Model, _native, load, reference
from llama_sidecar.runtime.bench import measure
from llama_sidecar.runtime.prompts import Prompt
from llama_sidecar.scripts.run import command
from llama_sidecar.sidecars import check_draft_model, open_main
from llama_sidecar.sidecars.errors import PairMismatch, UnknownKind

PROMPT = list(b"hello world, this is where it starts")
N = 32  # at token 38 two logits of T are so near that the number of rows decides
Q8 = gguf.GGMLQuantizationType.Q8_0


def draft_for(main: Path, folder: Path, like: str) -> Path:
    """A model to draft with: the main model at a coarser type (right now and then), or another in shape and weights."""
    if like == "the same, coarser":
        return models.write_pair(folder, recurrent=main.parent.name.startswith("R"), type=Q8).main
    return drafts.write_target(folder, like)


@pytest.fixture(scope="module", params=["T", "R", "qwen3"])
def main(request: pytest.FixtureRequest, pair_of: PairOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in ("T", "R"):
        return pair_of(request.param).main
    return drafts.write_target(tmp_path_factory.mktemp("qwen3"), "qwen3")


def plain_ids(model: Model, n: int = N) -> list[int]:
    with model.session(spec_type="none") as session:
        generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens


@pytest.mark.parametrize("like", ["the same, coarser", "llama", "qwen35"])
def test_drafts_are_the_draft_models_own_text(main: Path, like: str, tmp_path: Path) -> None:
    draft = draft_for(main, tmp_path, like)
    with load(main, draft, ctx=256, threads=1, depth=4) as model:
        assert (model.kind, model.speculation.path, model.speculation.match) == (
            "model",
            draft,
            "same vocabulary",
        )
        for depth in (1, 2, 4):
            expected, expected_drafts = reference.generate(model, PROMPT, N, depth)
            with model.session(depth=depth) as session:
                native, chooser = session._native, _native.greedy_chooser()
                native.feed(PROMPT, True)
                found, found_drafts, n_accepted = [native.first(chooser)], list[list[int]](), 0
                while len(found) < N:
                    step = native.step(chooser, min(depth, N - len(found) - 1), True)
                    found += step.tokens
                    found_drafts.append(step.drafts)
                    n_accepted += step.n_accepted
            assert found == expected == plain_ids(model)
            assert found_drafts == expected_drafts
            if like == "the same, coarser" and not main.parent.name.startswith("qwen3"):
                assert n_accepted > 0


@pytest.mark.parametrize("letter", ["T", "R"])
def test_a_copy_of_the_main_model_is_always_right(letter: str, pair_of: PairOf, tmp_path: Path) -> None:
    main = pair_of(letter).main
    draft = Path(shutil.copy(main, tmp_path / "copy.gguf"))
    with load(main, draft, ctx=256, threads=1, depth=3) as model:
        generation = model.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
        assert generation.tokens == plain_ids(model)
        assert generation.stats.kind == "model"
        assert generation.stats.accepted_per_position == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("letter", ["T", "R"])
def test_rounds_without_drafts_and_early_ends_leave_it_right(
    letter: str, pair_of: PairOf, tmp_path: Path
) -> None:
    """However the sequence got where it is, the next draft is the same: tokens wait, drafts that stand keep their cells."""
    main = pair_of(letter).main
    draft = draft_for(main, tmp_path, "the same, coarser")
    depths = [3, 0, 0, 2, 1, 0, 3, 4, 4, 1]
    with load(main, draft, ctx=256, threads=1, depth=4) as model:
        runs = [
            drafts_at_depths(model, PROMPT, depths, catches_up=catches_up) for catches_up in (True, False)
        ]
        assert runs[0] == runs[1] and list(map(len, runs[0])) == depths
        moved = [moved_rounds(model, PROMPT, depths[:7], moves=moves) for moves in (True, False)]
        assert moved[0] == moved[1]
        with (
            model.session() as session
        ):  # a stop inside an accepted block, and then a longer and a shorter prompt
            text = plain_ids(model)
            stop = bytes(text[5:7]).decode("latin-1")
            first = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True, stop=stop)
            first.read()
            for prompt in ([*PROMPT, *text[:9]], PROMPT[:20]):
                again = session.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)
                again.read()
                with model.session(spec_type="none") as plain:
                    alone = plain.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)
                    alone.read()
                assert again.tokens == alone.tokens


def test_pace_and_bench_take_it_as_any_drafter(pair_of: PairOf, tmp_path: Path) -> None:
    main = pair_of("R").main
    draft = Path(shutil.copy(main, tmp_path / "copy.gguf"))
    with load(main, draft, ctx=256, threads=1) as model:
        report = measure(model, [Prompt("hello", "chat")], n=24, budget_s=30)
        assert report.tokens_equal and report.figures.stats.kind == "model"
        assert report.source["drafter"]["file"] == "copy.gguf"


def test_its_vocabulary_must_be_the_main_models(pair_of: PairOf, tmp_path: Path) -> None:
    main = pair_of("R").main
    padded = models.write_pair(tmp_path / "padded", n_vocab=models.N_VOCAB + 32).main
    assert check_draft_model(open_main(main), open_main(padded)).status == "same vocabulary"
    for larger, smaller in ((main, padded), (padded, main)):
        with load(larger, smaller, ctx=128, threads=1, depth=3) as model:
            generation = model.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
            generation.read()
            assert generation.tokens == plain_ids(model, 24)
    wide = models.write_pair(tmp_path / "wide", n_vocab=models.N_VOCAB + 200).main
    with pytest.raises(PairMismatch, match=r"vocabulary's size is 456, the main model's is 256"):
        load(main, wide)
    other = tmp_path / "other.gguf"
    length = (1).to_bytes(8, "little")
    other.write_bytes(
        main.read_bytes().replace(length + b"z", length + b"?", 1).replace(length + b"?", length + b"z", 1)
    )
    with pytest.raises(PairMismatch, match=r"text of token 63 is 'z', the main model's is '\?'"):
        load(main, other)
    with pytest.raises(PairMismatch, match="is the main model itself"):
        load(main, main)


def test_it_is_named_and_never_found(pair_of: PairOf, tmp_path: Path) -> None:
    main = Path(shutil.copy(pair_of("R").main, tmp_path / "main.gguf"))
    draft = Path(shutil.copy(main, tmp_path / "draft-model.gguf"))
    with load(main, ctx=64, threads=1) as model:
        assert model.kind is None
    for name in ("model", "draft-simple"):
        with pytest.raises(LoadError, match=r"--sidecar FILE names it"):
            load(main, spec_type=name)
        with load(main, draft, spec_type=name, ctx=64, threads=1, depth=2) as model:
            assert model.kind == "model"
    with pytest.raises(LoadError, match="is a main model, but a mtp sidecar was asked for"):
        load(main, draft, spec_type="mtp")
    with pytest.raises(LoadError, match="is a mtp sidecar, but 'model' was asked for"):
        load(main, pair_of("R").sidecar, spec_type="model")
    with pytest.raises(UnknownKind, match=r"model \(draft-simple\)"):
        load(main, spec_type="modle")
    with pytest.raises(LoadError, match="no confidence head"):
        load(main, draft, min_confidence=0.5)


def test_the_command_line_names_it_too(pair_of: PairOf, tmp_path: Path) -> None:
    main = pair_of("R").main
    draft = shutil.copy(main, tmp_path / "copy.gguf")
    arguments = [str(main), "-md", str(draft), "-p", "hello", "-n", "12", "--temp", "0", "--depth", "3"]
    result = CliRunner().invoke(command, [*arguments, "-c", "64", "-t", "1"])
    assert result.exit_code == 0, result.output
    assert "model depth 3: 100% accepted" in result.output
