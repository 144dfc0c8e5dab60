"""`llama-sidecar bench`: what speculation gains here. Parses, shows progress, prints; runtime.bench measures."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llama_sidecar.runtime.bench import measure
from llama_sidecar.runtime.prompts import Prompt, read_prompts
from llama_sidecar.runtime.sampling import ACCEPT

from ._options import (
    GroupedCommand,
    Loader,
    budget_option,
    load_options,
    seed_option,
    shaping_options,
    text_options,
)
from ._report import summary
from ._show import note

BUILT_IN = {path.stem: path for path in sorted((Path(__file__).parent / "prompts").glob("*.jsonl"))}


@click.command(cls=GroupedCommand)
@click.option(
    "--prompts",
    "sources",
    multiple=True,
    metavar="FILE",
    help='Your own prompts: a text file is one, each line of a .jsonl file is one, {"prompt": ...} or {"messages": '
    f"[...]}}; or a built-in set: {', '.join(BUILT_IN)}. May be repeated.  [default: all built-in sets]",
)
@text_options(128)
@seed_option("Seed of both runs of a pair.")
@budget_option(
    300.0, "Time to take: texts are shortened to it, then pairs are left out, and the output says so."
)
@click.option(
    "--synthetic-length",
    type=click.FloatRange(1),
    metavar="L",
    help="Accept drafts by coin tosses of this mean accepted length, whatever the model says: measures cost, not "
    "acceptance; the text is meaningless.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--accept",
    type=click.Choice([*ACCEPT]),
    default="match",
    show_default=True,
    help="Which drafts stand above temperature 0 (see run); by reject the texts of a pair differ.",
)
@shaping_options
@load_options
def command(
    open_model: Loader,
    sources: tuple[str, ...],
    n: int,
    temperature: float,
    seed: int,
    budget: float,
    synthetic_length: float | None,
    accept: str,
    as_json: bool,
    shaping: dict[str, Any],
) -> None:
    """Measure what speculation gains with the model MAIN on this machine, on your prompts.

    Every prompt is decoded plainly and speculatively in turns, in one process. Printed are the medians over at least
    five such pairs, whether the token ids are equal, how many drafts were right, what a decode of n rows costs (v(n)) and
    a drafted token (c), and the most that speculation could gain here: L / v(depth + 1), drafting for free. The table is
    Markdown, to paste into an issue as it is.

    \b
    llama-sidecar bench models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar bench models/Qwen3.5-0.8B-Q8_0.gguf --depth 2 --prompts mine.jsonl --json > result.json
    """
    prompts = _prompts(sources)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with open_model() as model, bar:
        task = bar.add_task("warming up", total=None)
        report = measure(
            model,
            prompts,
            n=n,
            temperature=temperature,
            seed=seed,
            shaping=shaping,
            accept=accept,
            budget_s=budget,
            synthetic_length=synthetic_length,
            progress=lambda done, total: bar.update(
                task, completed=done, total=total, description="measuring"
            ),
        )
    if as_json:
        click.echo(json.dumps(report.to_json()))
        return
    for warning in report.warnings:
        note(warning)
    click.echo(summary(report))


def _prompts(sources: tuple[str, ...]) -> list[Prompt]:
    """The prompts of all sources in turns, so that a run cut short still has some of each."""
    sets = [read_prompts(BUILT_IN.get(source) or Path(source)) for source in sources or BUILT_IN]
    return [prompt for group in itertools.zip_longest(*sets) for prompt in group if prompt is not None]
