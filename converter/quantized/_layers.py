"""What the layers of GPTQ and AWQ have in common: `qweight`, `qzeros` and `scales` in place of a weight, stored transposed.

A row of the weight is spread over the whole of `qweight`, which therefore is read whole and kept a while. Knows neither
how codes lie in their words nor what is taken off them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from llama_sidecar.converter.errors import BadShard
from llama_sidecar.converter.quantized._joined import Settings
from llama_sidecar.converter.quantized.packed import WORD_BITS
from llama_sidecar.converter.shards import F32, U8, Stored, Tensor, numbers

AWQ = "awq"
AWQ_BITS = 4
SCALES = ("F16", "BF16", "F32")
RECENT_BYTES = 1 << 28


class Recent:
    """The tensors read whole last, up to `RECENT_BYTES` of them, for all threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: OrderedDict[str, U8] = OrderedDict()

    def raw(self, tensor: Stored) -> U8:
        with self._lock:
            if tensor.name not in self._held:
                self._held[tensor.name] = tensor.raw_rows(0, tensor.n_rows)
                while len(self._held) > 1 and sum(one.nbytes for one in self._held.values()) > RECENT_BYTES:
                    self._held.popitem(last=False)
            self._held.move_to_end(tensor.name)
            return self._held[tensor.name]


@dataclass(frozen=True)
class Layer(Tensor):
    """A weight (n_rows, n_cols) out of its layer's tensors; `scales` are (n_groups, n_rows)."""

    qweight: Stored = field(repr=False)
    qzeros: Stored = field(repr=False)
    scales: Stored = field(repr=False)
    recent: Recent = field(repr=False)

    def raw_rows(self, start: int, stop: int) -> U8:
        """Rows of qweight, counted from its first again after its last: none of them is a row of the weight."""
        stored = (row % self.qweight.n_rows for row in range(start, stop))
        return np.concatenate([self.qweight.raw_rows(row, row + 1) for row in stored])

    def scales_of(self, start: int, stop: int) -> F32:
        """The scales of rows start..stop: (n_groups, stop - start)."""
        return numbers(self.recent.raw(self.scales), self.scales.dtype)[:, start:stop]

    def check_type(self) -> None:
        pass


Part = tuple[Stored, str, tuple[int, ...]]  # a tensor, and the type and shape that it is to have


def layers(
    stored: Mapping[str, Stored], settings: Settings, *, of_awq: bool
) -> Iterator[tuple[str, Stored, Stored, Stored]]:
    """The layers of AWQ or those of GPTQ: name with a dot at its end, qweight, qzeros and scales. Raises BadShard."""
    for name, qweight in stored.items():
        if not name.endswith(".qweight") or qweight.dtype != "I32" or len(qweight.shape) != 2:
            continue
        layer = name.removesuffix("qweight")
        qzeros, scales = stored.get(f"{layer}qzeros"), stored.get(f"{layer}scales")
        if qzeros is None or scales is None:
            raise BadShard(f"{name} in {qweight.file} has no {layer}qzeros or no {layer}scales beside it")
        if _is_awq(qweight, scales, settings) == of_awq:
            yield layer, qweight, qzeros, scales


def _is_awq(qweight: Stored, scales: Stored, settings: Settings) -> bool:
    """AWQ packs the rows of a weight into words, GPTQ its columns."""
    in_a_word = WORD_BITS // AWQ_BITS
    return settings.method == AWQ or scales.shape[-1:] == (qweight.shape[1] * in_a_word,)


def check(parts: Iterable[Part], qweight: Stored) -> None:
    """Raises BadShard where one has another type or shape; a scale's type is any of `SCALES`."""
    for part, dtype, shape in parts:
        if (part.dtype, part.shape) != (dtype, shape) or 0 in shape:
            raise BadShard(
                f"{part.name} is {part.dtype} of shape {part.shape}; expected {dtype} of {shape} with {qweight.name} of {qweight.shape}"
            )


def scale_type(scales: Stored) -> str:
    """The type that scales are to have: their own where that is one of `SCALES`."""
    return scales.dtype if scales.dtype in SCALES else SCALES[0]
