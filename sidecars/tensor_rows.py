"""Tensors of a file, whole or some of their rows, as they lie there or in narrower types: what files of cut heads are made of.

Knows tensors and their bytes; which of them, and which rows, is the caller's matter.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import ArrayLike, NDArray

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import BLOCK_SIZES, StringArray, TensorInfo

PIECE_BYTES = 1 << 18  # of a tensor, held in memory at a time: near the cache

# The widest type of a narrow head's matrices: a draft step costs little more than reading them, and drafts are as good.
NARROW = GGMLQuantizationType.Q4_0

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, name of a tensor)
Types = Mapping[str, int]  # ggml's type of each tensor

_U64 = struct.Struct("<Q")


def narrowed_type(info: TensorInfo) -> int:
    """The type of a tensor in a narrow head: its own but for matrices wider than NARROW, with F16 where a row is not whole blocks."""
    is_matrix = len(info.shape) > 1 and info.name.endswith(".weight")
    if not is_matrix or info.name.endswith(keys.ALWAYS_F32) or not _can_dequantise(info.type):
        return info.type
    wanted = GGMLQuantizationType.F16 if info.shape[0] % BLOCK_SIZES[NARROW][0] else NARROW
    return wanted if _bits(info.type) > _bits(wanted) else info.type


def _bits(kind: int) -> float:
    n_elements, n_bytes = BLOCK_SIZES[int(kind)]
    return 8 * n_bytes / n_elements


def _can_dequantise(kind: int) -> bool:
    try:
        gguf.dequantize(np.zeros((1, BLOCK_SIZES[int(kind)][1]), np.uint8), GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError):
        return False
    return True


def as_type(info: TensorInfo, kind: int, n_rows: int | None) -> TensorInfo:
    """A tensor as it will be written: of another type, and cut to `n_rows` rows unless that is None."""
    shape = info.shape if n_rows is None else (info.shape[0], n_rows)
    n_elements, n_bytes = BLOCK_SIZES[int(kind)]
    changed = replace(info, shape=shape, type=kind)
    return replace(changed, n_bytes=changed.n_elements // n_elements * n_bytes)


def checked_rows(rows: ArrayLike, n_vocab: int, what: str) -> NDArray[np.int32]:
    """Token ids (n,) after a check that they ascend and are below `n_vocab`; BadRows says `what` they are."""
    ids = np.asarray(rows)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise errors.BadRows(f"{what} are not a list of token ids")
    if ids[0] < 0 or ids[-1] >= n_vocab or (ids[1:] <= ids[:-1]).any():
        raise errors.BadRows(f"{what} are not ascending token ids from 0 to {n_vocab - 1}")
    return ids.astype(np.int32)


def value_bytes(value: object) -> bytes:
    """A key's value as it goes into a hash."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, StringArray):
        return b"".join(_U64.pack(len(text)) + text for text in value.iter_raw())
    return repr(value).encode()


def write_header(header: gguf.GGUFWriter, out: BinaryIO) -> None:
    """Writes a header, which is used up, into an open file, and goes to its end."""
    header.write_header_to_file(Path(out.name))
    header.write_kv_data_to_file()
    header.write_ti_data_to_file()
    header.close()
    out.seek(0, os.SEEK_END)


def write_data(
    out: BinaryIO,
    sources: Mapping[str, TensorInfo],
    plan: list[TensorInfo],
    ids: NDArray[np.int32],
    progress: Progress | None,
) -> None:
    """Write the tensors of `plan`, each from its source of the same name; of one that is shorter there, the rows `ids`."""
    total, done = sum(info.n_bytes for info in plan), 0
    out.write(padding(out))
    for info in plan:
        old = sources[info.name]
        for stored in pieces(old, None if old.shape == info.shape else ids):
            piece = _as_stored(old, stored, info.type)
            out.write(piece.data)
            done += piece.nbytes
            if progress:
                progress(done, total, info.name)
        out.write(padding(out))


def padding(out: BinaryIO) -> bytes:
    """What a tensor's data need behind them."""
    return bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT)


def pieces(info: TensorInfo, rows: NDArray[Any] | None = None) -> Iterator[NDArray[np.uint8]]:
    """Read a tensor, or of a matrix the given rows (ascending), in pieces `(n, row_bytes)` of about PIECE_BYTES."""
    n_rows = info.n_elements // info.shape[0]
    row_bytes = info.n_bytes // n_rows
    wanted = np.arange(n_rows) if rows is None else rows
    step = max(1, PIECE_BYTES // row_bytes)
    start = 0
    while start < len(wanted):
        first = int(wanted[start])
        stop = int(np.searchsorted(wanted, first + step))
        n_bytes = (int(wanted[stop - 1]) + 1 - first) * row_bytes
        data = info.read(first * row_bytes, n_bytes)
        yield data.reshape(-1, row_bytes)[wanted[start:stop] - first]
        start = stop


def _as_stored(info: TensorInfo, rows: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    """Stored rows of a tensor in a type: as they are where it is their own."""
    return rows if info.type == kind else _encoded(_dequantised(info, rows), kind)


def _dequantised(info: TensorInfo, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    try:
        values = gguf.dequantize(rows, GGMLQuantizationType(info.type))
    except (NotImplementedError, ValueError) as error:
        raise errors.BadTensorType(
            f"{info.path}: {info.name} is {info.type_name}, which cannot be dequantised here"
        ) from error
    return np.asarray(values, np.float32).reshape(len(rows), -1)


def _encoded(rows: NDArray[np.float32], kind: int) -> NDArray[np.uint8]:
    """The bytes of rows in a type; numpy does it in a quarter of a second for 32,768 rows of 1,024, libggml in a tenth."""
    with np.errstate(over="ignore"):  # a value beyond F16: a worse draft
        return np.asarray(gguf.quantize(rows, GGMLQuantizationType(kind))).view(np.uint8)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turns the system's refusals into an UnwritableFile."""
    try:
        yield
    except OSError as error:
        raise errors.UnwritableFile(f"{path} cannot be written: {error.strerror or error}") from error
