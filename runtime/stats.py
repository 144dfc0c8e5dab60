"""What a generation did and what it cost. Names are the project's definitions (ARCHITECTURE.md, Definitions)."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from . import _native

# What native/traffic.h counts.
TRAFFIC = (
    "n_decodes",
    "n_graphs_reused",
    "n_syncs",
    "logits_bytes",
    "hidden_bytes",
    "fed_bytes",
    "state_bytes",
)


@dataclass
class Stats:
    """Counts and seconds of one generation.

    `prompt_s` is the time the prompt took the target and then the drafter; `first_s` that until the first token was there.
    `coverage` is the share of the emitted tokens that a compact head had a row for when they came; None with a full head or
    before the end.
    `n_prompt` are the prompt's tokens, of which `n_reused` were held by the session and `n_prompt_decoded` had to be decoded.
    `n_tokens` are tokens emitted; `n_drafted` and `n_accepted` are drafts, the target's own tokens excluded.
    The `n_ngram_` ones are those among rounds and drafts whose drafts the look-up found ahead of the drafter.
    `kernels` says what computes small products on the CPU, and why.
    `accept` is the rule by which drafts stand (see `Session.generate`).
    `widths` are the numbers of rows that decodes had, where they were limited to those that agree to the bit (`exact`).
    `depth` is the largest that a round may have: every round's, or as far as pace may go.
    `generate_s` runs from the first token on, without the time the caller spends between pieces; `rest_s` of it is neither
    drafting nor verifying nor choosing.
    `n_decodes` to `state_bytes` are of the rounds: decodes of target and drafter, how many of them ran the graph of the one before,
    calls that waited for the backend, and the bytes that crossed between host and device: logits and hidden rows to the host,
    hidden rows fed to the drafter, states either way (native/traffic.h). The CPU counts as a device.
    `waiting` is how OpenMP's threads waited at the end: "spin 1 ms" at most ("spin" where libgomp was loaded before us), "sleep"
    while others used some of the processors, "as it is" where the user or the system decides.

    >>> stats = Stats("mtp", "on", "beside the main file", depth=3, n_rounds=1, n_drafted=3, n_accepted=2,
    ...               _drafted_at=[1, 1, 1], _accepted_at=[1, 1, 0])
    >>> stats.mean_accepted_length, stats.accepted_per_position, stats.rounds_per_depth
    (3.0, [1.0, 1.0, 0.0], [0, 0, 0, 1])
    """

    kind: str | None
    speculation: str
    why: str
    depth: int
    kernels: str = "stock"
    accept: str = "match"
    widths: tuple[int, ...] = ()
    n_prompt: int = 0
    n_reused: int = 0
    n_rounds: int = 0
    n_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_ngram_rounds: int = 0
    n_ngram_drafted: int = 0
    n_ngram_accepted: int = 0
    prompt_s: float = 0.0
    first_s: float = 0.0
    generate_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    n_decodes: int = 0
    n_graphs_reused: int = 0
    n_syncs: int = 0
    logits_bytes: int = 0
    hidden_bytes: int = 0
    fed_bytes: int = 0
    state_bytes: int = 0
    coverage: float | None = None
    waiting: str = ""
    _drafted_at: list[int] = field(default_factory=list)
    _accepted_at: list[int] = field(default_factory=list)

    def count(self, counts: _native.Counts) -> None:
        """Takes over what the native loop has counted."""
        self.n_rounds, self.n_tokens = counts.n_rounds, counts.n_tokens
        self.n_drafted, self.n_accepted = counts.n_drafted, counts.n_accepted
        self.n_ngram_rounds = counts.n_ngram_rounds
        self.n_ngram_drafted, self.n_ngram_accepted = counts.n_ngram_drafted, counts.n_ngram_accepted
        self.draft_s, self.verify_s, self.accept_s = counts.draft_s, counts.verify_s, counts.accept_s
        self._drafted_at, self._accepted_at = counts.drafted_at, counts.accepted_at
        for name in TRAFFIC:
            setattr(self, name, getattr(counts.traffic, name))

    def include(self, other: Stats) -> None:
        """Adds the counts and seconds of another generation."""
        summed = [
            f.name for f in fields(self) if f.name.startswith("n_") or f.name.endswith(("_s", "_bytes"))
        ]
        for name in summed:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for counts, others in (
            (self._drafted_at, other._drafted_at),
            (self._accepted_at, other._accepted_at),
        ):
            counts.extend([0] * (len(others) - len(counts)))
            for i, n in enumerate(others):
                counts[i] += n

    @property
    def n_prompt_decoded(self) -> int:
        """Tokens of the prompt that the session did not hold."""
        return self.n_prompt - self.n_reused

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the drafts made at each position, the share that stood."""
        return [a / d for a, d in zip(self._accepted_at, self._drafted_at, strict=True)]

    @property
    def rounds_per_depth(self) -> list[int]:
        """How many rounds drafted 0, 1, 2, ... tokens."""
        at_least = [self.n_rounds, *self._drafted_at, 0]
        return [n - deeper for n, deeper in itertools.pairwise(at_least)]

    @property
    def mean_accepted_length(self) -> float:
        """L: tokens emitted per round, the target's own included."""
        return 1 + self.n_accepted / self.n_rounds if self.n_rounds else 0.0

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first one, which the prompt pays for."""
        return (self.n_tokens - 1) / self.generate_s if self.generate_s > 0 and self.n_tokens > 1 else 0.0

    @property
    def rest_s(self) -> float:
        """Seconds outside of what the native loop measures: Python, mostly."""
        return max(0.0, self.generate_s - self.draft_s - self.verify_s - self.accept_s)

    def to_json(self) -> dict[str, Any]:
        """The published names, ready for `json.dumps`."""
        data = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return data | {
            "n_prompt_decoded": self.n_prompt_decoded,
            "rest_s": self.rest_s,
            "accepted_per_position": self.accepted_per_position,
            "rounds_per_depth": self.rounds_per_depth,
            "mean_accepted_length": self.mean_accepted_length,
            "tok_s": self.tok_s,
        }
