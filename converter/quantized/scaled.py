"""FP8 and int8 weights with scales beside them: DeepSeek's and Qwen's blocks, compressed-tensors, fbgemm, modelopt's FP8.

Facts: transformers' finegrained_fp8 and compressed-tensors' naive format. A weight's codes have its own name and shape,
its scales the name and `_scale_inv`, `_scale`, or `.scale` in place of `.weight`: all are factors, whatever they are
called. Integers may have a zero point. Which block a scale is for, config.json says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llama_sidecar.converter.quantized._joined import Grid, Joined, Settings, grid
from llama_sidecar.converter.shards import F32, FP8, U8, Stored, Tensor

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
SCALES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Scaled(Tensor):
    """Codes times scales, less zero points before that where there are any."""

    codes: Stored = field(repr=False)
    scale: Grid = field(repr=False)
    zero: Grid | None = field(default=None, repr=False)

    def raw_rows(self, start: int, stop: int) -> U8:
        return self.codes.raw_rows(start, stop)

    def rows(self, start: int, stop: int) -> F32:
        values = self.codes.rows(start, stop)
        if self.zero is not None:
            values -= self.zero.over(start, stop)
        values *= self.scale.over(start, stop)
        return values

    def check_type(self) -> None:
        pass


def find(stored: Mapping[str, Stored], settings: Settings) -> Iterator[Joined]:
    for name, codes in stored.items():
        if codes.dtype not in (*FP8, "I8"):
            continue
        names = (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale")
        scale = next((stored[n] for n in names if n in stored), None)
        allowed = SCALES if codes.dtype == "I8" else (*SCALES, "F8_E8M0")  # 4-bit codes may be called I8 too
        if scale is None or scale.dtype not in allowed:
            continue
        zero = stored.get(f"{name}_zero_point")
        shape = codes.shape
        weight = Scaled(
            name, codes.dtype, shape, codes.file, codes,
            grid(scale, name, shape, settings.blocks()),
            grid(zero, name, shape, settings.blocks()) if zero else None,
        )  # fmt: skip
        yield Joined(weight, (name, scale.name, *([zero.name] if zero else ())))
