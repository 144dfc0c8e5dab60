"""`llama-sidecar demo`: the whole way on the checkpoint that ships with the source. What `make demo` runs."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from pathlib import Path

import click

from llama_sidecar import sidecars
from llama_sidecar.converter import convert
from llama_sidecar.runtime import LoadError, load
from llama_sidecar.runtime._native import survive_bus_errors
from llama_sidecar.runtime.bench import Pair, Report, measure
from llama_sidecar.runtime.prompts import Prompt

from ._report import summary
from ._show import note

MAIN_TYPE = "Q4_0"  # the one that this model decodes plainly the fastest at (docs/PERFORMANCE.md): what speculation must beat
N_PROMPTS = 20
N_SHOWN = 3  # texts
BUDGET_S = 40
WORTHWHILE = 1.05


@click.command()
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-models"),
    show_default=True,
    help="Folder for the converted files; they stay, to be used afterwards.",
)
@click.option(
    "-n", "--n-predict", "n", type=click.IntRange(8), default=128, show_default=True, help="Tokens per text."
)
def command(out: Path, n: int) -> None:
    """Convert the demo checkpoint, write some code with it plainly and speculatively, and show what that gained.

    The checkpoint is a Qwen3.5 model of 12 M parameters with a trained draft head. It ships with the source tree, not in
    the wheel. Takes less than a minute.
    """
    checkpoint = _find_checkpoint()
    click.echo(
        f"1. Convert {checkpoint} to a main GGUF and its sidecar, at the type that it runs fastest at\n"
    )
    files = convert(checkpoint, out, MAIN_TYPE, force=True)
    if files.main is None or files.sidecar is None:
        raise LoadError(f"{checkpoint} gave no pair of files: {'; '.join(files.warnings)}")
    click.echo(f"   main     {files.main}  ({files.main_type}, {files.main_bytes / 1e6:.1f} MB)")
    click.echo(
        f"   sidecar  {files.sidecar}  ({files.sidecar_type}, {files.sidecar_bytes / 1e6:.1f} MB, {files.kind})"
    )

    click.echo("\n2. Complete code that the model was not trained on, plainly and speculatively in turns\n")
    survive_bus_errors()
    with load(files.main, files.sidecar) as model:
        pairs = itertools.count()
        report = measure(
            model,
            _heldout(checkpoint),
            n=n,
            budget_s=BUDGET_S,
            on_pair=lambda pair: _show_pair(next(pairs), pair),
        )

    click.echo("3. What speculation gained\n")
    for warning in report.warnings:
        note(warning)
    click.echo(summary(report))
    if report.figures.speedup < WORTHWHILE:
        click.echo(f"\n{_why_so_little(report)}")
    main = shlex.quote(str(files.main))
    click.echo("\n4. Go on (the model has read Python's library, and knows nothing of the world)\n")
    click.echo(f"   llama-sidecar run {main} -p 'class Stack:'")
    click.echo(f"   llama-sidecar bench {main}")
    click.echo(f"   llama-sidecar chat {main}")


def _find_checkpoint() -> Path:
    """The embedded checkpoint, beside the package in an editable install or in the source tree one stands in."""
    places = [Path(str(sidecars.__file__)).parent / "demo", Path.cwd() / "sidecars" / "demo"]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None:
        raise LoadError(
            "the demo checkpoint is not here: it ships with the source tree, not in the wheel; run `make demo` there"
        )
    return found


def _heldout(checkpoint: Path) -> list[Prompt]:
    lines = (checkpoint / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [Prompt(entry["prompt"], "held-out code") for entry in entries if entry["kind"] == "code"][
        :N_PROMPTS
    ]


def _show_pair(i: int, pair: Pair) -> None:
    """How the two runs compare; of the first ones the prompt and the text, too."""
    stats, at = pair.spec.stats, pair.divergence
    equal = "token ids equal" if at is None else f"token ids first apart at {at}"
    if i < N_SHOWN:
        click.echo(click.style(str(pair.prompt.content), dim=True) + pair.spec.text.rstrip())
    click.echo(
        f"   -> plain {pair.plain.stats.tok_s:.0f} tok/s, speculative {stats.tok_s:.0f} tok/s, "
        f"L {stats.mean_accepted_length:.2f}, {equal}" + ("\n" if i < N_SHOWN else "")
    )
    sys.stdout.flush()


def _why_so_little(report: Report) -> str:
    return (
        f"The gain is small because the model is: one decode takes {1000 * report.one_row_s:.2f} ms, most of it overhead, "
        "which more rows and a draft step pay again. `llama-sidecar bench MODEL` measures a larger one."
    )
