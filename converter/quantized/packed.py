"""Integers of 1 to 8 bits packed into words of 32: the pack-quantized format of compressed-tensors.

Facts: compressed-tensors' pack_quantized compressor. Of a weight `W`, `W_packed` holds the codes, the first in a word's
lowest bits and no code across two words, each row padded to whole words; `W_shape` the shape without the padding, `W_scale`
one factor for each row or each group of its columns, `W_zero_point`, packed along the rows, what is taken off a code, half
the range where there is none; `W_g_idx` the group of each column where they are not in order. 1 to 8 bits fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.errors import BadShard, UnsupportedModel
from llama_sidecar.converter.quantized._joined import Joined, Settings
from llama_sidecar.converter.shards import F32, U8, Stored, Tensor

METHODS = ("compressed-tensors",)
WORD_BITS = 32


@dataclass(frozen=True)
class Packed(Tensor):
    """Codes of `n_bits` in words (n_rows, n_words), scales (n_rows, n_groups), and what belongs to them."""

    words: Stored = field(repr=False)
    n_bits: int
    scale: Stored = field(repr=False)
    group_cols: int
    zero: Stored | None = field(default=None, repr=False)
    groups: Stored | None = field(default=None, repr=False)

    def raw_rows(self, start: int, stop: int) -> U8:
        return self.words.raw_rows(start, stop)

    def rows(self, start: int, stop: int) -> F32:
        codes = unpack(self.words.raw_rows(start, stop).view("<u4"), self.n_bits)[:, : self.n_cols]
        values: F32 = codes.astype(np.float32)
        values -= self._over_columns(self._zeros(start, stop))
        is_shared = self.scale.n_rows == 1
        scales = self.scale.rows(0, 1) if is_shared else self.scale.rows(start, stop)
        values *= self._over_columns(scales)
        return values

    def _zeros(self, start: int, stop: int) -> F32:
        if self.zero is None:
            return np.full((1, 1), 1 << (self.n_bits - 1), np.float32)
        per_word = WORD_BITS // self.n_bits
        first = start // per_word
        words = self.zero.raw_rows(first, -(-stop // per_word)).view("<u4")
        zeros = unpack(np.ascontiguousarray(words.T), self.n_bits).T
        found: F32 = zeros[start - first * per_word : stop - first * per_word].astype(np.float32)
        return found

    def _over_columns(self, per_group: F32) -> F32:
        if per_group.shape[1] == 1:
            return per_group
        if self.groups is not None:
            index = self.groups.raw_rows(0, self.n_cols).view("<i4").reshape(-1)
            if index.max() >= per_group.shape[1]:
                raise BadShard(
                    f"{self.groups.name} names group {index.max()}; expected one of the {per_group.shape[1]} of {self.name}"
                )
            if index.min() >= 0:  # -1 stands for none
                return np.take(per_group, index, axis=1)
        repeated: F32 = np.repeat(per_group, self.group_cols, axis=1)[:, : self.n_cols]
        return repeated

    def check_type(self) -> None:
        pass


def unpack(words: npt.NDArray[np.uint32], n_bits: int) -> npt.NDArray[np.uint32]:
    """Words (n_rows, n_words) -> their codes, lowest bits first: (n_rows, n_words * (32 // n_bits)).

    >>> unpack(np.array([[0x21]], np.uint32), 4)[0, :3]
    array([1, 2, 0], dtype=uint32)
    """
    shifts = np.arange(0, WORD_BITS - n_bits + 1, n_bits, dtype=np.uint32)
    codes: npt.NDArray[np.uint32] = words[:, :, None] >> shifts
    codes &= np.uint32((1 << n_bits) - 1)
    return codes.reshape(len(words), -1)


def find(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Joined]:
    for name, words in stored.items():
        if not name.endswith("_packed") or words.dtype != "I32":
            continue
        stem = name.removesuffix("_packed")
        scale, said = stored.get(f"{stem}_scale"), stored.get(f"{stem}_shape")
        if scale is None or said is None:
            raise BadShard(f"{name} in {words.file} has no {stem}_scale or no {stem}_shape beside it")
        shape = _shape(said, words)
        n_bits = _n_bits(words, shape[1], settings)
        zero, groups = stored.get(f"{stem}_zero_point"), stored.get(f"{stem}_g_idx")
        group_cols = _group_cols(scale, stem, shape, settings)
        _check(zero, (-(-shape[0] // (WORD_BITS // n_bits)), scale.n_cols), stem)
        _check(groups, (shape[1],), stem)
        parts = [part.name for part in (words, scale, said, zero, groups) if part is not None]
        weight = Packed(
            stem, f"INT{n_bits}", shape, words.file, words, n_bits, scale, group_cols, zero, groups
        )
        yield Joined(weight, tuple(parts))


def _shape(said: Stored, words: Stored) -> tuple[int, int]:
    sizes = (
        said.rows(0, said.n_rows).reshape(-1).astype(np.int64).tolist()
        if said.dtype in ("I64", "I32") and prod(said.shape) == 2
        else []
    )
    if len(sizes) != 2 or len(words.shape) != 2 or sizes[0] != words.shape[0] or sizes[1] < 1:
        raise BadShard(
            f"{said.name} says {sizes or said.dtype} of {words.name} of shape {words.shape}; expected two sizes, the first the same"
        )
    return sizes[0], sizes[1]


def _n_bits(words: Stored, n_cols: int, settings: Settings) -> int:
    """The number of bits among those that config.json names with which a row is that many words."""
    said = sorted({bits for bits in settings.integers("num_bits") if bits <= 8})
    fitting = [bits for bits in said if -(-n_cols // (WORD_BITS // bits)) == words.shape[1]]
    if not fitting:
        raise UnsupportedModel(
            f"{words.name} has {words.shape[1]} words for {n_cols} columns, and config.json names "
            f"{' and '.join(map(str, said)) or 'no'} bits for weights; expected a number of bits that fits, 8 at most"
        )
    return fitting[0]


def _group_cols(scale: Stored, stem: str, shape: tuple[int, int], settings: Settings) -> int:
    """How many columns share a scale."""
    n_groups = scale.n_cols
    is_whole = n_groups > 0 and shape[1] % n_groups == 0
    sizes = [*settings.integers("group_size"), *([shape[1] // n_groups] if is_whole else [])]
    size = next((size for size in sizes if -(-shape[1] // size) == n_groups), None)
    if (
        size is None
        or scale.n_rows not in (1, shape[0])
        or (scale.n_rows == 1 and n_groups > 1 and shape[0] > 1)
    ):
        raise BadShard(
            f"{scale.name} has shape {scale.shape} for {stem} of {shape}; expected a row for each of its rows, of whole groups"
        )
    return size


def _check(part: Stored | None, shape: tuple[int, ...], stem: str) -> None:
    if part is not None and (part.dtype != "I32" or part.shape != shape):
        raise BadShard(
            f"{part.name} is {part.dtype} of shape {part.shape}; expected I32 of {shape} for {stem}"
        )
