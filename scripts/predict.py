"""`llama-sidecar predict`: will speculation pay here? Parses, shows progress, prints; runtime.predict measures."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from llama_sidecar.runtime.costs import expected_tokens
from llama_sidecar.runtime.placement import idle_gpu_hint
from llama_sidecar.runtime.predict import (
    ACCEPTANCES,
    BUDGET_S,
    MAX_DEPTH,
    PUBLISHED,
    Prediction,
    best_depth,
    best_speedup,
    predict,
    published_near,
)
from llama_sidecar.runtime.random_model import SHAPES, TYPES

from ._options import NumberOr
from ._show import note, table

SOURCES = list(dict.fromkeys(published.source for published in PUBLISHED))


@click.command()
@click.option(
    "--size",
    type=click.Choice([*SHAPES]),
    default="0.8B",
    show_default=True,
    help="Which Qwen3.5 model's shape to measure.",
)
@click.option(
    "--type",
    "type_",
    type=click.Choice(TYPES, case_sensitive=False),
    default="Q8_0",
    metavar="TYPE",
    help=f"The type of its weights: {', '.join(TYPES)}.  [default: Q8_0]",
)
@click.option(
    "--max-depth",
    type=click.IntRange(1, 15),
    default=MAX_DEPTH,
    show_default=True,
    help="The most drafts per round to consider.",
)
@click.option(
    "-t", "--threads", type=click.IntRange(1), metavar="N", help="CPU threads.  [default: the physical cores]"
)
@click.option(
    "-ngl",
    "--gpu-layers",
    type=NumberOr("layers", "auto"),
    default="auto",
    show_default=True,
    help="Layers on the GPU; auto takes as many as fit its free memory.",
)
@click.option("-dev", "--device", metavar="NAMES", help="llama.cpp's devices, comma separated, or none.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=BUDGET_S,
    show_default=True,
    help="Time to measure for; where it runs out, fewer runs are made, and the output says so.",
)
@click.option(
    "--keep", is_flag=True, help="Keep the random model until the next predict, to run bench on it."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(
    size: str,
    type_: str,
    max_depth: int,
    threads: int | None,
    gpu_layers: int | str,
    device: str | None,
    budget: float,
    keep: bool,
    as_json: bool,
) -> None:
    """Predict what speculation will gain on this machine, before you download a model.

    A model of random weights, as large as the real one, is written into the cache folder, measured, and removed again.
    Printed are the best depth and the speed-up for each acceptance, the chance that a drafted token is right, with what
    was published about real models beside it. Takes about a minute for the default on an otherwise idle machine.

    \b
    llama-sidecar predict
    llama-sidecar predict --size 4B --type Q4_K_M
    """
    if hint := idle_gpu_hint():
        note(hint)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("preparing", total=None)
        prediction = predict(
            SHAPES[size],
            type_,
            max_depth=max_depth,
            threads=threads,
            gpu_layers=gpu_layers,
            device=device,
            budget_s=budget,
            keep=keep,
            announce=lambda n_bytes, folder: _announce(n_bytes, folder, keep),
            progress=lambda step, done, total: bar.update(
                task, description=step, completed=done, total=total
            ),
        )
    if as_json:
        click.echo(json.dumps(prediction.to_json()))
        return
    for warning in prediction.report.warnings:
        note(warning)
    click.echo(_summary(prediction))


def _announce(n_bytes: int, folder: Path, keep: bool) -> None:
    stays = "kept until the next predict" if keep else "removed afterwards"
    note(f"writing {n_bytes / 1e9:.2f} GB of random weights to {folder}, {stays}")


def _summary(prediction: Prediction) -> str:
    parts = [_measured(prediction), _table(prediction), _sources(), f"**{prediction.verdict}**"]
    if prediction.kept:
        parts.append(f"llama-sidecar bench {shlex.quote(str(prediction.pair.main))} --synthetic-length 3")
    return "\n\n".join(parts)


def _measured(prediction: Prediction) -> str:
    report, shape = prediction.report, prediction.shape
    machine = report.source["machine"]
    measured, predicted = prediction.checked
    head = f"{prediction.n_head_rows:,} of {shape.n_vocab:,} rows"
    rows = [
        ("model", f"{shape.name} in shape, random weights, {prediction.type}"),
        ("hardware", f"{machine['cpu']}, {report.source['threads']} threads; {report.source['backend']}"),
        ("plain", f"{report.figures.plain_tok_s:.1f} tok/s; one row takes {1000 * report.one_row_s:.2f} ms"),
        (
            "verification",
            f"v(n) = {' '.join(f'{v:.2f}' for v in report.v)} for n = 1 to {len(report.v)} rows at once",
        ),
        (
            "draft step",
            f"{1000 * report.draft_step_s:.2f} ms, c = {report.c:.2f} rows, with a head of {head}",
        ),
        (
            "check",
            f"a run at depth {report.depth} with coin tosses gained {measured:.2f}; v and c give {predicted:.2f}",
        ),
    ]
    return table(["", ""], rows)


def _table(prediction: Prediction) -> str:
    costs = prediction.costs
    rows = []
    for acceptance in ACCEPTANCES:
        depth = best_depth(costs, acceptance)
        seen = dict.fromkeys(f"{p.task} [{SOURCES.index(p.source) + 1}]" for p in published_near(acceptance))
        rows.append(
            (
                f"{acceptance:.2f}",
                str(depth) if depth else "0: leave it off",
                f"{best_speedup(costs, acceptance):.2f}",
                f"{expected_tokens([acceptance] * depth):.2f}",
                ", ".join(seen),
            )
        )
    return table(["acceptance", "best depth", "speed-up", "tokens a round", "seen near it"], rows)


def _sources() -> str:
    """What was published, source by source."""
    lines = ["Acceptance: the chance that a draft is right when those before it are. Published:"]
    for number, source in enumerate(SOURCES, 1):
        found = ", ".join(f"{p.task} {p.acceptance:.2f}" for p in PUBLISHED if p.source == source)
        lines.append(f"[{number}] {source.model}: {found} ({source.where}, {source.url})")
    lines.append(
        "A smaller model, another task or a temperature may give less: `llama-sidecar bench` measures yours."
    )
    return "\n".join(lines)
