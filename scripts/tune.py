"""`llama-sidecar tune`: which depth is best here, and whether any is. Parses, shows progress, prints; runtime.tuning measures."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llama_sidecar.runtime.prompts import Prompt, read_prompts
from llama_sidecar.runtime.tuning import Tuning, tune

from ._options import Loader, budget_option, load_options, text_options
from ._show import note, table
from .bench import BUILT_IN


@click.command()
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Your own prompts, as `bench` takes them. May be repeated.  [default: the built-in ones]",
)
@text_options(64)
@budget_option(60.0, "Time to take: fewer prompts are then measured, and shorter texts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@load_options
def command(
    open_model: Loader, files: tuple[Path, ...], n: int, temperature: float, budget: float, as_json: bool
) -> None:
    """Measure which depth is best for the model MAIN on this machine, or whether to leave drafting off.

    Each prompt is written plainly and at every depth up to --depth, in turns. The table has each depth's speed, as costs
    and acceptance predict it and as it was measured. The costs are kept, and the next runs choose their depth from them.

    \b
    llama-sidecar tune models/Qwen3.5-0.8B-Q8_0.gguf --prompts mine.jsonl
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} texts"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with open_model() as model, bar:
        task = bar.add_task("calibrating", total=None)
        tuning = tune(
            model,
            _prompts(files),
            n=n,
            temperature=temperature,
            budget_s=budget,
            progress=lambda done, total: bar.update(
                task, completed=done, total=total, description="measuring"
            ),
        )
    if as_json:
        click.echo(json.dumps(tuning.to_json()))
        return
    if not tuning.remembered:
        note("the costs could not be kept (no cache folder that can be written): they are measured each time")
    click.echo(_summary(tuning))


def _prompts(files: tuple[Path, ...]) -> list[Prompt]:
    """The prompts of all files in turns, so that a run cut short still has some of each."""
    sets = [read_prompts(file) for file in files or BUILT_IN.values()]
    return [prompt for group in itertools.zip_longest(*sets) for prompt in group if prompt is not None]


def _summary(tuning: Tuning) -> str:
    rows = [
        (
            f"{row.depth}" if row.depth else "0 (plain)",
            f"{row.predicted_tok_s:.1f}",
            f"{row.measured_tok_s:.1f}",
            f"{row.speedup:.2f}",
            tuning.verdict_on(row.depth),
        )
        for row in tuning.rows
    ]
    head = ["depth", "predicted tok/s", "measured tok/s", "speed-up", "verdict"]
    acceptance = " ".join(f"{share:.2f}" for share in tuning.acceptance)
    sampling = f"temperature {tuning.temperature:g}" if tuning.temperature else "greedy"
    texts = f"{len(tuning.prompts)} prompts, {tuning.n} tokens a text, {sampling}"
    machine = f"{tuning.source['machine']['cpu']}, {tuning.source['threads']} threads"
    kernels = f"kernels: {tuning.source['kernels']['chosen']}"
    return f"{table(head, rows)}\n\n{texts}; right by position: {acceptance}; {machine}\n{kernels}\n{tuning.verdict}"
