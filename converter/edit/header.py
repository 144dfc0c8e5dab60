"""The header of a GGUF file made from other files' headers: keys keep the types and bytes they have there.

Why not `gguf.GGUFWriter`: it packs a vocabulary string by string, as text, and takes neither empty arrays nor tensor types newer
than its release. Follows ggml's docs/gguf.md, version 3. Knows no key but `general.alignment`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType
from numpy.typing import NDArray

from llama_sidecar.converter.writer import Tensor
from llama_sidecar.sidecars import GGUFHeader, StringArray, keys
from llama_sidecar.sidecars.gguf_reader import DEFAULT_ALIGNMENT, MAGIC

VERSION = 3

Types = tuple[GGUFValueType, ...]  # of a scalar its type; of an array ARRAY and the type of its items
Value = tuple[Types, Any]  # as `GGUFHeader.key_types` and `GGUFHeader.keys` have them
Keys = dict[str, Value]

_LAYOUTS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


def keys_of(header: GGUFHeader, wanted: Callable[[str], bool] = lambda name: True) -> Keys:
    """The keys of a file in its order, without those of sharding and without arrays of arrays, which no model has."""
    return {
        name: (header.key_types[name], value)
        for name, value in header.keys.items()
        if not name.startswith("split.") and not isinstance(value, list) and wanted(name)
    }


def text(value: str) -> Value:
    """A string as a key's value."""
    return (GGUFValueType.STRING,), value


def texts(values: Sequence[str]) -> Value:
    """Strings as a key's value, one array."""
    return (GGUFValueType.ARRAY, GGUFValueType.STRING), StringArray.of(values)


def uint(value: int) -> Value:
    """An unsigned integer as a key's value."""
    return (GGUFValueType.UINT32,), value


class Header:
    """A header to be written, with the methods that the writer calls, in this order.

    >>> Header({"general.architecture": text("qwen35")}, []).data_alignment
    32
    """

    def __init__(self, file_keys: Keys, tensors: Sequence[Tensor]) -> None:
        self._keys, self._tensors = file_keys, tensors
        self._path: Path | None = None

    @property
    def data_alignment(self) -> int:
        return int(self._keys.get(keys.ALIGNMENT, ((), DEFAULT_ALIGNMENT))[1])

    def write_header_to_file(self, path: Path) -> None:
        self._path = path
        self._append(MAGIC + struct.pack("<IQQ", VERSION, len(self._tensors), len(self._keys)))

    def write_kv_data_to_file(self) -> None:
        self._append(b"".join(_string(name) + _packed(*value) for name, value in self._keys.items()))

    def write_ti_data_to_file(self) -> None:
        entries, offset = bytearray(), 0
        for tensor in self._tensors:
            shape = tensor.shape[::-1]
            entries += _string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            entries += struct.pack("<IQ", int(tensor.type), offset)
            offset += -(-tensor.n_bytes // self.data_alignment) * self.data_alignment
        self._append(entries)

    def close(self) -> None:
        """Nothing stays open between the calls."""

    def _append(self, data: bytes | bytearray) -> None:
        assert self._path, "write_header_to_file comes first"
        with self._path.open("ab") as file:
            file.write(data)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _packed(types: Types, value: Any) -> bytes:
    """A value with its type before it."""
    kind, *item = types
    start = struct.pack("<I", kind)
    if kind == GGUFValueType.STRING:
        return start + _string(value)
    if kind != GGUFValueType.ARRAY:
        return start + struct.pack(_LAYOUTS[kind], value)
    start += struct.pack("<IQ", item[0], len(value))
    if isinstance(value, StringArray):
        return start + value.data
    return start + np.asarray(value).astype(_LAYOUTS[item[0]], copy=False).tobytes()


def same_value(ours: Any, theirs: Any) -> bool:
    """Whether two values of keys are equal, arrays item by item."""
    if isinstance(ours, np.ndarray) or isinstance(theirs, np.ndarray):
        return np.array_equal(ours, theirs)
    return bool(ours == theirs)


def holds(types: Types, values: NDArray[Any]) -> bool:
    """Whether an array of a key's type can hold these values."""
    return np.array_equal(values.astype(_LAYOUTS[types[1]]), values)
