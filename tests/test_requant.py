"""A sidecar at another type: what the converter would have written where nothing was rounded before, and honest where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
import pytest
import tiny_gguf
from click.testing import CliRunner
from conftest import PairOf
from test_split_merge import content
from type_cases import make_case

from llama_sidecar.converter import TYPES, convert
from llama_sidecar.converter.edit import graft, merge, requant, split, stored
from llama_sidecar.converter.errors import (
    CannotDequantize,
    InputGiven,
    NothingToDo,
    OutOfRange,
    OutputExists,
    OutputFailed,
    UnknownType,
)
from llama_sidecar.runtime import load
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import TensorInfo, open_sidecar, read_header
from llama_sidecar.sidecars.compact import choose_rows, open_compact, write_compact
from llama_sidecar.sidecars.errors import NotASidecar

STEPS = "sidecar.requant.from"


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("requant"), request.param, "short")


@pytest.fixture(scope="module")
def wide(folder: Path) -> Path:
    """A BF16 sidecar, which has all that the checkpoint has."""
    sidecar = convert(folder, folder.parent / "bf16", None, "BF16").sidecar
    assert sidecar
    return sidecar


@pytest.mark.parametrize("type", [name for name in TYPES if name != "BF16"])
def test_it_is_what_the_converter_writes_from_the_checkpoint(
    folder: Path, wide: Path, type: str, tmp_path: Path
) -> None:
    converted = convert(folder, tmp_path / "converted", None, type).sidecar
    result = requant(wide, tmp_path / "requant", type, type)
    assert converted and result.sidecar and result.sidecar.name == converted.name
    assert content(result.sidecar) == content(converted) and result.notes == []
    assert bool(result.warnings) == (type in ("Q3_K_M", "Q2_K"))


def test_block_and_vocabulary_go_apart(folder: Path, wide: Path, tmp_path: Path) -> None:
    default = convert(folder, tmp_path / "converted", None).sidecar
    both = requant(wide, tmp_path / "both", "Q8_0", "Q4_0").sidecar
    assert default and both and content(both) == content(default)
    vocabulary = requant(wide, tmp_path / "one", vocabulary_type="q4_0".upper()).sidecar
    assert vocabulary and vocabulary.name == wide.name
    twice = requant(vocabulary, tmp_path / "two", "Q8_0").sidecar
    assert twice and content(twice)[1] == content(default)[1]
    assert STEPS not in read_header(twice).keys  # each tensor was rounded once
    kinds = {name: info.type_name for name, info in read_header(vocabulary).tensors.items()}
    assert (kinds["token_embd.weight"], kinds["blk.8.nextn.eh_proj.weight"]) == ("Q4_0", "BF16")


def test_values_that_are_rounded_twice_are_told(wide: Path, tmp_path: Path) -> None:
    first = requant(wide, tmp_path / "a", "Q8_0", "Q5_0")
    second = requant(str(first.sidecar), tmp_path / "b", "Q4_K_S", "Q4_0")
    assert second.sidecar and second.notes == ["rounded twice: values come from Q5_0, Q8_0"]
    steps = list(read_header(second.sidecar).keys[STEPS])
    assert set(steps) - {"Q8_0 -> Q5_0"} == {"Q5_0 -> Q4_0", "Q8_0 -> Q4_K", "Q8_0 -> Q5_K"}
    third = requant(second.sidecar, tmp_path / "c", vocabulary_type="F16")
    assert third.sidecar and list(read_header(third.sidecar).keys[STEPS]) == [*steps, "Q4_0 -> F16"]
    ours, theirs = (content(path)[1] for path in (second.sidecar, third.sidecar))
    assert {n for n in ours if ours[n] != theirs[n]} == {"token_embd.weight", "output.weight"} & ours.keys()


@pytest.mark.parametrize("type", [t for t in TYPES if t not in ("F32", "F16", "BF16")])
def test_libggml_reads_what_gguf_reads(wide: Path, type: str, tmp_path: Path) -> None:
    """Every type that can be written can be read again, to the values that the published gguf package finds there."""
    path = requant(wide, tmp_path, type, type).sidecar
    assert path
    for info in read_header(path).tensors.values():
        tensor = stored.Stored(info)
        raw = tensor.rows(0, tensor.n_rows)
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(info.type))
        np.testing.assert_allclose(tensor.values(0, tensor.n_rows), expected, rtol=1e-5, atol=1e-7)


def test_a_range_of_rows_is_that_part_of_the_whole(wide: Path) -> None:
    info = next(info for info in read_header(wide).tensors.values() if len(info.shape) == 2)
    for tensor in (stored.Stored(info), stored.Retyped(info, gguf.GGMLQuantizationType.Q4_K)):
        whole = tensor.rows(0, tensor.n_rows)
        assert whole.nbytes == tensor.n_bytes
        parts = [tensor.rows(a, min(a + 7, tensor.n_rows)) for a in range(0, tensor.n_rows, 7)]
        assert np.array_equal(np.concatenate([p.reshape(-1) for p in parts]), whole.reshape(-1))


def test_where_a_head_comes_from_is_kept(wide: Path, folder: Path, tmp_path: Path) -> None:
    source, result = open_sidecar(wide), open_sidecar(requant(wide, tmp_path / "q", "Q8_0").sidecar or "")
    assert (source.trunk, source.rows) == (result.trunk, result.rows)
    pair = models.write_pair(tmp_path / "pair", type=gguf.GGMLQuantizationType.Q8_0)
    grafted = graft(pair.sidecar, pair.main, tmp_path / "g").sidecar
    small = requant(grafted or "", tmp_path / "small", "Q4_0", "Q4_0").sidecar
    assert small
    keys = read_header(small).keys
    assert keys["sidecar.graft.trunk"] == "" and list(keys[STEPS]) == ["Q8_0 -> Q4_0"]
    merged = merge(pair.main, small, tmp_path / "merged.gguf").main
    parts = split(merged or "", tmp_path / "parts").sidecar
    assert parts and list(read_header(parts).keys[STEPS]) == ["Q8_0 -> Q4_0"]
    assert STEPS not in read_header(split(merged or "", tmp_path / "parts", force=True).main or "").keys


def test_it_drafts_and_the_text_stays(pair_of: PairOf, tmp_path: Path) -> None:
    pair = pair_of("R")
    small = requant(pair.sidecar, tmp_path, "Q4_0", "Q4_0").sidecar
    texts = []
    for sidecar in (pair.sidecar, small):
        with load(pair.main, sidecar, ctx=128, threads=1, depth=3) as model:
            generation = model.generate("def f(", max_tokens=30, temperature=0)
            generation.read()
            assert generation.stats.n_drafted > 0
            texts.append(generation.tokens)
    assert texts[0] == texts[1]


def test_a_compact_sidecar_too(pair_of: PairOf, tmp_path: Path) -> None:
    pair = pair_of("R")
    source = open_sidecar(pair.sidecar)
    path = tmp_path / "compact-main-F32-128.gguf"
    write_compact(source, choose_rows(source.tokens, None, 128), path)
    result = requant(path, tmp_path / "out", "Q8_0", "Q4_0")
    assert result.sidecar and result.sidecar.name == "compact-main-Q8_0-128.gguf"
    ours, theirs = open_compact(result.sidecar), open_compact(path)
    assert np.array_equal(ours.target_ids, theirs.target_ids) and ours.source == theirs.source
    assert ours.header.tensors["token_embd.weight"].type_name == "Q4_0"
    with load(pair.main, result.sidecar, ctx=64, threads=1, depth=3) as model:
        generation = model.generate("def f(", max_tokens=10, temperature=0)
        generation.read()
        assert generation.stats.n_drafted > 0


@pytest.mark.parametrize("name", ["eagle3", "dflash", "assistant"])
def test_drafters_of_other_kinds_too(name: str, tmp_path: Path) -> None:
    prefix = "mtp" if name == "assistant" else name
    source = tiny_gguf.sidecar(tmp_path / f"{prefix}-main-F32.gguf", name)
    result = requant(source, tmp_path / "out", "F16")
    assert result.sidecar and result.sidecar.name == f"{prefix}-main-F16.gguf"
    before, after = read_header(source).tensors, read_header(result.sidecar).tensors
    for info in before.values():
        is_matrix = len(info.shape) > 1 and info.name not in ("token_embd.weight", "output.weight")
        assert after[info.name].type_name == ("F16" if is_matrix else info.type_name)


# What is refused


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main-F32.gguf")
    main = tiny_gguf.main(tmp_path / "main.gguf")
    cases: list[tuple[Path, tuple[Any, ...], type[Exception], str]] = [
        (sidecar, (), NothingToDo, "no type"),
        (sidecar, ("F32",), NothingToDo, "already"),
        (sidecar, ("Q9_0",), UnknownType, "Q9_0"),
        (sidecar, (None, "Q9_0"), UnknownType, "Q9_0"),
        (main, ("F16",), NotASidecar, "not a sidecar"),
    ]
    for path, types, error, words in cases:
        with pytest.raises(error, match=words):
            requant(path, tmp_path / "out", *types)
    with pytest.raises(OutputFailed, match="folder"):
        requant(sidecar, tmp_path / "out.gguf", "F16")
    assert not (tmp_path / "out").exists()


def test_types_that_libggml_cannot_read_are_named_before_anything_is_written(tmp_path: Path) -> None:
    info = TensorInfo("blk.2.attn_q.weight", (32, 1), 9, 0, 36, tmp_path / "x.gguf")  # Q8_1
    with pytest.raises(CannotDequantize, match=r"attn_q\.weight is Q8_1"):
        stored.check_dequantizable([info])


@pytest.mark.parametrize(("value", "type"), [(1e5, "F16"), (1e5, "Q8_0"), (np.nan, "Q4_0")])
def test_values_that_a_type_cannot_hold_leave_nothing_behind(value: float, type: str, tmp_path: Path) -> None:
    rows = tiny_gguf.floats(32, 64)
    rows[3, 4] = value
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-a.gguf", tensors={"blk.2.nextn.eh_proj.weight": rows})
    with pytest.raises(OutOfRange, match=r"eh_proj\.weight has values"):
        requant(sidecar, tmp_path / "out", type)
    assert not (tmp_path / "out").exists()


def test_an_input_is_never_written_over_and_no_file_unasked(tmp_path: Path) -> None:
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main-F16.gguf")
    with pytest.raises(InputGiven):
        requant(sidecar, tmp_path, "F16", force=True)
    requant(sidecar, tmp_path / "out", "F16")
    with pytest.raises(OutputExists, match="--force"):
        requant(sidecar, tmp_path / "out", "F16")
    requant(sidecar, tmp_path / "out", "F16", force=True)


def test_the_command_prints_text_or_one_object(tmp_path: Path) -> None:
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main-F32.gguf")
    call = ["requant", str(sidecar), "--out", str(tmp_path / "out")]
    text = CliRunner().invoke(cli, [*call, "--type", "q8_0"])
    assert text.exit_code == 0 and text.stdout.startswith("sidecar ") and "mtp-main-Q8_0.gguf" in text.stdout
    data = json.loads(CliRunner().invoke(cli, [*call, "--vocab-type", "Q4_0", "--json"]).stdout)
    assert data["schema"] == 1 and data["match"] is None and data["sidecar"].endswith("mtp-main-F32.gguf")
    assert isinstance(CliRunner().invoke(cli, call).exception, NothingToDo)
