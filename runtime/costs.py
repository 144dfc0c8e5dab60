"""What a round costs here: measured in a few seconds, remembered in the user's cache folder, handed to pace.

Measured on real rounds, whose drafts stand by a coin: one row now and then repeated by itself is faster than one between a
drafter's steps. Plain decoding and every depth take turns, so that a machine that drifts drifts for all of them. Medians
count once the machine's slow spells are taken out, or the fastest third where something else ran meanwhile. What a part costs
depends on shapes and types, not on weights: the key under which costs are kept is made of those, the machine, the library and
the settings. Knows nothing of acceptance, and decides nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from llama_sidecar.sidecars import GGUFHeader, read_model

from . import _native
from .cache_folder import CacheFolder
from .drafter_choice import NGRAM
from .errors import CacheError, LoadError
from .session import Scripted

if TYPE_CHECKING:
    from .llm import Model
    from .session import Session

BUDGET_S = 4.5  # what is promised is 5, and the last turn may take a little longer than the one before
MAX_AGE_S = 7 * 24 * 3600.0  # drivers, cooling and power plans change
BUSY_AGE_S = 600.0  # costs of a busy machine
BUSY_SHARE = 0.1  # of the time stood ready without a processor: 0.3 to 0.5 beside a busy loop on every core, else up to 0.02
MAX_TURNS = 25
MAX_DEPTHS = 9  # measured in a turn; those between are interpolated
N_CTX = 512
N_CELLS = 128  # to twice as many are in the context, where that is quickly read: attention is dear beside a small model's weights
N_ROUNDS = 3  # in a row at each depth: the first makes new graphs
SLOW_ROW_S = 0.05  # for slower rows, the 0.2 ms of a first round's new graphs are not worth further ones
COIN = 0.5  # some rounds then follow on one with many drafts that stood, and some on one with none
WEAK = 0.1  # of an opinion against a measurement
N_FITS = 30
N_POLISHES = 3  # of how slow the machine was, from round to round
N_NEIGHBOURS = 4  # rounds before and after one that say so
CALM = 1.15  # a median so far above the fastest third was disturbed
SCHEMA = 4
TEXT = '''"""Reads a table of measurements and prints the mean of each column."""

import csv
import sys

# Every row has the same columns; the first one names them. Empty cells are left out of the mean.
'''
# How OpenMP's threads wait: on a busy machine it decides what a decode costs, and many small steps above all.
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND")


def expected_tokens(acceptance: Sequence[float]) -> float:
    """E(k): tokens a round emits on average, the target's own included.

    Args:
        acceptance: (k,) the chance that each draft stands when all before it do.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    n_expected = chance = 1.0
    for accepted in acceptance:
        chance *= accepted
        n_expected += chance
    return n_expected


def expected_draft_changes(acceptance: Sequence[float]) -> float:
    """Decodes of the drafter a round whose rows are not as many as those of its decode before, where each round has this depth.

    Its first decode has the drafts of the round before that stood, its others one row each.

    >>> expected_draft_changes([0.75]), expected_draft_changes([0.75, 0.5])
    (0.375, 1.5)
    """
    if not acceptance:
        return 0.0
    return 2 * acceptance[0] * (1 - acceptance[0] if len(acceptance) == 1 else 1)


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts.

    Args:
        plain_s: a decode of one row in a session that never drafts.
        verify_s: (max_depth + 1,) decodes of 1, 2, ... rows, all of them output, in a session that drafts.
        first_draft_s: the first draft of a round that follows on one in which no draft stood.
        draft_step_s: each further draft.
        catch_up_s: what the first draft takes longer for each draft of the round before that stood.
        draft_change_s: what a decode of the drafter takes longer that has not as many rows as its last (a new graph, too).
        overhead_s: everything else in a round, whatever it emits.
        token_s: everything else, for each token emitted (choosing it, its text).
        change_s: what the first round at another depth takes longer (llama.cpp makes new graphs).
        calm: whether the machine did nothing else when they were measured.
        n_slots: rollback slots these were measured with; 0 for as many as the greatest depth needs.
        n_threads: CPU threads these were measured with.
        key: what they were measured on, see `costs_key`.

    Raises:
        ValueError: a cost is not a positive number, or there is no width to verify drafts with.

    >>> costs = Costs(plain_s=1.0, verify_s=(1.1, 1.5, 1.75), first_draft_s=0.25, draft_step_s=0.125)
    >>> [costs.round_s(depth) for depth in range(3)]
    [1.0, 1.75, 2.125]
    >>> costs.speedup([0.75])
    1.0
    """

    plain_s: float
    verify_s: tuple[float, ...]
    first_draft_s: float
    draft_step_s: float
    catch_up_s: float = 0.0
    draft_change_s: float = 0.0
    overhead_s: float = 0.0
    token_s: float = 0.0
    change_s: float = 0.0
    calm: bool = True
    n_slots: int = 0
    n_threads: int = 0
    key: str = ""

    def __post_init__(self) -> None:
        positive = (self.plain_s, *self.verify_s, self.first_draft_s, self.draft_step_s)
        seconds = (*positive, self.catch_up_s, self.draft_change_s)
        seconds += (self.overhead_s, self.token_s, self.change_s)
        if (
            len(self.verify_s) < 2
            or not all(math.isfinite(s) and s >= 0 for s in seconds)
            or not all(positive)
        ):
            raise ValueError(f"these are no costs: {self}")

    @property
    def max_depth(self) -> int:
        """The greatest depth whose verification is covered."""
        return len(self.verify_s) - 1

    @property
    def slots(self) -> int:
        """The rollback slots these are the costs of."""
        return self.n_slots or self.max_depth

    def draft_s(self, depth: int, n_stood: float = 0.0, n_changes: float = 0.0) -> float:
        """Seconds of the drafter in a round that follows on one in which `n_stood` drafts stood, with so many new graphs."""
        if not depth:
            return 0.0
        catch_up_s = n_stood * self.catch_up_s + n_changes * self.draft_change_s
        return self.first_draft_s + (depth - 1) * self.draft_step_s + catch_up_s

    def round_s(self, depth: int, n_stood: float = 0.0, n_changes: float = 0.0) -> float:
        """Seconds of a round but for its tokens' own; at depth 0 of a plain round."""
        target_s = self.verify_s[depth] if depth else self.plain_s
        return target_s + self.draft_s(depth, n_stood, n_changes) + self.overhead_s

    def seconds_per_token(self, acceptance: Sequence[float]) -> float:
        """Seconds a token takes on average in rounds with as many drafts as `acceptance` has positions; none is plain."""
        n_tokens = expected_tokens(acceptance)
        n_changes = expected_draft_changes(acceptance)
        return self.round_s(len(acceptance), n_tokens - 1, n_changes) / n_tokens + self.token_s

    def speedup(self, acceptance: Sequence[float]) -> float:
        """Speed of such rounds over plain decoding's."""
        return self.seconds_per_token(()) / self.seconds_per_token(acceptance)

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """Raises ValueError for anything that `to_json` does not write."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r} is not {SCHEMA}")
            seconds = [
                field.name for field in fields(cls) if field.name.endswith("_s") and field.name != "verify_s"
            ]
            return cls(
                **{name: float(data[name]) for name in seconds},
                verify_s=tuple(float(s) for s in data["verify_s"]),
                calm=bool(data["calm"]),
                n_slots=int(data["n_slots"]),
                n_threads=int(data["n_threads"]),
                key=str(data["key"]),
            )
        except (TypeError, KeyError, OverflowError) as error:
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
    costs = remembered(model) if model.kind else None
    if costs is None:
        costs = calibrate(model, budget_s=budget_s)
        with suppress(CacheError):  # then it is measured each time
            remember(costs)
    return costs


def remembered(model: Model) -> Costs | None:
    """The costs kept for this model, as far as its depth goes; None where they are to be measured.

    Example:
        >>> remembered(model) is None                                           # doctest: +SKIP
        True
    """
    costs, depth = recall(costs_key(model)), _n_drafts(model)
    if costs is None or not 1 <= depth <= costs.max_depth:
        return None
    if depth < costs.max_depth:
        costs = replace(costs, verify_s=costs.verify_s[: depth + 1], n_slots=costs.slots)
    return costs


def _n_drafts(model: Model) -> int:
    return min(model.depth, model.settings.batch - 1)


def costs_key(model: Model) -> str:
    """What costs depend on, as 32 hex digits: machine, backend, library, files, threads, cache types.

    Files count by the shapes and types of their tensors: another quantisation is another key, another fine-tune is not.
    """
    head = model.head_weights.path
    facts = target_facts(model) | {
        "openmp": [os.environ.get(name) for name in OPENMP],
        "kind": model.kind,
        "head": None if head == model.main.path else shapes(read_model(head)),
    }
    if widths := model.widths(model.n_ctx):
        facts["widths"] = widths
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def target_facts(model: Model) -> dict[str, Any]:
    """What a decode of the target depends on: machine, backend, library, shapes and types, threads, cache types."""
    from .provenance import backend, library, machine, native  # it imports llm.py, which may import this

    settings = model.settings
    return {
        "machine": machine(),
        "backend": backend(model),
        "library": library(),
        "native": native(),
        "main": shapes(model.main.header),
        "threads": settings.n_threads,
        "flash_attn": settings.flash_attn,
        "use_mmap": settings.use_mmap,
        "kernels": sorted(t.name for t in model.kernels.ours),
        "cache_types": [settings.cache_type_k, settings.cache_type_v],
    }


def recall(key: str) -> Costs | None:
    """The costs kept under a key; None where there are none, they are too old, or the file is damaged."""
    with suppress(OSError, ValueError, CacheError):
        folder, name = CacheFolder(), f"{key}.json"
        path, costs = folder.path("costs", name), Costs.from_json(folder.read_json("costs", name))
        max_age_s = MAX_AGE_S if costs.calm else BUSY_AGE_S
        if costs.key == key and time.time() - path.stat().st_mtime < max_age_s:
            return costs
    return None


def remember(costs: Costs) -> None:
    """Keeps costs under their key. Raises CacheError where the cache cannot be used."""
    folder, name = CacheFolder(), f"{costs.key}.json"
    folder.write("costs", name, json.dumps(costs.to_json(), indent=2).encode())
    folder.trim(keep=folder.path("costs", name))


def shapes(header: GGUFHeader) -> str:
    """A hash of the architecture and of all tensors' names, shapes and types."""
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
    started, waited_s = time.perf_counter(), _waited_s()
    depth = _n_drafts(model)
    if depth < 1:
        raise LoadError("a batch of 1 has no room for drafts: raise --batch")
    tokens = model.vocab.tokenize(TEXT)
    # The look-up drafts for nothing, and not everywhere.
    stand_in = Scripted([0] * (N_CTX + depth), 0, hidden_rows=False) if model.kind == NGRAM else None
    with (
        model.session(ctx=N_CTX, spec_type="none", learn=False) as plain,
        model.session(ctx=N_CTX, depth=depth, learn=False, scripted=stand_in) as drafting,
    ):
        plain_rounds, rounds = _steady(_measure(plain, drafting, tokens, depth, started + budget_s))
    waited_share = (_waited_s() - waited_s) / (time.perf_counter() - started)
    return replace(
        _costs(plain_rounds, rounds, depth, in_one_pass=model.drafts_in_one_pass),
        calm=waited_share < BUSY_SHARE,
        n_slots=depth,
        n_threads=model.settings.n_threads,
        key=costs_key(model),
    )


def _waited_s() -> float:
    """Seconds that this thread stood ready and others had the processors; 0 where the system does not say."""
    with suppress(OSError, ValueError):
        _, waited_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        return waited_ns / 1e9
    return 0.0


@dataclass(frozen=True)
class _Round:
    """Counts and seconds of one round. `n_stood` are the drafts that stood in the one before; `changed`: it had another depth.

    `n_changes` are decodes of the drafter that had not as many rows as its last.
    """

    changed: bool
    n_drafted: int
    n_stood: int
    n_changes: int
    n_emitted: int
    draft_s: float
    verify_s: float
    other_s: float


_Turn = tuple[list[_Round], list[_Round]]  # of the session that never drafts, and of the one that does


class _Rehearsal(_native.Pacing):
    """Stands in for pace: goes through the depths given, notes what each round took, and then ends the text."""

    def __init__(self, session: Session, depths: Sequence[int], deadline: float) -> None:
        super().__init__()
        self.rounds: list[_Round] = []
        self._session = session
        self._depths = depths
        self._deadline = deadline
        self._n_stood = 0
        self._n_draft_rows = 0  # of the drafter's last decode
        self._last_depth = -1
        self._last_s = 0.0  # the clock after the last round

    def drafting(self) -> bool:
        return True

    def depth(self) -> int:
        self._last_s = self._last_s or time.perf_counter()
        return self._depths[len(self.rounds)] if len(self.rounds) < len(self._depths) else 0

    def plain_in_place(self) -> None:
        pass

    def switched(self, seconds: float) -> None:
        pass

    def observe(self, n_drafted: int, n_accepted: int, draft_s: float, verify_s: float) -> None:
        now = time.perf_counter()
        other_s = max(0.0, now - self._last_s - draft_s - verify_s)
        changed = n_drafted != self._last_depth
        n_changes = 0
        if n_drafted:
            decodes = [self._n_draft_rows, 1 + self._n_stood, *([1] * (n_drafted - 1))]
            n_changes = sum(before != after for before, after in pairwise(decodes))
            self._n_draft_rows = decodes[-1]
        self.rounds.append(
            _Round(changed, n_drafted, self._n_stood, n_changes, 1 + n_accepted, draft_s, verify_s, other_s)
        )
        self._n_stood = n_accepted if n_drafted else self._n_stood + 1
        self._last_depth = n_drafted
        self._last_s = now
        is_late = now > self._deadline and len(self.rounds) > 1
        if is_late or len(self.rounds) == len(self._depths):
            self._session.cancel()


def _measure(
    plain: Session, drafting: Session, tokens: Sequence[int], depth: int, deadline: float
) -> list[_Turn]:
    """Rounds of both sessions, in turns until time or MAX_TURNS run out; the first turn may end early, and is then the only one."""
    row_s = plain.time_rows(tokens, 1, 2)[-1]  # also brings the weights into memory
    n_rounds = 1 if row_s > SLOW_ROW_S else N_ROUNDS
    spread = {round(d) for d in np.linspace(depth, 0, min(depth + 1, MAX_DEPTHS))}
    depths = list(dict.fromkeys([depth, 1, *sorted(spread, reverse=True)]))  # what is needed most comes first
    prompt = [tokens[i % len(tokens)] for i in range(N_CELLS)] if n_rounds > 1 else tokens[:1]
    plain_text, text = [*prompt], [*prompt]
    turns: list[_Turn] = []
    for turn in range(MAX_TURNS):
        started = time.perf_counter()
        plain_rounds = _rehearse(plain, plain_text, [0], n_rounds + 1, turn, deadline)
        turns.append((plain_rounds, _rehearse(drafting, text, depths, n_rounds, turn, deadline)))
        now = time.perf_counter()
        if 2 * now - started > deadline:
            break
        if len(text) > 2 * N_CELLS:
            text = [*prompt]
        if len(plain_text) > 2 * N_CELLS:
            plain_text = [*prompt]
    return turns


def _steady(turns: Sequence[_Turn]) -> _Turn:
    """The rounds of all turns, as on a machine that was as fast all the time: one that is slow for seconds would give some shapes a
    slow median and others a fast one. How slow it was at a round is the median over its neighbours, each against all of its shape:
    the fastest of them at first, since half of a shape's may be slow ones."""
    rounds = [(drafts, r) for turn in turns for drafts, part in enumerate(turn) for r in part]
    shapes = [(drafts, r.changed, r.n_drafted) for drafts, r in rounds]
    taken = np.array([max(r.verify_s, 1e-9) for _, r in rounds])
    slowness = np.ones(len(rounds))
    for polish in range(N_POLISHES):
        found = defaultdict[tuple[int, bool, int], list[float]](list)
        for shape, seconds in zip(shapes, taken / slowness, strict=True):
            found[shape].append(seconds)
        usual = {shape: median(seconds) if polish else _fastest(seconds) for shape, seconds in found.items()}
        share = taken / [usual[shape] for shape in shapes]
        slowness = np.array(
            [np.median(share[max(0, i - N_NEIGHBOURS) : i + N_NEIGHBOURS + 1]) for i in range(len(share))]
        )
    steady: _Turn = ([], [])
    for (drafts, r), slow in zip(rounds, slowness, strict=True):
        draft_s, verify_s, other_s = (float(s / slow) for s in (r.draft_s, r.verify_s, r.other_s))
        steady[drafts].append(replace(r, draft_s=draft_s, verify_s=verify_s, other_s=other_s))
    return steady


def _rehearse(
    session: Session, text: list[int], depths: Sequence[int], n_rounds: int, seed: int, deadline: float
) -> list[_Round]:
    """Goes on with a text for `n_rounds` rounds at each depth in turn, or two where time runs out."""
    plan = [depth for depth in depths for _ in range(n_rounds)]
    session.pace = rehearsal = _Rehearsal(session, plan, deadline)
    generation = session.generate_synthetic(text, p_accept=COIN, max_tokens=session.n_ctx, seed=seed)
    generation.read()
    text += generation.tokens
    return rehearsal.rounds


def _typical(seconds: Sequence[float]) -> float:
    """The median, or where it lies far above the fastest third, because something else ran, that third's."""
    fastest, middle = _fastest(seconds), median(seconds)
    typical = middle if middle <= CALM * fastest else fastest
    return max(typical, 1e-9)  # a clock may be too coarse for a small model


def _fastest(seconds: Sequence[float]) -> float:
    """The median of the fastest third."""
    return median(sorted(seconds)[: max(1, len(seconds) // 3)])


def _costs(
    plain_rounds: Sequence[_Round], rounds: Sequence[_Round], depth: int, *, in_one_pass: bool = False
) -> Costs:
    """Widths that were not measured are interpolated. `in_one_pass`: a further draft may cost nothing at all."""
    first_rounds = [r for r in rounds if r.changed]
    plain_rounds = [r for r in plain_rounds if not r.changed] or plain_rounds
    rounds = [r for r in rounds if not r.changed] or rounds
    plain_s = _typical([r.verify_s for r in plain_rounds])
    known = {1: plain_s}
    for n_drafted in sorted({r.n_drafted for r in rounds}):
        known[n_drafted + 1] = _typical([r.verify_s for r in rounds if r.n_drafted == n_drafted])
    change_s = median(r.verify_s - known.get(r.n_drafted + 1, r.verify_s) for r in first_rounds)
    # A round that something else slowed down slowed its draft as well: their ratio counts.
    # In one pass a round's decodes are alike, whatever stood.
    drafts = [
        (
            (1, r.n_drafted - 1, r.n_stood, 0 if in_one_pass else r.n_changes),
            r.draft_s / r.verify_s * known[r.n_drafted + 1],
        )
        for r in rounds
        if r.n_drafted
    ]
    # Where too little was measured: a further draft costs what the first does, or in one pass nothing, catching up nothing, and a
    # new graph nothing.
    opinions = [
        ((0 if in_one_pass else WEAK, -WEAK, 0, 0), 0.0),
        ((0, 0, WEAK, 0), 0.0),
        ((0, 0, 0, WEAK), 0.0),
    ]
    first_s, step_s, catch_up_s, draft_change_s = _fit([*drafts, *opinions])
    others = [((1, r.n_emitted), r.other_s) for r in (*plain_rounds, *rounds)]
    overhead_s, token_s = _fit(others)
    first_s = max(first_s, 1e-9)
    # Noise may say less; no drafter's own step is so much cheaper than its first.
    least_step_s = 1e-9 if in_one_pass else first_s / 4
    return Costs(
        plain_s=plain_s,
        verify_s=tuple(float(s) for s in np.interp(range(1, depth + 2), [*known], [*known.values()])),
        first_draft_s=first_s,
        draft_step_s=max(step_s, least_step_s),
        catch_up_s=max(catch_up_s, 0.0),
        draft_change_s=max(draft_change_s, 0.0),
        overhead_s=max(overhead_s, 0.0),
        token_s=max(token_s, 0.0),
        change_s=max(change_s, 0.0),
    )


def _fit(equations: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """The factors of the terms that come nearest to all right-hand sides by absolute distance: outliers count little.

    >>> [round(x, 2) for x in _fit([((1, 1), 3.0), ((1, 2), 50.0), ((1, 3), 7.0), ((1, 4), 9.0)])]
    [1.0, 2.0]
    """
    terms = np.array([left for left, _ in equations], float)
    values = np.array([right for _, right in equations])
    least = 1e-4 * np.abs(values).mean() + 1e-12
    weights = np.ones_like(values)
    for _ in range(N_FITS):  # least squares, each time with weights that make them absolute
        factors = np.linalg.lstsq(terms * weights[:, None], values * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ factors - values), least))
    return [float(factor) for factor in factors]
