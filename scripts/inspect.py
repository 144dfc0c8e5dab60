"""`llama-sidecar inspect`: what a file is and what beside it fits. Formats what sidecars/inspection.py finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from llama_sidecar.runtime.exactness import Exactness
from llama_sidecar.runtime.exactness import recall as recall_exactness
from llama_sidecar.runtime.kernel_choice import recall
from llama_sidecar.runtime.kernels import kernel_set, types
from llama_sidecar.runtime.memory import account
from llama_sidecar.runtime.placement import default_threads
from llama_sidecar.sidecars import KINDS, read_model
from llama_sidecar.sidecars.errors import LlamaSidecarError, printable
from llama_sidecar.sidecars.inspection import Origin, Report, inspect
from llama_sidecar.sidecars.memory import AUTO_DEPTH

from ._console import tables
from ._files import MODEL


@click.command()
@click.argument("file", type=MODEL)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program instead of tables.")
def command(file: Path, as_json: bool) -> None:
    """Say what FILE is (a main model or a sidecar) and which files beside it belong to it.

    Reads headers only, so it is quick for any size. Sure matches are "verified" (made from the same checkpoint) or
    "same trunk, unverified"; a grafted head is "same family, unverified"; "unverified" alone means that nothing contradicts, as with
    files made by other converters. Of a head that was grafted or requantised it says from what; of a main model also how many
    rows in a decode agree to the bit on this machine, where --exact has measured it.
    """
    report = inspect(file)
    kernels, exactness = _kernels(report), _exactness(report)
    if as_json:
        found = {"kernels": kernels, "exactness": [one.to_json() for one in exactness]}
        click.echo(json.dumps(report.to_json() | found, indent=2))
        return
    console = tables()
    console.print(_facts(report, exactness))
    console.print(_types(report, kernels))
    console.print(_neighbours(report) if report.neighbours else _nothing_beside(report))


def _facts(report: Report, exactness: list[Exactness]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = [*_fact_rows(report), *(("equal rows here", str(one)) for one in exactness)]
    for name, value in rows:
        table.add_row(name, escape(printable(value)))
    return table


def _fact_rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "file", str(report.path) + (f" (1 of {report.n_shards} shards)" if report.n_shards > 1 else "")
    yield "is", _what_it_is(report)
    if report.name:
        yield "name", report.name
    yield "architecture", report.arch
    yield (
        "size",
        f"{_bytes(report.file_bytes)}, {report.n_tensors} tensors, {report.n_parameters:,} parameters",
    )
    yield "width", "any" if report.width is None else str(report.width)
    yield "trunk layers", "any" if report.n_layers is None else str(report.n_layers)
    yield "vocabulary", f"{report.n_vocab:,} tokens"
    yield "fingerprint", f"trunk {_short(report.trunk)}, source rows {_short(report.rows)}"
    yield "memory", _memory(report)
    if report.origin:
        yield from _origin_rows(report.origin)


def _memory(report: Report) -> str:
    found = report.memory
    alone = " without its main model" if report.role == "sidecar" else ""
    return f"about {_bytes(found.total)} to run with a context of {found.n_ctx:,} tokens{alone} ({account(found)})"


def _origin_rows(origin: Origin) -> Iterator[tuple[str, str]]:
    if origin.match:
        yield "head inside", origin.match
    if origin.taken_from:
        yield "head taken from", origin.taken_from
    if origin.grafted_from is not None:
        trunk = (
            f"with trunk {_short(origin.grafted_from)}"
            if origin.grafted_from
            else "with a trunk that is not known"
        )
        yield "head grafted", f"trained {trunk}, another of the same family: unverified"
    if origin.requantised:
        yield "head requantised", ", then ".join(origin.requantised)


def _what_it_is(report: Report) -> str:
    if report.kind is None:
        return "a main model"
    kind = KINDS[report.kind]
    if report.role == "sidecar":
        return f"a sidecar: {kind.title} ({kind.llama_name})"
    return f"a main model with its {kind.title} head inside"


def _kernels(report: Report) -> dict[str, dict[str, Any]]:
    """By type: our kernels for it on this processor, and how many times as fast they were where that is remembered."""
    try:
        sets = {type.name: kernel_set(type) for type in types()}
        header = read_model(report.path)
        trials = recall(header, max_rows=AUTO_DEPTH + 1, threads=default_threads()) if sets else ()
    except LlamaSidecarError:  # no llama.cpp here: nothing runs at all
        return {}
    gains = {trial.type.name: trial.ours_gains for trial in trials}
    used = (use.type for use in report.types)
    return {type: {"set": sets[type], "ours_gains": gains.get(type)} for type in used if type in sets}


def _exactness(report: Report) -> list[Exactness]:
    """How many rows of a main model decode equally here, for each of the settings where `--exact` has measured it."""
    try:
        return [] if report.role == "sidecar" else recall_exactness(read_model(report.path))
    except LlamaSidecarError:  # no llama.cpp here: nothing runs at all
        return []


def _types(report: Report, kernels: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="types", title_justify="left")
    table.add_column("type")
    for name in ("tensors", "parameters", "size"):
        table.add_column(name, justify="right")
    table.add_column("our kernels here")
    for use in report.types:
        found = kernels.get(use.type)
        gains = f", {found['ours_gains']:.1f} times as fast" if found and found["ours_gains"] else ""
        ours = f"{found['set']}{gains}" if found else "none"
        table.add_row(use.type, str(use.n_tensors), f"{use.n_elements:,}", _bytes(use.n_bytes), ours)
    return table


def _neighbours(report: Report) -> Table:
    table = Table(title=f"{_others(report)} beside it", title_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("fits")
    table.add_column("why", overflow="fold")
    for other in report.neighbours:
        why = "; ".join(part for part in (other.choice, other.detail) if part)
        table.add_row(escape(printable(other.path.name)), other.status or "no", escape(printable(why)))
    return table


def _nothing_beside(report: Report) -> str:
    return f"no {_others(report)} beside it"


def _others(report: Report) -> str:
    return "main models" if report.role == "sidecar" else "sidecars"


def _short(fingerprint: str | None) -> str:
    return f"{fingerprint[:16]}..." if fingerprint else "none"


def _bytes(n: int) -> str:
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
