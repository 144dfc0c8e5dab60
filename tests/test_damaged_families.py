"""Damaged and odd checkpoints of every family, and of its head, as users have them: one line that names it, nothing half-written.

What is said of files that no family matters to, test_checkpoint.py and test_convert.py have.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    VARIANTS,
    WITH_HEAD,
    Array,
    make_checkpoint,
    tiny_config,
    tiny_tensors,
    write_json,
)

from llama_sidecar.converter import convert, dry_run
from llama_sidecar.converter.errors import (
    BadShard,
    BadTokenizer,
    ConversionError,
    MissingShard,
    TensorMismatch,
)
from llama_sidecar.converter.families import families

FIRST = list({arch: (arch, variant) for arch, variant in reversed(VARIANTS)}.values())
FIRST_WITH_HEAD = list({arch: (arch, variant) for arch, variant in reversed(WITH_HEAD)}.values())


def head_of(arch: str, variant: str, tensors: dict[str, Array]) -> list[str]:
    """The names of the head's own tensors."""
    config = tiny_config(arch, variant)
    n = config.get("text_config", config)["num_hidden_layers"]
    marks = ("mtp.", f"layers.{n}.", f"layers.{n + 1}.", f"layers.{n + 2}.")
    return [name for name in tensors if any(mark in name for mark in marks)]


def refused(folder: Path, kind: type[ConversionError], match: str) -> None:
    out = folder.parent / "out"
    with pytest.raises(kind, match=match) as error:
        convert(folder, out, "Q8_0")
    assert "\n" not in str(error.value) and not out.exists()


@pytest.mark.parametrize(("arch", "variant"), FIRST_WITH_HEAD, ids=map("-".join, FIRST_WITH_HEAD))
def test_the_heads_shard_is_missing(arch: str, variant: str, tmp_path: Path) -> None:
    """The index lists it; and where the index is lost too, the head's own projection is what is missed or nothing is."""
    tensors = tiny_tensors(arch, variant)
    head = head_of(arch, variant, tensors)
    folder = make_checkpoint(
        tmp_path, arch, variant, tensors={n: t for n, t in tensors.items() if n not in head}
    )
    listed = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(head, "model-mtp.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": listed})
    refused(folder, MissingShard, r"names model-mtp\.safetensors, not in the folder: download")
    (folder / "model.safetensors.index.json").unlink()
    result = convert(folder, tmp_path / "main", "Q8_0")
    assert result.main and result.sidecar is None
    assert any("there is no head to write" in warning for warning in result.warnings) or not any(
        "nextn" in key or "mtp" in key for key in json.dumps(tiny_config(arch, variant)).split('"')
    )


@pytest.mark.parametrize(("arch", "variant"), FIRST_WITH_HEAD, ids=map("-".join, FIRST_WITH_HEAD))
def test_one_tensor_of_the_head_is_missing(arch: str, variant: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(arch, variant)
    lost = next(name for name in reversed(head_of(arch, variant, tensors)) if name.endswith("norm.weight"))
    folder = make_checkpoint(tmp_path, arch, variant, tensors={n: t for n, t in tensors.items() if n != lost})
    canonical = families()[arch].canonical(lost)
    refused(folder, TensorMismatch, rf"missing: {canonical}$".replace(".", r"\."))
    assert dry_run(folder, tmp_path).mismatch.missing == [canonical]


@pytest.mark.parametrize(("arch", "variant"), FIRST, ids=map("-".join, FIRST))
def test_more_tensors_than_there_are_places(arch: str, variant: str, tmp_path: Path) -> None:
    more = {name: np.zeros(3, np.float32) for name in ("mtp.0.extra.weight", "model.layers.0.extra.weight")}
    folder = make_checkpoint(tmp_path, arch, variant, tensors=tiny_tensors(arch, variant) | more)
    refused(
        folder,
        TensorMismatch,
        r"no place for: (mtp\.0\.extra|model\.layers\.0\.extra)\.weight \(model\.safetensors\), \S+ \(",
    )


@pytest.mark.parametrize(("arch", "variant"), FIRST, ids=map("-".join, FIRST))
def test_every_tensor_of_another_shape_is_named(arch: str, variant: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(arch, variant)
    changed = [name for name in tensors if name.endswith("norm.weight") and tensors[name].ndim == 1][:3]
    wrong = tensors | {name: np.zeros(tensors[name].shape[0] + 1, np.float32) for name in changed}
    folder = make_checkpoint(tmp_path, arch, variant, tensors=wrong)
    refused(folder, TensorMismatch, "other shapes than config.json calls for")
    with pytest.raises(TensorMismatch) as error:
        convert(folder, tmp_path / "out")
    for name in changed:
        n = tensors[name].shape[0]
        assert f"{name} [{n + 1}] instead of [{n}]" in str(error.value)


@pytest.mark.parametrize(("arch", "variant"), FIRST, ids=map("-".join, FIRST))
def test_a_shard_cut_short(arch: str, variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, arch, variant)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(folder, BadShard, r"model\.safetensors is truncated")


@pytest.mark.parametrize(("arch", "variant"), FIRST, ids=map("-".join, FIRST))
def test_a_vocabulary_that_is_split_in_an_unknown_way(arch: str, variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, arch, variant)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if "pretokenizers" in tokenizer["pre_tokenizer"]:
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    else:
        tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    write_json(folder / "tokenizer.json", tokenizer)
    refused(folder, BadTokenizer, "tokenizer.json splits by")


@pytest.mark.parametrize(("arch", "variant"), FIRST, ids=map("-".join, FIRST))
def test_a_config_without_a_value_that_is_needed(arch: str, variant: str, tmp_path: Path) -> None:
    config = tiny_config(arch, variant)
    del config.get("text_config", config)["hidden_size"]
    folder = make_checkpoint(tmp_path, arch, variant, tensors=tiny_tensors(arch, variant), config=config)
    refused(folder, ConversionError, "config.json has no 'hidden_size'")
