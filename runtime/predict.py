"""Will speculation pay on this machine? What a round costs is measured on a model of random weights, before any download.

The benchmark (bench.py) measures v(n), the time of n rows in one decode over that of one row, and c, the time of a draft
step over that of one row. Acceptance depends on model and text, so it stays open: with each draft standing at chance a,
once those before it stand, a round of k drafts gives E(k) = 1 + a + ... + a^k tokens and is

    E(k) / (v(k+1) + k c)

times as fast as plain decoding (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023).
What others measured on real models stands beside it, each with its source. Knows nothing of terminals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import memory, placement
from .bench import Report, measure, p_accept
from .cache_folder import CacheFolder, default_root
from .costs import Costs
from .errors import CacheError, LoadError, PromptError
from .library import llama
from .llm import Model, load
from .prompts import Prompt
from .random_model import MARK, SHAPES, RandomPair, Shape, random_pair
from .weights import Settings

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MAX_DEPTH = 4
N_CTX = 512
N_TOKENS = 16  # a text; what is timed are single decodes and draft steps, more than a hundred of each
BUDGET_S = 60.0
WORTHWHILE = 1.05  # less is within what a machine's speed drifts by
PROMPT = Prompt("def add(first, second):\n    return first + second\n" * 2, "random weights")

Progress = Callable[[str, int, int], None]


def best_depth(costs: Costs, acceptance: float) -> int:
    """The fastest depth that the costs cover, the smaller one of equals; 0 means: leave it off.

    >>> costs = Costs(plain_s=1.0, verify_s=(1.0, 1.2, 1.4), first_draft_s=0.1, draft_step_s=0.1)
    >>> best_depth(costs, 0.8), best_depth(costs, 0.2)
    (2, 0)
    """
    return max(range(costs.max_depth + 1), key=lambda depth: costs.speedup([acceptance] * depth))


def best_speedup(costs: Costs, acceptance: float) -> float:
    """The speed-up at the best depth."""
    return costs.speedup([acceptance] * best_depth(costs, acceptance))


@dataclass(frozen=True)
class Source:
    """Where acceptance was published."""

    model: str
    where: str
    url: str


LLAMA_CPP = Source(
    "Qwen3.6-27B", "llama.cpp pull request 24340", "https://github.com/ggml-org/llama.cpp/pull/24340"
)
IK_LLAMA = Source(
    "Qwen3.8-Flash-Next",
    "ik_llama.cpp pull request 2369",
    "https://github.com/ikawrakow/ik_llama.cpp/pull/2369",
)
MLX_VLM = Source("Qwen3.5-4B", "mlx-vlm pull request 1167", "https://github.com/Blaizzy/mlx-vlm/pull/1167")
DEEPSEEK = Source("DeepSeek-V3", "technical report, section 5.4.3", "https://arxiv.org/abs/2412.19437")


@dataclass(frozen=True)
class Published:
    """An acceptance that was measured on a real model: of `task`, the chance that a draft stands."""

    task: str
    acceptance: float
    source: Source

    @classmethod
    def from_length(cls, task: str, length: float, source: Source) -> Published:
        """From a mean accepted length at depth 3, the target's own token included."""
        return cls(task, p_accept(length, 3), source)


# Lengths at depth 3. llama.cpp: 192 tokens a prompt, of which accepted drafts
# (2026-06-14, Q8_0): code_python 136 and code_cpp 130; explain_concept 130 and qa_factual 132; creative_short 125; all
# other tokens began a round. ik_llama.cpp: "a.len" of code and story (2026-09-01). mlx-vlm: 1.92 accepted a round.
# DeepSeek: the second token is accepted 85 to 90 % of the time, across topics.
PUBLISHED = (
    Published.from_length("code", 384 / (384 - 136 - 130), LLAMA_CPP),
    Published.from_length("chat", 384 / (384 - 130 - 132), LLAMA_CPP),
    Published.from_length("prose", 192 / (192 - 125), LLAMA_CPP),
    Published.from_length("code", 3.76, IK_LLAMA),
    Published.from_length("prose", 2.39, IK_LLAMA),
    Published.from_length("code", 1 + 1.92, MLX_VLM),
    Published("mixed", 0.85, DEEPSEEK),
    Published("mixed", 0.90, DEEPSEEK),
)
TASKS = ("code", "chat", "prose")


@dataclass(frozen=True)
class Prediction:
    """What was measured, and what follows from it.

    `pair` are the files, which are gone by now unless they were kept; `n_head_rows` the rows of the vocabulary that the
    head was measured with.
    """

    shape: Shape
    type: str
    pair: RandomPair
    n_head_rows: int
    report: Report
    kept: bool

    @property
    def costs(self) -> Costs:
        """In decodes of one row."""
        v, c = self.report.v, max(self.report.c, 1e-9)
        return Costs(plain_s=v[0], verify_s=tuple(v), first_draft_s=c, draft_step_s=c)

    @property
    def checked(self) -> tuple[float, float]:
        """The speed-up of the run itself, whose drafts stood by coin tosses, and what the arithmetic says of that run."""
        figures, costs = self.report.figures, self.costs
        round_rows = costs.round_s(self.report.depth) / costs.plain_s
        return figures.speedup, figures.stats.mean_accepted_length / round_rows

    def speedups(self, task: str) -> tuple[float, float]:
        """The best speed-up at the lowest and at the highest acceptance published for a task."""
        found = [best_speedup(self.costs, p.acceptance) for p in PUBLISHED if p.task == task]
        return min(found), max(found)

    @property
    def verdict(self) -> str:
        """One line for someone who asks whether to turn speculation on."""
        ranges = [self.speedups(task) for task in TASKS]
        code, chat, prose = (_range(low, high) for low, high in ranges)
        speed = f"{code} times plain speed ({self.report.figures.plain_tok_s:.0f} tok/s) on code, {chat} on chat, {prose} on prose"
        if max(high for _, high in ranges) < WORTHWHILE:
            return f"Speculation does not pay here, leave it off: it would write at {speed}."
        if min(low for low, _ in ranges) < WORTHWHILE:
            return f"Speculation pays here for some texts only: expect {speed}."
        return f"Speculation pays here: expect {speed}."

    def to_json(self) -> dict[str, Any]:
        """The published names, ready for `json.dumps`."""
        costs, report = self.costs, self.report
        measured, predicted = self.checked
        return {
            "schema": 1,
            "verdict": self.verdict,
            "shape": self.shape.name,
            "type": self.type,
            "bytes": {"main": self.pair.main_bytes, "sidecar": self.pair.sidecar_bytes},
            "kept": [str(self.pair.main), str(self.pair.sidecar)] if self.kept else [],
            "head_rows": self.n_head_rows,
            "n_vocab": self.shape.n_vocab,
            "plain_tok_s": report.figures.plain_tok_s,
            "row_s": report.one_row_s,
            "draft_step_s": report.draft_step_s,
            "v": report.v,
            "c": report.c,
            "table": [
                {
                    "acceptance": acceptance,
                    "depth": best_depth(costs, acceptance),
                    "speedup": best_speedup(costs, acceptance),
                    "speedup_by_depth": [costs.speedup([acceptance] * k) for k in range(len(report.v))],
                }
                for acceptance in ACCEPTANCES
            ],
            "check": {"depth": report.depth, "measured": measured, "predicted": predicted},
            "published": [
                {"task": p.task, "acceptance": p.acceptance, "model": p.source.model, "source": p.source.url}
                for p in PUBLISHED
            ],
            "warnings": report.warnings,
            **{
                name: report.source[name]
                for name in ("machine", "backend", "threads", "llama_cpp", "version")
            },
        }


def published_near(acceptance: float) -> list[Published]:
    """What was published nearer to this acceptance of ACCEPTANCES than to any other.

    >>> sorted({p.task for p in published_near(0.95)})
    ['code']
    """
    return [p for p in PUBLISHED if min(ACCEPTANCES, key=lambda a: abs(a - p.acceptance)) == acceptance]


def predict(
    shape: Shape = SHAPES["0.8B"],
    type: str = "Q8_0",
    *,
    max_depth: int = MAX_DEPTH,
    threads: int | None = None,
    gpu_layers: int | str = "auto",
    device: str | None = None,
    budget_s: float = BUDGET_S,
    folder: Path | None = None,
    keep: bool = False,
    announce: Callable[[int, Path], None] = lambda n_bytes, folder: None,
    progress: Progress = lambda step, done, total: None,
) -> Prediction:
    """Measures what rounds cost with a model of random weights, and says what that means.

    Args:
        shape: of which model; `type`: of its matrices, one of random_model.TYPES.
        max_depth: the most drafts a round that are considered.
        threads, gpu_layers, device: as in `load`.
        budget_s: seconds for the texts; timing the widths comes on top.
        folder: where the files live meanwhile (default: the user's cache).
        keep: leave them there, until the next prediction.
        announce: called with the bytes that will be written and the folder, before they are.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        LlamaSidecarError: the disk or the memory is too small, another prediction is running, llama.cpp is missing.

    Example:
        >>> predict().verdict                                                       # doctest: +SKIP
        'Speculation pays here: expect 1.2 to 1.5 times plain speed (31 tok/s) on code, 1.3 on chat, 1.1 on prose.'
    """
    Settings(gpu_layers=gpu_layers, device=device, threads=threads)  # before a gigabyte is written for them
    if not budget_s > 0:
        raise PromptError(f"a budget of {budget_s} seconds is no time at all")
    folder = folder or default_root() / "predict"

    def before_writing(n_bytes: int) -> None:
        _check_memory(n_bytes)
        announce(n_bytes, folder)

    with (
        random_pair(
            shape,
            type,
            folder,
            keep=keep,
            announce=before_writing,
            progress=lambda done, total: progress("writing random weights", done, total),
        ) as pair,
        _no_cached_heads(),
        load(
            pair.main,
            pair.sidecar,
            depth=max_depth,
            threads=threads,
            gpu_layers=gpu_layers,
            device=device,
            ctx=N_CTX,
        ) as model,
    ):
        report = measure(
            model,
            [PROMPT],
            n=N_TOKENS,
            budget_s=budget_s,
            synthetic_length=1 + max_depth / 2,
            progress=lambda done, total: progress("measuring", done, total),
        )
        return Prediction(shape, type, pair, _n_head_rows(model), report, keep)


@contextlib.contextmanager
def _no_cached_heads() -> Iterator[None]:
    """Removes the compact heads that `load` cut from random ones: nothing will ask for them again."""
    try:
        yield
    finally:
        with contextlib.suppress(CacheError, OSError):
            for entry in CacheFolder().entries():
                if entry.sort == "heads" and MARK in entry.path.name:
                    entry.path.unlink()


def _n_head_rows(model: Model) -> int:
    lib = llama()
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model.head_weights.model)))


def _check_memory(n_bytes: int) -> None:
    """A model that does not fit is read from the disk again for each token: that would measure the disk."""
    room = memory.available()
    on_gpus = sum(gpu.free_bytes for gpu in placement.gpus())
    if room is not None and n_bytes > room.n_bytes + on_gpus:
        raise LoadError(
            f"the model takes {memory.gigabytes(n_bytes)}, and {memory.gigabytes(room.n_bytes + on_gpus)} are left of "
            f"{room.of}: choose a smaller size or type"
        )


def _range(low: float, high: float) -> str:
    """'1.2 to 1.4', or one number where they are the same."""
    ends = [f"{low:.1f}", f"{high:.1f}"]
    return " to ".join(dict.fromkeys(ends))
