"""A GGUF file as an editable value: read one, change its keys and tensors one by one, write it again, sound or not.

An edit is a list of plain values, so that a test or a fuzzer can keep it as JSON. Nothing is checked but that Python can
pack the values. Knows no key and no tensor.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType as V

from llama_sidecar.sidecars import read_header
from llama_sidecar.sidecars.gguf_header import BLOCK_SIZES, StringArray

FORMATS = {
    V.UINT8: "B", V.INT8: "b", V.UINT16: "H", V.INT16: "h", V.UINT32: "I", V.INT32: "i", V.FLOAT32: "f",
    V.BOOL: "?", V.UINT64: "Q", V.INT64: "q", V.FLOAT64: "d",
}  # fmt: skip
Edit = list[Any]


@dataclass
class Key:
    """`type` is a scalar's or (ARRAY, item); of an array `value` is a list."""

    type: tuple[V, ...]
    value: Any


@dataclass
class Tensor:
    shape: list[int]  # ggml's order
    type: int
    data: bytes


@dataclass
class File:
    keys: dict[str, Key]
    tensors: dict[str, Tensor]

    def apply(self, *edits: Edit) -> File:
        """This file, changed. An edit of what is not there raises KeyError.

        >>> File({}, {}).apply(["set", "a.b", "UINT32", 1]).keys["a.b"].value
        1
        """
        for name, *arguments in edits:
            getattr(self, f"_{name}")(*arguments)
        return self

    def _set(self, name: str, type: str, value: Any) -> None:
        """`type` as "UINT32" or "ARRAY UINT32"."""
        self.keys[name] = Key(tuple(V[part] for part in type.split()), value)

    def _value(self, name: str, value: Any) -> None:
        """Another value of the type it has."""
        self.keys[name].value = value

    def _item(self, name: str, i: int, value: Any) -> None:
        self.keys[name].value[i] = value

    def _drop(self, name: str) -> None:
        del self.keys[name]

    def _rename(self, old: str, new: str) -> None:
        """Of a tensor."""
        self.tensors = {new if name == old else name: tensor for name, tensor in self.tensors.items()}

    def _copy(self, name: str, new: str) -> None:
        """A tensor, under a further name."""
        old = self.tensors[name]
        self.tensors[new] = Tensor(list(old.shape), old.type, old.data)

    def _remove(self, name: str) -> None:
        """A tensor."""
        del self.tensors[name]

    def _shape(self, name: str, shape: list[int], type: int | None = None) -> None:
        """Another shape, and type, with data of that size; the data there is repeated."""
        tensor = self.tensors[name]
        tensor.shape, tensor.type = list(shape), tensor.type if type is None else type
        per_block, block_bytes = BLOCK_SIZES[tensor.type]
        n_bytes = int(np.prod(shape, dtype=object)) // per_block * block_bytes
        tensor.data = (tensor.data * (n_bytes // max(1, len(tensor.data)) + 1))[:n_bytes]

    def _fill(self, name: str, word: int) -> None:
        """Every 32-bit word of a tensor's data."""
        tensor = self.tensors[name]
        tensor.data = (struct.pack("<I", word) * (len(tensor.data) // 4 + 1))[: len(tensor.data)]

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        alignment = 32
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))]
        for name, key in self.keys.items():
            parts += [_text(name), struct.pack("<I", key.type[0]), _packed(key.type, key.value)]
        offset = 0
        for name, tensor in self.tensors.items():
            n = len(tensor.shape)
            parts += [_text(name), struct.pack(f"<I{n}QIQ", n, *tensor.shape, tensor.type, offset)]
            offset += -(-len(tensor.data) // alignment) * alignment
        head = b"".join(parts)
        padded = [t.data + bytes(-len(t.data) % alignment) for t in self.tensors.values()]
        return b"".join([head, bytes(-len(head) % alignment), *padded])


def read(path: Path) -> File:
    """A sound file of one shard."""
    header = read_header(path)
    keys = {name: Key(header.key_types[name], _plain(value)) for name, value in header.keys.items()}
    tensors = {
        name: Tensor(list(info.shape), int(info.type), header.tensor_bytes(name).tobytes())
        for name, info in header.tensors.items()
    }
    return File(keys, tensors)


def _plain(value: Any) -> Any:
    if isinstance(value, (StringArray, np.ndarray)):
        return list(value) if isinstance(value, StringArray) else value.tolist()
    return value


def _text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _packed(type: tuple[V, ...], value: Any) -> bytes:
    if type[0] == V.STRING:
        return _text(value)
    if type[0] != V.ARRAY:
        return struct.pack("<" + FORMATS[type[0]], value)
    head = struct.pack("<IQ", type[1], len(value))
    if type[1] in (V.STRING, V.ARRAY):
        return head + b"".join(map(_text, value))
    return head + struct.pack(f"<{len(value)}{FORMATS[type[1]]}", *value)
