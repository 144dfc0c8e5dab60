"""`llama-sidecar verify`: is speculation lossless here? Parses, shows progress, prints; runtime.verification compares."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llama_sidecar.runtime.prompts import Prompt, read_prompts
from llama_sidecar.runtime.verification import BUG, IDENTICAL, NEAR_TIE, TEMPERATURE, Report, verify
from llama_sidecar.sidecars import LlamaSidecarError
from llama_sidecar.sidecars.errors import printable

from ._options import Loader, budget_option, length_option, load_options, seed_option
from ._show import note, table
from .bench import BUILT_IN

N_SHOWN = 8  # texts that part from the plain one


class BadInput(click.ClickException):
    """Nothing was verified: an exit code of its own, since 1 says BUG."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        click.echo(f"error: {printable(self.message)}", err=True)


@click.command()
@click.option(
    "--prompts",
    "sources",
    multiple=True,
    metavar="FILE",
    help="Your own prompts, as `bench` takes them. May be repeated.  [default: the built-in ones]",
)
@length_option(128)
@seed_option("First seed of the texts with temperature.")
@budget_option(
    60.0, "Time to take: texts are shortened to it, then prompts are left out, and the output says so."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@load_options
def command(
    open_model: Loader, sources: tuple[str, ...], n: int, seed: int, budget: float, as_json: bool
) -> None:
    """Verify that speculation is lossless with the model MAIN on this machine.

    Texts are written plainly and speculatively, with drafters that are right for the first 0, 1, 2 ... tokens of every draft
    and with the model's own, and compared token by token; so is the state that rejected drafts leave behind. Seeded texts
    are compared as well, and the distribution of draws. A difference is a near-tie only if it is no larger than what the
    number of rows in a decode changes in the logits, which is measured; anything more is a BUG.

    Exit code: 0 identical or near-ties, 1 BUG, 2 nothing could be verified.

    \b
    llama-sidecar verify models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar verify models/Qwen3.5-0.8B-Q8_0.gguf --depth 2 --prompts mine.jsonl --json > result.json
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    try:
        prompts = _prompts(sources)
        with open_model() as model, bar:
            task = bar.add_task("loading", total=1.0)
            report = verify(
                model,
                prompts,
                n=n,
                seed=seed,
                budget_s=budget,
                progress=lambda what, share: bar.update(task, description=what, completed=share),
            )
    except LlamaSidecarError as error:
        raise BadInput(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        for warning in report.warnings:
            note(warning)
        click.echo(summary(report))
    if report.verdict == BUG:
        sys.exit(1)


def _prompts(sources: tuple[str, ...]) -> list[Prompt]:
    """The prompts of all sources in turns, so that a run cut short still has some of each."""
    sets = [read_prompts(BUILT_IN.get(source) or Path(source)) for source in sources or BUILT_IN]
    return [prompt for group in itertools.zip_longest(*sets) for prompt in group if prompt is not None]


def summary(report: Report) -> str:
    """A Markdown table to paste into an issue as it is, and the faults behind it."""
    return "\n".join([table(["", ""], _rows(report)), *(f"\n{fault}" for fault in report.faults)])


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    source, rounding = report.source, report.rounding
    main, drafter, machine = source["main"], source["drafter"], source["machine"]
    yield "model", f"{main['file']} ({main['arch']}, {main['type']}, {main['bytes'] / 1e6:,.1f} MB)"
    where = drafter.get("file") or ("embedded in the model" if drafter["match"] else None)
    yield "drafter", ", ".join(filter(None, [drafter["kind"], where]))
    yield "hardware", f"{machine['cpu']}, {source['threads']} threads; {source['backend']}"
    yield (
        "software",
        f"llama-sidecar {source['version']}, llama-cpp-python {source['llama_cpp']['llama_cpp_python']}; kernels: "
        f"{source['kernels']['chosen']}; flash attention {source['flash_attn']}, KV {source['cache_type_k']}/{source['cache_type_v']}",
    )
    n_equal = sum(trial.divergence is None for trial in report.trials)
    texts = f"{len(report.trials)} texts of {report.n} tokens, {len(report.prompts)} prompts, depth {report.depth}"
    yield "greedy", f"{n_equal} equal to plain of {texts}"
    for trial in [trial for trial in report.trials if trial.divergence is not None][:N_SHOWN]:
        yield (
            f"prompt {trial.prompt + 1}, {trial.drafter}",
            f"first apart at token {trial.divergence}, margin {trial.margin:.2g}: {report.verdict_on(trial)}",
        )
    yield "states after rewinds", _states(report)
    widths = f"2 to {report.depth + 1} rows against one, {rounding.n_rows} positions"
    found = "equal to the bit" if rounding.difference == 0 else f"differ by up to {rounding.difference:.2g}"
    yield "logits by width", f"{found} ({widths}; standard deviation {rounding.spread:.2g})"
    n_equal = sum(at is None for at in report.seeded)
    yield "seeded", f"{n_equal} equal to plain of {len(report.seeded)} texts at temperature {TEMPERATURE:g}"
    if report.draws:
        draws = report.draws
        yield (
            "distribution",
            f"{draws.n} plain and {draws.n} speculative draws of {draws.n_joint} tokens, {draws.n_cells} cells: "
            f"p = {draws.p:.2g}",
        )
    yield "**verdict**", f"**{_verdict(report)}**"


def _states(report: Report) -> str:
    n_equal = sum(trial.state_equal for trial in report.trials)
    difference = max(trial.next_difference for trial in report.trials)
    after = "equal to the bit" if difference == 0 else f"apart by up to {difference:.2g}"
    return f"{n_equal} of {len(report.trials)} equal in every byte; the next logits {after}"


def _verdict(report: Report) -> str:
    margins = [trial.margin for trial in report.trials if trial.margin is not None]
    match report.verdict:
        case verdict if verdict == IDENTICAL:
            return IDENTICAL
        case verdict if verdict == NEAR_TIE:
            margin = f" at margin {max(margins):.2g}" if margins else " in seeded draws"
            return f"{NEAR_TIE}{margin} (rounding explains {report.allowed:.2g})"
        case verdict:
            return f"{verdict}: {len(report.faults)} differences that rounding does not explain"
