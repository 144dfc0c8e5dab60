"""GPTQ: integers of 2, 4 or 8 bits packed down the columns of the transposed weight.

Facts: GPTQModel's and AutoGPTQ's layers of torch. Of a layer `L`, `L.qweight` (n_cols * bits / 32, n_rows) holds the codes,
a column's first in the lowest bits; `L.scales` (n_groups, n_rows) the factors; `L.qzeros` (n_groups, n_rows * bits / 32)
what is taken off a code, less one unless config.json has checkpoint_format "gptq_v2"; `L.g_idx` (n_cols,) the group of
each column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.errors import BadShard, UnsupportedModel
from llama_sidecar.converter.quantized._joined import Joined, Settings
from llama_sidecar.converter.quantized._layers import Layer, Part, Recent, check, layers, scale_type
from llama_sidecar.converter.quantized.packed import WORD_BITS, unpack
from llama_sidecar.converter.shards import F32, Stored

METHODS = ("gptq",)
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Gptq(Layer):
    """A weight (n_rows, n_cols) out of its layer's four tensors; `offset` is what a stored zero point lacks."""

    g_idx: Stored | None = field(repr=False)
    n_bits: int
    offset: int

    def rows(self, start: int, stop: int) -> F32:
        words = self.recent.raw(self.qweight).view("<u4")[:, start:stop]
        columns = unpack(np.ascontiguousarray(words.T), self.n_bits)
        values = columns.astype(np.float32)
        groups = self._groups()
        values -= self._zeros(start, stop).T[:, groups]
        values *= self.scales_of(start, stop).T[:, groups]
        return values

    def _groups(self) -> npt.NDArray[np.int64]:
        n_groups = self.scales.shape[0]
        if self.g_idx is None:
            return np.arange(self.n_cols) // -(-self.n_cols // n_groups)
        index = self.recent.raw(self.g_idx).view("<i4").reshape(-1).astype(np.int64)
        if index.min() < 0 or index.max() >= n_groups:
            raise BadShard(f"{self.g_idx.name} names groups beyond the {n_groups} that there are")
        return index

    def _zeros(self, start: int, stop: int) -> F32:
        per_word = WORD_BITS // self.n_bits
        first = start // per_word
        words = self.recent.raw(self.qzeros).view("<u4")[:, first : -(-stop // per_word)]
        codes = unpack(words, self.n_bits)[:, start - first * per_word : stop - first * per_word]
        codes += np.uint32(self.offset)
        codes &= np.uint32((1 << self.n_bits) - 1)  # as every kernel for these files has it
        return codes.astype(np.float32)


def find(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Joined]:
    recent = Recent()
    for layer, qweight, qzeros, scales in layers(stored, settings, of_awq=False):
        g_idx = stored.get(f"{layer}g_idx")
        n_rows, n_bits = qweight.shape[1], _n_bits(qweight, g_idx, settings)
        n_cols = qweight.shape[0] * WORD_BITS // n_bits
        n_groups = scales.shape[0] if len(scales.shape) == 2 else 0
        parts: list[Part] = [
            (qzeros, "I32", (n_groups, n_rows * n_bits // WORD_BITS)),
            (scales, scale_type(scales), (n_groups, n_rows)),
            *([(g_idx, "I32", (n_cols,))] if g_idx is not None else []),
        ]
        check(parts, qweight)
        offset = 0 if settings.values.get("checkpoint_format") == "gptq_v2" else 1
        weight = Gptq(
            f"{layer}weight", f"INT{n_bits}", (n_rows, n_cols), qweight.file,
            qweight, qzeros, scales, recent, g_idx, n_bits, offset,
        )  # fmt: skip
        yield Joined(weight, (qweight.name, *(part.name for part, _, _ in parts)))


def _n_bits(qweight: Stored, g_idx: Stored | None, settings: Settings) -> int:
    """As many bits as make a column's codes fill its words; config.json says so where no g_idx does."""
    n_words, n_cols = qweight.shape[0], g_idx.n_rows if g_idx is not None else 0
    n_bits = n_words * WORD_BITS / n_cols if n_cols else settings.values.get("bits")
    if n_bits not in BITS:
        raise UnsupportedModel(
            f"{qweight.name} has codes of {n_bits} bits; expected {', '.join(map(str, BITS))}: convert the unquantized checkpoint"
        )
    return int(n_bits)
