"""Reading a checkpoint folder: every layout of shards, strict headers, FP8, and no step out of the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import random_values, tiny_tensors, write_json, write_safetensors

from llama_sidecar.converter.checkpoint import open_checkpoint
from llama_sidecar.converter.errors import (
    BadConfig,
    BadShard,
    ConversionError,
    MissingDependency,
    MissingShard,
    NotACheckpoint,
    UnsafePath,
    UnsupportedModel,
)
from llama_sidecar.converter.shards import Tensor

A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = np.arange(6, dtype=np.float16).reshape(2, 3)


def folder(path: Path, config: dict[str, object] | None = None, **files: dict[str, np.ndarray]) -> Path:
    """A checkpoint folder with one safetensors file per keyword (`model_1` becomes model-1.safetensors)."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", {"architectures": ["X"], **(config or {})})
    for name, tensors in files.items():
        write_safetensors(path / f"{name.replace('_', '-')}.safetensors", tensors)
    return path


def index(path: Path, weight_map: dict[str, str]) -> None:
    write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def values(tensor: Tensor) -> np.ndarray:
    return tensor.rows(0, tensor.n_rows).reshape(tensor.shape)


def test_single_file_sharded_and_unindexed(tmp_path: Path) -> None:
    single = folder(tmp_path / "single", model={"a": A, "b": B})
    sharded = folder(tmp_path / "sharded", model_1={"a": A}, model_2={"b": B})
    index(sharded, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    unindexed = folder(tmp_path / "unindexed", model_1={"a": A}, model_2={"b": B})
    for path in (single, sharded, unindexed):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.warnings == []
            assert {n: t.shape for n, t in checkpoint.tensors.items()} == {"a": (4, 3), "b": (2, 3)}
            np.testing.assert_array_equal(values(checkpoint.tensors["a"]), A)
            np.testing.assert_array_equal(checkpoint.tensors["b"].rows(1, 2), B[1:].astype(np.float32))


def test_partly_indexed_files_are_read_with_a_warning(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model_1={"a": A}, extra={"b": B})
    index(path, {"a": "model-1.safetensors"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors.keys() == {"a", "b"}
        assert "extra.safetensors" in checkpoint.warnings[0]


def test_index_decides_for_the_names_it_lists(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model={"a": A[:1]}, model_1={"a": A})
    index(path, {"a": "model-1.safetensors"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["a"].shape == (4, 3)
        assert checkpoint.warnings == [
            "model.safetensors is ignored: model.safetensors.index.json lists other files for its tensors"
        ]


def test_one_tensor_in_two_unlisted_files_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model_1={"a": A}, model_2={"a": A})
    with pytest.raises(BadShard, match=r"model-2.safetensors and model-1.safetensors both hold a"):
        open_checkpoint(path)


def test_dtypes_are_widened(tmp_path: Path) -> None:
    exact = random_values("x", (5, 8)).astype(ml_dtypes.bfloat16)
    path = folder(tmp_path / "c", model={"bf16": exact, "f64": exact.astype(np.float64), "ids": np.arange(3)})
    with open_checkpoint(path) as checkpoint:
        for name in ("bf16", "f64"):
            assert checkpoint.tensors[name].rows(1, 4).dtype == np.float32
            np.testing.assert_array_equal(checkpoint.tensors[name].rows(1, 4), exact[1:4].astype(np.float32))
        with pytest.raises(UnsupportedModel, match=r"ids in model\.safetensors is I64"):
            checkpoint.tensors["ids"].check_type()


def test_block_wise_fp8_is_dequantized_in_any_slice(tmp_path: Path) -> None:
    stored = random_values("w", (2, 10, 7), 200).astype(ml_dtypes.float8_e4m3fn)
    scale = random_values("s", (2, 3, 2)).astype(np.float32)
    path = folder(
        tmp_path / "c",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 5]}},
        model={"w": stored, "w_scale_inv": scale, "w.activation_scale": scale[0, 0, :1]},
    )
    factors = np.repeat(np.repeat(scale, 4, axis=1), 5, axis=2)[:, :10, :7]
    expected = (stored.astype(np.float32) * factors).reshape(20, 7)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors.keys() == {"w"}
        for start, stop in ((0, 20), (3, 4), (9, 15)):
            np.testing.assert_array_equal(checkpoint.tensors["w"].rows(start, stop), expected[start:stop])


def test_fp8_without_its_scales_and_other_quantizations_are_errors(tmp_path: Path) -> None:
    stored = random_values("w", (4, 4)).astype(ml_dtypes.float8_e4m3fn)
    path = folder(tmp_path / "c", {"quantization_config": {"quant_method": "fp8"}}, model={"w": stored})
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedModel, match="w_scale_inv"):
        checkpoint.tensors["w"].check_type()
    write_json(path / "config.json", {"quantization_config": {"quant_method": "quip"}})
    with pytest.raises(UnsupportedModel, match="quantized by 'quip'"):
        open_checkpoint(path)
    write_json(path / "config.json", {"quantization_config": ["fp8"]})
    with pytest.raises(BadConfig, match="expected an object"):
        open_checkpoint(path)


@pytest.mark.parametrize("block", [[4, 4], [2**62, 2**62], [10**30, 10**30], None])
def test_an_fp8_block_larger_than_its_weight_covers_it(block: list[int] | None, tmp_path: Path) -> None:
    stored = random_values("w", (4, 4), 200).astype(ml_dtypes.float8_e4m3fn)
    path = folder(
        tmp_path / "c",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}},
        model={"w": stored, "w_scale_inv": np.full((1, 1), 0.5, np.float32)},
    )
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(values(checkpoint.tensors["w"]), stored.astype(np.float32) / 2)


def test_an_fp8_weight_without_values(tmp_path: Path) -> None:
    empty = np.zeros((0, 4), ml_dtypes.float8_e4m3fn)
    path = folder(
        tmp_path / "c",
        {"quantization_config": {"quant_method": "fp8"}},
        model={"w": empty, "w_scale_inv": np.zeros((3, 1), np.float32)},
    )
    with pytest.raises(BadShard, match="w_scale_inv has shape"):
        open_checkpoint(path)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotACheckpoint, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(NotACheckpoint, match="cannot be read as JSON"):
        open_checkpoint(tmp_path)
    write_json(tmp_path / "config.json", {})
    with pytest.raises(NotACheckpoint, match="holds no weights"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotACheckpoint, match="is a file"):
        open_checkpoint(tmp_path / "config.json")


def test_missing_shards_and_tensors_are_listed(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model_1={"a": A})
    index(path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"})
    with pytest.raises(MissingShard, match=r"model-2.safetensors, model-3.safetensors"):
        open_checkpoint(path)
    index(path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(MissingShard, match="do not hold: b"):
        open_checkpoint(path)


def _header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HUGE = 10**4000
BROKEN = {
    "empty": b"",
    "no_header": b"\x10\0\0\0\0\0\0\0{}",
    "huge_header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no_json": (8).to_bytes(8, "little") + b"{{{{{{{{",
    "no_object": _header([1]),
    "truncated_data": _header({"a": ENTRY}) + b"1234567",
    "unknown_dtype": _header({"a": ENTRY | {"dtype": "F3"}}) + bytes(8),
    "wrong_size": _header({"a": ENTRY | {"shape": [3]}}) + bytes(8),
    "negative": _header({"a": ENTRY | {"shape": [-2]}}) + bytes(8),
    "huge": _header({"a": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}}),
    "utf_16": (lambda t: len(t).to_bytes(8, "little") + t)('{"__metadata__":{}}'.encode("utf-16")),
    "overlap": _header({"a": ENTRY, "b": ENTRY}) + bytes(8),
    "gap": _header({"a": ENTRY | {"data_offsets": [8, 16]}}) + bytes(16),
    "twice": (lambda t: len(t).to_bytes(8, "little") + t + bytes(8))(
        b'{"a":%b,"a":%b}' % ((json.dumps(ENTRY).encode(),) * 2)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_safetensors_are_refused(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "c")
    (path / "model.safetensors").write_bytes(BROKEN[name])
    with pytest.raises(BadShard, match=r"model\.safetensors"):
        open_checkpoint(path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_index_must_not_leave_the_folder(file: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model={"a": A})
    index(path, {"a": file})
    with pytest.raises(UnsafePath, match="plain file name"):
        open_checkpoint(path)


def test_links_stay_in_the_folder_or_in_the_cache(tmp_path: Path) -> None:
    outside = folder(tmp_path / "outside", model={"a": A}) / "model.safetensors"
    path = folder(tmp_path / "c")
    os.symlink(outside, path / "model.safetensors")
    with pytest.raises(UnsafePath, match="outside the folder"):
        open_checkpoint(path)

    cache = tmp_path / "models--org--Some-Model-1B"
    snapshot = folder(cache / "snapshots" / "0123abc")
    (cache / "blobs").mkdir()
    outside.rename(cache / "blobs" / "f00")
    os.symlink("../../blobs/f00", snapshot / "model.safetensors")
    with open_checkpoint(snapshot) as checkpoint:
        assert checkpoint.name == "Some-Model-1B"
        np.testing.assert_array_equal(values(checkpoint.tensors["a"]), A)


@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "broken link"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_is_no_file_is_refused_and_not_waited_for(what: str, name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "c") / name
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(name if what == "loop" else "absent")
    with pytest.raises(BadShard, match=r"link that leads nowhere|a folder, a pipe or a broken link"):
        open_checkpoint(path.parent)


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model={"a": A})
    (path / "._model.safetensors").write_bytes(b"\0\5\x16\7")  # as other systems leave beside what they copy
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors.keys() == {"a"} and checkpoint.warnings == []


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model={"a": A})
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(NotACheckpoint, match="does not exist"):
            open_checkpoint(tmp_path / name)
        index(path, {"a": name})
        with pytest.raises(MissingShard, match="not in the folder"):
            open_checkpoint(path)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotACheckpoint, match="permission denied"):
        open_checkpoint(folder(tmp_path / "c", model={"a": A}))


def test_json_may_begin_with_a_mark(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", model={"a": A})
    (path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.config) == 0


def test_bin_shards_need_torch_and_say_so(tmp_path: Path) -> None:
    """In a process where torch cannot be imported."""
    path = folder(tmp_path / "c")
    (path / "pytorch_model.bin").write_bytes(b"PK")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from llama_sidecar.converter.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(path)!r})"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert MissingDependency.__name__ in run.stderr
    assert "pip install 'llama-sidecar[torch]'" in run.stderr


def test_bin_shards_are_read_through_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    big = random_values("big", (64, 1024))
    state = {
        "a": torch.from_numpy(big),
        "b": torch.from_numpy(big).to(torch.bfloat16),
        "t": torch.from_numpy(A).T,
        "part": torch.from_numpy(big)[5:9, 3:7],
        "tied": torch.from_numpy(big)[8:],
        "none": torch.zeros(0, 4),
    }
    path = folder(tmp_path / "c")
    torch.save(state, path / "pytorch_model.bin")
    with open_checkpoint(path) as checkpoint:
        for _ in range(2):
            np.testing.assert_array_equal(values(checkpoint.tensors["a"]), big)
            np.testing.assert_array_equal(checkpoint.tensors["b"].rows(3, 9), state["b"].float().numpy()[3:9])
            np.testing.assert_array_equal(values(checkpoint.tensors["t"]), A.T)
            np.testing.assert_array_equal(values(checkpoint.tensors["part"]), big[5:9, 3:7])
            np.testing.assert_array_equal(values(checkpoint.tensors["tied"]), big[8:])
            assert values(checkpoint.tensors["none"]).shape == (0, 4)
        os.truncate(path / "pytorch_model.bin", 70_000)
        with pytest.raises(BadShard, match="while it was read: it was changed or cut"):
            checkpoint.tensors["a"].rows(0, 64)
    for state in (
        {"a": object()},
        {1: torch.zeros(2)},
        {"state_dict": {"a": torch.zeros(2)}},
        torch.zeros(2),
        {"a": torch.zeros(1).expand(1 << 40)},
    ):
        torch.save(state, path / "pytorch_model.bin")
        with pytest.raises(BadShard, match=r"pytorch_model\.bin"):
            open_checkpoint(path)
    for odd in (
        torch.eye(3).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64),
    ):
        torch.save({"a": odd}, path / "pytorch_model.bin")
        with pytest.raises(UnsupportedModel, match="expected a dense tensor"):
            open_checkpoint(path)
    torch.save({"ids": torch.arange(3)}, path / "pytorch_model.bin")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["ids"].dtype == "I64"


def test_every_error_is_one_line() -> None:
    for error in ConversionError.__subclasses__():
        assert error.__doc__ and "\n" not in error.__doc__


def test_tiny_checkpoints_never_change() -> None:
    """The stored listings stand on these bytes."""
    digest = sha256(b"".join(tensor.tobytes() for tensor in tiny_tensors("qwen35", "tied").values()))
    assert digest.hexdigest()[:16] == "53a4f7c7ef0c3864"
