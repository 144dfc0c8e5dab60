"""A head split off a main file and merged into one: the same bytes and keys, files that load and draft, and no false claims."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
import pytest
import tiny_gguf
from checkpoints import WITH_HEAD, make_checkpoint
from click.testing import CliRunner, Result

from llama_sidecar.converter import convert
from llama_sidecar.converter.edit import merge, split, stored
from llama_sidecar.converter.errors import (
    CannotMerge,
    InputGiven,
    NoHead,
    OutputExists,
    OutputFailed,
)
from llama_sidecar.runtime import load
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import (
    LlamaSidecarError,
    StringArray,
    check_pair,
    open_main,
    open_sidecar,
    read_header,
    read_model,
)
from llama_sidecar.sidecars.compact import open_compact, write_compact
from llama_sidecar.sidecars.errors import (
    CompactGiven,
    NotAMain,
    NotASidecar,
    PairMismatch,
    TruncatedFile,
    WrongTensorShape,
)

OURS = "sidecar."
Content = tuple[dict[str, Any], dict[str, Any]]


def content(path: Path) -> Content:
    """All keys with their types and all tensors with their bytes."""
    header = read_header(path)
    file_keys = {name: (header.key_types[name], plain(value)) for name, value in header.keys.items()}
    tensors = {
        name: (info.shape, info.type_name, header.tensor_bytes(name).tobytes())
        for name, info in header.tensors.items()
    }
    return file_keys, tensors


def plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return list(value.iter_raw())
    return value.tolist() if isinstance(value, np.ndarray) else value


def without(content: Content, prefix: str) -> Content:
    return {name: value for name, value in content[0].items() if not name.startswith(prefix)}, content[1]


# The same bytes


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("recurrent", [True, False], ids="RT")
def test_split_gives_what_would_have_been_written_apart(recurrent: bool, type: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[type]
    apart = models.write_pair(tmp_path / "apart", recurrent=recurrent, type=kind)
    whole = models.write_pair(tmp_path / "whole", recurrent=recurrent, type=kind, embedded=True)
    result = split(whole.main, tmp_path / "out")
    assert result.main == tmp_path / "out" / f"main-{type}.gguf"
    assert result.sidecar == tmp_path / "out" / f"mtp-main-{type}.gguf"
    assert content(result.main) == content(apart.main)
    assert without(content(result.sidecar), OURS) == content(apart.sidecar)
    assert (result.main_bytes, result.sidecar_bytes) == (
        result.main.stat().st_size,
        result.sidecar.stat().st_size,
    )


def test_the_sidecar_can_be_had_alone(tmp_path: Path) -> None:
    whole = tiny_gguf.main(tmp_path / "whole.gguf", head=True)
    both, one = split(whole, tmp_path / "both"), split(whole, tmp_path / "one", sidecar_only=True)
    assert both.sidecar and one.sidecar and (one.main, one.main_bytes, one.match) == (None, 0, both.match)
    assert list((tmp_path / "one").iterdir()) == [one.sidecar]
    assert content(one.sidecar) == content(both.sidecar)


@pytest.mark.parametrize("recurrent", [True, False], ids="RT")
def test_split_and_merge_undo_each_other(recurrent: bool, tmp_path: Path) -> None:
    whole = models.write_pair(tmp_path / "whole", recurrent=recurrent, embedded=True).main
    parts = split(whole, tmp_path / "parts")
    assert parts.main and parts.sidecar
    again = merge(parts.main, parts.sidecar, tmp_path / "again.gguf")
    assert again.main and content(again.main) == content(whole) and not again.warnings

    apart = models.write_pair(tmp_path / "apart", recurrent=recurrent)
    merged = merge(apart.main, apart.sidecar, tmp_path / "merged.gguf")
    assert merged.main
    parts = split(merged.main, tmp_path / "parts2")
    assert parts.main and content(parts.main) == content(apart.main)
    assert parts.sidecar and content(parts.sidecar) == content(apart.sidecar)


OWN_MIX = "deepseek4"  # its head has an output mix of its own, which no main file has a place for
MERGEABLE = [variant for variant in WITH_HEAD if variant[0] != OWN_MIX]


def test_a_head_with_an_output_mix_of_its_own_stays_beside_its_main_file(tmp_path: Path) -> None:
    converted = convert(make_checkpoint(tmp_path, OWN_MIX, "plain"), tmp_path / "apart", "BF16", "BF16")
    assert converted.main and converted.sidecar
    with pytest.raises(CannotMerge, match=r"output_hc_fn\.weight, .* of its own"):
        merge(converted.main, converted.sidecar, tmp_path / "merged.gguf")
    assert not (tmp_path / "merged.gguf").exists()


@pytest.mark.parametrize(("arch", "variant"), MERGEABLE, ids=map("-".join, MERGEABLE))
def test_converted_pairs_survive_it_whatever_their_family(arch: str, variant: str, tmp_path: Path) -> None:
    """So what is split off equals the peer's own files, as converted ones do (test_convert_peer.py)."""
    converted = convert(make_checkpoint(tmp_path, arch, variant), tmp_path / "apart", "BF16", "BF16")
    assert converted.main and converted.sidecar
    merged = merge(converted.main, converted.sidecar, tmp_path / "merged.gguf").main
    assert merged and open_main(merged).head_kind == "mtp"
    parts = split(merged, tmp_path / "parts")
    assert parts.main and content(parts.main) == content(converted.main)
    assert parts.sidecar and content(parts.sidecar) == content(converted.sidecar)
    assert parts.match == "verified"


def blocks_of(n: int, **per_layer: list[Any]) -> dict[str, Any]:
    keys = tiny_gguf.main_keys() | {"qwen35.block_count": n}
    return keys | {f"qwen35.{name}": values for name, values in per_layer.items()}


def several_heads(path: Path, **per_layer: list[Any]) -> Path:
    """Two trunk layers, three heads, keys with a value for each block."""
    tensors = tiny_gguf.main_tensors()
    for i in (2, 3, 4):
        tensors |= tiny_gguf.head_tensors(i)
    keys = blocks_of(5, **per_layer) | {"qwen35.nextn_predict_layers": 3}
    return tiny_gguf.write(path, "qwen35", keys, tensors)


def test_keys_with_a_value_for_each_block_follow_their_blocks(tmp_path: Path) -> None:
    per_layer: dict[str, list[Any]] = {
        "attention.head_count_kv": [4, 2, 1, 1, 1],
        "attention.sliding_window_pattern": [True, False, True, True, True],
        "swiglu_clamp_exp": [1.5, 2.5, 0.0, 0.0, 0.0],
        "rope.dimension_sections": [8, 4, 4, 0, 0],  # of five by chance: not one a block
        "target_layers": [1],
    }
    whole = several_heads(tmp_path / "whole.gguf", **per_layer)
    parts = split(whole, tmp_path / "parts")
    assert parts.main and parts.sidecar
    main, sidecar = (
        {n.removeprefix("qwen35."): plain(v) for n, v in read_header(path).keys.items()}
        for path in (parts.main, parts.sidecar)
    )
    assert (main["block_count"], sidecar["block_count"], sidecar["nextn_predict_layers"]) == (2, 5, 3)
    assert "nextn_predict_layers" not in main
    for name in ("attention.head_count_kv", "attention.sliding_window_pattern", "swiglu_clamp_exp"):
        assert (main[name], sidecar[name]) == (per_layer[name][:2], per_layer[name])
    assert main["rope.dimension_sections"] == sidecar["rope.dimension_sections"] == [8, 4, 4, 0, 0]
    assert main["target_layers"] == [1]
    again = merge(parts.main, parts.sidecar, tmp_path / "again.gguf").main
    assert again and content(again) == content(whole)


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        ({"n": 7}, {"n": 7}, 7),
        ({"n": 7}, {"n": [7, 7, 9]}, [7, 7, 9]),  # what the trunk's layers share, a head may not
        ({"n": [7, 8]}, {"n": [7, 8, 9]}, [7, 8, 9]),
        ({}, {"n": [7, 8, 9]}, [7, 8, 9]),
        ({}, {"n": 7}, 7),
        ({"n": 7}, {}, 7),
        ({"attention.recurrent_layers": [True, False]}, {}, [True, False, False]),
        ({"context_length": 4096}, {"context_length": 8192}, 4096),
    ],
)
def test_one_key_of_both(ours: dict[str, Any], theirs: dict[str, Any], merged: Any, tmp_path: Path) -> None:
    (name,) = ours or theirs
    pair = [{f"qwen35.{n}": value for n, value in side.items()} for side in (ours, theirs)]
    main = tiny_gguf.main(tmp_path / "main.gguf", keys=pair[0])
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main.gguf", keys=pair[1])
    result = merge(main, sidecar, tmp_path / "out.gguf")
    assert result.main and plain(read_header(result.main).keys[f"qwen35.{name}"]) == merged
    assert len(result.warnings) == (not ours) and all(f"qwen35.{name} is added" in w for w in result.warnings)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"n": 7}, {"n": 8}),
        ({"n": [7, 8]}, {"n": [7, 9, 9]}),
        ({"n": 7}, {"n": [7, 8, 9]}),
        ({"n": [7, 8]}, {}),
        ({"n": [7, 8]}, {"n": [7.0, 8.0, 9.5]}),
        ({"n": [7, 8]}, {"n": ["7", "8", "9"]}),
        ({"n": [7, 8]}, {"n": "7"}),
    ],
)
def test_keys_that_contradict_each_other_are_all_named(
    ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    pair = [
        {"qwen35.a.b": i, **{f"qwen35.{n}": v for n, v in side.items()}}
        for i, side in enumerate((ours, theirs))
    ]
    main = tiny_gguf.main(tmp_path / "main.gguf", keys=pair[0])
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main.gguf", keys=pair[1])
    with pytest.raises(PairMismatch, match=r"qwen35\.a\.b \(1 instead of 0\), qwen35\.n \("):
        merge(main, sidecar, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_main_file_that_declares_a_head_it_lost_takes_one(tmp_path: Path) -> None:
    """Some converters leave block_count and nextn_predict_layers as they were when they drop the head."""
    keys = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1, "qwen35.n": [1, 2, 3]}
    main = tiny_gguf.main(tmp_path / "main.gguf", keys=keys)
    with pytest.raises(NoHead, match="declares 1 MTP blocks"):
        split(main, tmp_path / "parts")
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main.gguf", keys={"qwen35.n": [1, 2, 3]})
    out = merge(main, sidecar, tmp_path / "out.gguf").main
    assert out and read_header(out).keys["qwen35.n"].tolist() == [1, 2, 3]


def test_keys_keep_their_bytes_whatever_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    for name, value in tiny_gguf.main_keys(head=True).items():
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
    writer.add_token_list([b"\xff\xfe", "", "ä", *tiny_gguf.TOKENS[3:]])
    writer.add_key_value("a.u64", 1 << 63, gguf.GGUFValueType.UINT64)
    writer.add_key_value("a.i8", -3, gguf.GGUFValueType.INT8)
    writer.add_key_value("a.f64", 0.1, gguf.GGUFValueType.FLOAT64)
    writer.add_key_value("a.bool", True, gguf.GGUFValueType.BOOL)
    writer.add_key_value("a.u16", [1, 65535], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT16)
    writer.add_key_value("a.bools", [True, False], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL)
    writer.add_custom_alignment(128)
    for name, value in tiny_gguf.main_tensors(head=True).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = split(path, tmp_path / "parts")
    assert parts.main and parts.sidecar
    again = merge(parts.main, parts.sidecar, tmp_path / "again.gguf").main
    assert again and content(again) == content(path)
    assert all(info.offset % 128 == 0 for info in read_header(parts.sidecar).tensors.values())


@pytest.mark.parametrize(("label", "labels"), [("5.8K", ("2.7K", "3.7K")), ("0.8B", ("0.8B", "0.8B"))])
def test_sizes_are_labelled_as_the_converter_does(
    label: str, labels: tuple[str, str], tmp_path: Path
) -> None:
    """A label that counts the parameters counts again; one from the model's name stays."""
    whole = tiny_gguf.main(tmp_path / "whole.gguf", head=True, keys={"general.size_label": label})
    parts = split(whole, tmp_path / "parts")
    assert parts.main and parts.sidecar
    assert tuple(read_header(p).keys["general.size_label"] for p in (parts.main, parts.sidecar)) == labels


def test_shards_become_one_file(tmp_path: Path) -> None:
    whole = several_heads(tmp_path / "whole.gguf")
    header = read_header(whole)
    for i, names in enumerate(([], list(header.tensors)[:3], list(header.tensors)[3:])):
        writer = gguf.GGUFWriter(tmp_path / f"in-0000{i + 1}-of-00003.gguf", "qwen35")
        for name, value in header.keys.items() if i == 0 else ():
            if name != "general.architecture":
                kind, *item = header.key_types[name]
                writer.add_key_value(name, list(value) if item else value, kind, *item)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(header.tensors))
        for name in names:
            shape = header.tensors[name].shape[::-1]
            writer.add_tensor(name, header.tensor_bytes(name).view(np.float32).reshape(shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = tmp_path / "in-00001-of-00003.gguf"
    parts = split(first, tmp_path / "parts")
    assert parts.main == tmp_path / "parts" / "in-F32.gguf"
    assert parts.sidecar and len(read_model(parts.main).paths) == 1
    again = merge(parts.main, parts.sidecar, tmp_path / "again.gguf").main
    assert again and content(again) == content(whole)


# What runs


@pytest.mark.parametrize("recurrent", [True, False], ids="RT")
def test_every_form_drafts_the_same(recurrent: bool, tmp_path: Path) -> None:
    apart = models.write_pair(tmp_path / "apart", recurrent=recurrent)
    merged = merge(apart.main, apart.sidecar, tmp_path / "merged.gguf").main
    assert merged
    parts = split(merged, tmp_path / "parts")
    assert parts.main and parts.sidecar
    (tmp_path / "alone").mkdir()
    plain_main = shutil.copy(parts.main, tmp_path / "alone")
    runs = []
    for main in (apart.main, merged, parts.main):
        with load(main, ctx=128, threads=1, depth=3) as model:
            assert model.kind == "mtp"
            assert (model.speculation.path == main) == (main == merged)
            generation = model.generate("def f(", max_tokens=40, temperature=0)
            generation.read()
            stats = generation.stats
            runs.append((generation.tokens, stats.n_rounds, stats.n_drafted, stats.n_accepted))
    assert runs[0] == runs[1] == runs[2] and runs[0][2] > 0
    with load(plain_main, ctx=128, threads=1) as model:
        generation = model.generate("def f(", max_tokens=40, temperature=0)
        generation.read()
        assert generation.tokens == runs[0][0] and generation.stats.speculation == "off"


# What the files say of themselves


def converted_pair(tmp_path: Path) -> tuple[Path, Path]:
    result = convert(make_checkpoint(tmp_path), tmp_path / "apart", "BF16", "BF16")
    assert result.main and result.sidecar
    return result.main, result.sidecar


def edited(path: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The same file with other keys."""
    header = read_header(path)
    values = {name: (header.key_types[name], value) for name, value in header.keys.items()}
    change(values)
    writer = gguf.GGUFWriter(out, header.arch)
    for name, (types, value) in values.items():
        if name != "general.architecture":
            kind, *item = types
            raw = list(value.iter_raw()) if isinstance(value, StringArray) else value
            writer.add_key_value(name, list(raw) if item else raw, kind, *item)
    for info in header.tensors.values():
        data = header.tensor_bytes(info.name)
        writer.add_tensor(info.name, data.reshape(*info.shape[1:][::-1], -1), raw_dtype=info.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for name in names:
            del values[name]

    return change


@pytest.mark.parametrize(
    ("dropped", "status"),
    [
        ((), "verified"),
        (("sidecar.fingerprint.rows",), "same trunk, unverified"),
        (("sidecar.fingerprint.rows", "sidecar.fingerprint.trunk"), "unverified"),
    ],
)
@pytest.mark.parametrize("role", ["main", "sidecar"])
def test_a_merge_and_a_split_prove_nothing_new(
    role: str, dropped: tuple[str, ...], status: str, tmp_path: Path
) -> None:
    main, sidecar = converted_pair(tmp_path)
    if role == "main":
        main = edited(main, tmp_path / "main.gguf", drop(*dropped))
        status = "same trunk, unverified" if dropped else status  # a main file's trunk is recomputed
    else:
        sidecar = edited(sidecar, tmp_path / "mtp-main.gguf", drop(*dropped))
    assert check_pair(open_main(main), open_sidecar(sidecar)).status == status
    merged = merge(main, sidecar, tmp_path / "merged.gguf")
    assert merged.main and merged.match == status
    parts = split(merged.main, tmp_path / "parts")
    assert parts.match == status
    assert parts.main and content(parts.main) == content(main)
    assert parts.sidecar and content(parts.sidecar)[1] == content(sidecar)[1]
    ours = {name: value for name, value in content(parts.sidecar)[0].items() if "fingerprint" in name}
    assert ours == {name: value for name, value in content(sidecar)[0].items() if "fingerprint" in name}
    write_compact(open_main(merged.main), range(64), path := tmp_path / "compact-64.gguf")
    assert check_pair(open_main(main), open_compact(path)).status == status


def test_a_head_from_another_converter_is_tied_to_the_trunk_it_was_inside(tmp_path: Path) -> None:
    whole = tiny_gguf.main(tmp_path / "whole.gguf", head=True)
    parts = split(whole, tmp_path / "parts")
    assert parts.match == "same trunk, unverified" and parts.sidecar and parts.main
    assert not [name for name in read_header(parts.main).keys if name.startswith(OURS)]
    assert open_sidecar(parts.sidecar).trunk == open_main(whole).trunk
    with pytest.raises(PairMismatch, match="fingerprint"):
        check_pair(open_main(tiny_gguf.main(tmp_path / "other.gguf", seed=1)), open_sidecar(parts.sidecar))


def test_what_of_the_sidecar_is_left_out_is_said(tmp_path: Path) -> None:
    result = convert(make_checkpoint(tmp_path, variant="untied"), tmp_path / "apart", "BF16")
    assert result.main and result.sidecar
    merged = merge(result.main, result.sidecar, tmp_path / "merged.gguf")
    assert [warning.split(":")[0] for warning in merged.warnings] == [
        "token_embd.weight of the sidecar (Q4_0) is left out",
        "output.weight of the sidecar (Q4_0) is left out",
    ]
    main = tiny_gguf.main(tmp_path / "main.gguf")
    other = tiny_gguf.floats(tiny_gguf.N_VOCAB, tiny_gguf.WIDTH, seed=9)
    sidecar = tiny_gguf.sidecar(
        tmp_path / "mtp-main.gguf", tensors={"output.weight": other, "token_embd.weight": other}
    )
    warnings = merge(main, sidecar, tmp_path / "two.gguf").warnings
    assert ["none" in warning for warning in sorted(warnings)] == [True, False]
    assert "differs" in sorted(warnings)[1]


# What is refused


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return tiny_gguf.main(tmp_path / "main.gguf"), tiny_gguf.sidecar(tmp_path / "mtp-main.gguf")


def test_what_is_not_a_main_file_with_a_head_is_not_split(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for path, error, words in (
        (pair[0], NoHead, "no head"),
        (pair[1], NotAMain, "not a main model"),
        (tmp_path / "missing.gguf", LlamaSidecarError, "no such file"),
        (tmp_path, LlamaSidecarError, "folder"),
    ):
        with pytest.raises(error, match=words):
            split(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_breaks_its_kinds_rules_is_not_split_off(tmp_path: Path) -> None:
    tensors = tiny_gguf.main_tensors(head=True) | {"blk.2.nextn.enorm.weight": tiny_gguf.floats(7)}
    whole = tiny_gguf.write(tmp_path / "whole.gguf", "qwen35", tiny_gguf.main_keys(head=True), tensors)
    with pytest.raises(WrongTensorShape, match="enorm"):
        split(whole, tmp_path / "out")
    keys = {n: v for n, v in tiny_gguf.main_keys(head=True).items() if "nextn" not in n}
    undeclared = tiny_gguf.write(tmp_path / "two.gguf", "qwen35", keys, tiny_gguf.main_tensors(head=True))
    with pytest.raises(LlamaSidecarError, match="nextn_predict_layers"):
        split(undeclared, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["assistant", "dspark", "dflash", "eagle3"])
def test_drafters_that_are_models_of_their_own_are_not_merged(name: str, tmp_path: Path) -> None:
    arch = "gemma4" if name == "assistant" else "qwen35"
    main = tiny_gguf.main(tmp_path / "main.gguf", arch=arch)
    sidecar = tiny_gguf.sidecar(tmp_path / f"{name}.gguf", name)
    with pytest.raises(CannotMerge, match="model of its own"):
        merge(main, sidecar, tmp_path / "out.gguf")


def test_a_pair_that_does_not_belong_together_is_not_merged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main, sidecar = pair
    other = [*tiny_gguf.TOKENS[:7], "other", *tiny_gguf.TOKENS[8:]]
    cases: list[tuple[Path, Path, type[LlamaSidecarError], str]] = [
        (tiny_gguf.main(tmp_path / "a.gguf", tokens=other), sidecar, PairMismatch, "token 7 is 't7'"),
        (tiny_gguf.main(tmp_path / "b.gguf", arch="qwen3next"), sidecar, PairMismatch, "architecture"),
        (tiny_gguf.main(tmp_path / "c.gguf", head=True), sidecar, CannotMerge, "already"),
        (main, main, NotASidecar, "not a sidecar"),
        (sidecar, sidecar, NotAMain, "not a main model"),
        (
            main,
            tiny_gguf.sidecar(tmp_path / "d.gguf", keys={"sidecar.compact.target_ids": [1]}),
            CompactGiven,
            "compact",
        ),
    ]
    for first, second, error, words in cases:
        with pytest.raises(error, match=words):
            merge(first, second, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_a_padded_sidecar_whose_head_has_its_own_padded_matrices_is_not_merged(tmp_path: Path) -> None:
    padded = [*tiny_gguf.TOKENS, "[PAD16]"]
    rows = tiny_gguf.floats(17, tiny_gguf.WIDTH)
    own = {"token_embd.weight": rows, "blk.2.nextn.embed_tokens.weight": rows}
    keys = {"tokenizer.ggml.tokens": padded}
    main = tiny_gguf.main(tmp_path / "main.gguf")
    with pytest.raises(WrongTensorShape, match="embed_tokens"):
        merge(main, tiny_gguf.sidecar(tmp_path / "mtp-a.gguf", keys=keys, tensors=own), tmp_path / "out.gguf")
    del own["blk.2.nextn.embed_tokens.weight"]
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-b.gguf", keys=keys, tensors=own)
    assert merge(main, sidecar, tmp_path / "out.gguf").warnings


@pytest.mark.parametrize("force", [False, True])
def test_an_input_is_never_written_over(pair: tuple[Path, Path], force: bool, tmp_path: Path) -> None:
    main, sidecar = pair
    whole = tiny_gguf.main(tmp_path / "whole-F32.gguf", head=True)
    before = {path: path.read_bytes() for path in (main, sidecar, whole)}
    link = tmp_path / "link.gguf"
    link.symlink_to(main)
    hard = tmp_path / "hard.gguf"
    hard.hardlink_to(main)
    with pytest.raises(InputGiven, match=r"whole-F32\.gguf"):
        split(whole, tmp_path, force=force)
    for out in (main, link, hard):
        with pytest.raises(InputGiven, match="another --out"):
            merge(main, sidecar, out, force=force)
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_other_files_are_replaced_only_when_forced(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    with pytest.raises(OutputExists, match="--force"):
        merge(*pair, out)
    assert out.read_text() == "mine"
    merge(*pair, out, force=True)
    assert open_main(out).head_kind == "mtp"
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(OutputExists, match="folder"):
        merge(*pair, tmp_path / "folder.gguf", force=True)


@pytest.mark.parametrize("name", ["out", "mtp-out.gguf", "a-dflash-b.gguf", "out.gguf.txt"])
def test_names_that_mean_something_else_are_refused(
    name: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(OutputFailed, match="name"):
        merge(*pair, tmp_path / name)
    with pytest.raises(OutputFailed, match="folder"):
        split(tiny_gguf.main(tmp_path / "w.gguf", head=True), tmp_path / "parts.gguf")


def test_a_file_cut_short_leaves_nothing_behind(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main = pair[0]
    main.write_bytes(main.read_bytes()[:-100])
    with pytest.raises(TruncatedFile):
        merge(*pair, tmp_path / "new" / "out.gguf")
    assert not (tmp_path / "new").exists()


def test_a_file_that_shrinks_while_it_is_read_leaves_nothing_behind(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = stored.Stored.rows

    def cut_and_read(tensor: stored.Stored, start: int, stop: int) -> Any:
        if (tmp_path / "new").exists():  # the headers are read, the output is begun
            pair[0].write_bytes(pair[0].read_bytes()[:4000])
        return rows(tensor, start, stop)

    monkeypatch.setattr(stored.Stored, "rows", cut_and_read)
    with pytest.raises(TruncatedFile, match="shorter"):
        merge(*pair, tmp_path / "new" / "out.gguf")
    assert not (tmp_path / "new").exists()


# The commands


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_the_commands_print_text_or_one_object(tmp_path: Path) -> None:
    whole = tiny_gguf.main(tmp_path / "whole.gguf", head=True)
    result = call("split", whole, "--out", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["main", "sidecar", "match"]
    data = json.loads(call("split", whole, "-o", tmp_path / "parts", "--force", "--json").stdout)
    assert data["schema"] == 1 and data["match"] == "same trunk, unverified" and data["warnings"] == []
    assert data["sidecar_bytes"] == Path(data["sidecar"]).stat().st_size
    merged = call("merge", data["main"], data["sidecar"], "-o", tmp_path / "new" / "out.gguf", "--json")
    assert json.loads(merged.stdout)["sidecar"] is None
    assert content(tmp_path / "new" / "out.gguf")[1] == content(whole)[1]


@pytest.mark.parametrize("name", ["split", "merge", "graft", "requant"])
def test_every_command_explains_itself(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0 and f"llama-sidecar {name} " in result.output and "--json" in result.output


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "main.gguf")
    result = call("split", main, "--out", tmp_path / "parts")
    assert isinstance(result.exception, NoHead) and "\n" not in str(result.exception)
    assert call("split", main).exit_code == 2  # --out is required
