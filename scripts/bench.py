"""`llama-sidecar bench`: what speculation gains here. Parses, shows progress, prints; runtime.study measures, runtime.report draws."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llama_sidecar.runtime.bench import measure
from llama_sidecar.runtime.prompts import Prompt, read_prompts
from llama_sidecar.runtime.report import check_drawing, figure, page
from llama_sidecar.runtime.sampling import ACCEPT
from llama_sidecar.runtime.study import MAX_TEMPERATURE, read_results, run_study, write_text
from llama_sidecar.runtime.weights import MAX_DEPTH

from ._options import (
    GroupedCommand,
    Loader,
    Numbers,
    budget_option,
    load_options,
    main_optional,
    seed_option,
    shaping_options,
    text_options,
)
from ._report import row, study_summary, summary
from ._show import note

DEPTHS, TEMPERATURES = (0, 1, 2, 3, 4), (0.0, 0.7, 1.0)  # of a report
OUT = click.Path(dir_okay=False, path_type=Path)
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
@click.option(
    "--depths",
    type=Numbers("depths", int, most=MAX_DEPTH),
    metavar="K,...",
    help="Measure these depths, too, in runs of their own.  [default with --report or --svg: 0,1,2,3,4]",
)
@click.option(
    "--temps",
    type=Numbers("temperatures", float, most=MAX_TEMPERATURE),
    metavar="T,...",
    help="Measure at these temperatures, too.  [default with --report or --svg: 0,0.7,1]",
)
@click.option("--report", type=OUT, metavar="FILE", help="Write a page (HTML) with charts of it all.")
@click.option("--svg", type=OUT, metavar="FILE", help="Write the speed-ups as one drawing.")
@click.option("--markdown", is_flag=True, help="Print one row to paste under those of other machines.")
@click.option(
    "--from",
    "results",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure nothing: take the results from what --json printed, or from a page.",
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
@main_optional
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
    depths: tuple[int, ...] | None,
    temps: tuple[float, ...] | None,
    report: Path | None,
    svg: Path | None,
    markdown: bool,
    results: Path | None,
    as_json: bool,
    shaping: dict[str, Any],
) -> None:
    """Measure what speculation gains with the model MAIN on this machine, on your prompts.

    Every prompt is decoded plainly and speculatively in turns, in one process. Printed are the medians over at least
    five such pairs, whether the token ids are equal, how many drafts were right, what a decode of n rows costs (v(n)) and
    a drafted token (c), and the most that speculation could gain here: L / v(depth + 1), drafting for free. The table is
    Markdown, to paste into an issue as it is. A report has several depths and temperatures besides.

    \b
    llama-sidecar bench models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar bench models/Qwen3.5-0.8B-Q8_0.gguf --depth 2 --prompts mine.jsonl --json > result.json
    llama-sidecar bench models/Qwen3.5-0.8B-Q8_0.gguf --report result.html --budget 600
    """
    drawn = report is not None or svg is not None
    if drawn:
        check_drawing()
    if results is not None:
        if click.get_current_context().params["main"] is not None:
            raise click.UsageError("--from measures nothing: leave MAIN out")
        _show(read_results(results), report, svg, markdown, as_json)
        return
    prompts = _prompts(sources)
    all_depths = drawn and depths is None and synthetic_length is None
    if drawn and synthetic_length is None:
        temps = TEMPERATURES if temps is None else temps
    is_study = drawn or bool(depths) or bool(temps)
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
    options: dict[str, Any] = {
        "n": n,
        "temperature": temperature,
        "seed": seed,
        "shaping": shaping,
        "accept": accept,
        "synthetic_length": synthetic_length,
    }
    with open_model() as model, bar:
        task = bar.add_task("warming up", total=None)

        def show_progress(part: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"measuring {part}".rstrip())

        if is_study:
            if all_depths:
                depths = tuple(depth for depth in DEPTHS if depth <= model.max_depth)
            study = run_study(
                model,
                prompts,
                depths=depths or (),
                temperatures=temps or (),
                budget_s=budget,
                command=shlex.join(["llama-sidecar", *sys.argv[1:]]),
                progress=show_progress,
                **options,
            )
        else:
            found = measure(
                model,
                prompts,
                budget_s=budget,
                progress=lambda done, total: show_progress("", done, total),
                **options,
            )
    if is_study:
        _show(study, report, svg, markdown, as_json)
    elif as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        for warning in found.warnings:
            note(warning)
        click.echo(row(found.to_json()) if markdown else summary(found))


def _show(
    study: dict[str, Any], report: Path | None, svg: Path | None, markdown: bool, as_json: bool
) -> None:
    """Prints what was asked for, then writes: results of minutes are not lost for a drawing."""
    for warning in dict.fromkeys([*study["warnings"], *study["bench"].get("warnings", ())]):
        note(warning)
    click.echo(json.dumps(study) if as_json else row(study["bench"]) if markdown else study_summary(study))
    for path, draw in ((report, page), (svg, figure)):
        if path is not None:
            write_text(path, draw(study))
            note(f"written: {path}")


def _prompts(sources: tuple[str, ...]) -> list[Prompt]:
    """The prompts of all sources in turns, so that a run cut short still has some of each."""
    sets = [read_prompts(BUILT_IN.get(source) or Path(source)) for source in sources or BUILT_IN]
    return [prompt for group in itertools.zip_longest(*sets) for prompt in group if prompt is not None]
