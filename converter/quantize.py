"""Rows of float32 as the bytes of a type.

Block types are computed by libggml itself, from the library that llama-cpp-python installs; F32, F16, BF16 and I32, of whole
numbers below 2**24, need no library. Knows neither tensors nor files.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import MissingDependency

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

MAX_VALUE = 65504  # in blocks, whose scales are half-precision


def row_bytes(kind: GGMLType, n_cols: int) -> int:
    """The size of one row of `n_cols` values."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(n_cols // block * size)


def uses_importance(kind: GGMLType) -> bool:
    """Whether the type's blocks are fitted to their values; those of Q8_0 follow from the largest."""
    return bool(GGML_QUANT_SIZES[kind][0] > 1 and kind != GGMLType.Q8_0)


def encode(rows: F32, kind: GGMLType, importance: F32 | None = None) -> U8:
    """Float32 rows (n_rows, n_cols), contiguous -> their bytes in a type (n_rows, row_bytes).

    `importance` (n_cols,) weighs the columns where blocks are fitted. Raises FloatingPointError for values that no block
    can hold, and MissingDependency when a block type is asked for and libggml is not there.

        >>> encode(np.ones((2, 4), np.float32), GGMLType.F16).shape
        (2, 8)
    """
    if kind == GGMLType.F32:
        return rows.view(np.uint8)
    if kind == GGMLType.I32:
        return rows.astype("<i4").view(np.uint8)
    if kind == GGMLType.F16:
        return rows.astype("<f2").view(np.uint8)
    if kind == GGMLType.BF16:
        return _bfloat16(rows).view(np.uint8)
    return _blocks(rows, kind, importance)


def check_libggml(kinds: Iterable[GGMLType]) -> None:
    """Raises MissingDependency if one of the types is a block type and libggml is not there."""
    if any(GGML_QUANT_SIZES[kind][0] > 1 for kind in kinds):
        libggml()


def _bfloat16(rows: F32) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even; a NaN stays one, made quiet."""
    bits = rows.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(rows)
    if nan.any():
        rounded[nan] = bits[nan] >> 16 | 64
    return rounded.astype("<u2")


def _blocks(rows: F32, kind: GGMLType, importance: F32 | None) -> U8:
    n_rows, n_cols = rows.shape
    # Also true of a NaN, which libggml would pass over.
    if not (rows.min() >= -MAX_VALUE and rows.max() <= MAX_VALUE):
        raise FloatingPointError(f"values beyond {MAX_VALUE}, infinities or NaNs")
    out = np.empty((n_rows, row_bytes(kind, n_cols)), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    written = libggml().ggml_quantize_chunk(
        int(kind), rows.ctypes.data, out.ctypes.data, 0, n_rows, n_cols, weights
    )
    assert written == out.nbytes, f"libggml wrote {written} bytes of {kind.name} for {rows.shape}"
    if not libggml().ggml_validate_row_data(int(kind), out.ctypes.data, out.nbytes):
        raise FloatingPointError("libggml made blocks whose scales are infinities or NaNs")
    return out


def libggml_path() -> Path | None:
    """Where llama-cpp-python's ggml base library is; None without one."""
    spec = importlib.util.find_spec("llama_cpp")
    package = Path(spec.origin).parent if spec and spec.origin else None
    return min((package / "lib").glob("*ggml-base.*"), default=None) if package else None


@cache
def libggml() -> ctypes.CDLL:
    """The ggml base library that llama-cpp-python installs, loaded without importing llama_cpp."""
    path = libggml_path()
    if path is None:
        raise MissingDependency(
            "block types need libggml, which llama-cpp-python installs and which was not found: "
            "pip install llama-cpp-python, or ask for F32, F16 or BF16"
        )
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    library.ggml_validate_row_data.restype = ctypes.c_bool
    library.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return library
