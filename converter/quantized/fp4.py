"""Four-bit floats in groups that share a scale: NVFP4 of modelopt and compressed-tensors, MXFP4 of gpt-oss, MiMo and DeepSeek.

Facts: the OCP microscaling formats, modelopt's and compressed-tensors' exports, ggml's block_nvfp4 and block_mxfp4. Two
codes of E2M1 share a byte, the first in its low half. NVFP4 has a scale of E4M3 for 16 values and a factor for the
whole matrix beside it, which compressed-tensors stores as its inverse; MXFP4 a power of two for 32. Codes and scales are
called `W_packed` and `W_scale`, `W_blocks` and `W_scales`, or `W` and `W_scale` (or `.scale`). GGUF has both as types of
its own, in which they can be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from llama_sidecar.converter.errors import BadShard
from llama_sidecar.converter.quantized._joined import Joined, Settings
from llama_sidecar.converter.shards import BYTES, F32, U8, Stored, Tensor

METHODS = ("modelopt", "compressed-tensors", "mxfp4", "fp8")

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([_E2M1, -_E2M1])
PAIRS: F32 = np.stack(
    [VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], axis=1
)  # a byte's two values
GROUPS = {("NVFP4", "F8_E4M3"): 16, ("MXFP4", "U8"): 32, ("MXFP4", "F8_E8M0"): 32}
NVFP4_BLOCK = 64  # ggml puts four groups into a block


@dataclass(frozen=True)
class Factor:
    """A factor for each matrix of a weight, or one for all; stored as it is or inverted."""

    stored: Stored
    is_inverse: bool

    def values(self) -> F32:
        """(n_matrices,) or (1,)."""
        found = self.stored.rows(0, self.stored.n_rows).reshape(-1)
        with np.errstate(divide="ignore"):  # what comes of a 0 is refused where it is quantised
            inverse: F32 = np.float32(1) / found
        return inverse if self.is_inverse else found


@dataclass(frozen=True)
class Fp4(Tensor):
    """Codes (..., n_cols / 2), scales (..., n_cols / `group`), and NVFP4's factor for the whole.

    `input` is what the activations are to be scaled by, which a file that keeps the type can tell its reader. `order` are
    the groups of a row as `blocks` is to write them, None for as they are.
    """

    codes: Stored = field(repr=False)
    scale: Stored = field(repr=False)
    group: int
    factor: Factor | None = field(default=None, repr=False)
    input: Factor | None = field(default=None, repr=False)
    order: tuple[int, ...] | None = field(default=None, repr=False)

    def raw_rows(self, start: int, stop: int) -> U8:
        return self.codes.raw_rows(start, stop)

    def rows(self, start: int, stop: int) -> F32:
        values = PAIRS[self.raw_rows(start, stop)].reshape(stop - start, -1, self.group)
        values *= self._scales(start, stop)[:, :, None]
        if self.factor is not None:
            factors = self.factor.values()
            matrix = np.arange(start, stop) // self.shape[-2]
            with np.errstate(invalid="ignore"):
                values *= factors[matrix if len(factors) > 1 else matrix * 0].reshape(-1, 1, 1)
        return values.reshape(stop - start, self.n_cols)

    def _scales(self, start: int, stop: int) -> F32:
        table = BYTES["F8_E8M0" if self.dtype == "MXFP4" else "F8_E4M3"]
        return table[self.scale.raw_rows(start, stop)]

    def blocks(self, start: int, stop: int) -> U8:
        """The same codes and scales in ggml's order; the factor for the whole is not in them."""
        codes, scales = self.raw_rows(start, stop), self.scale.raw_rows(start, stop)
        n_groups, half = scales.shape[1], self.group // 2
        if self.order is not None:
            order = list(self.order)
            codes = codes.reshape(stop - start, n_groups, half)[:, order].reshape(codes.shape)
            scales = scales[:, order]
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(stop - start, n_groups, 2, half)
        packed = pairs[:, :, 0] | pairs[:, :, 1] << 4  # value j with value j + half
        per_block = NVFP4_BLOCK // self.group if self.dtype == "NVFP4" else 1
        n_blocks = n_groups // per_block
        if self.dtype == "NVFP4":
            scales &= np.uint8(0x7F)  # ggml's has no sign, and a scale none to lose
        parts = [scales.reshape(-1, n_blocks, per_block), packed.reshape(-1, n_blocks, per_block * half)]
        return np.concatenate(parts, axis=2).reshape(stop - start, -1)

    def check_type(self) -> None:
        pass


def find(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Joined]:
    for name, codes in stored.items():
        if codes.dtype not in ("U8", "I8"):
            continue
        stem, scale = _scale_of(name, stored)
        kind = next((kind for kind, dtype in GROUPS if scale is not None and dtype == scale.dtype), None)
        if scale is None or kind is None:
            continue
        if name.endswith("_blocks") and len(codes.shape) > 2:  # a group has a dimension of its own
            codes = replace(codes, shape=(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1]))
        stack, n_bytes = codes.shape[:-1], codes.shape[-1] if codes.shape else 0
        shape, group = (*stack, 2 * n_bytes), GROUPS[kind, scale.dtype]
        if not stack or shape[-1] % group or scale.shape != (*stack, shape[-1] // group):
            raise BadShard(
                f"{scale.name} has shape {scale.shape} for {name} of {codes.shape}; expected a scale for each {group} values of {kind}"
            )
        factor = _factor(f"{stem}_scale_2", f"{stem}_global_scale", stored, shape)
        layer = stem.removesuffix(".weight")
        of_input = _factor(f"{layer}.input_scale", f"{layer}.input_global_scale", stored, shape)
        weight = Fp4(stem, kind, shape, codes.file, codes, scale, group, factor, of_input)
        more = [one.stored.name for one in (factor, of_input) if one is not None]
        yield Joined(weight, (name, scale.name, *more))


def _scale_of(name: str, stored: Mapping[str, Stored]) -> tuple[str, Stored | None]:
    """The weight's name and its scales, if there are any."""
    for suffix, ending in {"_packed": "_scale", "_blocks": "_scales"}.items():
        if name.endswith(suffix):
            stem = name.removesuffix(suffix)
            return stem, stored.get(f"{stem}{ending}")
    return name, stored.get(f"{name}_scale", stored.get(f"{name.removesuffix('.weight')}.scale"))


def _factor(plain: str, inverse: str, stored: Mapping[str, Stored], shape: tuple[int, ...]) -> Factor | None:
    found = stored.get(plain, stored.get(inverse))
    if found is None:
        return None
    if prod(found.shape) not in (1, prod(shape[:-2])):
        raise BadShard(
            f"{found.name} has shape {found.shape}; expected one value, or one for each matrix of {shape}"
        )
    return Factor(found, is_inverse=plain not in stored)
