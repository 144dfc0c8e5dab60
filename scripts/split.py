"""`llama-sidecar split`: a main file with its head inside into a main file and a sidecar. Parses and prints; no logic."""

from __future__ import annotations

from pathlib import Path

import click

from llama_sidecar.converter.edit import split

from ._edits import FOLDER, FORCE, JSON, run
from ._files import MAIN


@click.command()
@click.argument("main", type=MAIN)
@FOLDER
@click.option(
    "--sidecar-only", is_flag=True, help="Write the sidecar alone, to graft its head onto another main file."
)
@FORCE
@JSON
def command(main: Path, out: Path, sidecar_only: bool, force: bool, as_json: bool) -> None:
    """Split MAIN, a GGUF with its draft head inside, into a main GGUF without it and a sidecar GGUF that holds it.

    Both load in any llama.cpp, and every tensor keeps its bytes. The files are called as MAIN is, the sidecar with mtp- before
    its name. Either both files are written or none.

    \b
    llama-sidecar split NAME-Q8_0.gguf --out apart
    """
    run(split, main, out, sidecar_only=sidecar_only, force=force, as_json=as_json)
