"""Which depth is best for a model here: every depth's speed as costs and acceptance predict it, and as it is.

Every prompt is written plainly and at each depth in turns, so that whatever slows the machine slows all of them; speed-ups
are medians over prompts. The costs are measured anew and remembered, for pace to start from. Knows nothing of terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .costs import BUDGET_S, Costs, calibrate, remember
from .errors import CacheError, PromptError
from .llm import Model
from .prompts import Prompt, prompts_hash
from .provenance import provenance
from .session import Session
from .stats import Stats

MIN_TOKENS = 16  # a budget shortens the texts to this
N_PASSES = 3  # prompts that a budget should have time for
WORTHWHILE = 1.02  # a smaller speed-up is within what a machine's speed drifts by
EQUAL = 0.97  # of the best speed is as good as the best

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One depth: tokens per second predicted and measured (medians), and its speed over plain decoding's."""

    depth: int
    predicted_tok_s: float
    measured_tok_s: float
    speedup: float


@dataclass(frozen=True)
class Tuning:
    """All that was found: `rows` by depth from 0, `acceptance` by position, each draft given those before it.

    `remembered` is False where the cache folder cannot be used: the costs are then measured again each time.
    """

    costs: Costs
    rows: Sequence[Row]
    acceptance: Sequence[float]
    prompts: Sequence[Prompt]
    n: int
    temperature: float
    remembered: bool
    source: dict[str, Any]

    @property
    def best_depth(self) -> int:
        """The depth of the highest speed-up; 0 where none is worth its while."""
        best = max(self.rows, key=lambda row: row.speedup)
        return best.depth if best.speedup >= WORTHWHILE else 0

    @property
    def verdict(self) -> str:
        """What to do, in a few words."""
        if not self.best_depth:
            return "leave it off: no depth is faster than plain decoding here"
        return f"draft {self.best_depth}: {self.rows[self.best_depth].speedup:.2f} times as fast as plain decoding"

    def verdict_on(self, depth: int) -> str:
        """How a depth does, in a few words."""
        speedup, best = self.rows[depth].speedup, self.rows[self.best_depth].speedup
        if depth == self.best_depth:
            return "best"
        if speedup >= EQUAL * best:
            return "as good"
        return "slower than plain" if speedup < 1 else "slower than the best"

    def to_json(self) -> dict[str, Any]:
        """The published names, ready for `json.dumps`."""
        return {
            "schema": 1,
            "best_depth": self.best_depth,
            "verdict": self.verdict,
            "depths": [
                {
                    "depth": row.depth,
                    "predicted_tok_s": row.predicted_tok_s,
                    "measured_tok_s": row.measured_tok_s,
                    "speedup": row.speedup,
                    "verdict": self.verdict_on(row.depth),
                }
                for row in self.rows
            ],
            "acceptance": list(self.acceptance),
            "costs": self.costs.to_json(),
            "remembered": self.remembered,
            "n": self.n,
            "temperature": self.temperature,
            "prompts": {"n": len(self.prompts), "sha256": prompts_hash(self.prompts)},
            **self.source,
        }


def tune(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    n: int = 64,
    temperature: float = 0.0,
    budget_s: float = 60.0,
    progress: Progress = lambda done, total: None,
) -> Tuning:
    """Measures costs and remembers them, then every depth's speed from 0 to the model's.

    Args:
        model: with a drafter.
        prompts: gone through once, as far as the budget reaches; those that the model cannot take are left out.
        n: tokens a text, at least 2; shortened where the budget is too small.
        temperature: of all texts.
        budget_s: seconds for all of it; one prompt is always measured.
        progress: called with the texts done and the texts in all.

    Raises:
        LoadError: nothing drafts for this model; PromptError: no prompt can be used, or n or the budget is too small.

    Example:
        >>> tune(model, [Prompt("import os\\n", "code")]).verdict                 # doctest: +SKIP
        'draft 3: 1.52 times as fast as plain decoding'
    """
    if n < 2:
        raise PromptError(f"{n} tokens a text are too few to time: at least 2")
    if not budget_s > 0:
        raise PromptError(f"a budget of {budget_s} seconds is no time at all")
    deadline = time.perf_counter() + budget_s
    costs = calibrate(model, budget_s=min(BUDGET_S, budget_s / 2))
    try:
        remember(costs)
        remembered = True
    except CacheError:
        remembered = False
    n_fitting = (deadline - time.perf_counter()) / (N_PASSES * (costs.max_depth + 1) * costs.plain_s)
    n = int(min(n, max(MIN_TOKENS, n_fitting)))
    usable = _usable(model, prompts, n)
    passes = _run(model, usable, costs.max_depth, n, temperature, deadline, progress)
    acceptance = _acceptance([stats[-1] for stats in passes])
    return Tuning(
        costs=costs,
        rows=[_row(costs, depth, acceptance, passes) for depth in range(costs.max_depth + 1)],
        acceptance=acceptance,
        prompts=usable[: len(passes)],
        n=n,
        temperature=temperature,
        remembered=remembered,
        source=provenance(model),
    )


def _usable(model: Model, prompts: Sequence[Prompt], n: int) -> list[Prompt]:
    """The prompts that the model can take; an error where it can take none."""
    usable, why = [], "there is none"
    for prompt in prompts:
        try:
            n_tokens = len(prompt.tokens(model))
        except PromptError as error:  # messages, and no chat template
            why = str(error)
            continue
        if 0 < n_tokens <= model.n_ctx - n:
            usable.append(prompt)
        else:
            why = f"{n_tokens} tokens are not between 1 and {model.n_ctx - n}, what --ctx leaves beside -n"
    if not usable:
        raise PromptError(f"no prompt can be used: {why}")
    return usable


def _run(
    model: Model,
    prompts: Sequence[Prompt],
    max_depth: int,
    n: int,
    temperature: float,
    deadline: float,
    progress: Progress,
) -> list[list[Stats]]:
    """For each prompt that there is time for, but for one at least: the text at each depth from 0 on."""
    passes: list[list[Stats]] = []
    n_depths = max_depth + 1
    with (
        model.session(spec_type="none", learn=False) as plain,
        model.session(depth=max_depth, learn=False) as drafting,
    ):
        pass_s = 0.0
        for i, prompt in enumerate(prompts):
            started = time.perf_counter()
            if passes and started + pass_s > deadline:
                break
            tokens = prompt.tokens(model)
            by_depth: dict[int, Stats] = {}
            for j in range(n_depths):
                depth = (i + j) % n_depths  # each prompt begins with another depth
                by_depth[depth] = _write(drafting if depth else plain, tokens, depth, n, temperature)
                progress(i * n_depths + j + 1, n_depths * len(prompts))
            passes.append([by_depth[depth] for depth in range(n_depths)])
            pass_s = time.perf_counter() - started
    return passes


def _write(session: Session, tokens: Sequence[int], depth: int, n: int, temperature: float) -> Stats:
    text = session.generate(
        tokens, max_tokens=n, temperature=temperature, seed=0, depth=depth, ignore_eos=True
    )
    text.read()
    return text.stats


def _acceptance(deepest: Sequence[Stats]) -> list[float]:
    """By position: the share that stood of the drafts whose predecessors all stood."""
    total = Stats(deepest[0].kind, deepest[0].speculation, deepest[0].why, deepest[0].depth)
    for stats in deepest:
        total.include(stats)
    shares = total.accepted_per_position
    return [share / before if before else 0.0 for before, share in zip([1.0, *shares], shares, strict=False)]


def _row(costs: Costs, depth: int, acceptance: Sequence[float], passes: Sequence[Sequence[Stats]]) -> Row:
    return Row(
        depth=depth,
        predicted_tok_s=1 / costs.seconds_per_token(acceptance[:depth]),
        measured_tok_s=median(stats[depth].tok_s for stats in passes),
        speedup=median(stats[depth].tok_s / stats[0].tok_s for stats in passes),
    )
