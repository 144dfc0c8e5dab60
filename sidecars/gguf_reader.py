"""Reads the header of a GGUF file strictly, and never the tensors' data.

Follows the GGUF specification (ggml's docs/gguf.md), versions 2 and 3, little-endian, and refuses what llama.cpp's
reader refuses. Every count, length, type and offset is checked against the file before anything is exposed, so time
and memory stay within a few times `MAX_HEADER_BYTES` whatever a file says. Why not `gguf.GGUFReader`: it trusts
lengths (numpy and struct tracebacks on a damaged file), makes one view per string (seconds for a vocabulary of
250,000), maps the whole file, and knows no tensor type newer than its release. This module does not know what any key
or tensor means, except `general.alignment`.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import BLOCK_SIZES, GGUFHeader, StringArray, TensorInfo, type_name

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20  # a million tokens with their merges need about 40 MiB
MAX_ENTRIES = 1 << 16  # keys, tensors, inner arrays: whatever costs a Python object each
MAX_NESTING = 4  # arrays within arrays; llama.cpp reads none
MAX_KEY_BYTES = 1024  # GGUF allows 65535; no key is near
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: dict[GGUFValueType, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: _U32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: _U64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check the header of one GGUF file (not of its other shards: see `shards.read_model`).

    Raises UnreadableFile or the GGUFError that names the broken rule.

    >>> read_header("NAME-Q8_0.gguf").keys["qwen35.block_count"]  # doctest: +SKIP
    24
    """
    path = Path(path)
    try:
        # Not blocking, so that a pipe given by mistake is refused instead of waited for.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise errors.UnreadableFile(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise errors.UnreadableFile(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            found = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise errors.UnreadableFile(f"{path}: this is {found}; a GGUF file is expected")
        return _parse(_Cursor(path, fd, status.st_size))
    finally:
        os.close(fd)


class _Cursor:
    """Reads little-endian values from the front of a file and never past its end or past MAX_HEADER_BYTES."""

    def __init__(self, path: Path, fd: int, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self.where = "the first bytes"  # what is being read, for messages
        self.pos = 0
        self._fd = fd
        self._buffer = bytearray()
        self._n_entries = 0

    def fail(self, kind: type[errors.LlamaSidecarError], text: str) -> errors.LlamaSidecarError:
        return kind(f"{self.path}: {text}")

    def count(self, n: int, what: str) -> int:
        """Take `n` objects from the budget of MAX_ENTRIES."""
        self._n_entries += n
        if self._n_entries > MAX_ENTRIES:
            raise self.fail(
                errors.HeaderTooLarge,
                f"the header declares {n} {what}; at most {MAX_ENTRIES} entries are read, so it is damaged",
            )
        return n

    def fill(self, end: int) -> bytearray:
        """Return the buffer with at least the file's first `end` bytes in it."""
        if end <= len(self._buffer):
            return self._buffer
        if end > self.file_bytes:
            raise self.fail(
                errors.TruncatedFile,
                f"the file has {self.file_bytes} bytes and {self.where} ends at byte {end}; download or convert it again",
            )
        if end > MAX_HEADER_BYTES:
            raise self.fail(
                errors.HeaderTooLarge,
                f"{self.where} ends at byte {end}; a header of at most {MAX_HEADER_BYTES} bytes is expected",
            )
        want = min(max(end, 2 * len(self._buffer), 1 << 16), self.file_bytes, MAX_HEADER_BYTES)
        try:
            while len(self._buffer) < want:
                piece = os.pread(self._fd, want - len(self._buffer), len(self._buffer))
                if not piece:
                    raise self.fail(errors.TruncatedFile, "the file became shorter while it was read")
                self._buffer += piece
        except OSError as error:
            raise errors.UnreadableFile(f"{self.path}: {error.strerror or error}") from error
        return self._buffer

    def take(self, n_bytes: int) -> bytes:
        start, self.pos = self.pos, self.pos + n_bytes
        return bytes(self.fill(self.pos)[start : self.pos])

    def unpack(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def u32(self) -> int:
        return int(self.unpack(_U32))

    def u64(self) -> int:
        return int(self.unpack(_U64))

    def name(self, max_bytes: int, what: str) -> str:
        n_bytes = self.u64()
        if not 0 < n_bytes <= max_bytes:
            raise self.fail(
                errors.BadName, f"{what} has a name of {n_bytes} bytes; 1 to {max_bytes} are expected"
            )
        raw = self.take(n_bytes)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(errors.BadName, f"{what} has a name that is not UTF-8: {raw[:80]!r}") from error

    def strings(self, n: int) -> StringArray:
        """Read `n` strings in one pass; the loop runs half a million times for a large vocabulary."""
        start = pos = self.pos
        buffer = self.fill(start + 8 * n)  # each has at least its length: an impossible count ends here
        limit = len(buffer)
        ends, unpack = array("Q"), _U64.unpack_from
        for _ in range(n):
            if pos + 8 > limit:
                buffer = self.fill(pos + 8)
                limit = len(buffer)
            pos += 8 + unpack(buffer, pos)[0]
            if pos > limit:
                buffer = self.fill(pos)
                limit = len(buffer)
            ends.append(pos - start)
        self.pos = pos
        return StringArray(bytes(buffer[start:pos]), ends)


def _parse(cursor: _Cursor) -> GGUFHeader:
    version = _read_version(cursor)
    cursor.where = "the counts"
    n_tensors, n_keys = cursor.count(cursor.u64(), "tensors"), cursor.count(cursor.u64(), "keys")
    values: dict[str, Any] = {}
    types: dict[str, tuple[GGUFValueType, ...]] = {}
    for i in range(n_keys):
        cursor.where = f"the name of key {i}"
        name = cursor.name(MAX_KEY_BYTES, f"key {i}")
        if name in values:
            raise cursor.fail(errors.DuplicateName, f"the key {name} occurs twice")
        cursor.where = f"the value of {name}"
        kind = _value_type(cursor, name)
        types[name], values[name] = _read_value(cursor, name, kind, depth=0)
    alignment = _alignment(cursor, values, types)
    infos = [_read_tensor_info(cursor, i) for i in range(n_tensors)]
    return GGUFHeader(
        path=cursor.path,
        version=version,
        keys=values,
        key_types=types,
        tensors=_place(cursor, infos, alignment),
        file_bytes=cursor.file_bytes,
        paths=(cursor.path,),
    )


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.take(min(4, cursor.file_bytes))
    if magic != MAGIC:
        raise cursor.fail(errors.NotGGUF, f"the file starts with {magic!r}; a GGUF starts with {MAGIC!r}")
    cursor.where = "the version"
    version = cursor.u32()
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    found = f"is big-endian (version {swapped})" if swapped in (1, 2, 3) else f"is GGUF version {version}"
    raise cursor.fail(
        errors.UnsupportedVersion,
        f"the file {found}; little-endian GGUF version 2 or 3 is expected: convert it again",
    )


def _value_type(cursor: _Cursor, name: str) -> GGUFValueType:
    kind = cursor.u32()
    try:
        return GGUFValueType(kind)
    except ValueError as error:
        raise cursor.fail(
            errors.BadValueType, f"{name} has the value type {kind}; GGUF defines 0 to {max(GGUFValueType)}"
        ) from error


def _read_value(
    cursor: _Cursor, name: str, kind: GGUFValueType, depth: int
) -> tuple[tuple[GGUFValueType, ...], Any]:
    if kind == GGUFValueType.STRING:
        return (kind,), cursor.take(cursor.u64()).decode("utf-8", errors="replace")
    if kind != GGUFValueType.ARRAY:
        return (kind,), cursor.unpack(_SCALARS[kind])
    if depth == MAX_NESTING:
        raise cursor.fail(errors.HeaderTooLarge, f"{name} nests arrays more than {MAX_NESTING} deep")
    item, n = _value_type(cursor, name), cursor.u64()
    if item == GGUFValueType.STRING:
        return (kind, item), cursor.strings(n)
    if item == GGUFValueType.ARRAY:
        inner = [
            _read_value(cursor, name, item, depth + 1)[1] for _ in range(cursor.count(n, f"arrays in {name}"))
        ]
        return (kind, item), inner
    layout = _SCALARS[item]
    raw = cursor.take(n * layout.size)
    if item == GGUFValueType.BOOL:
        return (kind, item), np.frombuffer(raw, np.uint8) != 0
    return (kind, item), np.frombuffer(raw, np.dtype(layout.format))


def _alignment(
    cursor: _Cursor, values: Mapping[str, Any], types: Mapping[str, tuple[GGUFValueType, ...]]
) -> int:
    if keys.ALIGNMENT not in values:
        return DEFAULT_ALIGNMENT
    value = values[keys.ALIGNMENT]
    if types[keys.ALIGNMENT] != (GGUFValueType.UINT32,) or value == 0 or value & (value - 1):
        raise cursor.fail(
            errors.BadAlignment, f"{keys.ALIGNMENT} is {value!r}; a U32 power of two is expected"
        )
    return int(value)


def _read_tensor_info(cursor: _Cursor, i: int) -> TensorInfo:
    """Read one tensor's entry; its offset still counts from the start of the data."""
    cursor.where = f"the entry of tensor {i}"
    name = cursor.name(MAX_TENSOR_NAME_BYTES, f"tensor {i}")
    n_dims = cursor.u32()
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(errors.BadShape, f"{name} has {n_dims} dimensions; 1 to {MAX_DIMS} are expected")
    shape = tuple(cursor.u64() for _ in range(n_dims))
    kind, offset = cursor.u32(), cursor.u64()
    if kind not in BLOCK_SIZES:
        known = ", ".join(type_name(k) for k in sorted(BLOCK_SIZES))
        raise cursor.fail(errors.BadTensorType, f"{name} has the tensor type {kind}; known are {known}")
    per_block, block_bytes = BLOCK_SIZES[kind]
    n_elements = 1
    for size in shape:
        n_elements *= size
    if not 0 < n_elements < 1 << 63:
        raise cursor.fail(errors.BadShape, f"{name} has the shape {list(shape)}, which is empty or too large")
    if shape[0] % per_block:
        raise cursor.fail(
            errors.BadShape,
            f"{name} has rows of {shape[0]}; {type_name(kind)} needs a multiple of {per_block}",
        )
    with suppress(ValueError):  # newer than the installed gguf package: it stays a plain int
        kind = GGMLQuantizationType(kind)
    return TensorInfo(name, shape, kind, offset, n_elements // per_block * block_bytes, cursor.path)


def _place(cursor: _Cursor, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Check that the tensors lie one after the other within the file, and count offsets from its start."""
    data_start = _pad(cursor.pos, alignment)
    expected = 0
    placed: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in placed:
            raise cursor.fail(errors.DuplicateName, f"the tensor {info.name} occurs twice")
        if info.offset != expected:
            fault = "overlaps the tensor before it" if info.offset < expected else "leaves a gap before it"
            raise cursor.fail(
                errors.BadOffset,
                f"{info.name} {fault}: its offset is {info.offset}, {expected} is expected (alignment {alignment})",
            )
        start = data_start + info.offset
        if start + info.n_bytes > cursor.file_bytes:
            raise cursor.fail(
                errors.TruncatedFile,
                f"the file has {cursor.file_bytes} bytes and the data of {info.name} ends at byte "
                f"{start + info.n_bytes}; download or convert it again",
            )
        placed[info.name] = replace(info, offset=start)
        expected = _pad(info.offset + info.n_bytes, alignment)
    return placed


def _pad(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
