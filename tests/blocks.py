"""Weights for the small-batch kernels: random and extreme blocks of every type, and what their products are in float64.

Knows the layouts only so far that it finds the scales. For tests, and for scripts/dev/foreign_kernels.py.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

TYPES = (T.Q8_0, T.Q4_0, T.Q5_0, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.BF16, T.F16, T.F32)
HALVES = {  # where a block has its scales and minima
    T.Q8_0: (0,),
    T.Q4_0: (0,),
    T.Q5_0: (0,),
    T.IQ4_NL: (0,),
    T.IQ4_XS: (0,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
}
EXTREMES = (
    0.0,
    -0.0,
    65504.0,
    -65504.0,
    6e-8,
    6e-5,
)  # of a half: zeros, the largest, the least, nearly normal
CODES = (255, 128, 127, 0)


def n_values(type: T, n_blocks: int) -> int:
    """A row length: that many blocks, or an odd number for types whose block is one value."""
    block = gguf.GGML_QUANT_SIZES[type][0]
    return block * n_blocks if block > 1 else 29 * n_blocks


def random_weights(rng: np.random.Generator, type: T, n_out: int, n_in: int) -> np.ndarray:
    """Blocks of random bits, whose scales are ordinary numbers of either sign: (n_out, bytes)."""
    if type not in HALVES:
        return dense(rng.standard_normal((n_out, n_in)).astype(np.float32), type)
    block, size = gguf.GGML_QUANT_SIZES[type]
    blocks = rng.integers(0, 256, (n_out, n_in // block, size), dtype=np.uint8)
    for offset in HALVES[type]:
        scales = rng.uniform(0.001, 0.01, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        blocks[:, :, offset : offset + 2] = scales.astype(np.float16)[:, :, None].view(np.uint8)
    return blocks.reshape(n_out, -1)


def extreme_weights(rng: np.random.Generator, type: T, n_in: int) -> np.ndarray:
    """A row of each extreme: as every scale, or as every weight; then rows whose codes are all the same. The rest is random."""
    weights = random_weights(rng, type, 40, n_in)
    if type not in HALVES:
        weights[: len(EXTREMES)] = dense(np.repeat(np.float32(EXTREMES)[:, None], n_in, axis=1), type)
        weights[len(EXTREMES)] = dense(np.full((1, n_in), 1e-40, np.float32), type)[0]
        return weights
    block, size = gguf.GGML_QUANT_SIZES[type]
    blocks = weights.reshape(40, n_in // block, size)
    halves = [byte for offset in HALVES[type] for byte in (offset, offset + 1)]
    for row, scale in enumerate(EXTREMES):
        blocks[row, :, halves] = np.tile(np.float16([scale]).view(np.uint8), len(HALVES[type]))[:, None]
    for row, code in enumerate(CODES, len(EXTREMES)):
        blocks[row][:, [i for i in range(size) if i not in halves]] = code
    return weights


def extreme_rows(rng: np.random.Generator, n_in: int) -> np.ndarray:
    """Eight rows of x: zeros, subnormal, huge, tiny and lopsided values, and what is largest when quantised, of either sign."""
    x = rng.standard_normal((8, n_in)).astype(np.float32)
    x[0] = 0
    x[1] = 1e-40
    x[2] *= 1e25
    x[3, ::3] = 0
    x[4] = np.where(np.arange(n_in) % 32 == 0, 1000, 1e-3)
    x[5] *= 1e-25
    x[6], x[7] = 1, -1
    return x


def dense(values: np.ndarray, type: T) -> np.ndarray:
    """Weights that are numbers themselves, as bytes."""
    return gguf.quants.quantize(values, type).view(np.uint8).reshape(len(values), -1)


def exact(type: T, weights: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the error that rows of 8 bits (BF16 for BF16) may make at most."""
    values = gguf.quants.dequantize(weights.view(np.float32 if type == T.F32 else np.uint8), type)
    w, x64 = values.astype(np.float64), x.astype(np.float64)
    if type in HALVES:
        step = np.abs(x64).reshape(len(x), -1, 32).max(axis=2).repeat(32, axis=1) / 127 / 2
        step = np.where(step < 1e-38, np.abs(x64), step)  # blocks below 1e-36 count as 0
    else:
        step = np.abs(x64) * (2.0**-8 if type == T.BF16 else 0)
    rounding = np.abs(x64) @ np.abs(w).T * 2.0**-20
    if type == T.BF16:  # AVX512-BF16 counts subnormal numbers as 0
        rounding += np.abs(x64) @ np.abs(subnormal(w)).T + np.abs(subnormal(x64)) @ np.abs(w).T
    return x64 @ w.T, step @ np.abs(w).T + rounding + 1e-37


def subnormal(values: np.ndarray) -> np.ndarray:
    """Those values that F32 has no full precision for; 0 for the others."""
    return np.where(np.abs(values) < 2.0**-126, values, 0)
