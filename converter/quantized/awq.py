"""AWQ: integers of 4 bits, eight rows of the weight in a word.

Facts: AutoAWQ's layers of its version "gemm". Of a layer `L`, `L.qweight` (n_cols, n_rows / 8) holds the codes of the
transposed weight, `L.scales` (n_groups, n_rows) the factors of groups of columns, and `L.qzeros` (n_groups, n_rows / 8),
packed like the codes, what is taken off a code. From its lowest bits on a word has the rows 0, 2, 4, 6, 1, 3, 5, 7 of its
eight. What AWQ scales activations by has gone into the weights before. AutoAWQ's other versions pack otherwise and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.errors import BadShard, UnsupportedModel
from llama_sidecar.converter.quantized._joined import Joined, Settings
from llama_sidecar.converter.quantized._layers import (
    AWQ,
    AWQ_BITS,
    Layer,
    Recent,
    check,
    layers,
    scale_type,
)
from llama_sidecar.converter.quantized.packed import WORD_BITS, unpack
from llama_sidecar.converter.shards import F32, Stored

METHODS = (AWQ,)
PER_WORD = WORD_BITS // AWQ_BITS
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in its word each of eight rows is
VERSION = "gemm"


@dataclass(frozen=True)
class Awq(Layer):
    """A weight (n_rows, n_cols); no other order of columns than the stored one."""

    def rows(self, start: int, stop: int) -> F32:
        n_groups = self.scales.shape[0]
        values = self._codes(self.qweight, start, stop).reshape(n_groups, -1, stop - start)
        values -= self._codes(self.qzeros, start, stop)[:, None]
        values *= self.scales_of(start, stop)[:, None]
        return np.ascontiguousarray(values.reshape(self.n_cols, -1).T)

    def _codes(self, packed: Stored, start: int, stop: int) -> F32:
        """The codes of rows start..stop, a column of them for each: (packed.n_rows, stop - start)."""
        first, last = start // PER_WORD, -(-stop // PER_WORD)
        words = self.recent.raw(packed).view("<u4")[:, first:last]
        codes: npt.NDArray[np.uint32] = unpack(words, AWQ_BITS).reshape(-1, PER_WORD)[:, PLACES]
        held = codes.reshape(len(words), -1)[:, start - first * PER_WORD : stop - first * PER_WORD]
        return held.astype(np.float32)


def find(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Joined]:
    recent = Recent()
    for layer, qweight, qzeros, scales in layers(stored, settings, of_awq=True):
        _check_settings(settings)
        (n_cols, n_words), n_groups = qweight.shape, scales.shape[0] if scales.shape else 0
        n_rows = n_words * PER_WORD
        if not n_groups or n_cols % n_groups:
            raise BadShard(
                f"{scales.name} has shape {scales.shape} for {n_cols} columns; expected whole groups of them"
            )
        check(
            [
                (qzeros, "I32", (n_groups, n_words)),
                (scales, scale_type(scales), (n_groups, n_rows)),
            ],
            qweight,
        )
        weight = Awq(
            f"{layer}weight", f"INT{AWQ_BITS}", (n_rows, n_cols), qweight.file, qweight, qzeros, scales, recent
        )  # fmt: skip
        yield Joined(weight, (qweight.name, qzeros.name, scales.name))


def _check_settings(settings: Settings) -> None:
    """Raises UnsupportedModel for what is packed otherwise."""
    version, n_bits = (settings.values.get(name) for name in ("version", "bits"))
    if str(version or VERSION).lower() != VERSION or (n_bits or AWQ_BITS) != AWQ_BITS:
        raise UnsupportedModel(
            f"config.json says that AWQ's version is {version!r} and its codes have {n_bits} bits; expected {VERSION!r} and "
            f"{AWQ_BITS}: convert the unquantized checkpoint"
        )
