"""The small-batch kernels: whether this process has them, and which weights of a model they take.

Thin Python over runtime/native/smallbatch. Knows types and reasons; knows nothing of models or sessions. The kernels join
ggml's CPU backend at the first wish for them, never at import, and stay for the life of the process; they compute nothing but
products with weights that were placed for them, and attention's with the rows of those (smallbatch/device.h).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from . import _native
from .library import llama

MAX_ROWS = 8  # of a product
TRIAL_BYTES = 96 << 20  # of weights per pass: far more than most caches hold
TRIAL_SHAPE = (1024, 2048)  # values in, values out; a row is a multiple of every block
_lock = threading.Lock()


def problem() -> str | None:
    """Why the kernels cannot be used in this process, or None; the first call lets them join.

    Raises:
        LibraryError: llama.cpp itself cannot be used.

    Example:
        >>> problem()                               # doctest: +SKIP
        "ggml's CPU backend was built without repacking"
    """
    with _lock:
        return _register()


@functools.cache
def _register() -> str | None:
    why: str | None = _native.smallbatch_register(llama()._lib._handle)
    return why


def kernel_set(type: Type | int) -> str | None:
    """The kernels that products with weights of this type run on here ("avx512-vnni", ...), or None."""
    name: str | None = _native.smallbatch_set_for(int(type))
    return name


def types() -> frozenset[Type]:
    """The weight types that have kernels on this processor; none where they cannot be used."""
    if problem() is not None:
        return frozenset()
    return frozenset(t for t in Type if kernel_set(t) is not None)


@contextmanager
def placing(wanted: Collection[Type | int] | None = None) -> Iterator[frozenset[Type]]:
    """While it lasts, models that this thread loads have their matrices of the `wanted` types placed for the kernels.

    The weights stay where they are (in the mapped file); matrices of other types go where llama.cpp puts them. Load with all layers on
    the CPU. Yields the types that are placed: none where `problem()` says why.

    Args:
        wanted: weight types (default: all that have kernels).

    Example:
        >>> with placing({Type.Q8_0}):              # doctest: +SKIP
        ...     model = llama_cpp.llama_model_load_from_file(b"model.gguf", params)
    """
    placed = types() if wanted is None else types() & {Type(t) for t in wanted}
    _native.smallbatch_set_placing([int(t) for t in placed])
    try:
        yield placed
    finally:
        _native.smallbatch_set_placing([])


@dataclass(frozen=True)
class Trial:
    """How long products with weights of one type took, a pass over all of them, in seconds, at each number of rows.

    `ours_s` by the small-batch kernels, `stock_s` by llama.cpp's own with the weights repacked for them. The weights
    were matrices of `shape` (values in, values out), `n_bytes` in all.
    """

    type: Type
    shape: tuple[int, int]
    n_bytes: int
    n_rows: tuple[int, ...]
    ours_s: tuple[float, ...]
    stock_s: tuple[float, ...]

    @property
    def ours_gains(self) -> float:
        """How many times as fast ours is: the geometric mean over the numbers of rows.

        >>> Trial(Type.Q8_0, (1024, 2048), 1 << 20, (1, 4), (1.0, 1.0), (2.0, 8.0)).ours_gains
        4.0
        """
        ratios = [stock / ours for stock, ours in zip(self.stock_s, self.ours_s, strict=True)]
        return math.prod(ratios) ** (1 / len(ratios))


def try_out(
    type: Type | int,
    *,
    n_rows: Sequence[int],
    threads: int,
    shape: tuple[int, int] = TRIAL_SHAPE,
    n_bytes: int = TRIAL_BYTES,
    repeats: int = 4,
    repacked: bool = True,
) -> Trial:
    """Times passes over made-up weights of `type`, by ours and by the CPU backend in turns; a third of a second.

    Args:
        n_rows: numbers of rows, 1 to 8: what matters is 1 and depth + 1.
        threads: CPU threads.
        shape: values in and out of each matrix.
        n_bytes: of weights read in a pass.
        repeats: passes of each, of which the fastest counts.
        repacked: whether the CPU backend may repack its weights, as it does when llama.cpp loads a file.

    Raises:
        ValueError: `type` has no kernels here (see `types()`), or its blocks do not fit into rows of `shape`.

    Example:
        >>> try_out(Type.Q4_K, n_rows=(1, 4), threads=8).ours_gains > 1      # doctest: +SKIP
        True
    """
    type = Type(type)
    if type not in types():
        raise ValueError(f"{type.name} has no small-batch kernels here: {problem() or 'not that type'}")
    if shape[0] % GGML_QUANT_SIZES[type][0] or min(shape) < 1:
        raise ValueError(
            f"{shape[0]} values are no blocks of {type.name} ({GGML_QUANT_SIZES[type][0]} values each)"
        )
    try:
        ours_s, stock_s = _native.smallbatch_trial(
            int(type), *shape, n_bytes, list(n_rows), threads, repeats, repacked
        )
    finally:
        _native.release_team()  # the first text may be another thread's
    return Trial(type, shape, n_bytes, tuple(n_rows), tuple(ours_s), tuple(stock_s))
