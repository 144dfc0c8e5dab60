"""Predicting the gain: random models are sound and leave nothing behind, and the arithmetic is the documented one."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as GGMLType

from llama_sidecar.runtime import LoadError, load, memory, predict, random_model
from llama_sidecar.runtime.costs import Costs
from llama_sidecar.runtime.errors import CacheError
from llama_sidecar.runtime.predict import Prediction, best_depth, best_speedup
from llama_sidecar.runtime.random_model import SHAPES, TYPES, RandomPair, Shape, random_pair
from llama_sidecar.scripts.predict import command
from llama_sidecar.sidecars import LlamaSidecarError, read_header

TINY = Shape(
    "tiny",
    n_embd=256,
    n_layers=4,
    n_ff=256,
    n_head=4,
    n_kv=2,
    n_value_heads=8,
    tied=True,
    n_key_heads=4,
    head_dim=64,
    state=32,
    n_vocab=600,
)


# The random model


@pytest.mark.parametrize("type", [*random_model.SCALES, *random_model.FLOATS])
def test_random_blocks_are_finite_and_as_large_as_weights(type: GGMLType) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[type][1]
    data = random_model.random_blocks(type, 500 * block_bytes, np.random.default_rng(0))
    values = gguf.quants.dequantize(data, type)
    assert len(data) == 500 * block_bytes
    assert np.isfinite(values).all()
    assert 0.01 < values.std() < 0.04


@pytest.mark.parametrize(("type", "tied"), [*((type, True) for type in TYPES), ("Q8_0", False)])
def test_every_type_loads_and_drafts_with_finite_logits(type: str, tied: bool, tmp_path: Path) -> None:
    announced: list[int] = []
    shape = replace(TINY, tied=tied)
    with random_pair(shape, type, tmp_path / "x", announce=announced.append) as pair:
        sizes = [pair.main.stat().st_size, pair.sidecar.stat().st_size]
        assert sizes == [pair.main_bytes, pair.sidecar_bytes]
        assert announced == [sum(sizes)]
        types = {t.type_name for t in read_header(pair.main).tensors.values()} - {"F32"}
        assert types == {"Q4_0": {"Q4_0", "Q6_K"}, "Q4_K_M": {"Q4_K", "Q6_K"}}.get(type, {type})
        with load(pair.main, pair.sidecar, depth=2, ctx=64, threads=1) as model, model.session() as session:
            generation = session.generate("some text", max_tokens=6, temperature=0, ignore_eos=True)
            generation.read()
            assert generation.stats.n_drafted > 0
            assert np.isfinite(session._native.logits(0)).all()
    assert not (tmp_path / "x").exists()


def test_q4_k_m_is_mixed_as_llama_quantize_mixes_it() -> None:
    """What `llama-quantize --dry-run` of llama.cpp 0c1e57098 says of the 0.8B."""
    shape = SHAPES["0.8B"]
    finer = [
        i
        for i in range(24)
        if random_model.main_type("Q4_K_M", f"blk.{i}.ffn_down.weight", shape) == GGMLType.Q6_K
    ]
    assert finer == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    assert random_model.main_type("Q4_K_M", "blk.5.attn_qkv.weight", shape) == GGMLType.Q6_K
    assert random_model.main_type("Q4_K_M", "blk.5.ffn_up.weight", shape) == GGMLType.Q4_K
    assert random_model.main_type("Q4_K_M", "token_embd.weight", shape) == GGMLType.Q6_K


@pytest.mark.parametrize(
    ("size", "n_trunk", "n_head"), [("0.8B", 752_393_024, 20_452_864), ("9B", 8_953_803_264, 243_290_624)]
)
def test_shapes_have_the_parameters_of_the_real_models(size: str, n_trunk: int, n_head: int) -> None:
    shape = SHAPES[size]

    def n_parameters(blocks: range) -> int:
        tensors = random_model._tensors(shape, blocks, lambda name: GGMLType.BF16)
        return sum(int(np.prod(t.shape)) for t in tensors)

    vocabulary = n_parameters(range(0))
    assert n_parameters(range(shape.n_layers)) == n_trunk
    head_block = range(shape.n_layers, shape.n_layers + 1)
    assert n_parameters(head_block) - vocabulary == n_head


# Nothing stays behind


@pytest.mark.parametrize("failure", [LoadError("x"), KeyboardInterrupt()])
def test_a_failed_run_leaves_nothing(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        assert len([*(tmp_path / "cache").iterdir()]) == 2
        raise failure

    monkeypatch.setattr(predict, "measure", fail)
    with pytest.raises(type(failure)):
        predict.predict(TINY, folder=tmp_path / "cache", keep=True)
    assert [*tmp_path.iterdir()] == []


def test_interrupted_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), random_pair(TINY, "Q8_0", tmp_path / "x", progress=interrupt):
        pass
    assert [*tmp_path.iterdir()] == []


def test_kept_files_stay_until_the_next_run_and_other_files_for_ever(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with random_pair(TINY, "BF16", folder, keep=True) as first:
        pass
    (folder / "mine.gguf").write_text("mine")
    assert first.main.stat().st_size == first.main_bytes
    with random_pair(TINY, "Q8_0", folder) as second:
        assert {path.name for path in folder.iterdir()} == {
            "mine.gguf",
            second.main.name,
            second.sidecar.name,
        }
    assert [path.name for path in folder.iterdir()] == ["mine.gguf"]


@pytest.mark.parametrize(
    "wrong", [{"budget_s": math.nan}, {"budget_s": -1.0}, {"threads": 9999}, {"gpu_layers": "many"}], ids=str
)
def test_wrong_settings_are_said_before_anything_is_written(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(LlamaSidecarError):
        predict.predict(SHAPES["0.8B"], folder=tmp_path / "models", **wrong)
    assert not (tmp_path / "models").exists()


def test_one_at_a_time(tmp_path: Path) -> None:
    with random_pair(TINY, "Q8_0", tmp_path / "x") as pair:
        with pytest.raises(CacheError, match="one at a time"), random_pair(TINY, "Q8_0", tmp_path / "x"):
            pass
        assert pair.main.exists()


def test_too_small_a_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=random_model.FREE_RESERVE_BYTES + 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with (
        pytest.raises(CacheError, match=r"1\.07 GB free.* name another folder") as caught,
        random_pair(TINY, "Q8_0", tmp_path / "x"),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CacheError, match=r"name another folder \(LLAMA_SIDECAR_CACHE"),
        random_pair(TINY, "Q8_0", tmp_path / "file" / "x"),
    ):
        pass


def test_too_little_memory_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: memory.Room(1000, "the control group's limit of 2 kB"))
    with pytest.raises(LoadError, match="0 MB are left of the control group's limit of 2 kB"):
        predict.predict(TINY, folder=tmp_path / "x")
    assert [*tmp_path.iterdir()] == []


def test_the_head_is_cut_as_in_real_use_and_not_left_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path))
    prediction = predict.predict(replace(TINY, n_vocab=65_600), "Q4_0", max_depth=1, threads=1)
    assert prediction.n_head_rows == 32_768
    assert [*tmp_path.rglob("*.gguf")] == []


# What it says


def test_the_table_by_hand() -> None:
    costs = Costs(plain_s=1.0, verify_s=(1.0, 1.5, 1.8), first_draft_s=0.1, draft_step_s=0.1)
    assert costs.speedup([]) == 1.0
    assert costs.speedup([0.8]) == pytest.approx(1.8 / 1.6)
    assert costs.speedup([0.8, 0.8]) == pytest.approx(2.44 / 2.0)
    assert (best_depth(costs, 0.8), best_speedup(costs, 0.8)) == (2, pytest.approx(1.22))
    assert (best_depth(costs, 0.5), best_speedup(costs, 0.5)) == (
        0,
        1.0,
    )  # 1.5 / 1.6 and 1.75 / 2.0 are slower


@pytest.mark.parametrize(
    ("v", "words"),
    [
        ([1.0, 1.1, 1.2, 1.3, 1.4], "pays here: expect"),
        ([1.0, 1.8, 2.1, 2.5, 2.9], "for some texts only"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "does not pay here"),
    ],
)
def test_verdict(v: list[float], words: str) -> None:
    report = SimpleNamespace(v=v, c=0.05, figures=SimpleNamespace(plain_tok_s=30.0))
    pair = RandomPair(Path("a"), Path("b"), 1, 1)
    verdict = Prediction(TINY, "Q8_0", pair, 600, cast(Any, report), kept=False).verdict
    assert words in verdict
    assert "(30 tok/s) on code" in verdict


def test_every_published_acceptance_is_near_one_row() -> None:
    rows = [published for a in predict.ACCEPTANCES for published in predict.published_near(a)]
    assert sorted(p.acceptance for p in rows) == sorted(p.acceptance for p in predict.PUBLISHED)
    assert {p.task for p in rows} >= {*predict.TASKS}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path))
    monkeypatch.setitem(SHAPES, "0.8B", TINY)
    done = CliRunner().invoke(command, ["-t", "1", "--json"], catch_exceptions=False)
    data = json.loads(done.stdout)
    assert data["schema"] == 1
    assert [row["acceptance"] for row in data["table"]] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert len(data["v"]) == 5
    assert data["v"][0] == 1.0
    for row in data["table"]:
        assert row["speedup"] == max(row["speedup_by_depth"])
    assert f"{tmp_path}" in done.stderr
    assert not (tmp_path / "predict").exists() and not [*tmp_path.rglob("*.gguf")]


def test_the_command_prints_table_verdict_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path))
    monkeypatch.setitem(SHAPES, "0.8B", TINY)
    arguments = ["-t", "1", "--max-depth", "1", "--type", "q4_0", "--keep"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "| acceptance |" in done.stdout
    assert "**Speculation" in done.stdout
    assert "llama-sidecar bench" in done.stdout
    assert len([*(tmp_path / "predict").iterdir()]) == 2
