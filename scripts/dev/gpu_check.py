"""Checks a backend: lossless sweep, benchmark and memory, in one table and one JSON file. Runs on whatever is there.

    python scripts/dev/gpu_check.py MAIN.gguf --json-out check.json

The sweep decodes with drafters that are right for the first j of a draft, and with the model's own, at depths 1 to 4, and
compares token ids with the plain text's. It exits with 1 when they part anywhere but at a near-tie.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import click

from llama_sidecar.runtime import LoadError, placement
from llama_sidecar.runtime.bench import measure
from llama_sidecar.runtime.lossless import Check, sweep
from llama_sidecar.runtime.prompts import read_prompts
from llama_sidecar.scripts.__main__ import main
from llama_sidecar.scripts._options import Loader, load_options
from llama_sidecar.scripts._report import summary
from llama_sidecar.scripts._show import note, table
from llama_sidecar.scripts.bench import BUILT_IN

DEPTHS = (1, 2, 3, 4)
NEAR_TIE = 2e-2  # of logits: widths round by this much on the CPU with F32 and BF16 weights


@click.command("gpu_check.py")
@click.option(
    "-n", "--n-predict", "n", type=click.IntRange(8), default=64, show_default=True, help="Tokens per text."
)
@click.option("--budget", default=120.0, show_default=True, metavar="SECONDS", help="Time for the benchmark.")
@click.option(
    "--json-out", type=click.Path(path_type=Path), default=Path("gpu_check.json"), show_default=True
)
@load_options
def command(open_model: Loader, n: int, budget: float, json_out: Path) -> None:
    """Check MAIN and its sidecar on the backends that the installed llama-cpp-python has."""
    free_before = _free_bytes()
    with open_model() as model:
        free_loaded = _free_bytes()
        with model.session():
            free_in_session = _free_bytes()
        prompts = read_prompts(BUILT_IN["code"]) + read_prompts(BUILT_IN["prose"])
        checks = [
            (prompt.task, check)
            for prompt in prompts[::2]
            for check in sweep(model, prompt.tokens(model), depths=DEPTHS, n=n)
        ]
        report = measure(model, prompts, n=n, budget_s=budget)
    memory = {
        "peak_rss": _peak_rss_bytes(),
        "gpu_free_before": free_before,
        "gpu_weights": free_before - free_loaded,
        "gpu_session": free_loaded - free_in_session,
    }
    failed = [check for _, check in checks if check.margin is not None and check.margin > NEAR_TIE]
    columns = ["task", "drafter", "depth", "tokens", "L", "token ids"]
    click.echo(table(columns, [(task, *_row(check)) for task, check in checks]))
    click.echo(f"\n{summary(report)}\n")
    click.echo(
        table(
            ["memory", "MB"],
            [(name.replace("_", " "), f"{n_bytes / 1e6:,.1f}") for name, n_bytes in memory.items()],
        )
    )
    for warning in report.warnings:
        note(warning)
    data = {
        "schema": 1,
        "lossless": not failed,
        "near_tie": NEAR_TIE,
        "sweep": [{"task": task, **check.to_json()} for task, check in checks],
        "memory_bytes": memory,
        "bench": report.to_json(),
    }
    json_out.write_text(json.dumps(data, indent=1) + "\n")
    click.echo(f"\nwritten to {json_out}")
    if failed:
        raise LoadError(f"{len(failed)} of {len(checks)} texts part from the plain one where no near-tie is")


def _row(check: Check) -> tuple[str, ...]:
    ids = "equal" if check.divergence is None else f"apart at {check.divergence}, margin {check.margin:.2g}"
    return check.drafter, str(check.depth), str(check.n_tokens), f"{check.mean_accepted_length:.2f}", ids


def _free_bytes() -> int:
    return sum(gpu.free_bytes for gpu in placement.gpus())


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    main(command)
