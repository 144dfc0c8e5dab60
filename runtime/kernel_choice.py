"""Which kernels compute a model's products on the CPU: those asked for, or what is faster here, measured and remembered.

Measured are passes over made-up weights in the shape of the model's own (see trial.h), for each type that makes up some of
it, at one row and at as many as a verification has; no weights are loaded. Knows types, shapes and bytes; knows no sessions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from llama_sidecar.sidecars import GGUFHeader

from . import kernels
from .cache_folder import CacheFolder
from .errors import CacheError, LoadError
from .kernels import TRIAL_BYTES, Trial

NAMES: tuple[str, ...] = ("auto", "ours", "stock")
DEFAULT: str = "auto"
MAX_AGE_S = 7 * 24 * 3600.0  # as long as costs are kept
CLEAR_GAIN = 1.1  # of all products together, by bytes; trials differ by up to 3 % from one to the next where nothing else runs
LEAST_SHARE = 0.02  # of a model's matrices, in bytes; what is less does not decide
MAX_MEASURED = 4  # types: the largest, about half a second each
REPEATS = 5
MAX_SCORE_BYTES = (
    512 << 20
)  # of a batch's attention scores over a whole context, which only flash attention does without
SCHEMA = 4  # also counted up when the kernels get faster: what is remembered of the old ones is too low
_WHOLE_VOCABULARY = (
    "token_embd.weight",
    "output.weight",
)  # one or two matrices, many times as large as the others


@dataclass(frozen=True)
class Choice:
    """The weight types whose products our kernels compute, why, and what was measured to choose them.

    >>> str(Choice(frozenset(), "it was asked for"))
    'stock (it was asked for)'
    """

    ours: frozenset[Type]
    why: str
    trials: tuple[Trial, ...] = ()

    def __str__(self) -> str:
        if not self.ours:
            return f"stock ({self.why})"
        by_set: dict[str, list[str]] = {}
        for type in sorted(self.ours, key=lambda t: t.name):
            by_set.setdefault(kernels.kernel_set(type) or "none", []).append(type.name)
        sets = "; ".join(f"{name}: {', '.join(types)}" for name, types in sorted(by_set.items()))
        return f"ours ({self.why}; {sets})"

    def to_json(self) -> dict[str, Any]:
        """The published names, ready for `json.dumps`."""
        return {
            "chosen": str(self),
            "ours": {t.name: kernels.kernel_set(t) for t in sorted(self.ours, key=lambda t: t.name)},
            "why": self.why,
            "trials": [_trial_to_json(trial) | {"ours_gains": trial.ours_gains} for trial in self.trials],
        }


def choose(
    wanted: str,
    headers: Sequence[GGUFHeader],
    *,
    max_rows: int,
    threads: int,
    gpu_layers: int = 0,
    repacked: bool = True,
) -> Choice:
    """Which types of these files go to our kernels.

    Args:
        wanted: one of NAMES.
        headers: the main file's, and the drafter's where it has one of its own.
        max_rows: rows of a verification, depth + 1; 1 without a drafter.
        threads: CPU threads.
        gpu_layers: layers on a GPU, whose weights our kernels cannot take.
        repacked: whether the CPU backend may repack weights.

    Raises:
        LoadError: "ours" cannot be had; the text says why and what to do.

    Example:
        >>> str(choose("auto", [main.header], max_rows=5, threads=8))           # doctest: +SKIP
        'ours (1.9 times as fast here; avx2: Q4_K, Q6_K)'
    """
    if wanted == "stock":
        return Choice(frozenset(), "it was asked for")
    obstacle = f"{gpu_layers} layers go to a GPU" if gpu_layers else kernels.problem()
    present = (
        frozenset(t for t in kernels.types() if t in _types_of(headers)) if not obstacle else frozenset()
    )
    if wanted == "ours":
        if obstacle:
            do = "--gpu-layers 0" if gpu_layers else "--kernels stock"
            raise LoadError(f"our kernels, which run on the CPU, cannot be had: {obstacle} ({do})")
        if not present:
            known = ", ".join(sorted(t.name for t in kernels.types()))
            raise LoadError(
                f"our kernels have none of this file's types (there are: {known}; --kernels stock)"
            )
        return Choice(present, "it was asked for")
    if obstacle:
        return Choice(frozenset(), obstacle)
    shapes: dict[Type, tuple[tuple[int, int], int]] = {}
    for header in headers:
        shapes = typical_shapes(header) | shapes  # the main file's count first
    if not shapes:
        return Choice(frozenset(), "there are none for these types")
    trials = _measured(shapes, n_rows=_n_rows(max_rows), threads=threads, repacked=repacked)
    slower = {trial.type for trial in trials if trial.ours_gains * CLEAR_GAIN < 1}
    gains = {trial.type: trial.ours_gains for trial in trials if trial.type not in slower}
    bytes_of = {type: n_bytes for type, (_, n_bytes) in shapes.items()}
    n_bytes = sum(bytes_of.values())
    gain = math.exp(sum(bytes_of[type] * math.log(gains[type]) for type in gains) / n_bytes)
    if gain < CLEAR_GAIN:
        return Choice(frozenset(), "ours are not clearly faster here", trials)
    return Choice(present - slower, f"{gain:.1f} times as fast here", trials)


def typical_shapes(header: GGUFHeader) -> dict[Type, tuple[tuple[int, int], int]]:
    """By type that has kernels and makes up LEAST_SHARE: values in and out of a typical matrix, and bytes of all of them.

    Typical is the shape with most bytes among the layers' matrices, an expert's counted as one; those of the whole vocabulary
    count where there are no others. The types with most bytes come first, MAX_MEASURED at most.
    """
    matrices = [info for info in header.tensors.values() if len(info.shape) > 1]
    least = max(1.0, LEAST_SHARE * sum(info.n_bytes for info in matrices))
    shapes = {}
    for type in kernels.types():
        all_of_it = [info for info in matrices if info.type == type]
        n_bytes = sum(info.n_bytes for info in all_of_it)
        if n_bytes < least:
            continue
        layers = [info for info in all_of_it if info.name not in _WHOLE_VOCABULARY] or all_of_it
        by_shape: dict[tuple[int, int], int] = {}
        for info in layers:
            shape = (info.shape[0], info.shape[1])
            by_shape[shape] = by_shape.get(shape, 0) + info.n_bytes
        shapes[type] = (max(by_shape, key=lambda shape: by_shape[shape]), n_bytes)
    return dict(sorted(shapes.items(), key=lambda item: -item[1][1])[:MAX_MEASURED])


def recall(header: GGUFHeader, *, max_rows: int, threads: int) -> tuple[Trial, ...]:
    """What is remembered of a main file's types; none where nothing is, or it is too old. Measures nothing."""
    known = _recall(_key(threads, repacked=True))
    names = [_named(t, shape, n, _n_rows(max_rows)) for t, (shape, n) in typical_shapes(header).items()]
    return tuple(known[name] for name in names if name in known)


def flash_attention(
    wanted: str, choice: Choice, header: GGUFHeader, *, n_ctx: int, batch: int, cache_type_v: str
) -> str:
    """Flash attention for the target: what is wanted, but "off" for "auto" where our kernels compute all of its products.

    Without it the products inside attention are ours too. Rows are then equal to the bit at every width however long the
    context is, which llama.cpp's flash attention with F16 keys and values is not beyond 256 cells, and several rows are
    faster. It stays on where llama.cpp needs it (a quantised V cache) and where a batch's scores would take too much memory.

    Args:
        wanted: "auto", "on" or "off".
        choice: the kernels chosen.
        header: the main file's.
        n_ctx: cells of the context.
        batch: tokens decoded at once.
        cache_type_v: type of the KV cache's values.

    Example:
        >>> flash_attention("on", Choice(frozenset(), "it was asked for"), header, n_ctx=8192, batch=512,
        ...                 cache_type_v="f16")                                  # doctest: +SKIP
        'on'
    """
    n_heads = header.keys.get(f"{header.arch}.attention.head_count", 0)
    most = int(np.max(n_heads))  # one number, or an array of one for each layer
    fits = 4 * most * n_ctx * min(batch, n_ctx) <= MAX_SCORE_BYTES
    exact = _types_of([header]) <= choice.ours and cache_type_v.lower() in ("f16", "bf16", "f32") and fits
    return "off" if wanted.lower() == "auto" and exact else wanted


def _n_rows(max_rows: int) -> tuple[int, ...]:
    return tuple(sorted({1, min(max_rows, kernels.MAX_ROWS)}))


def _types_of(headers: Sequence[GGUFHeader]) -> frozenset[int]:
    """Of all matrices."""
    return frozenset(
        info.type for header in headers for info in header.tensors.values() if len(info.shape) > 1
    )


# Remembering


def _measured(
    shapes: Mapping[Type, tuple[tuple[int, int], int]],
    *,
    n_rows: tuple[int, ...],
    threads: int,
    repacked: bool,
) -> tuple[Trial, ...]:
    key = _key(threads, repacked)
    known = _recall(key)
    trials, is_new = [], False
    for type, (shape, n_bytes) in shapes.items():
        name = _named(type, shape, n_bytes, n_rows)
        if name not in known:
            known[name] = kernels.try_out(
                type,
                n_rows=n_rows,
                threads=threads,
                shape=shape,
                n_bytes=min(n_bytes, TRIAL_BYTES),
                repeats=REPEATS,
                repacked=repacked,
            )
            is_new = True
        trials.append(known[name])
    if is_new:
        with suppress(CacheError):  # then it is measured each time
            _remember(key, known)
    return tuple(trials)


def _named(type: Type, shape: tuple[int, int], n_bytes: int, n_rows: tuple[int, ...]) -> str:
    return f"{type.name} {shape[0]}x{shape[1]} {min(n_bytes, TRIAL_BYTES)} bytes, rows {n_rows}"


def _key(threads: int, repacked: bool) -> str:
    """What trials depend on besides types and shapes, as 32 hex digits."""
    from .costs import OPENMP
    from .provenance import library, machine, native  # both import llm.py, which imports this

    facts = {
        "machine": machine(),
        "library": library(),
        "native": native(),
        "openmp": [os.environ.get(name) for name in OPENMP],
        "sets": {t.name: kernels.kernel_set(t) for t in kernels.types()},
        "threads": threads,
        "repacked": repacked,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _recall(key: str) -> dict[str, Trial]:
    """By name; nothing where there is no such file, it is too old or damaged."""
    with suppress(OSError, ValueError, CacheError):
        folder, name = CacheFolder(), f"{key}.json"
        if time.time() - folder.path("kernels", name).stat().st_mtime < MAX_AGE_S:
            return _trials_from_json(folder.read_json("kernels", name))
    return {}


def _remember(key: str, trials: Mapping[str, Trial]) -> None:
    folder, name = CacheFolder(), f"{key}.json"
    data = {"schema": SCHEMA, "trials": {name: _trial_to_json(trial) for name, trial in trials.items()}}
    folder.write("kernels", name, json.dumps(data, indent=2).encode())
    folder.trim(keep=folder.path("kernels", name))


def _trial_to_json(trial: Trial) -> dict[str, Any]:
    return asdict(trial) | {"type": trial.type.name}


def _trials_from_json(data: Any) -> dict[str, Trial]:
    """Raises ValueError for anything that `_remember` does not write."""
    try:
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r} is not {SCHEMA}")
        return {name: _trial_from_json(trial) for name, trial in data["trials"].items()}
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"these are no trials: {error!r}") from error


def _trial_from_json(data: Any) -> Trial:
    trial = Trial(
        type=Type[data["type"]],
        shape=(int(data["shape"][0]), int(data["shape"][1])),
        n_bytes=int(data["n_bytes"]),
        n_rows=tuple(int(n) for n in data["n_rows"]),
        ours_s=tuple(float(s) for s in data["ours_s"]),
        stock_s=tuple(float(s) for s in data["stock_s"]),
    )
    seconds = (*trial.ours_s, *trial.stock_s)
    if not len(trial.n_rows) == len(trial.ours_s) == len(trial.stock_s) or not trial.n_rows:
        raise ValueError(f"{trial} has other numbers of widths and of times")
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ValueError(f"{trial} has times that are none")
    return trial
