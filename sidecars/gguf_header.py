"""What the header of a GGUF file says: its keys, its tensors and where they lie. gguf_reader.py makes these from a file.

Knows ggml's tensor types and their sizes; of keys it knows only that most start with `general.architecture`.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from llama_sidecar.sidecars import errors, keys

# (elements, bytes) of one block. ggml's values where the published gguf package lacks or misstates them.
BLOCK_SIZES: dict[int, tuple[int, int]] = {
    **{int(kind): size for kind, size in GGML_QUANT_SIZES.items()},
    9: (32, 36),  # Q8_1
    41: (128, 18),  # Q1_0
    42: (64, 18),  # Q2_0
}
_TYPE_NAMES: dict[int, str] = {**{int(t): t.name for t in GGMLQuantizationType}, 41: "Q1_0", 42: "Q2_0"}
_ARCH = re.compile(r"[A-Za-z0-9._-]{1,64}")
_U64 = struct.Struct("<Q")
_T = TypeVar("_T")


class StringArray(Sequence[str]):
    """The strings of one GGUF array, kept as the file's bytes and decoded one by one when asked for.

    `raw(i)` is a string's bytes as stored; indexing decodes UTF-8 and replaces what is not.
    """

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: array[int]) -> None:
        self._data = data  # the array as it lies in the file: 8 bytes of length, then the text, n times
        self._ends = ends  # (n,) where each string ends in it

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.raw(i).decode("utf-8", errors="replace")

    def __iter__(self) -> Iterator[str]:
        return (text.decode("utf-8", errors="replace") for text in self.iter_raw())

    def __eq__(self, other: object) -> bool:
        return self._data == other._data if isinstance(other, StringArray) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"

    @classmethod
    def of(cls, texts: Iterable[str]) -> StringArray:
        """Make one from strings."""
        parts = [_U64.pack(len(text)) + text for text in (t.encode("utf-8") for t in texts)]
        return cls(b"".join(parts), array("Q", accumulate(map(len, parts))))

    @property
    def data(self) -> bytes:
        """The array as it lies in a file: of each string its length (8 bytes), then its bytes."""
        return self._data

    def raw(self, i: int) -> bytes:
        """Return string `i` as the file's bytes; raises IndexError."""
        if i < 0:
            i += len(self)
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._data[(self._ends[i - 1] if i else 0) + 8 : self._ends[i]]

    def iter_raw(self) -> Iterator[bytes]:
        """Yield every string as the file's bytes."""
        start = 8
        for end in self._ends:
            yield self._data[start:end]
            start = end + 8


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    `shape` is in ggml's order (fastest first), `offset` counts from the start of the file at `path`, `type` is a plain
    int where the installed gguf package does not know it.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType | int
    offset: int
    n_bytes: int
    path: Path

    @property
    def n_elements(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def type_name(self) -> str:
        return type_name(self.type)

    def read(self, start: int = 0, n_bytes: int | None = None) -> NDArray[np.uint8]:
        """Read `n_bytes` of the tensor's data from byte `start` on, by default all; raises UnreadableFile, TruncatedFile.

        >>> read_header("mtp-NAME-Q8_0.gguf").tensors["output_norm.weight"].read(n_bytes=4).view("<f4")  # doctest: +SKIP
        """
        data = np.empty(self.n_bytes - start if n_bytes is None else n_bytes, np.uint8)
        view, at = data.data, self.offset + start
        try:
            with open(self.path, "rb", buffering=0) as file:
                while view:
                    n_read = os.preadv(file.fileno(), [view], at)
                    if not n_read:
                        raise errors.TruncatedFile(
                            f"{self.path}: the file became shorter while {self.name} was read"
                        )
                    view, at = view[n_read:], at + n_read
        except OSError as error:
            raise errors.UnreadableFile(f"{self.path}: {error.strerror or error}") from error
        return data


@dataclass(frozen=True)
class GGUFHeader:
    """A GGUF file's keys and tensors, every one checked against the file.

    Scalars in `keys` are Python values, arrays of strings a `StringArray`, other arrays numpy arrays (arrays of arrays:
    lists of them). `key_types` has `(UINT32,)` for a scalar and `(ARRAY, INT32)` for an array, as gguf's reader has.
    `file_bytes` and `tensors` cover all shards where `shards.read_model` made the header.
    """

    path: Path
    version: int
    keys: Mapping[str, Any]
    key_types: Mapping[str, tuple[GGUFValueType, ...]]
    tensors: Mapping[str, TensorInfo]
    file_bytes: int
    paths: tuple[Path, ...]

    @property
    def arch(self) -> str:
        """`general.architecture`; raises MissingKey or WrongKey."""
        arch = self.string(keys.ARCHITECTURE)
        if not _ARCH.fullmatch(arch):
            raise errors.WrongKey(
                f"{self.path}: {keys.ARCHITECTURE} is {arch[:64]!r}; a name like qwen35 is expected"
            )
        return arch

    def key(self, template: str) -> str:
        """Fill `{arch}` of a name from keys.py: `header.key("{arch}.block_count")` -> "qwen35.block_count"."""
        return template.replace("{arch}", self.arch) if "{arch}" in template else template

    def string(self, template: str, default: str | None = None) -> str:
        """Return a string key; raises MissingKey (where there is no `default`) or WrongKey."""
        return self._typed(template, str, "a string", default)

    def flag(self, template: str, default: bool | None = None) -> bool:
        """Return a key that is true or false; raises MissingKey (where there is no `default`) or WrongKey."""
        return self._typed(template, bool, "true or false", default)

    def uint(self, template: str, default: int | None = None) -> int:
        """Return an unsigned integer key; raises MissingKey (where there is no `default`) or WrongKey."""
        value = self._typed(template, int, "an unsigned integer", default)
        if isinstance(value, bool) or value < 0:
            raise errors.WrongKey(
                f"{self.path}: {self.key(template)} is {value!r}; an unsigned integer is expected"
            )
        return value

    def strings(self, template: str) -> StringArray:
        """Return an array-of-strings key; raises MissingKey or WrongKey."""
        return self._typed(template, StringArray, "an array of strings", None)

    def _typed(self, template: str, kind: type[_T], expected: str, default: _T | None) -> _T:
        name = self.key(template)
        value = self.keys.get(name, default)
        if value is None:
            raise errors.MissingKey(f"{self.path}: the key {name} is missing; {expected} is expected")
        if not isinstance(value, kind):
            found = " of ".join(t.name.lower() for t in self.key_types[name])
            raise errors.WrongKey(f"{self.path}: {name} is {found}; {expected} is expected")
        return value

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Read one tensor's raw bytes, shape `(n_bytes,)`; raises MissingTensors, UnreadableFile, TruncatedFile.

        >>> read_header("mtp-NAME-Q8_0.gguf").tensor_bytes("output_norm.weight").view("<f4")  # doctest: +SKIP
        """
        info = self.tensors.get(name)
        if info is None:
            raise errors.MissingTensors(f"{self.path}: there is no tensor {name}")
        return info.read()


def type_name(kind: int) -> str:
    """Name a tensor type: `type_name(8)` -> "Q8_0"."""
    return _TYPE_NAMES.get(int(kind), f"type {int(kind)}")
