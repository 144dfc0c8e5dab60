"""How long OpenMP's threads spin before they sleep: libgomp is told when it is loaded, the only time it listens.

native/waiting.h says why, and decides later whether they spin at all. Knows libgomp alone, and can do nothing where it was loaded
before, as by an earlier `import llama_cpp`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from . import _native

SPIN_MS = 1  # less than a scheduler's slice; waits on an idle machine are far shorter
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # the user's own, which win
_MAPPED = Path("/proc/self/maps")


@contextlib.contextmanager
def bounded_spin() -> Iterator[None]:
    """Around the import of llama_cpp and `_native.bind`: threads of a libgomp that is loaded meanwhile spin for SPIN_MS at most.

    The environment is as before afterwards, and untouched where the user has chosen and where there is no /proc.

    Example:
        >>> with bounded_spin():                                                 # doctest: +SKIP
        ...     import llama_cpp
    """
    if any(name in os.environ for name in CHOICES) or not _MAPPED.exists():
        yield
        return
    before = _MAPPED.read_text()
    os.environ["GOMP_SPINCOUNT"] = str(_native.spins_in(SPIN_MS / 1000))
    try:
        yield
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)
    library = _native.openmp_library()
    if library is not None and os.path.realpath(library) not in before:
        _native.spins_for(SPIN_MS)
