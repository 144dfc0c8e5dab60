"""What a round costs here: measured in a few seconds, remembered in the user's cache folder, handed to pace.

Measured in turns: each turn times every part (a plain row, each width of a verification, the drafts), so that a machine that
drifts drifts for all of them. Medians count, or the fastest third where something else ran meanwhile. What a part costs
depends on shapes and types, not on weights: the key under which costs are kept is made of those, the machine, the library
and the settings. Knows nothing of acceptance, and decides nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from llama_sidecar.sidecars import GGUFHeader, read_model

from .cache_folder import CacheFolder
from .errors import CacheError, LoadError

if TYPE_CHECKING:
    from .llm import Model
    from .session import Session

BUDGET_S = 5.0
MAX_AGE_S = 7 * 24 * 3600.0  # drivers, cooling and power plans change, and a bad hour shall be forgotten
MAX_TURNS = 15
N_CTX = 512
N_ROUNDS = 3  # drafted rounds timed in each turn
SLOW_ROW_S = 0.05  # for slower rows, the 0.2 ms of a first decode's new graph are not worth a second decode
CALM = 1.15  # a median so far above the fastest third was disturbed
SCHEMA = 1
TEXT = '''"""Reads a table of measurements and prints the mean of each column."""

import csv
import sys

# Every row has the same columns; the first one names them. Empty cells are left out of the mean.
'''  # of equal tokens a mixture of experts would need few experts
# How OpenMP's threads wait: on a busy machine it decides what a decode costs, and many small steps above all.
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND")

Part = tuple[str, int]  # ("plain", 1), ("rows", n) or ("draft", depth); ("other", 1) comes with the drafts
Samples = dict[Part, list[float]]  # seconds
_PLAIN: Part = ("plain", 1)
_OTHER: Part = ("other", 1)


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts.

    Args:
        plain_s: a decode of one row in a session that never drafts.
        verify_s: (max_depth + 1,) decodes of 1, 2, ... rows, all of them output, in a session that drafts.
        first_draft_s: the first draft of a round: the head over the rows accepted before and the last token.
        draft_step_s: each further draft.
        other_s: everything else (choosing, text), per emitted token.
        n_threads: CPU threads these were measured with.
        key: what they were measured on, see `costs_key`.

    Raises:
        ValueError: a cost is not a positive number, or there is no width to verify drafts with.

    >>> costs = Costs(plain_s=1.0, verify_s=(1.1, 1.5, 1.75), first_draft_s=0.25, draft_step_s=0.125)
    >>> [costs.round_s(depth) for depth in range(3)]
    [1.0, 1.75, 2.125]
    """

    plain_s: float
    verify_s: tuple[float, ...]
    first_draft_s: float
    draft_step_s: float
    other_s: float = 0.0
    n_threads: int = 0
    key: str = ""

    def __post_init__(self) -> None:
        seconds = (self.plain_s, *self.verify_s, self.first_draft_s, self.draft_step_s)
        if len(self.verify_s) < 2 or not all(math.isfinite(s) and s > 0 for s in seconds) or self.other_s < 0:
            raise ValueError(f"these are no costs: {self}")

    @property
    def max_depth(self) -> int:
        """The greatest depth whose verification is covered."""
        return len(self.verify_s) - 1

    def draft_s(self, depth: int) -> float:
        """Seconds of the drafter in a round."""
        return self.first_draft_s + (depth - 1) * self.draft_step_s if depth else 0.0

    def round_s(self, depth: int) -> float:
        """Seconds of drafter and target in a round; at depth 0 of a plain round."""
        return self.verify_s[depth] + self.draft_s(depth) if depth else self.plain_s

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """Raises ValueError for anything that `to_json` does not write."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r} is not {SCHEMA}")
            names = ("plain_s", "first_draft_s", "draft_step_s", "other_s")
            return cls(
                **{name: float(data[name]) for name in names},
                verify_s=tuple(float(s) for s in data["verify_s"]),
                n_threads=int(data["n_threads"]),
                key=str(data["key"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"these are no costs: {error!r}") from error


# Remembering


def costs_for(model: Model, *, budget_s: float = BUDGET_S) -> Costs:
    """What rounds of this model cost here: remembered, or measured now and remembered.

    Args:
        model: with a drafter.
        budget_s: seconds that measuring may take; a large model's first turn may take longer.

    Raises:
        LoadError: nothing drafts for this model.

    Example:
        >>> costs_for(model).round_s(3)                                         # doctest: +SKIP
        0.0312
    """
    costs = recall(costs_key(model)) if model.kind else None
    if costs is None:
        costs = calibrate(model, budget_s=budget_s)
        with suppress(CacheError):  # then it is measured each time
            remember(costs)
    return costs


def costs_key(model: Model) -> str:
    """What costs depend on, as 32 hex digits: machine, backend, library, files, threads, cache types.

    Files count by the shapes and types of their tensors: another quantisation is another key, another fine-tune is not.
    """
    from .provenance import backend, library, machine  # it imports llm.py, which may import this

    settings = model.settings
    head = model.head_weights.path
    facts = {
        "machine": machine(),
        "backend": backend(model),
        "library": library(),
        "openmp": [os.environ.get(name) for name in OPENMP],
        "main": _shapes(model.main.header),
        "kind": model.kind,
        "head": None if head == model.main.path else _shapes(read_model(head)),
        "depth": model.depth,
        "threads": settings.n_threads,
        "flash_attn": settings.flash_attn,
        "kernels": sorted(t.name for t in model.kernels.ours),
        "cache_types": [settings.cache_type_k, settings.cache_type_v],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def recall(key: str) -> Costs | None:
    """The costs kept under a key; None where there are none, they are too old, or the file is damaged."""
    with suppress(OSError, ValueError, CacheError):
        path = CacheFolder().path("costs", f"{key}.json")
        costs = Costs.from_json(json.loads(path.read_bytes()))
        if costs.key == key and time.time() - path.stat().st_mtime < MAX_AGE_S:
            return costs
    return None


def remember(costs: Costs) -> None:
    """Keeps costs under their key. Raises CacheError where the cache cannot be used."""
    folder, name = CacheFolder(), f"{costs.key}.json"
    folder.write("costs", name, json.dumps(costs.to_json(), indent=2).encode())
    folder.trim(keep=folder.path("costs", name))


def _shapes(header: GGUFHeader) -> str:
    tensors = sorted((t.name, list(t.shape), int(t.type)) for t in header.tensors.values())
    return hashlib.sha256(json.dumps([header.arch, tensors]).encode()).hexdigest()


# Measuring


def calibrate(model: Model, *, budget_s: float = BUDGET_S) -> Costs:
    """Measures what rounds of this model cost here, on sessions of its own.

    Args:
        model: with a drafter; depths up to its own are measured.
        budget_s: seconds it may take; where one turn takes longer, its least necessary parts are left out and interpolated.

    Raises:
        LoadError: nothing drafts for this model, or its batch has no room for drafts.

    Example:
        >>> calibrate(model).plain_s                                            # doctest: +SKIP
        0.0334
    """
    if model.kind is None:
        raise LoadError(f"there is no draft to measure: {model.speculation.why} (--sidecar FILE names one)")
    deadline = time.perf_counter() + budget_s
    depth = min(model.depth, model.settings.batch - 1)
    if depth < 1:
        raise LoadError("a batch of 1 has no room for drafts: raise --batch")
    tokens = model.vocab.tokenize(TEXT)
    with (
        model.session(ctx=N_CTX, spec_type="none", learn=False) as plain,
        model.session(ctx=N_CTX, depth=depth, learn=False) as drafting,
    ):
        samples = _measure(plain, drafting, tokens, depth, deadline)
    return _costs(samples, depth, n_threads=model.settings.n_threads, key=costs_key(model))


def _measure(
    plain: Session, drafting: Session, tokens: Sequence[int], depth: int, deadline: float
) -> Samples:
    """Turns until time or MAX_TURNS run out, to and fro; the first may end early, and then there is no other."""
    row_s = plain.time_rows(tokens, 1, 2)[-1]  # also brings the weights into memory
    n_decodes = 1 if row_s > SLOW_ROW_S else 2

    def rows(session: Session, n: int) -> Callable[[], Samples]:
        part = _PLAIN if session is plain else ("rows", n)
        return lambda: {part: session.time_rows(tokens, n, n_decodes)[-1:]}

    needed = [
        rows(plain, 1),
        rows(drafting, depth + 1),
        lambda: _time_drafts(drafting, tokens, depth, deadline),
    ]
    wanted = [rows(drafting, n) for n in range(depth, 0, -1)]
    if depth > 1:
        wanted.insert(0, lambda: _time_drafts(drafting, tokens, 1, deadline))
    samples: Samples = {}
    turn_s = longest_s = 0.0
    for turn in range(MAX_TURNS):
        started = time.perf_counter()
        if turn and started + turn_s > deadline:
            break
        parts = [*needed, *wanted] if turn % 2 == 0 else [*reversed(wanted), *reversed(needed)]
        for i, measure in enumerate(parts):
            before = time.perf_counter()
            if not turn and i >= len(needed) and before + longest_s > deadline:
                break
            for part, seconds in measure().items():
                samples.setdefault(part, []).extend(seconds)
            longest_s = max(longest_s, time.perf_counter() - before)
        turn_s = time.perf_counter() - started
    return samples


def _time_drafts(session: Session, tokens: Sequence[int], depth: int, deadline: float) -> Samples:
    """Seconds of the drafter in rounds of `depth` drafts, and of everything else per emitted token."""
    text = session.generate(tokens[:4], max_tokens=session.n_ctx, temperature=0, ignore_eos=True, depth=depth)
    stats = text.stats
    n_rounds, draft_s, seconds = 0, 0.0, []
    for _ in text:  # a piece of text may take several rounds
        if n_rounds and stats.n_rounds > n_rounds:  # the very first round makes new graphs
            seconds.append((stats.draft_s - draft_s) / (stats.n_rounds - n_rounds))
            if len(seconds) == N_ROUNDS or time.perf_counter() > deadline:
                break
        n_rounds, draft_s = stats.n_rounds, stats.draft_s
    text.close()
    if not seconds:  # a text of unprintable tokens has no pieces
        seconds = [stats.draft_s / max(1, stats.n_rounds)]
    other_s = stats.generate_s - stats.draft_s - stats.verify_s
    return {("draft", depth): seconds, _OTHER: [max(0.0, other_s) / max(1, stats.n_tokens - 1)]}


def _typical(seconds: Sequence[float]) -> float:
    """The median, or where it lies far above the fastest third, because something else ran, that third's."""
    fastest = median(sorted(seconds)[: max(1, len(seconds) // 3)])
    middle = median(seconds)
    typical = middle if middle <= CALM * fastest else fastest
    return max(typical, 1e-9)  # a clock may be too coarse for a small model


def _costs(samples: Samples, depth: int, *, n_threads: int, key: str) -> Costs:
    """Widths that were not measured are interpolated."""
    seconds = {part: _typical(found) for part, found in samples.items()}
    known = {1: seconds[_PLAIN]} | {n: s for (what, n), s in sorted(seconds.items()) if what == "rows"}
    deepest_s = seconds["draft", depth]
    first_s = seconds.get(("draft", 1), deepest_s / depth)
    step_s = (deepest_s - first_s) / (depth - 1) if depth > 1 else first_s
    return Costs(
        plain_s=seconds[_PLAIN],
        verify_s=tuple(float(s) for s in np.interp(range(1, depth + 2), [*known], [*known.values()])),
        first_draft_s=first_s,
        draft_step_s=max(step_s, first_s / 4),  # noise may say less; no drafter's step is so much cheaper
        other_s=seconds[_OTHER],
        n_threads=n_threads,
        key=key,
    )
