"""One weight file of a checkpoint: safetensors, or a `.bin` of PyTorch, as tensors that are read in rows when asked for.

Knows the two formats and how numbers are stored. Does not know which files belong together, which tensors are one
quantised weight (quantized/), what a tensor means, nor where the file lies (places.py).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.errors import BadShard, MissingDependency, UnsupportedModel
from llama_sidecar.converter.places import WeightFile

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
INTEGERS = {"I8": "<i1", "U8": "<u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8"}
FP8 = ("F8_E4M3", "F8_E5M2")
BYTES: dict[str, F32] = {  # the number that each byte stands for
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    for name, dtype in (("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2))
} | {"F8_E8M0": np.append(2.0 ** np.arange(-127, 128), np.nan).astype(np.float32)}
MAX_HEADER_BYTES = (
    1 << 25
)  # the format allows 100 MB, of which JSON makes gigabytes; 91,000 tensors need 11 MB
MAX_DIMS = 8


@dataclass(frozen=True)
class Tensor(ABC):
    """One weight, seen as (n_rows, n_cols): a vector has one column, and all but the last of more dimensions are rows.

    `dtype` says how its values are stored: as safetensors spells it, or a quantised weight's own name for it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def n_cols(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    @abstractmethod
    def raw_rows(self, start: int, stop: int) -> U8:
        """Rows start..stop as they are stored, without scales: (stop - start, bytes of a row)."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32, dequantized: (stop - start, n_cols)."""

    @abstractmethod
    def check_type(self) -> None:
        """Raises UnsupportedModel unless the values are those of a weight."""

    def blocks(self, start: int, stop: int) -> U8:
        """Rows start..stop as GGUF stores the type that is called like `dtype`."""
        return self.raw_rows(start, stop)


@dataclass(frozen=True)
class Stored(Tensor):
    """A tensor of a file: `read_into(offset, buffer)` fills the buffer with the tensor's bytes from the offset on."""

    read_into: Callable[[int, U8], None] = field(repr=False)

    def raw_rows(self, start: int, stop: int) -> U8:
        row_bytes = self.n_cols * ITEM_BYTES[self.dtype]
        raw = np.empty((stop - start, row_bytes), np.uint8)
        self.read_into(start * row_bytes, raw.reshape(-1))
        return raw

    def rows(self, start: int, stop: int) -> F32:
        return numbers(self.raw_rows(start, stop), self.dtype)

    def check_type(self) -> None:
        if self.dtype in FP8:
            raise UnsupportedModel(
                f"{self.name} in {self.file} is {self.dtype}; expected {self.name}_scale_inv, {self.name}_scale or "
                f"{self.name.removesuffix('.weight')}.scale with it"
            )
        if self.dtype not in ("BF16", *FLOATS):
            raise UnsupportedModel(
                f"{self.name} in {self.file} is {self.dtype} and no part of a quantized weight that is known; expected "
                "F32, F16 or BF16: convert the unquantized checkpoint"
            )


def numbers(raw: U8, dtype: str) -> F32:
    """Rows of bytes as the numbers that a type stores: (n_rows, bytes) -> (n_rows, n_cols)."""
    if dtype == "BF16":
        wide = raw.view("<u2").astype(np.uint32)
        return np.left_shift(wide, 16, out=wide).view(np.float32)
    if dtype in BYTES:
        return BYTES[dtype][raw]
    return raw.view((FLOATS | INTEGERS)[dtype]).astype(np.float32, copy=False)


def read_safetensors(file: WeightFile) -> dict[str, Stored]:
    """The tensors of one safetensors file, after its whole header has been checked (format: huggingface/safetensors)."""
    prefix = _read(file, 0, min(8, file.n_bytes))
    header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= header_bytes <= file.n_bytes - 8:
        raise BadShard(
            f"{file.where} declares a header of {header_bytes} bytes and has {file.n_bytes}: it is truncated or no safetensors"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise BadShard(
            f"{file.where} declares a header of {header_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are read: it is damaged"
        )
    try:
        header = json.loads(_read(file, 8, header_bytes).decode(), object_pairs_hook=_unique)
        entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadShard(f"{file.where} has a broken safetensors header: {error}") from error

    data_start, end = 8 + header_bytes, 0
    for name, (_, _, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise BadShard(
                f"{file.where} stores {name!r} at {start}; expected {end}: tensors overlap or leave a gap"
            )
        end = stop
    if data_start + end > file.n_bytes:
        raise BadShard(
            f"{file.where} is truncated: its header declares {data_start + end} bytes, the file has {file.n_bytes}"
        )
    return {
        name: Stored(name, dtype, shape, file.name, _from(file, data_start + start))
        for name, (dtype, shape, start, _) in entries.items()
    }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names


def _entry(value: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dimensions; at most {MAX_DIMS} are expected")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop)):
        raise ValueError(f"sizes {shape} at {start}..{stop}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"unknown data type {dtype!r}")
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{stop - start} bytes for {dtype} of shape {shape}")
    return dtype, shape, start, stop


def _read(file: WeightFile, offset: int, n_bytes: int) -> bytes:
    buffer = np.empty(n_bytes, np.uint8)
    file.read_into(offset, buffer)
    return buffer.tobytes()


def _from(file: WeightFile, base: int) -> Callable[[int, U8], None]:
    return lambda offset, buffer: file.read_into(base + offset, buffer)


def read_bin(path: Path, file: WeightFile) -> dict[str, Stored]:
    """The tensors of one `pytorch_model*.bin`: torch says where they are (weights only), and `file`, the same file, is read there.

    Nothing is read through torch's mapping: a file that became shorter would end the process.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            f"{path} is a PyTorch shard, and torch is not installed: pip install 'llama-sidecar[torch]'"
        ) from error
    dtypes = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
        torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
    records = _records(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about the format, beside what it raises or we say
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for a bad file
        raise BadShard(
            f"{path} cannot be read by torch: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor) for name, t in state.items()
    ):
        raise BadShard(f"{path} holds more than named tensors; expected a state dict")
    for name, tensor in state.items():
        if tensor.dtype not in dtypes or tensor.layout != torch.strided or tensor.device.type != "cpu":
            found = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
            raise UnsupportedModel(f"{name} in {path.name} is {found}; expected a dense tensor of numbers")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise BadShard(f"{name} in {path} repeats what is stored of it; expected every value once")
    storages = [t.untyped_storage() for t in state.values() if t.numel()]
    base = _mapped_at(path, records, {storage.data_ptr(): storage.nbytes() for storage in storages})
    tensors = {}
    for name, tensor in state.items():
        read_into = _from(file, tensor.data_ptr() - base)
        if not tensor.is_contiguous():
            storage = tensor.untyped_storage()
            data = torch.frombuffer(
                bytearray(_read(file, storage.data_ptr() - base, storage.nbytes())), dtype=tensor.dtype
            )
            ordered = data.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).contiguous()
            read_into = _copy_from(ordered.reshape(-1).view(torch.uint8).numpy())
        tensors[name] = Stored(name, dtypes[tensor.dtype], tuple(tensor.shape), path.name, read_into)
    return tensors


def _copy_from(data: U8) -> Callable[[int, U8], None]:
    def read_into(offset: int, buffer: U8) -> None:
        buffer[:] = data[offset : offset + buffer.size]

    return read_into


def _records(path: Path) -> dict[int, int]:
    """Bytes of a zip archive's records of tensors by where their data begins; none where it is no archive. Raises BadShard.

    To be called before torch reads it, which asks for as much memory as a record says to hold.
    """
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                return {}
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
                ends = [_data_start(file, record) + record.file_size for record in records]
                n_bytes = file.seek(0, os.SEEK_END)
                order = [
                    archive.read(r) for r in records if r.filename.endswith("/byteorder") and r.file_size < 16
                ]
    except Exception as error:  # zipfile raises more than its own for a bad one
        raise BadShard(f"{path} is a broken archive: {error}") from error
    if any(r.compress_type != zipfile.ZIP_STORED or r.compress_size != r.file_size for r in records):
        raise BadShard(f"{path} is packed in a way that is not known here: save it anew with torch.save")
    if max(ends, default=0) > n_bytes:
        raise BadShard(f"{path} is truncated: it declares a record to {max(ends)}, and has {n_bytes} bytes")
    if any(found != b"little" for found in order):
        raise UnsupportedModel(f"{path} was written on a big-endian machine: save it anew on another")
    return {
        end - record.file_size: record.file_size
        for end, record in zip(ends, records, strict=True)
        if "/data/" in record.filename
    }


def _mapped_at(path: Path, records: dict[int, int], storages: dict[int, int]) -> int:
    """Where torch has mapped the archive of `records`; `storages` are bytes by address, each within one of them. Raises BadShard."""
    if not storages:
        return 0
    first = min(storages)
    bases = [first - start for start in records if (first - start) % mmap.PAGESIZE == 0]
    bases = [base for base in bases if all(address - base in records for address in storages)]
    if not bases:
        raise BadShard(f"{path} is packed in a way that is not known here: save it anew with torch.save")
    fitting = [
        base
        for base in bases
        if all(n_bytes <= records[address - base] for address, n_bytes in storages.items())
    ]
    if not fitting:
        raise BadShard(
            f"{path} says that more bytes of a tensor are stored than its record has: it is damaged"
        )
    if len(fitting) > 1:
        raise BadShard(f"{path} can be read in {len(fitting)} ways: save it anew with torch.save")
    return fitting[0]


def _data_start(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Where a record's data begins: behind a header of its own, whose name and extra field have any length."""
    file.seek(record.header_offset)
    n_name, n_extra = struct.unpack_from("<HH", file.read(30), 26)
    return record.header_offset + 30 + int(n_name) + int(n_extra)
