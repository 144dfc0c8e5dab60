"""Is speculation lossless here? Plain against speculative texts of a model, states after rewinds, and draws, with a verdict.

What several rows in a decode round otherwise than one is measured on the same texts (lossless.py), and only that much is
excused; docs/LOSSLESS.md has the definition. Knows nothing of terminals.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import LoadError, PromptError
from .llm import Model
from .lossless import TOP_K, Rounding, Row, compare_widths, feed, first_divergence
from .prompts import Prompt, prompts_hash, usable
from .provenance import provenance
from .sampling import MAX_SEED
from .session import Generation, Scripted, Session

IDENTICAL, NEAR_TIE, BUG = "identical", "near-tie", "BUG"
MIN_TOKENS = 16  # a budget shortens the texts to this before it leaves prompts out
ALLOWANCE = 4  # two logits move towards each other, and by twice what was seen at the positions measured
TEMPERATURE = 0.8
N_SEEDS = 2
N_DRAWS = 400  # of each arm of the distribution test
MIN_DRAWS = 20
N_JOINT = 3  # tokens of a draw
N_DRAW_PROMPT = 8  # tokens of its prompt: it is decoded anew for each draw
DRAW_SHARE = 0.25  # of the budget
MIN_CELL = 5
N_SHUFFLES = 20_000
P_BUG = 1e-4  # a fault of chance in so many runs is called BUG

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Trial:
    """One speculative text against the plain one of the same prompt, and the states both leave.

    `divergence` is where the ids first differ and `margin` how far apart the two tokens' logits are there in the plain
    decode. `state_equal` says whether the target's state is byte for byte that of a session which decoded the same tokens one
    by one, `next_difference` how far the logits after one more token are from that session's.
    """

    prompt: int
    drafter: str
    n_tokens: int
    mean_accepted_length: float
    divergence: int | None
    margin: float | None
    state_equal: bool
    next_difference: float


@dataclass(frozen=True)
class Draws:
    """Two samples of the joint of a prompt's first tokens: `p` is how probably chance alone sets them so far apart."""

    n: int
    n_joint: int
    n_cells: int
    p: float


@dataclass
class Report:
    """What was compared, what was found, and the verdict."""

    prompts: list[Prompt]
    depth: int
    n: int
    seed: int
    trials: list[Trial] = field(default_factory=list)
    rounding: Rounding = field(default_factory=Rounding)
    seeded: list[int | None] = field(
        default_factory=list
    )  # where each speculative text leaves its seed's plain one
    seeded_flips: float = 0.0  # texts that rounding is expected to set apart, of all of `seeded`
    draws: Draws | None = None
    warnings: list[str] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def allowed(self) -> float:
        """How far apart two logits may be that rounding swaps: four times the largest difference between widths."""
        return ALLOWANCE * self.rounding.difference

    @property
    def seeded_p(self) -> float:
        """How probably rounding sets as many seeded texts apart as were found apart, or more."""
        n_apart = sum(at is not None for at in self.seeded)
        rate = ALLOWANCE * self.seeded_flips
        fewer = sum(math.exp(-rate) * rate**k / math.factorial(k) for k in range(n_apart))
        return max(0.0, 1.0 - fewer)

    def verdict_on(self, trial: Trial) -> str:
        """Of one greedy text and the state behind it."""
        if trial.next_difference > self.allowed or (trial.margin is not None and trial.margin > self.allowed):
            return BUG
        return IDENTICAL if trial.divergence is None else NEAR_TIE

    @property
    def faults(self) -> list[str]:
        """What rounding does not explain, a line each; empty unless the verdict is BUG."""
        found = []
        excuse = f"rounding explains {self.allowed:.2g}"
        for trial in self.trials:
            if self.verdict_on(trial) != BUG:
                continue
            where = f"prompt {trial.prompt + 1}, {trial.drafter}"
            if trial.margin is not None and trial.margin > self.allowed:
                found.append(
                    f"{where}: another token at {trial.divergence}, {trial.margin:.2g} below the plain one ({excuse})"
                )
            if trial.next_difference > self.allowed:
                found.append(
                    f"{where}: the state left behind gives logits {trial.next_difference:.2g} off ({excuse})"
                )
        if self.rounding.difference > self.rounding.spread:
            found.append(
                f"decodes of 2 to {self.depth + 1} rows differ from one row by {self.rounding.difference:.2g}, more than "
                f"the logits' own standard deviation ({self.rounding.spread:.2g}): that is no rounding"
            )
        if self.seeded_p < P_BUG:
            n_apart = sum(at is not None for at in self.seeded)
            found.append(
                f"{n_apart} of {len(self.seeded)} seeded texts are not the plain ones (rounding explains {self.seeded_flips:.2g})"
            )
        if self.draws and self.draws.p < P_BUG:
            found.append(
                f"speculative draws are distributed otherwise than plain ones (p = {self.draws.p:.1g})"
            )
        return found

    @property
    def verdict(self) -> str:
        """ "identical", "near-tie" or "BUG"."""
        if self.faults:
            return BUG
        apart = any(trial.divergence is not None for trial in self.trials)
        return NEAR_TIE if apart or any(at is not None for at in self.seeded) else IDENTICAL

    def to_json(self) -> dict[str, Any]:
        """The published names, ready for `json.dumps`."""
        margins = [trial.margin for trial in self.trials if trial.margin is not None]
        return {
            "schema": 1,
            "verdict": self.verdict,
            "faults": self.faults,
            "largest_margin": max(margins, default=None),
            "allowed_margin": self.allowed,
            "widths": {
                "rows": [2, self.depth + 1],
                "positions": self.rounding.n_rows,
                "difference": self.rounding.difference,
                "spread": self.rounding.spread,
            },
            "trials": [vars(trial) | {"verdict": self.verdict_on(trial)} for trial in self.trials],
            "seeded": {
                "temperature": TEMPERATURE,
                "first_divergences": self.seeded,
                "expected_apart": self.seeded_flips,
                "p": self.seeded_p,
            },
            "distribution": vars(self.draws) if self.draws else None,
            "depth": self.depth,
            "n": self.n,
            "seed": self.seed,
            "prompts": {"n": len(self.prompts), "sha256": prompts_hash(self.prompts)},
            "warnings": self.warnings,
            **self.source,
        }


def verify(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    n: int = 128,
    seed: int = 0,
    budget_s: float | None = None,
    progress: Progress = lambda what, share: None,
) -> Report:
    """Compares plain with speculative decoding of `model`: texts, states after rewinds, seeded texts, and draws.

    Every prompt is written plainly, with scripted drafters that are right for the first 0 .. depth tokens of each draft,
    and with the model's own drafter at that depth and (where the depth is pace's) as it runs.

    Args:
        model: with a drafter.
        prompts: to write greedily; the first also with temperature.
        n: tokens a text.
        seed: of the first text with temperature.
        budget_s: seconds for all of it: texts are shortened, then prompts left out, and the report says so.
        progress: called with what is done, and the share of the prompts or of the time that is behind.

    Raises:
        LoadError: nothing drafts for this model; PromptError: no prompt can be used, or `n` is out of range.

    Example:
        >>> verify(model, [Prompt("import os\\n", "code")], n=32).verdict            # doctest: +SKIP
        'identical'
    """
    if model.kind is None:
        raise LoadError(
            f"there is nothing to verify: {model.speculation.why} (--sidecar FILE names a sidecar)"
        )
    if n < 2:
        raise PromptError(f"{n} tokens a text are too few to compare: at least 2")
    if n >= model.n_ctx:
        raise PromptError(
            f"{n} tokens a text leave no room for a prompt in a context of {model.n_ctx} (-n, --ctx)"
        )
    if budget_s is not None and not budget_s > 0:
        raise PromptError(f"a budget of {budget_s} seconds is no time at all")
    found, warnings = usable(model, prompts, n)
    report = Report([prompt for prompt, _ in found], model.depth, n, seed, warnings=warnings)
    report.source = provenance(model)
    _Verification(model, report, math.inf if budget_s is None else budget_s, progress).run(
        [tokens for _, tokens in found]
    )
    return report


@dataclass(frozen=True)
class _Ended:
    """A session at the end of its text: its state, and the logits (n_vocab,) after the text's last token."""

    state: bytes
    following: Row

    @classmethod
    def of(cls, session: Session, last: int) -> _Ended:
        with session.model.turns:
            state = session._native.state()
        feed(session, [last])
        with session.model.turns:
            following = np.array(session._native.logits(0), np.float32)  # of whichever context pace is in
        return cls(state, following)


class _Verification:
    """A report that fills."""

    def __init__(self, model: Model, report: Report, budget_s: float, progress: Progress) -> None:
        self._model = model
        self._report = report
        self._budget_s = budget_s
        self._deadline = time.perf_counter() + budget_s
        self._progress = progress

    def run(self, prompts: list[list[int]]) -> None:
        """The first prompt with everything, then the others greedily while there is time."""
        report, slowest_s = self._report, 0.0
        self._shorten(prompts[0])
        for i, prompt in enumerate(prompts):
            started = time.perf_counter()
            if i and started + slowest_s > self._deadline:
                report.warnings.append(f"{i} of {len(prompts)} prompts fitted into the budget (--budget)")
                report.prompts = report.prompts[:i]
                break
            self._greedy(i, prompt, len(prompts))
            slowest_s = max(slowest_s, time.perf_counter() - started)
            if i == 0:
                self._seeded(prompt)
                self._draw(prompt[:N_DRAW_PROMPT])

    def _shorten(self, prompt: list[int]) -> None:
        """Makes the texts as short as the first prompt's part of the budget needs, by what a plain token takes."""
        report, n_drafters = self._report, self._report.depth + 1 + 2
        self._progress("warming up", 0.0)
        with self._model.session(spec_type="none") as session:
            self._write(session, prompt, 4)
            token_s = self._write(session, prompt, 8).stats.generate_s / 7
        n_each = 1.5 * n_drafters + 3 + 4 * N_SEEDS  # plain tokens' time for each of n
        n = max(MIN_TOKENS, int(min(report.n, (1 - DRAW_SHARE) * self._budget_s / (n_each * token_s))))
        if n < report.n:
            report.warnings.append(
                f"{n} tokens a text instead of {report.n}, to stay within the budget (--budget)"
            )
            report.n = n

    def _write(
        self, session: Session, prompt: Sequence[int], n: int | None = None, **options: Any
    ) -> Generation:
        options = {"temperature": 0, "repeat_penalty": 1, **options}  # whatever the file says
        text = session.generate(prompt, max_tokens=n or self._report.n, ignore_eos=True, **options)
        text.read()
        return text

    def _drafters(self, script: list[int]) -> list[tuple[str, dict[str, Any]]]:
        """Names, and what makes a session of each."""
        model, depth = self._model, self._report.depth
        found: list[tuple[str, dict[str, Any]]] = [
            (f"{j} of {depth} right", {"depth": depth, "scripted": Scripted(script, j)})
            for j in range(depth + 1)
        ]
        found.append((f"{model.kind} depth {depth}", {"depth": depth}))
        if model.paced:
            found.append((f"{model.kind} pace", {}))
        return found

    def _greedy(self, i: int, prompt: list[int], n_prompts: int) -> None:
        model, report = self._model, self._report
        with model.session(spec_type="none", learn=False) as session:
            plain = self._write(session, prompt).tokens
            plain_end = _Ended.of(session, plain[-1])
        drafters = self._drafters([*prompt, *plain])
        trials: list[tuple[Trial, list[int]]] = []
        for done, (name, options) in enumerate(drafters):
            self._progress(
                f"greedy, prompt {i + 1} of {n_prompts}: {name}", (i + done / len(drafters)) / n_prompts
            )
            with model.session(learn=False, **options) as session:
                text = self._write(session, prompt)
                end = _Ended.of(session, text.tokens[-1])
            at = first_divergence(plain, text.tokens)
            expected = plain_end if at is None else self._plain_end(prompt, text.tokens)
            difference = float(np.max(np.abs(end.following - expected.following)))
            length = text.stats.mean_accepted_length
            equal = end.state == expected.state
            trial = Trial(i, name, len(text.tokens), length, at, None, equal, difference)
            trials.append((trial, text.tokens))
        if i == 0 or any(t.divergence is not None or not t.state_equal for t, _ in trials):
            self._progress(f"widths, prompt {i + 1} of {n_prompts}", (i + 1) / n_prompts)
            rivals: dict[int, set[int]] = {}
            for trial, tokens in trials:
                if trial.divergence is not None:
                    rivals.setdefault(trial.divergence, set()).add(tokens[trial.divergence])
            measured = compare_widths(model, prompt, plain, depth=report.depth, rivals=rivals)
            report.rounding.include(measured)
            trials = [(_with_margin(trial, tokens, measured), tokens) for trial, tokens in trials]
        report.trials += [trial for trial, _ in trials]

    def _plain_end(self, prompt: list[int], text: list[int]) -> _Ended:
        """Of a session that decoded this text one by one."""
        with self._model.session(spec_type="none") as session:
            feed(session, prompt)
            feed(session, text[:-1], one_by_one=True)
            return _Ended.of(session, text[-1])

    def _seeded(self, prompt: list[int]) -> None:
        """The same seed, plain and speculative; what is apart is set against the draws that rounding turns."""
        model, report = self._model, self._report
        flips: list[float] = []
        for i in range(N_SEEDS):
            if i and time.perf_counter() > self._deadline - DRAW_SHARE * self._budget_s:
                break
            options = _sampling(report.seed + i)
            with model.session(spec_type="none", learn=False) as session:
                plain = self._write(session, prompt, **options).tokens
            apart = []
            half = f"{(report.depth + 1) // 2} of {report.depth} right"
            for name, drafter in self._drafters([*prompt, *plain]):
                if name == half or "scripted" not in drafter:
                    self._progress(f"seed {report.seed + i}: {name}", i / N_SEEDS)
                    with model.session(learn=False, **drafter) as session:
                        apart.append(first_divergence(plain, self._write(session, prompt, **options).tokens))
            report.seeded += apart
            if any(at is not None for at in apart):
                measured = compare_widths(model, prompt, plain, depth=report.depth, temperature=TEMPERATURE)
                report.rounding.include(measured)
                flips.append(measured.flips)
        report.seeded_flips = len(report.seeded) * float(np.mean(flips)) if flips else 0.0

    def _draw(self, prompt: list[int]) -> None:
        """The joint of the first tokens, every draw with a seed of its own: speculative sampling against plain, or where decoding
        is exact, which allows no other, sample-and-match."""
        model, report = self._model, self._report
        rule = {"accept": "match" if model.exact else "reject"}
        samples: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
        started, share_s = time.perf_counter(), DRAW_SHARE * self._budget_s
        seeds = itertools.count(report.seed + N_SEEDS)
        with (
            model.session(spec_type="none", learn=False) as plain,
            model.session(depth=report.depth, learn=False) as spec,
        ):
            for i in range(N_DRAWS):
                spent_s = time.perf_counter() - started
                if spent_s > share_s or (0 < i < MIN_DRAWS and MIN_DRAWS * spent_s / i > share_s):
                    break
                self._progress(f"draws at temperature {TEMPERATURE:g}", i / N_DRAWS)
                for session, sample in zip((plain, spec), samples, strict=True):
                    text = self._write(session, prompt, N_JOINT, **_sampling(next(seeds)), **rule)
                    sample.append(tuple(text.tokens))
        n = len(samples[0])
        if n < MIN_DRAWS:
            report.warnings.append(
                f"no distribution test: {MIN_DRAWS} draws do not fit into {share_s:.0f} seconds (--budget)"
            )
            return
        n_cells, p = same_distribution(*samples)
        report.draws = Draws(n, N_JOINT, n_cells, p)


def _with_margin(trial: Trial, tokens: list[int], measured: Rounding) -> Trial:
    at = trial.divergence
    return trial if at is None else Trial(**vars(trial) | {"margin": measured.margins[at, tokens[at]]})


def _sampling(seed: int) -> dict[str, Any]:
    return {
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed % (MAX_SEED + 1),
    }


def same_distribution(
    a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]], *, n_shuffles: int = N_SHUFFLES
) -> tuple[int, float]:
    """Two-sample chi-square test on the joint of several tokens: the number of cells, and p by shuffling the two samples.

    A cell is a sequence of tokens; those seen fewer than five times are joined with others that begin alike. Shuffling
    (Fisher's permutation test) needs no large counts, as the chi-square distribution would.

    >>> same_distribution([(1, 2)] * 30, [(1, 3)] * 30)[1] < 0.001
    True
    """
    cells = _cells([*a, *b])
    labels = sorted(set(cells))
    index = {label: k for k, label in enumerate(labels)}
    first = np.bincount([index[cell] for cell in cells[: len(a)]], minlength=len(labels))
    both = np.bincount([index[cell] for cell in cells], minlength=len(labels))
    shuffled = np.random.default_rng(0).multivariate_hypergeometric(both, len(a), size=n_shuffles)
    expected = both * (len(a) / len(cells))

    def distance(counts: Any) -> Any:  # chi-square but for a factor
        return ((counts - expected) ** 2 / expected).sum(axis=-1)

    n_as_far = int((distance(shuffled) >= distance(first) * (1 - 1e-9)).sum())
    return len(labels), (1 + n_as_far) / (1 + n_shuffles)


def _cells(draws: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    cells = list(draws)
    for length in range(max(map(len, cells)), 0, -1):
        counts = Counter(cells)
        cells = [
            cell[: length - 1] if len(cell) == length and counts[cell] < MIN_CELL else cell for cell in cells
        ]
    return cells
