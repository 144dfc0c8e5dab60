"""Which tensor gets which type, and rows of float32 as the bytes of that type.

Facts: llama.cpp's converter and src/llama-quant.cpp for the types. Block types are computed by libggml itself, from the
library that llama-cpp-python installs; F32, F16 and BF16 need no library. Knows tensor names of GGUF, no checkpoint.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import MissingDependency, UnknownType
from llama_sidecar.sidecars import keys

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
ALWAYS_F32 = re.compile(r"_norm\.weight$|\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d)\.weight$")


@dataclass(frozen=True)
class Recipe:
    """The types of one file's matrices: `blocks` in the blocks, `embeddings` and `output` for the vocabulary's.

    With tied embeddings the one matrix gets the type of `output`. `name` appears in the file's name.
    """

    name: str
    blocks: GGMLType
    embeddings: GGMLType
    output: GGMLType

    @property
    def file_type(self) -> int:
        return int(TYPES[self.name])

    def type_of(self, name: str, shape: Sequence[int], tied: bool) -> GGMLType:
        """The type of a tensor by its GGUF name and its shape (slowest first)."""
        if len(shape) < 2 or not name.endswith(".weight") or ALWAYS_F32.search(name):
            return GGMLType.F32
        if name == keys.OUTPUT or (name == keys.TOKEN_EMBD and tied):
            return _fitting(self.output, shape[-1])
        return _fitting(self.embeddings if name == keys.TOKEN_EMBD else self.blocks, shape[-1])


def main_recipe(name: str) -> Recipe:
    """A named type for all matrices of a main file; Q4_0 keeps the output at Q6_K, as llama-quantize does."""
    kind = _known(name)
    return Recipe(name, kind, kind, GGMLType.Q6_K if kind == GGMLType.Q4_0 else kind)


def sidecar_recipe(name: str | None) -> Recipe:
    """A named type for all matrices of a sidecar; by default Q8_0 with the vocabulary's matrices at Q4_0.

    A draft that differs now and then costs speed and nothing else, and those matrices are most of a sidecar.
    """
    if name is None:
        return Recipe("Q8_0", GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_0)
    kind = _known(name)
    return Recipe(name, kind, kind, kind)


def _known(name: str) -> GGMLType:
    if name not in TYPES:
        raise UnknownType(f"the type asked for is {name!r}; expected one of {', '.join(TYPES)}")
    return GGMLType[name]


def _fitting(kind: GGMLType, n_cols: int) -> GGMLType:
    """The type, or the next one whose blocks fill a row of `n_cols` values."""
    if kind == GGMLType.Q6_K and n_cols % GGML_QUANT_SIZES[kind][0]:
        kind = GGMLType.Q8_0
    return GGMLType.F16 if n_cols % GGML_QUANT_SIZES[kind][0] else kind


def row_bytes(kind: GGMLType, n_cols: int) -> int:
    """The size of one row of `n_cols` values."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(n_cols // block * size)


def encode(rows: F32, kind: GGMLType) -> U8:
    """Float32 rows (n_rows, n_cols), contiguous -> their bytes in a type (n_rows, row_bytes).

    Raises MissingDependency when a block type is asked for and libggml is not there.

        >>> encode(np.ones((2, 4), np.float32), GGMLType.F16).shape
        (2, 8)
    """
    if kind == GGMLType.F32:
        return rows.view(np.uint8)
    if kind == GGMLType.F16:
        return rows.astype("<f2").view(np.uint8)
    if kind == GGMLType.BF16:
        return _bfloat16(rows).view(np.uint8)
    return _blocks(rows, kind)


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


def _blocks(rows: F32, kind: GGMLType) -> U8:
    n_rows, n_cols = rows.shape
    out = np.empty((n_rows, row_bytes(kind, n_cols)), np.uint8)
    written = libggml().ggml_quantize_chunk(
        int(kind), rows.ctypes.data, out.ctypes.data, 0, n_rows, n_cols, None
    )
    assert written == out.nbytes, f"libggml wrote {written} bytes of {kind.name} for {rows.shape}"
    return out


@cache
def libggml() -> ctypes.CDLL:
    """The ggml base library that llama-cpp-python installs, loaded without importing llama_cpp."""
    spec = importlib.util.find_spec("llama_cpp")
    package = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted((package / "lib").glob("*ggml-base.*")) if package else []
    if not found:
        raise MissingDependency(
            "block types need libggml, which llama-cpp-python installs and which was not found: "
            "pip install llama-cpp-python, or ask for F32, F16 or BF16"
        )
    library = ctypes.CDLL(str(found[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return library
