"""How the target's next token is chosen: greedy, or temperature / top-k / top-p / min-p with a seed.

The arithmetic is llama.cpp's sampler chain in its own order; this module only builds it. Defaults come from the file's
`general.sampling.*` keys, else from llama.cpp's own.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import _native
from .errors import PromptError
from .library import llama


@dataclass(frozen=True)
class Sampling:
    """Settings of one generation. `temperature` 0 is greedy; `seed` None draws a fresh one.

    >>> Sampling(temperature=0.7, seed=1).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0 or self.top_k == 1

    def with_options(self, **options: Any) -> Sampling:
        """These settings with every option that is not None put over them.

        Raises:
            PromptError: an option is out of its range.
        """
        chosen = replace(self, **{name: value for name, value in options.items() if value is not None})
        whole = isinstance(chosen.top_k, int) and isinstance(chosen.seed or 0, int)
        rules: dict[str, bool] = {
            f"top_k {chosen.top_k!r} and seed {chosen.seed!r} are not whole numbers": not whole,
            f"temperature {chosen.temperature} is not a number of at least 0": not (
                0 <= chosen.temperature < math.inf
            ),
            f"top_k {chosen.top_k} is negative": chosen.top_k < 0,
            f"top_p {chosen.top_p} is not between 0 and 1": not 0 < chosen.top_p <= 1,
            f"min_p {chosen.min_p} is not between 0 and 1": not 0 <= chosen.min_p <= 1,
            f"seed {chosen.seed} is not between 0 and 4294967295": not 0 <= (chosen.seed or 0) < 2**32,
        }
        broken = [rule for rule, is_broken in rules.items() if is_broken]
        if broken:
            raise PromptError("sampling: " + "; ".join(broken))
        return chosen


def file_defaults(keys: Mapping[str, Any]) -> Sampling:
    """The file's own sampling settings (`general.sampling.*`), greedy where it has none.

    >>> file_defaults({"general.sampling.temp": 0.6, "general.sampling.top_k": 20}).top_k
    20
    """
    found = {
        "temperature": keys.get("general.sampling.temp"),
        "top_k": keys.get("general.sampling.top_k"),
        "top_p": keys.get("general.sampling.top_p"),
        "min_p": keys.get("general.sampling.min_p"),
    }
    try:
        return Sampling().with_options(**found)
    except (PromptError, TypeError, ValueError):
        return Sampling()  # a file's nonsense is not the user's mistake


class Chooser:
    """A native chooser and what it needs kept alive. Close it when the generation ends; else it goes with its last reference."""

    def __init__(self, native: Any, free: Callable[[], None] = lambda: None) -> None:
        self.native = native
        self._free = weakref.finalize(self, free)
        self._free.atexit = False

    def close(self) -> None:
        self.native = None
        self._free()


def make_chooser(sampling: Sampling) -> Chooser:
    """Builds the chooser for these settings: own arg-max for greedy, llama.cpp's chain otherwise."""
    if sampling.greedy:
        return Chooser(_native.greedy_chooser())
    lib = llama()
    seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for part in (
        lib.llama_sampler_init_top_k(sampling.top_k),
        lib.llama_sampler_init_top_p(sampling.top_p, 1),
        lib.llama_sampler_init_min_p(sampling.min_p, 1),
        lib.llama_sampler_init_temp(sampling.temperature),
        lib.llama_sampler_init_dist(seed),
    ):
        lib.llama_sampler_chain_add(chain, part)
    return Chooser(_native.chain_chooser(address(chain)), lambda: lib.llama_sampler_free(chain))


def address(pointer: Any) -> int:
    """The address a ctypes pointer (or void pointer) holds."""
    import ctypes

    return ctypes.cast(pointer, ctypes.c_void_p).value or 0
