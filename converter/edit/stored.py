"""Tensors of GGUF files as the writer takes them: their bytes as they lie there, or the same values at another type.

Rows are read when the writer asks for them, so a file of any size passes through a few megabytes. libggml dequantises as it
quantises. Knows no tensor by name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import CannotDequantize, OutOfRange
from llama_sidecar.converter.quantize import encode, libggml, row_bytes
from llama_sidecar.sidecars import TensorInfo

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Stored:
    """One tensor of a file, unchanged: `rows(start, stop)` are its bytes, (stop - start, row_bytes). `shape` is slowest first."""

    info: TensorInfo

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape[::-1]

    @property
    def type(self) -> GGMLType | int:
        return self.info.type

    @property
    def n_cols(self) -> int:
        return self.info.shape[0]

    @property
    def n_rows(self) -> int:
        return prod(self.info.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.info.n_bytes // self.n_rows

    @property
    def n_bytes(self) -> int:
        return self.info.n_bytes

    def rows(self, start: int, stop: int) -> U8:
        """Raises UnreadableFile, TruncatedFile."""
        data = self.info.read(start * self.row_bytes, (stop - start) * self.row_bytes)
        return data.reshape(stop - start, self.row_bytes)

    def values(self, start: int, stop: int) -> F32:
        """The same rows as float32, (stop - start, n_cols). Raises CannotDequantize too."""
        return decode(self.rows(start, stop), self)


@dataclass(frozen=True)
class Retyped(Stored):
    """One tensor of a file at another type."""

    to: GGMLType

    @property
    def type(self) -> GGMLType:
        return self.to

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.to, self.n_cols)

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    def rows(self, start: int, stop: int) -> U8:
        """Raises OutOfRange for values that the type cannot hold, and what `Stored.values` raises."""
        values = Stored(self.info).values(start, stop)
        try:
            with np.errstate(over="raise"):
                return encode(values, self.to)
        except FloatingPointError as error:
            raise OutOfRange(
                f"{self.info.path}: {self.name} has values beyond the range of {self.to.name}: ask for BF16 or F32"
            ) from error


def pieces(tensor: Stored) -> Iterator[tuple[int, int]]:
    """Ranges of a tensor's rows, each of about PIECE_BYTES."""
    step = max(1, PIECE_BYTES // tensor.row_bytes)
    return ((start, min(start + step, tensor.n_rows)) for start in range(0, tensor.n_rows, step))


def same_bytes(ours: TensorInfo, theirs: TensorInfo) -> bool:
    """Whether two tensors of one shape and type hold the same."""
    one, other = Stored(ours), Stored(theirs)
    return all(np.array_equal(one.rows(a, b), other.rows(a, b)) for a, b in pieces(one))


def rounding(info: TensorInfo) -> float:
    """At most how much of a matrix's length its type may have rounded away, about: a few steps of its bits.

    Of values between a normal and a Student distribution (3 degrees of freedom) ggml's types lose 0.37 to 0.81 of it.
    """
    if info.type in FLOATS:
        return 2.0**-8  # BF16's, the coarsest
    return float(2.0 ** (2 - 8 * info.n_bytes / info.n_elements))


def decode(rows: U8, tensor: Stored) -> F32:
    """Rows as they lie in a file (n_rows, row_bytes) -> float32 (n_rows, n_cols).

    Raises CannotDequantize for a type of which libggml has no values, MissingDependency where there is no libggml.
    """
    kind, shape = tensor.info.type, (len(rows), tensor.n_cols)
    if kind == GGMLType.F32:
        return rows.view("<f4").reshape(shape)
    if kind == GGMLType.F16:
        return rows.view("<f2").astype(np.float32).reshape(shape)
    if kind == GGMLType.BF16:
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    dequantize = _dequantizer(tensor.info)
    values = np.empty(shape, np.float32)
    dequantize(rows.ctypes.data, values.ctypes.data, ctypes.c_int64(values.size))
    return values


def check_dequantizable(infos: Iterable[TensorInfo]) -> None:
    """Raises CannotDequantize for the first tensor of a type that libggml cannot read, before anything is written."""
    for info in infos:
        if info.type not in FLOATS:
            _dequantizer(info)


def _dequantizer(info: TensorInfo) -> ctypes._NamedFuncPointer:
    """libggml's function `dequantize_row_q4_K` and the like, which its library exports for every block type."""
    name = info.type_name.lower()
    if name.endswith("_k"):
        name = f"{name[:-1]}K"
    try:
        function = libggml()[f"dequantize_row_{name}"]
    except AttributeError as error:
        raise CannotDequantize(
            f"{info.path}: {info.name} is {info.type_name}, which libggml cannot dequantise: leave it at its type"
        ) from error
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return function
