"""What the commands that make GGUF files from GGUF files share: their options and how they end. No command itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llama_sidecar.converter.edit import EditResult
from llama_sidecar.sidecars.errors import printable

from ._progress import progress_bar

FOLDER = click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to write to; made if need be."
)
FORCE = click.option(
    "--force", is_flag=True, help="Replace files that are there already, never one that is read."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def run(edit: Callable[..., EditResult], *arguments: Any, as_json: bool, **options: Any) -> None:
    """Runs an edit with a progress bar, and prints what it wrote."""
    with progress_bar("reading the headers") as show:
        result = edit(*arguments, **options, progress=show)
    for warning in result.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    click.echo(json.dumps(result.to_json()) if as_json else printable_lines(result))


def printable_lines(result: EditResult) -> str:
    """The files, and how sure it is that they belong together."""
    lines = []
    for role, path, n_bytes in (
        ("main", result.main, result.main_bytes),
        ("sidecar", result.sidecar, result.sidecar_bytes),
    ):
        if path:
            lines.append(f"{role:8} {path}  ({n_bytes / 1e6:,.1f} MB)")
    if result.match:
        lines.append(f"{'match':8} {result.match}: {result.detail}")
    lines += [f"{'note':8} {note}" for note in result.notes]
    return "\n".join(printable(line) for line in lines)
