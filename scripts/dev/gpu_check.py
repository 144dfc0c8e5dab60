"""Checks a backend whole: what is lossless, fast and copied there, in one table and one JSON file. Runs on whatever is there.

    python scripts/dev/gpu_check.py MAIN.gguf --json-out check.json
    python scripts/dev/gpu_check.py FOLDER --shape 9B --type Q4_K_M --limit 300      (random weights, written there and removed)

Parts, in this order: memory; which widths agree to the bit; the lossless sweep (drafters that are right for the first j of a
draft, and the model's own, at depths 1 to 4, against the plain text); plain and speculative texts in turns; the draft step with
and without the backend's own argmax; each depth and pace by coins of a mean accepted length. The file is written anew after
each part, so that a run that is stopped, or out of time, leaves what it has and says what is missing. Exit code 1: texts part
where no near-tie is, or a part is missing.

It does not know what a text is worth: with random weights the sweep and the coins are what counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

from llama_sidecar.runtime import LoadError, Model, exactness, placement
from llama_sidecar.runtime.bench import measure, p_accept
from llama_sidecar.runtime.library import llama
from llama_sidecar.runtime.lossless import Check, sweep
from llama_sidecar.runtime.prompts import Prompt, read_prompts
from llama_sidecar.runtime.provenance import provenance
from llama_sidecar.runtime.random_model import SHAPES, TYPES, random_pair
from llama_sidecar.runtime.stats import TRAFFIC, Stats
from llama_sidecar.scripts.__main__ import main
from llama_sidecar.scripts._options import Loader, load_options
from llama_sidecar.scripts._report import summary
from llama_sidecar.scripts._show import note, table
from llama_sidecar.scripts.bench import BUILT_IN

DEPTHS = (1, 2, 3, 4)
NEAR_TIE = 2e-2  # of logits: widths round by this much on the CPU with F32 and BF16 weights
LENGTHS = (3.0, 2.5)  # mean accepted lengths at depth 3 that coins stand in for
N_PASSES = 3  # of what is timed in turns; the first warms up


class TimeUp(Exception):
    """The limit is reached; raised by its alarm, between two rounds."""


class Results:
    """What has been found, part by part: kept in a file, shown as tables."""

    def __init__(self, path: Path, parts: list[str]) -> None:
        self._path = path
        self.data: dict[str, Any] = {"schema": 2, "missing": parts, "near_tie": NEAR_TIE, "seconds": {}}
        self.tables: list[str] = []
        self._write()

    def add(self, part: str, found: Any, seconds: float, *tables: str) -> None:
        self.data["missing"] = [name for name in self.data["missing"] if name != part]
        self.data[part] = found
        self.data["seconds"][part] = seconds
        self.tables += tables
        for text in tables:
            click.echo(f"{text}\n")
        self._write()

    def stop(self, why: str) -> None:
        """Says why the rest is missing."""
        self.data["stopped"] = why
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_name(f"{self._path.name}.part")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n")
        fresh.replace(self._path)


@click.command("gpu_check.py")
@click.option(
    "-n", "--n-predict", "n", type=click.IntRange(8), default=64, show_default=True, help="Tokens per text."
)
@click.option("--budget", default=120.0, show_default=True, metavar="SECONDS", help="Time for the benchmark.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="SECONDS",
    help="Stop after so long with what there is.  [default: none]",
)
@click.option(
    "--shape",
    type=click.Choice([*SHAPES], case_sensitive=False),
    help="Write a random model of this Qwen3.5 shape into the folder MAIN, check it, remove it.",
)
@click.option(
    "--type",
    "type_",
    type=click.Choice(TYPES, case_sensitive=False),
    default="Q4_K_M",
    show_default=True,
    help="... of this type.",
)
@click.option(
    "--json-out", type=click.Path(path_type=Path), default=Path("gpu_check.json"), show_default=True
)
@load_options
def command(
    open_model: Loader,
    n: int,
    budget: float,
    limit: int | None,
    shape: str | None,
    type_: str,
    json_out: Path,
) -> None:
    """Check MAIN and its sidecar on the backends that the installed llama-cpp-python has."""
    results = Results(json_out, [*PARTS])
    with _limited(limit), contextlib.ExitStack() as undo:
        try:
            if shape is not None:
                folder: Path = open_model.args[0]  # type: ignore[attr-defined]
                pair = undo.enter_context(random_pair(SHAPES[shape], type_, folder))
                open_model = _Open(open_model, pair.main)
            _check(open_model, results, n, budget)
        except TimeUp:
            results.stop(f"the limit of {limit} seconds")
        except (KeyboardInterrupt, SystemExit):
            results.stop("interrupted")
            raise
    click.echo(f"written to {json_out}")
    failed = results.data.get("sweep", {}).get("n_failed", 0)
    if failed:
        raise LoadError(f"{failed} texts part from the plain one where no near-tie is")
    if results.data["missing"]:
        raise LoadError(f"not done: {', '.join(results.data['missing'])} ({results.data['stopped']})")


class _Open:
    """A loader of another main file with the same options."""

    def __init__(self, loader: Any, main_path: Path) -> None:
        self._loader, self._main = loader, main_path

    def __call__(self) -> Model:
        model: Model = self._loader.func(self._main, *self._loader.args[1:])
        return model


@contextlib.contextmanager
def _limited(seconds: int | None) -> Iterator[None]:
    """Raises TimeUp after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds or 0)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _check(open_model: Loader, results: Results, n: int, budget: float) -> None:
    started = time.perf_counter()
    free_before = _free_bytes()
    with open_model() as model:
        memory = _memory(model, free_before)
        results.data["source"] = provenance(model)
        click.echo(f"{_where(results.data['source'])}\n")
        results.add("memory", memory, time.perf_counter() - started, _memory_table(memory))
        prompts = read_prompts(BUILT_IN["code"]) + read_prompts(BUILT_IN["prose"])
        for part, run in PARTS.items():
            if run is not None:
                started = time.perf_counter()
                found, *tables = run(model, prompts, n, budget)
                results.add(part, found, time.perf_counter() - started, *tables)


def _where(source: dict[str, Any]) -> str:
    """What the figures are of; a processor's ones say why they are not a GPU's."""
    text = f"{source['backend']}, {source['machine']['cpu']}, llama-cpp-python {source['llama_cpp']['llama_cpp_python']}"
    if source["backend"] != "CPU":
        return text
    if not llama().llama_supports_gpu_offload():
        why = "the installed llama-cpp-python was built without one (docs/GPU.md has how to)"
    else:
        why = (
            "no layer was placed on one"
            if placement.gpus()
            else "llama.cpp finds none (is its driver there?)"
        )
    return f"{text}\nno GPU: {why}"


# The parts


def _memory(model: Model, free_before: int) -> dict[str, int]:
    """Bytes: of the files, and by how much less memory the devices then have free."""
    free_loaded = _free_bytes()
    with model.session(spec_type="none", learn=False):
        free_plain = _free_bytes()
    with model.session(learn=False):
        free_spec = _free_bytes()
    drafter = model.head_weights.path if model.head_weights is not model.weights else None
    return {
        "main_file": model.main.header.file_bytes,
        "drafter_file": os.path.getsize(drafter) if drafter is not None else 0,
        "device_weights": free_before - free_loaded,
        "device_plain_session": free_loaded - free_plain,
        "device_session": free_loaded - free_spec,
        "device_free": free_loaded,
        "peak_rss": _peak_rss_bytes(),
    }


def _memory_table(memory: dict[str, int]) -> str:
    return table(
        ["memory", "MB"],
        [(name.replace("_", " "), f"{n_bytes / 1e6:,.1f}") for name, n_bytes in memory.items()],
    )


def _widths(model: Model, prompts: list[Prompt], n: int, budget: float) -> tuple[dict[str, Any], str]:
    found = exactness.measure(model)
    return found.to_json(), f"widths that agree to the bit: {found}"


def _sweep(model: Model, prompts: list[Prompt], n: int, budget: float) -> tuple[dict[str, Any], str]:
    checks = [
        (prompt.task, check)
        for prompt in prompts[::2]
        for check in sweep(
            model, prompt.tokens(model), depths=[d for d in DEPTHS if d <= model.max_depth], n=n
        )
    ]
    failed = [check for _, check in checks if check.margin is not None and check.margin > NEAR_TIE]
    data = {
        "lossless": not failed,
        "n_failed": len(failed),
        "n_texts": len(checks),
        "n_equal": sum(check.divergence is None for _, check in checks),
        "texts": [{"task": task, **check.to_json()} for task, check in checks],
    }
    columns = ["task", "drafter", "depth", "tokens", "L", "token ids"]
    return data, table(columns, [(task, *_row(check)) for task, check in checks])


def _row(check: Check) -> tuple[str, ...]:
    ids = "equal" if check.divergence is None else f"apart at {check.divergence}, margin {check.margin:.2g}"
    return check.drafter, str(check.depth), str(check.n_tokens), f"{check.mean_accepted_length:.2f}", ids


def _bench(model: Model, prompts: list[Prompt], n: int, budget: float) -> tuple[dict[str, Any], str, str]:
    report = measure(model, prompts, n=n, budget_s=budget)
    for warning in report.warnings:
        note(warning)
    stats, seconds = report.figures.stats, report.round_s
    host_s = seconds["accept"] + seconds["rest"]
    data = report.to_json() | {"round": per_round(stats), "host_share": host_s / sum(seconds.values())}
    rows = [
        *_traffic_rows(stats),
        ("host time between decodes", f"{100 * data['host_share']:.1f} % of a round"),
    ]
    return data, summary(report), table(["a round", ""], rows)


def per_round(stats: Stats) -> dict[str, float]:
    """What a mean round counts (native/traffic.h).

    >>> per_round(Stats("mtp", "on", "", 3, n_rounds=2, n_syncs=14))["n_syncs"]
    7.0
    """
    return {name: getattr(stats, name) / max(1, stats.n_rounds) for name in TRAFFIC}


def _traffic_rows(stats: Stats) -> list[tuple[str, str]]:
    mean = per_round(stats)
    to_host = mean["logits_bytes"] + mean["hidden_bytes"]
    return [
        ("decodes", f"{mean['n_decodes']:.2f}, {mean['n_graphs_reused']:.2f} of them with the graph before"),
        ("synchronisations", f"{mean['n_syncs']:.2f}"),
        (
            "to the host",
            f"{to_host / 1e3:,.1f} kB (logits {mean['logits_bytes'] / 1e3:,.1f}, hidden rows {mean['hidden_bytes'] / 1e3:,.1f})",
        ),
        ("to the device", f"{mean['fed_bytes'] / 1e3:,.1f} kB of hidden rows"),
        ("states", f"{mean['state_bytes'] / 1e3:,.1f} kB"),
    ]


def _draft_step(model: Model, prompts: list[Prompt], n: int, budget: float) -> tuple[dict[str, Any], str]:
    """The drafter's time per drafted token, its logits on the host or the best token taken by the backend, in turns."""
    usual, depth = model.picks_on_backend, min(3, model.max_depth)
    runs: dict[bool, list[Stats]] = {False: [], True: []}
    try:
        for i in range(N_PASSES):
            for picks in runs:
                model.picks_on_backend = picks
                with model.session(depth=depth, learn=False) as session:
                    prompt = prompts[i % len(prompts)].tokens(model)
                    text = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
                    text.read()
                    runs[picks].append(text.stats)
    finally:
        model.picks_on_backend = usual
    found = {
        "backend picks" if picks else "host picks": {
            "draft_step_s": median(s.draft_s / max(1, s.n_drafted) for s in stats[1:]),
            "n_accepted": sum(s.n_accepted for s in stats),
            **per_round(stats[-1]),
        }
        for picks, stats in runs.items()
    }
    rows = [
        (
            name + (" (used here)" if usual == (name == "backend picks") else ""),
            f"{1e3 * row['draft_step_s']:.2f}",
            f"{row['logits_bytes'] / 1e3:,.1f}",
            f"{row['n_syncs']:.2f}",
        )
        for name, row in found.items()
    ]
    columns = ["draft step", "ms a token", "kB of logits a round", "synchronisations a round"]
    return {"depth": depth, "used": usual, **found}, table(columns, rows)


def _depths(model: Model, prompts: list[Prompt], n: int, budget: float) -> tuple[dict[str, Any], str]:
    """Tokens per second of every fixed depth and of pace, by coins that give these lengths at depth 3, in turns."""
    depths: list[int | None] = [0, *(d for d in DEPTHS if d <= model.max_depth), None]
    deepest = max(d for d in depths if d is not None)
    prompt, data, rows = prompts[0].tokens(model), {}, []
    for length in (x for x in LENGTHS if x <= min(3, deepest) + 1):
        coin = p_accept(length, min(3, deepest))
        speeds: dict[int | None, list[float]] = {depth: [] for depth in depths}
        with contextlib.ExitStack() as undo:
            sessions = {
                depth: undo.enter_context(model.session(depth=depth, learn=False))
                for depth in depths
                if depth is not None or model.paced
            }
            for i in range(N_PASSES):
                for depth, session in sessions.items():
                    text = session.generate_synthetic(
                        prompt, p_accept=coin, max_tokens=n * (1 if depth is not None else 3), seed=i
                    )
                    text.read()
                    speeds[depth].append(text.stats.tok_s)
        found = {depth: median(values[1:]) for depth, values in speeds.items() if values}
        best = max((d for d in found if d is not None), key=lambda d: found[d])
        names = {None: "pace"} | {depth: str(depth) for depth in depths if depth is not None}
        data[f"L {length:g}"] = {
            "tok_s": {names[depth]: speed for depth, speed in found.items()},
            "best_depth": best,
            "pace_share_of_best": found[None] / found[best] if None in found else None,
        }
        rows.append(
            (f"{length:g}", *(f"{found[depth]:.1f}" if depth in found else "" for depth in depths), str(best))
        )
    columns = ["tok/s at L (depth 3)", *(f"depth {d}" if d is not None else "pace" for d in depths), "best"]
    return data, table(columns, rows)


Part = Callable[[Model, list[Prompt], int, float], tuple[Any, ...]]
PARTS: dict[str, Part | None] = {
    "memory": None,  # while it is loaded
    "widths": _widths,
    "sweep": _sweep,
    "bench": _bench,
    "draft_step": _draft_step,
    "depths": _depths,
}


def _free_bytes() -> int:
    return sum(gpu.free_bytes for gpu in placement.gpus())


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    main(command)
