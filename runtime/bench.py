"""What speculation gains on this machine: plain and speculative runs in turns, and the costs that bound the gain.

Plain and speculative sessions of one model take turns in one process, so that whatever slows the machine slows both. A
pair is one prompt on each of them; figures are medians over pairs. After each pair the target decodes batches of every width,
which gives v(n) = time of n rows as a verification decodes them / time of 1 row as plain decoding does: with L tokens a round
at depth k, no drafter however cheap can gain more than L / v(k+1). Knows nothing of terminals; where the figures come from is
provenance.py.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from .costs import expected_tokens
from .errors import LoadError, PromptError
from .llm import Model
from .lossless import first_divergence, top_two_margin
from .prompts import Prompt, prompts_hash, usable
from .provenance import provenance
from .sampling import MAX_SEED
from .session import Generation, Session
from .stats import Stats

MIN_PAIRS = 5
MIN_TOKENS = 16  # a budget shortens the texts to this before it drops a pair
MIN_TIMED_TOKENS = 8  # a text that ends earlier has no speed worth naming
MAX_SHARE = 1.05  # nobody gains more than drafting for free: such a share speaks of a machine that drifted
N_WIDTH_DECODES = (
    9  # decodes of a width that rounds verify with, after each pair; the first of them is warm-up
)
N_OTHER_DECODES = 4  # of the others

Progress = Callable[[int, int], None]


def p_accept(length: float, depth: int) -> float:
    """The coin that gives a mean accepted length: p with 1 + p + ... + p^depth = length (llama-server's definition).

    Raises:
        PromptError: no coin gives it.

    >>> round(p_accept(3.0, 3), 3)
    0.811
    """
    if not 1 <= length <= depth + 1:
        raise PromptError(
            f"a mean accepted length of {length} is not between 1 and {depth + 1}, what depth {depth} allows"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * depth) < length else (low, middle)
    return (low + high) / 2


def relative(row_s: Mapping[int, Sequence[float]]) -> list[float]:
    """v(n) for n = 1, 2, ... from the medians of `row_s[n]`, seconds of single decodes.

    >>> relative({1: [2.0, 9.0, 2.0], 2: [3.0, 3.0, 3.0]})
    [1.0, 1.5]
    """
    return [median(seconds) / median(row_s[1]) for _, seconds in sorted(row_s.items())]


def speedup_bound(stats: Stats, v: Sequence[float]) -> float:
    """The speed-up over plain if drafting and choosing were free: L / v(k+1), each round at the depth k that it had."""
    verified = sum(n * v for n, v in zip(stats.rounds_per_depth, v, strict=False))
    return (stats.n_rounds + stats.n_accepted) / verified if verified else 1.0


@dataclass(frozen=True)
class Pair:
    """One prompt, plain and speculative; `row_s[n]` are seconds of single decodes of n rows right after."""

    prompt: Prompt
    plain: Generation
    spec: Generation
    row_s: dict[int, list[float]]

    @property
    def speedup(self) -> float:
        return self.spec.stats.tok_s / self.plain.stats.tok_s

    @property
    def share_of_bound(self) -> float:
        """Its speed-up over its own bound: what slows the machine for a while slows both."""
        return self.speedup / speedup_bound(self.spec.stats, relative(self.row_s))

    @property
    def divergence(self) -> int | None:
        """Position in the generated text at which the token ids first differ."""
        return first_divergence(self.plain.tokens, self.spec.tokens)


@dataclass(frozen=True)
class Figures:
    """Speeds and acceptance of some pairs: medians, the smallest and largest speed-up, acceptance over all rounds."""

    n_pairs: int
    plain_tok_s: float
    spec_tok_s: float
    speedup: float
    speedup_spread: tuple[float, float]
    stats: Stats

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Figures:
        first = pairs[0].spec.stats
        total = Stats(first.kind, first.speculation, first.why, first.depth)
        for pair in pairs:
            total.include(pair.spec.stats)
        speedups = [pair.speedup for pair in pairs]
        return cls(
            n_pairs=len(pairs),
            plain_tok_s=median(pair.plain.stats.tok_s for pair in pairs),
            spec_tok_s=median(pair.spec.stats.tok_s for pair in pairs),
            speedup=median(speedups),
            speedup_spread=(min(speedups), max(speedups)),
            stats=total,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "n_pairs": self.n_pairs,
            "plain_tok_s": self.plain_tok_s,
            "spec_tok_s": self.spec_tok_s,
            "speedup": self.speedup,
            "speedup_spread": list(self.speedup_spread),
            "mean_accepted_length": self.stats.mean_accepted_length,
            "accepted_per_position": self.stats.accepted_per_position,
        }


@dataclass(frozen=True)
class Divergence:
    """Where token ids first differ: which pair, at which token, and how far apart the target's two best logits are there
    (None where not the best logit decides: the seed's draw, penalties, a grammar)."""

    pair: int
    token: int
    margin: float | None


@dataclass
class Report:
    """All that was measured; `prompts` were used."""

    prompts: Sequence[Prompt]
    depth: int
    n: int
    temperature: float
    seed: int
    synthetic_length: float | None
    paced: bool  # pace chose the depth, `depth` at most
    accept: str = "match"
    shaping: Mapping[str, Any] = field(default_factory=dict)  # of `Sampling`, beside temperature and seed
    source: dict[str, Any] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    divergence: Divergence | None = None
    noisy: bool = (
        False  # something else used the machine: speeds can be read, figures that divide them cannot
    )
    warnings: list[str] = field(default_factory=list)

    @property
    def figures(self) -> Figures:
        """Over all pairs."""
        return Figures.of(self.pairs)

    @property
    def tasks(self) -> dict[str, Figures]:
        """Task by task."""
        names = dict.fromkeys(pair.prompt.task for pair in self.pairs)
        return {name: Figures.of([p for p in self.pairs if p.prompt.task == name]) for name in names}

    @property
    def v(self) -> list[float]:
        """v(n) for n = 1 .. depth+1."""
        return relative(self.row_s)

    @property
    def row_s(self) -> dict[int, list[float]]:
        """Seconds of all single decodes of n rows."""
        return {n: [s for pair in self.pairs for s in pair.row_s[n]] for n in self.pairs[0].row_s}

    @property
    def one_row_s(self) -> float:
        """Seconds of a decode of one row in the plain session, without the rollback slots and hidden rows that verifying needs."""
        return median(self.row_s[1])

    @property
    def draft_step_s(self) -> float:
        """What one drafted token costs: all of the drafter's time (its catch-up included) over the tokens drafted."""
        stats = self.figures.stats
        return stats.draft_s / stats.n_drafted if stats.n_drafted else 0.0

    @property
    def c(self) -> float:
        """The cost of a drafted token in decodes of one row."""
        return self.draft_step_s / self.one_row_s

    @property
    def round_s(self) -> dict[str, float]:
        """Where the mean round's seconds go; `rest` is text and bookkeeping."""
        stats = self.figures.stats
        parts = {
            "draft": stats.draft_s,
            "verify": stats.verify_s,
            "accept": stats.accept_s,
            "rest": stats.rest_s,
        }
        return {name: seconds / max(1, stats.n_rounds) for name, seconds in parts.items()}

    @property
    def coverage(self) -> float | None:
        """The share of the tokens emitted that a compact head has rows for; None with a full head."""
        runs = [pair.spec.stats for pair in self.pairs]
        if any(stats.coverage is None for stats in runs):
            return None
        return sum((stats.coverage or 0.0) * stats.n_tokens for stats in runs) / sum(s.n_tokens for s in runs)

    @property
    def prompts_sha256(self) -> str:
        return prompts_hash(self.prompts)

    @property
    def bound(self) -> float:
        """The speed-up if drafting and choosing were free, over all pairs."""
        return speedup_bound(self.figures.stats, self.v)

    @property
    def share_of_bound(self) -> float | None:
        """How much of its bound a pair reached, the median; None where the widths' times are too uncertain to say."""
        share = median(pair.share_of_bound for pair in self.pairs)
        return None if self.noisy or share > MAX_SHARE else share

    @property
    def tokens_equal(self) -> bool | None:
        """Whether plain and speculative token ids are the same in every pair; None when coins replaced verification."""
        return None if self.synthetic_length is not None else self.divergence is None

    def to_json(self) -> dict[str, Any]:
        """The published names, ready for `json.dumps`."""
        return {
            "schema": 1,
            **self.figures.to_json(),
            "tokens_equal": self.tokens_equal,
            "first_divergence": asdict(self.divergence) if self.divergence else None,
            "depth": self.depth,
            "paced": self.paced,
            "rounds_per_depth": self.figures.stats.rounds_per_depth,
            "v": self.v,
            "row_s": self.one_row_s,
            "draft_step_s": self.draft_step_s,
            "c": self.c,
            "round_s": self.round_s,
            "bound": self.bound,
            "share_of_bound": self.share_of_bound,
            "coverage": self.coverage,
            "tasks": {name: part.to_json() for name, part in self.tasks.items()},
            "n": self.n,
            "temperature": self.temperature,
            "seed": self.seed,
            "shaping": dict(self.shaping),
            "accept": self.accept,
            "synthetic_length": self.synthetic_length,
            "prompts": {"n": len(self.prompts), "sha256": self.prompts_sha256},
            "warnings": self.warnings,
            **self.source,
        }


def measure(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    n: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    shaping: Mapping[str, Any] | None = None,
    accept: str = "match",
    depth: int | None = None,
    budget_s: float | None = None,
    synthetic_length: float | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
    on_pair: Callable[[Pair], None] = lambda pair: None,
) -> Report:
    """Runs every prompt plain and speculative in turns, at least five pairs of them, and times the widths between.

    Args:
        model: with a drafter.
        prompts: one pair each; fewer than five are gone through again.
        n: tokens a text.
        temperature, seed: of both runs of a pair.
        shaping: further settings of `Sampling`, of both runs too.
        accept: the rule by which drafts stand, as in `Session.generate`; by "reject" the texts of a pair are not the same.
        depth: drafts in every round (default: the model's setting, which may be pace's choice).
        budget_s: seconds for all of it: texts are shortened, then pairs left out, and the report says so.
        synthetic_length: coins of this mean accepted length stand in for verification; the text is then meaningless.
        source: where the figures come from (default: `provenance(model)`, which reads all of its files).
        progress: called with the tokens done and the tokens in all.
        on_pair: called with each pair when it is done.

    Raises:
        LoadError: nothing drafts for this model; PromptError: no prompt can be used, or a setting is out of range.

    Example:
        >>> measure(model, [Prompt("import os\\n", "code")], n=64).figures.speedup      # doctest: +SKIP
    """
    if model.kind is None:
        raise LoadError(
            f"there is nothing to compare plain decoding with: {model.speculation.why} (--sidecar FILE names one)"
        )
    if n < 2:
        raise PromptError(f"{n} tokens a text are too few to time: at least 2")
    if n >= model.n_ctx:
        raise PromptError(
            f"{n} tokens a text leave no room for a prompt in a context of {model.n_ctx} (--ctx)"
        )
    if budget_s is not None and not budget_s > 0:
        raise PromptError(f"a budget of {budget_s} seconds is no time at all")
    if depth is not None and not 1 <= depth <= model.max_depth:
        raise PromptError(f"depth {depth} is not between 1 and {model.max_depth}, what drafts here allows")
    paced = model.paced and depth is None
    depth = model.depth if depth is None else depth
    if synthetic_length is not None and paced:
        raise PromptError("coins of one mean accepted length need one depth: name it with --depth")
    coin = None if synthetic_length is None else p_accept(synthetic_length, depth)
    deadline = time.perf_counter() + (math.inf if budget_s is None else budget_s)
    found, warnings = usable(model, prompts, n)
    report = Report([prompt for prompt, _ in found], depth, n, temperature, seed, synthetic_length, paced)
    report.accept = accept
    report.shaping = {name: value for name, value in (shaping or {}).items() if value is not None}
    report.warnings += warnings
    if model.exact and (n_rows := model.widths(model.n_ctx)[0]) > 1:
        report.warnings.append(
            f"plain rounds have {n_rows} rows too (--exact), and are slower than without it"
        )
    report.source = dict(provenance(model) if source is None else source)
    own_depth = None if paced else depth
    with (
        model.session(spec_type="none", learn=False) as plain,
        model.session(learn=False, depth=own_depth) as spec,
    ):
        report.depth = spec.depth  # of pace's: the most that it may choose
        bench = _Bench(
            report, plain, spec, coin, deadline, n_pairs=max(MIN_PAIRS, len(found)), progress=progress
        )
        bench.warm_up(found[0][1])
        bench.run(deque(found), on_pair)
    if not report.pairs:
        raise PromptError(f"every text ended before {MIN_TIMED_TOKENS} tokens: give other prompts")
    if coin is None:
        report.divergence = _first_divergence(model, report)
    report.noisy = any(_is_noisy(seconds) for seconds in report.row_s.values())
    if report.noisy:
        report.warnings.append(
            "equal decodes took very different times: something else uses this machine; measure again"
        )
    return report


def _first_divergence(model: Model, report: Report) -> Divergence | None:
    for i, pair in enumerate(report.pairs):
        at = pair.divergence
        if at is not None:
            before = [*pair.prompt.tokens(model), *pair.plain.tokens[:at]]
            chosen = model.sampling.with_options(temperature=report.temperature, **report.shaping)
            by_logits = chosen.greedy and not chosen.adjusts
            return Divergence(i, at, top_two_margin(model, before) if by_logits else None)
    return None


def _is_noisy(seconds: Sequence[float]) -> bool:
    """Whether the upper quartile is twice the lower one."""
    lower, _, upper = quantiles(seconds, n=4)
    return upper > 2 * lower


class _Bench:
    """Two sessions in turns, and a report that fills."""

    def __init__(
        self,
        report: Report,
        plain: Session,
        spec: Session,
        coin: float | None,
        deadline: float,
        *,
        n_pairs: int,
        progress: Progress,
    ) -> None:
        self._report = report
        self._plain = plain
        self._spec = spec
        self._coin = coin
        self._deadline = deadline
        self._n_pairs = n_pairs
        self._progress = progress

    def warm_up(self, tokens: list[int]) -> None:
        """Touches all weights and buffers, learns what a pair costs, and shortens the texts to what the budget allows."""
        report = self._report
        self._generate(self._plain, tokens, 4)
        self._generate(self._spec, tokens, 4)
        self._time_widths(tokens)
        started = time.perf_counter()
        runs = [
            self._generate(session, tokens, min(MIN_TOKENS, report.n))
            for session in (self._plain, self._spec)
        ]
        self._time_widths(tokens)
        now = time.perf_counter()
        token_s = sum(run.stats.generate_s / max(1, len(run.tokens) - 1) for run in runs)
        other_s = now - started - sum(run.stats.generate_s for run in runs)
        pair_s = (self._deadline - now) / self._n_pairs
        if other_s + report.n * token_s > pair_s and report.n > MIN_TOKENS:
            n = max(MIN_TOKENS, int((pair_s - other_s) / token_s))
            report.warnings.append(f"{n} tokens a text instead of {report.n}, to stay within the budget")
            report.n = n

    def run(self, prompts: deque[tuple[Prompt, list[int]]], on_pair: Callable[[Pair], None]) -> None:
        """Goes round the prompts until there are enough pairs or no time is left."""
        report, slowest_s = self._report, 0.0
        while prompts and len(report.pairs) < self._n_pairs:
            started = time.perf_counter()
            if report.pairs and started + slowest_s > self._deadline:
                report.warnings.append(
                    f"{len(report.pairs)} pairs instead of {self._n_pairs} fitted into the budget: a larger one tells more"
                )
                return
            prompt, tokens = prompts.popleft()
            pair = self._pair(prompt, tokens)
            n_short = min(len(pair.plain.tokens), len(pair.spec.tokens))
            if n_short < min(MIN_TIMED_TOKENS, report.n):
                report.warnings.append(
                    f"a prompt ({prompt.task}) was left out: its text ends after {n_short} tokens"
                )
                continue
            prompts.append((prompt, tokens))
            report.pairs.append(pair)
            on_pair(pair)
            slowest_s = max(slowest_s, time.perf_counter() - started)

    def _pair(self, prompt: Prompt, tokens: list[int]) -> Pair:
        """One prompt on both sessions; every other pair begins with the speculative one."""
        n_before = len(self._report.pairs)
        order = [self._plain, self._spec] if n_before % 2 == 0 else [self._spec, self._plain]
        runs = {}
        for i, session in enumerate(order):
            n_other = (2 * n_before + i) * self._report.n
            runs[session] = self._generate(session, tokens, self._report.n, n_other)
        spec = runs[self._spec]
        return Pair(prompt, runs[self._plain], spec, self._time_widths([*tokens, *spec.tokens]))

    def _generate(
        self, session: Session, tokens: list[int], n: int, n_other: int | None = None
    ) -> Generation:
        """Runs a text to its end. `n_other` are the tokens of earlier texts, for the progress; None shows none."""
        report = self._report
        seed = (report.seed + len(report.pairs)) % (MAX_SEED + 1)
        if self._coin is not None and session is self._spec:
            generation = session.generate_synthetic(tokens, p_accept=self._coin, max_tokens=n, seed=seed)
        else:
            generation = session.generate(
                tokens,
                max_tokens=n,
                temperature=report.temperature,
                seed=seed,
                accept=report.accept,
                **report.shaping,
                ignore_eos=self._coin is not None,
            )
        text_ends = False
        while not text_ends:
            text_ends = next(generation, None) is None
            if n_other is not None:
                self._progress(n_other + len(generation.tokens), 2 * self._n_pairs * report.n)
        return generation

    def _time_widths(self, tokens: list[int]) -> dict[int, list[float]]:
        """Seconds of decodes of 1 .. depth+1 rows of a real text (of equal rows a mixture of experts would use few)."""
        n_most = min(self._spec.depth + 1, self._spec.model.settings.batch)
        n_decodes = dict.fromkeys(range(1, n_most + 1), N_OTHER_DECODES)
        n_decodes |= dict.fromkeys(n_decodes if self._report.paced else (1, n_most), N_WIDTH_DECODES)
        return {
            n: (self._plain if n == 1 else self._spec).time_rows(tokens, n, decodes)[1:]
            for n, decodes in n_decodes.items()
        }
