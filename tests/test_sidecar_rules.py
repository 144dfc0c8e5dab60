"""What a file is, from its header; and every rule of FORMAT.md for sidecars, main models and pairs with its own error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import N_LAYERS, N_VOCAB, TOKENS, WIDTH, floats

from llama_sidecar.sidecars import (
    KINDS,
    Identity,
    check_pair,
    errors,
    identify,
    open_main,
    open_sidecar,
    read_header,
    read_model,
)

# Case 10: telling what a file is.


@pytest.mark.parametrize("name", tiny_gguf.SIDECARS)
def test_a_sidecar_is_told_from_its_header(name: str, tmp_path: Path) -> None:
    kind, arch, *_ = tiny_gguf.SIDECARS[name]
    path = tiny_gguf.sidecar(tmp_path / "any-name.gguf", name)
    assert identify(read_header(path)) == Identity("sidecar", kind)
    opened = open_sidecar(path)
    assert (opened.kind, opened.arch, list(opened.tokens)) == (kind, arch, TOKENS)
    with pytest.raises(errors.NotAMain, match=KINDS[kind].title):
        open_main(path)


@pytest.mark.parametrize(
    ("head", "identity"), [(False, Identity("main", None)), (True, Identity("main+head", "mtp"))]
)
def test_a_main_model_is_told_from_its_header(head: bool, identity: Identity, tmp_path: Path) -> None:
    path = tiny_gguf.main(tmp_path / "mtp-misleading.gguf", head=head)
    assert identify(read_header(path)) == identity
    main = open_main(path)
    assert (main.arch, main.width, main.n_layers, main.head_kind) == (
        "qwen35",
        WIDTH,
        N_LAYERS,
        identity.kind,
    )
    with pytest.raises(errors.NotASidecar, match="main model"):
        open_sidecar(path)


def test_drafters_with_an_architecture_of_their_own_need_no_other_key(tmp_path: Path) -> None:
    for arch, tensor, kind in (
        ("dflash", "markov_w1.weight", "dspark"),
        ("dflash", "fc.weight", "dflash"),
        ("eagle3", "x", "eagle3"),
    ):
        header = read_header(tiny_gguf.write(tmp_path / "bare.gguf", arch, {}, {tensor: floats(4, 4)}))
        assert identify(header) == Identity("sidecar", kind)


def test_a_head_that_was_lost_in_conversion_is_said(tmp_path: Path) -> None:
    path = tiny_gguf.write(
        tmp_path / "x.gguf", "qwen35", tiny_gguf.mtp_keys(), {"token_embd.weight": floats(N_VOCAB, WIDTH)}
    )
    with pytest.raises(errors.NotAModel, match="declares 1 MTP blocks"):
        open_sidecar(path)


@pytest.mark.parametrize(
    ("type", "words"), [("mmproj", "(mmproj)"), ("adapter", "LoRA"), ("imatrix", "matrix")]
)
def test_what_lies_beside_models_is_called_by_its_name(tmp_path: Path, type: str, words: str) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", "clip", {"general.type": type}, {"x": floats(4, 4)})
    for opened in (open_main, open_sidecar):
        with pytest.raises(errors.NotAModel, match=re.escape(words)):
            opened(path)


def test_kinds_are_ordered_and_named_as_llama_cpp_names_them() -> None:
    assert list(KINDS) == ["mtp", "dspark", "dflash", "eagle3"]
    for name, kind in KINDS.items():
        assert (kind.name, kind.prefix, kind.llama_name) == (name, f"{name}-", f"draft-{name}")


# One broken rule each: (how the file is changed, the error).

EH_PROJ = f"blk.{N_LAYERS}.nextn.eh_proj.weight"
BROKEN_SIDECARS: dict[str, tuple[str, dict[str, Any], type[errors.LlamaSidecarError]]] = {
    "no block count": ("mtp", {"keys": {"qwen35.block_count": None}}, errors.MissingKey),
    "no block count, dflash": ("dflash", {"keys": {"dflash.block_count": None}}, errors.MissingKey),
    "block count a string": ("mtp", {"keys": {"qwen35.block_count": "three"}}, errors.WrongKey),
    "block count of billions": ("eagle3", {"keys": {"eagle3.block_count": 1 << 31}}, errors.WrongKey),
    "no width": ("mtp", {"keys": {"qwen35.embedding_length": None}}, errors.MissingKey),
    "no number of heads": ("mtp", {"keys": {"qwen35.nextn_predict_layers": None}}, errors.MissingKey),
    "no heads": ("mtp", {"keys": {"qwen35.nextn_predict_layers": 0}}, errors.WrongKey),
    "more heads than blocks": ("mtp", {"keys": {"qwen35.nextn_predict_layers": 9}}, errors.WrongKey),
    "two heads, one there": ("mtp", {"keys": {"qwen35.nextn_predict_layers": 2}}, errors.MissingTensors),
    "no tokens": ("mtp", {"keys": {"tokenizer.ggml.tokens": None}}, errors.MissingKey),
    "tokens are numbers": ("mtp", {"keys": {"tokenizer.ggml.tokens": [1, 2]}}, errors.WrongKey),
    "two tokens of one text": (
        "mtp",
        {"keys": {"tokenizer.ggml.tokens": [*TOKENS[1:], "t3"]}},
        errors.DuplicateName,
    ),
    "no embeddings": ("mtp", {"tensors": {"token_embd.weight": None}}, errors.MissingTensors),
    "no final norm": ("mtp", {"tensors": {"output_norm.weight": None}}, errors.MissingTensors),
    "no enorm": ("mtp", {"tensors": {f"blk.{N_LAYERS}.nextn.enorm.weight": None}}, errors.MissingTensors),
    "fewer embeddings than tokens": (
        "mtp",
        {"tensors": {"token_embd.weight": floats(8, WIDTH)}},
        errors.WrongTensorShape,
    ),
    "projection of another width": (
        "mtp",
        {"tensors": {EH_PROJ: floats(WIDTH, WIDTH)}},
        errors.WrongTensorShape,
    ),
    "output of another size": (
        "mtp",
        {"tensors": {"output.weight": floats(8, WIDTH)}},
        errors.WrongTensorShape,
    ),
    "rows for some tokens": (
        "mtp",
        {"tensors": {"output.weight": floats(8, WIDTH), "d2t": np.arange(8, dtype=np.int64)}},
        errors.ForeignHead,
    ),
    "rows for some tokens, inside the block": (
        "mtp",
        {"tensors": {f"blk.{N_LAYERS}.nextn.d2t": np.arange(8, dtype=np.int64)}},
        errors.ForeignHead,
    ),
    "borrowed matrices": (
        "mtp",
        {"keys": {"qwen35.nextn_shared_target_tensors": 1}, "tensors": {"token_embd.weight": None}},
        errors.ForeignHead,
    ),
    "part of the trunk": (
        "mtp",
        {"tensors": {"blk.0.attn_q.weight": floats(WIDTH, WIDTH)}},
        errors.StrayTensors,
    ),
    "assistant without projection": (
        "assistant",
        {"tensors": {"nextn.pre_projection.weight": None}},
        errors.MissingTensors,
    ),
    "dflash without layers": ("dflash", {"keys": {"dflash.target_layers": None}}, errors.MissingKey),
    "dflash layers are strings": ("dflash", {"keys": {"dflash.target_layers": ["a"]}}, errors.WrongKey),
    "dflash without mask token": (
        "dflash",
        {"keys": {"tokenizer.ggml.mask_token_id": None}},
        errors.MissingKey,
    ),
    "dflash without fc": ("dflash", {"tensors": {"fc.weight": None}}, errors.MissingTensors),
    "dspark anchor an array": ("dspark", {"keys": {"dflash.sample_from_anchor": [1, 2]}}, errors.WrongKey),
    "eagle3 norm a text": ("eagle3", {"keys": {"eagle3.norm_before_fc": "x"}}, errors.WrongKey),
    "dspark half a Markov head": ("dspark", {"tensors": {"markov_w2.weight": None}}, errors.MissingTensors),
    "eagle3 of two layers": ("eagle3", {"keys": {"eagle3.target_layers": [1, 2]}}, errors.WrongKey),
    "eagle3 of another fc": (
        "eagle3",
        {"tensors": {"fc.weight": floats(16, WIDTH)}},
        errors.WrongTensorShape,
    ),
    "a newer format": ("mtp", {"keys": {"sidecar.format": 2}}, errors.UnsupportedFormat),
    "format a string": ("mtp", {"keys": {"sidecar.format": "1"}}, errors.WrongKey),
    "a short fingerprint": ("mtp", {"keys": {"sidecar.fingerprint.trunk": "abc"}}, errors.BadFingerprint),
    "an odd rows fingerprint": (
        "mtp",
        {"keys": {"sidecar.fingerprint.rows": "Z" * 64}},
        errors.BadFingerprint,
    ),
}
BROKEN_MAINS: dict[str, tuple[dict[str, Any], type[errors.LlamaSidecarError]]] = {
    "no block count": ({"qwen35.block_count": None}, errors.MissingKey),
    "no width": ({"qwen35.embedding_length": None}, errors.MissingKey),
    "no tokens": ({"tokenizer.ggml.tokens": None}, errors.MissingKey),
    "two tokens of one text": ({"tokenizer.ggml.tokens": [*TOKENS[1:], "t3"]}, errors.DuplicateName),
    "all blocks are heads": ({"qwen35.nextn_predict_layers": N_LAYERS}, errors.WrongKey),
    "a short fingerprint": ({"sidecar.fingerprint.rows": "abc"}, errors.BadFingerprint),
}


@pytest.mark.parametrize("name", BROKEN_SIDECARS)
def test_each_broken_rule_of_a_sidecar_has_its_error(name: str, tmp_path: Path) -> None:
    sidecar, changes, expected = BROKEN_SIDECARS[name]
    path = tiny_gguf.sidecar(tmp_path / "mtp-x.gguf", sidecar, **changes)
    with pytest.raises(expected) as caught:
        open_sidecar(path)
    assert type(caught.value) is expected and str(path) in str(caught.value)


@pytest.mark.parametrize("name", BROKEN_MAINS)
def test_each_broken_rule_of_a_main_model_has_its_error(name: str, tmp_path: Path) -> None:
    changes, expected = BROKEN_MAINS[name]
    keys = {k: v for k, v in (tiny_gguf.main_keys() | changes).items() if v is not None}
    path = tiny_gguf.write(tmp_path / "x.gguf", "qwen35", keys, tiny_gguf.main_tensors())
    with pytest.raises(expected) as caught:
        open_main(path)
    assert type(caught.value) is expected and str(path) in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), "x", 5])
def test_a_norms_constant_that_would_end_the_process_is_refused(value: Any, tmp_path: Path) -> None:
    """llama.cpp asserts that it is at least 0."""
    keys = {"qwen35.attention.layer_norm_rms_epsilon": value}
    for make, open_it in ((tiny_gguf.main, open_main), (tiny_gguf.sidecar, open_sidecar)):
        with pytest.raises(errors.WrongKey, match="at least 0"):
            open_it(make(tmp_path / "x.gguf", keys=keys))


def test_tokens_without_text_are_no_duplicates(tmp_path: Path) -> None:
    tokens = [*TOKENS[2:], "", ""]
    path = tiny_gguf.main(tmp_path / "x.gguf", keys={"tokenizer.ggml.tokens": tokens})
    assert list(open_main(path).tokens) == tokens


def test_all_missing_tensors_are_named_at_once(tmp_path: Path) -> None:
    gone = ["token_embd.weight", f"blk.{N_LAYERS}.nextn.enorm.weight", f"blk.{N_LAYERS}.nextn.hnorm.weight"]
    path = tiny_gguf.sidecar(tmp_path / "x.gguf", tensors=dict.fromkeys(gone))
    with pytest.raises(errors.MissingTensors) as caught:
        open_sidecar(path)
    assert all(name in str(caught.value) for name in gone)


def test_an_architecture_that_is_no_name_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", "qwen 35\n", {}, {"a": floats(4)})
    with pytest.raises(errors.WrongKey, match="architecture"):
        identify(read_header(path))


# Case 12 and the rest of a pair.


def pair(folder: Path, main: dict[str, Any], sidecar: dict[str, Any]) -> str:
    """Write both, `main` and `sidecar` being what their makers take, and return the status of the match."""
    name = sidecar.pop("name", "mtp")
    opened = open_main(tiny_gguf.main(folder / "m.gguf", **main))
    return check_pair(opened, open_sidecar(tiny_gguf.sidecar(folder / "mtp-m.gguf", name, **sidecar))).status


def other_vocabulary(tokens: list[str]) -> dict[str, Any]:
    return {
        "keys": {"tokenizer.ggml.tokens": tokens},
        "tensors": {"token_embd.weight": floats(len(tokens), WIDTH)},
    }


@pytest.mark.parametrize("name", tiny_gguf.SIDECARS)
def test_a_pair_without_fingerprints_is_unverified(name: str, tmp_path: Path) -> None:
    arch = "gemma4" if name == "assistant" else "qwen35"
    assert pair(tmp_path, {"arch": arch}, {"name": name}) == "unverified"


def test_another_vocabulary_names_the_token_and_both_texts(tmp_path: Path) -> None:
    other = [*TOKENS[:7], "seven", *TOKENS[8:]]
    with pytest.raises(errors.PairMismatch, match=r"token 7 is 'seven', the main model's is 't7'"):
        pair(tmp_path, {}, other_vocabulary(other))


def test_a_vocabulary_padded_longer_is_accepted_and_a_shorter_one_is_not(tmp_path: Path) -> None:
    padded = [*TOKENS, *(f"[PAD{i}]" for i in range(N_VOCAB, N_VOCAB + 8))]
    assert pair(tmp_path, {}, other_vocabulary(padded)) == "unverified"
    with pytest.raises(errors.PairMismatch, match=f"size is 8, the main model's is {N_VOCAB}"):
        pair(tmp_path, {}, other_vocabulary(TOKENS[:8]))


def test_another_architecture_width_or_depth_names_both_values(tmp_path: Path) -> None:
    with pytest.raises(errors.PairMismatch, match="architecture is qwen35, the main model's is glm4moe"):
        pair(tmp_path, {"arch": "glm4moe"}, {})
    with pytest.raises(errors.PairMismatch, match=r"width .* is 32, the main model's is 64"):
        pair(tmp_path, {"width": 64}, {})
    with pytest.raises(errors.PairMismatch, match="trunk layers is 1, the main model's is 2"):
        pair(
            tmp_path,
            {},
            {"keys": {"qwen35.nextn_predict_layers": 2}, "tensors": tiny_gguf.head_tensors(N_LAYERS - 1)},
        )
    with pytest.raises(errors.PairMismatch, match="deepest layer is 3, the main model's is 2"):
        pair(tmp_path, {}, {"name": "dflash", "keys": {"dflash.target_layers": [1, 3]}})


# Shards.


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """A main model in three shards, the first without tensors, as gguf-split makes them."""
    tensors = list(tiny_gguf.main_tensors().items())
    parts = [{}, dict(tensors[:2]), dict(tensors[2:])]
    paths = []
    for i, part in enumerate(parts):
        path = tmp_path / f"NAME-Q8_0-{i + 1:05}-of-00003.gguf"
        writer = gguf.GGUFWriter(path, "qwen35")
        if i == 0:
            writer.add_uint32("qwen35.block_count", N_LAYERS)
            writer.add_uint32("qwen35.embedding_length", WIDTH)
            writer.add_array("tokenizer.ggml.tokens", TOKENS)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, value in part.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_shards_are_read_as_one_model(shards: list[Path], tmp_path: Path) -> None:
    main = open_main(shards[0])
    assert main.header.paths == tuple(shards) and len(main.header.tensors) == len(tiny_gguf.main_tensors())
    assert main.header.file_bytes == sum(path.stat().st_size for path in shards)
    assert main.trunk == open_main(tiny_gguf.main(tmp_path / "whole.gguf")).trunk


def drop(paths: list[Path]) -> Path:
    paths[2].unlink()
    return paths[0]


def rename(paths: list[Path]) -> Path:
    return paths[0].rename(paths[0].with_name("renamed.gguf"))


def swap(paths: list[Path]) -> Path:
    shutil.copy(paths[1], paths[2])
    return paths[0]


@pytest.mark.parametrize(
    ("break_them", "message"),
    [
        (drop, "missing: NAME-Q8_0-00003"),
        (rename, "a name like"),
        (swap, "2 of 3; 3 of 3"),
        (lambda paths: paths[1], "give NAME"),
    ],
)
def test_broken_shards_are_one_error(
    break_them: Callable[[list[Path]], Path], message: str, shards: list[Path]
) -> None:
    with pytest.raises(errors.BadShards, match=message):
        read_model(break_them(shards))


def test_the_contract_names_every_error() -> None:
    contract = (Path(errors.__file__).parent / "FORMAT.md").read_text()
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    unnamed = {name for name in classes if not re.search(rf"\b{name}\b", contract)}
    assert unnamed == {"LlamaSidecarError", "GGUFError"}
