"""A Hugging Face checkpoint folder: its configuration, and every tensor of every shard, read in rows when asked for.

Knows the folder's files (config.json, the index, safetensors and `.bin` shards), their headers and block-wise FP8. Does
not know what a tensor means, nor any GGUF name. Safetensors are read with pread into small buffers, so that no mapped
page counts against the process.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import (
    BadShard,
    MissingDependency,
    MissingShard,
    NotACheckpoint,
    UnsafePath,
    UnsupportedModel,
)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

# Names of data types as safetensors spells them.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
FP8 = {
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for name, dtype in (("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2))
}
MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors format sets itself
INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Tensor:
    """One tensor, seen as (n_rows, n_cols): a vector has one column, and all but the last of more dimensions are rows.

    `read_into(offset, buffer)` fills the buffer with the tensor's bytes from the offset on. `scale` holds the factors
    of a block-wise FP8 weight, one for each `scale_block` of (rows, columns), or a single one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    read_into: Callable[[int, U8], None] = field(repr=False)
    scale: F32 | None = field(default=None, repr=False)
    scale_block: tuple[int, int] | None = None

    @property
    def n_cols(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    def raw_rows(self, start: int, stop: int) -> U8:
        """Rows start..stop as they are stored: (stop - start, bytes of a row)."""
        row_bytes = self.n_cols * ITEM_BYTES[self.dtype]
        raw = np.empty((stop - start, row_bytes), np.uint8)
        self.read_into(start * row_bytes, raw.reshape(-1))
        return raw

    def item(self, index: int) -> U8:
        """The bytes of what the first dimension's `index` selects, as stored."""
        item = np.empty(math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype], np.uint8)
        self.read_into(index * item.size, item)
        return item

    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32, dequantized: (stop - start, n_cols). Raises UnsupportedModel for other types."""
        if self.dtype == "BF16":
            wide = self.raw_rows(start, stop).view("<u2").astype(np.uint32)
            return np.left_shift(wide, 16, out=wide).view(np.float32)
        if self.dtype in FLOATS:
            return self.raw_rows(start, stop).view(FLOATS[self.dtype]).astype(np.float32, copy=False)
        if self.dtype in FP8:
            return self._scaled(FP8[self.dtype][self.raw_rows(start, stop)], start, stop)
        raise UnsupportedModel(
            f"{self.name} in {self.file} is {self.dtype}; expected F32, F16, BF16 or block-wise FP8: "
            "convert the unquantized checkpoint"
        )

    def _scaled(self, rows: F32, start: int, stop: int) -> F32:
        if self.scale is None:
            raise UnsupportedModel(
                f"{self.name} in {self.file} is {self.dtype}, and no {self.name}_scale_inv is there"
            )
        if self.scale_block is None:
            rows *= self.scale.reshape(-1)[0]
            return rows
        block_rows, block_cols = self.scale_block
        matrix, row = np.divmod(np.arange(start, stop), self.shape[-2])
        scales = self.scale.reshape(-1, self.scale.shape[-1])[
            matrix * self.scale.shape[-2] + row // block_rows
        ]
        rows *= np.repeat(scales, block_cols, axis=1)[:, : self.n_cols]
        return rows


@dataclass
class Checkpoint:
    """An opened folder. Use it as a context manager: the shards stay open until it is closed."""

    folder: Path
    config: Config
    tensors: dict[str, Tensor]
    warnings: list[str]
    _files: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def name(self) -> str:
        """The folder's name, or the repository's where the folder is a snapshot in a Hugging Face cache."""
        folder = self.folder.resolve()
        cache = _cache_root(folder)
        return cache.name.split("--")[-1] if cache else folder.name

    def json(self, name: str) -> dict[str, Any]:
        """The object in one of the folder's JSON files; {} if there is no such file."""
        return read_object(self.folder / name) if (self.folder / name).is_file() else {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens a checkpoint folder and reads every shard's header, but no weights.

    The index decides for the names it lists; without one `model.safetensors` does. Tensors that only another file
    holds are taken from there, with a warning that names it. Raises NotACheckpoint, MissingShard, BadShard,
    UnsafePath, UnsupportedModel, and MissingDependency where a `.bin` shard needs torch.

        >>> with open_checkpoint("Qwen3.5-0.8B") as checkpoint:                      # doctest: +SKIP
        ...     checkpoint.tensors["model.norm.weight"].shape
        (1024,)
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise NotACheckpoint(f"{folder} {found}; expected the folder of a Hugging Face checkpoint")
    if not (folder / "config.json").is_file():
        raise NotACheckpoint(f"{folder} has no config.json; expected the folder of a Hugging Face checkpoint")
    config = Config(read_object(folder / "config.json"))
    with ExitStack() as files:
        tensors, warnings = _collect(folder, files)
        return Checkpoint(folder, config, _with_scales(tensors, config), warnings, files.pop_all())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises NotACheckpoint when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise NotACheckpoint(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


# Which file holds which tensor.


def _collect(folder: Path, files: ExitStack) -> tuple[dict[str, Tensor], list[str]]:
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards or (folder / INDEX).is_file():
        index, single, read_shard = INDEX, "model.safetensors", _read_safetensors
    else:
        shards = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
        index, single, read_shard = BIN_INDEX, "pytorch_model.bin", _read_bin
    listed = _read_index(folder / index)
    if not shards and not listed:
        raise NotACheckpoint(f"{folder} holds no weights; expected *.safetensors or pytorch_model*.bin")

    absent = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if absent:
        raise MissingShard(
            f"{folder / index} names {', '.join(absent)}, not in the folder: download the missing files"
        )
    held = {file: read_shard(_inside(folder, file), files) for file in sorted({*shards, *listed.values()})}
    lost = sorted(name for name, file in listed.items() if name not in held[file])
    if lost:
        raise MissingShard(f"{folder / index} lists tensors that their files do not hold: {', '.join(lost)}")

    if not listed and single in held:
        listed = dict.fromkeys(held[single], single)
    tensors = {name: held[file][name] for name, file in listed.items()}
    warnings = []
    for file, found in held.items():
        extra = {name: tensor for name, tensor in found.items() if name not in listed}
        twice = sorted(extra.keys() & tensors.keys())
        if twice:
            others = ", ".join(sorted({tensors[name].file for name in twice}))
            raise BadShard(
                f"{file} and {others} both hold {', '.join(twice)}: remove the one that does not belong here"
            )
        tensors |= extra
        if listed and extra:
            warnings.append(
                f"{file} holds {len(extra)} tensors that {_authority(folder, index, single)} does not list; used"
            )
        elif listed and file not in listed.values():
            warnings.append(
                f"{file} is ignored: {_authority(folder, index, single)} lists other files for its tensors"
            )
    return tensors, warnings


def _authority(folder: Path, index: str, single: str) -> str:
    return index if (folder / index).is_file() else single


def _read_index(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    listed = read_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise NotACheckpoint(f"{path} has no usable 'weight_map'; expected tensor names with file names")
    for file in sorted(set(listed.values())):
        if file != Path(file).name or file in ("", ".", ".."):
            raise UnsafePath(f"{path} names the file {file!r}; expected a plain file name within the folder")
    return listed


def _inside(folder: Path, file: str) -> Path:
    """The file's path, if its links stay in the folder, or in the cache whose snapshot the folder is."""
    root = folder.resolve()
    target = (folder / file).resolve()
    if not target.is_relative_to(_cache_root(root) or root):
        raise UnsafePath(
            f"{folder / file} is a link to {target}, outside the folder: copy the file into the folder"
        )
    return target


def _cache_root(folder: Path) -> Path | None:
    """`models--ORG--NAME` for a folder `models--ORG--NAME/snapshots/HASH`, the layout of the Hugging Face cache."""
    return next(
        (p for p in folder.parents if p.name.startswith("models--") and folder.parent == p / "snapshots"),
        None,
    )


# Shards.


def _read_safetensors(path: Path, files: ExitStack) -> dict[str, Tensor]:
    """The tensors of one safetensors file, after its whole header has been checked (format: huggingface/safetensors)."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadShard(f"{path} cannot be opened: {error.strerror}") from error
    files.callback(os.close, fd)
    file_bytes = os.fstat(fd).st_size
    prefix = os.pread(fd, 8, 0)
    header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or header_bytes > file_bytes - 8:
        raise BadShard(
            f"{path} declares a header of {header_bytes} bytes and has {file_bytes}: it is truncated or no safetensors"
        )
    try:
        header = json.loads(os.pread(fd, header_bytes, 8), object_pairs_hook=_unique)
        entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadShard(f"{path} has a broken safetensors header: {error}") from error

    data_start, end = 8 + header_bytes, 0
    for name, (_, _, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise BadShard(
                f"{path} stores {name!r} at {start}; expected {end}: tensors overlap or leave a gap"
            )
        end = stop
    if data_start + end > file_bytes:
        raise BadShard(
            f"{path} is truncated: its header declares {data_start + end} bytes, the file has {file_bytes}"
        )
    return {
        name: Tensor(name, dtype, shape, path.name, _pread_from(fd, data_start + start, path))
        for name, (dtype, shape, start, _) in entries.items()
    }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names


def _entry(value: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"sizes {shape} at {start}..{stop}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown data type {dtype!r}")
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{stop - start} bytes for {dtype} of shape {shape}")
    return dtype, shape, start, stop


def _pread_from(fd: int, base: int, path: Path) -> Callable[[int, U8], None]:
    def read_into(offset: int, buffer: U8) -> None:
        view = buffer.data
        while view:
            try:
                n = os.preadv(fd, [view], base + offset)
            except OSError as error:
                raise BadShard(f"{path} cannot be read at {base + offset}: {error.strerror}") from error
            if n == 0:
                raise BadShard(f"{path} ended at {base + offset} while it was read: it was changed or cut")
            view, offset = view[n:], offset + n

    return read_into


def _read_bin(path: Path, files: ExitStack) -> dict[str, Tensor]:
    """The tensors of one `pytorch_model*.bin`, through torch: weights only, mapped."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            f"{path} is a PyTorch shard, and torch is not installed: pip install 'llama-sidecar[torch]'"
        ) from error
    dtypes = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for a bad file
        raise BadShard(
            f"{path} cannot be read by torch: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise BadShard(f"{path} holds more than named tensors; expected a state dict")
    tensors = {}
    for name, tensor in state.items():
        if tensor.dtype not in dtypes:
            raise UnsupportedModel(f"{name} in {path.name} is {tensor.dtype}; expected a floating-point type")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        read_into = _copy_from(data, mapped=tensor.is_contiguous())
        tensors[name] = Tensor(name, dtypes[tensor.dtype], tuple(tensor.shape), path.name, read_into)
    return tensors


def _copy_from(data: U8, mapped: bool) -> Callable[[int, U8], None]:
    def read_into(offset: int, buffer: U8) -> None:
        part = data[offset : offset + buffer.size]
        buffer[:] = part
        if mapped:
            _forget(part)

    return read_into


def _forget(mapped: U8) -> None:
    """Gives back the whole pages of a range mapped from a file: read again they come from the file again.

    Without it a mapped shard would slowly fill the process. Ordinary memory would be lost: never call it for that.
    """
    start = -(-mapped.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (mapped.ctypes.data + mapped.size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(start, length, mmap.MADV_DONTNEED)


# FP8.


def _with_scales(tensors: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Joins every FP8 weight with its `_scale_inv`; scales of activations are dropped."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method not in (None, "fp8"):
        raise UnsupportedModel(
            f"config.json says the weights are quantized by {method!r}; expected none or 'fp8': convert the unquantized checkpoint"
        )
    if method is None:
        return tensors
    block = quantization.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise UnsupportedModel(
            f"config.json has weight_block_size = {block!r}; expected two positive integers"
        )
    scales = {
        name.removesuffix("_scale_inv"): t for name, t in tensors.items() if name.endswith("_scale_inv")
    }
    weights = {
        name: t
        for name, t in tensors.items()
        if not name.endswith(("_scale_inv", "activation_scale", "input_scale"))
    }
    orphans = sorted(scales[name].name for name in scales.keys() - weights.keys())
    if orphans:
        raise MissingShard(f"{', '.join(orphans)} scale weights that are not in the checkpoint")
    return {name: _scaled(t, scales[name], block) if name in scales else t for name, t in weights.items()}


def _scaled(weight: Tensor, scale: Tensor, block: list[int] | None) -> Tensor:
    values = scale.rows(0, scale.n_rows).reshape(scale.shape)
    if block is None and values.size == 1:
        return replace(weight, scale=values)
    rows, cols = block or (0, 0)
    expected = (
        (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // cols))
        if rows and len(weight.shape) > 1
        else (1,)
    )
    if tuple(values.shape) != expected:
        raise BadShard(
            f"{scale.name} has shape {tuple(values.shape)}; expected {expected} for {weight.name} of {weight.shape}"
        )
    return replace(weight, scale=values, scale_block=(rows, cols))
