"""`llama-sidecar merge`: a main file and its sidecar into one file. Parses and prints; no logic."""

from __future__ import annotations

from pathlib import Path

import click

from llama_sidecar.converter.edit import merge

from ._edits import FORCE, JSON, run
from ._files import MAIN, SIDECAR


@click.command()
@click.argument("main", type=MAIN)
@click.argument("sidecar", type=SIDECAR)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="GGUF file to write, its folder made if need be.",
)
@FORCE
@JSON
def command(main: Path, sidecar: Path, out: Path, force: bool, as_json: bool) -> None:
    """Merge MAIN and its SIDECAR into one GGUF with the draft head inside: the reverse of split.

    The trunk's tensors are MAIN's and the head's are SIDECAR's, byte for byte. The head then drafts with MAIN's embeddings and
    output, so SIDECAR's own are left out; a warning says so where they are of another type. The two must belong together.

    \b
    llama-sidecar merge NAME-Q8_0.gguf mtp-NAME-Q8_0.gguf --out whole/NAME-Q8_0.gguf
    """
    run(merge, main, sidecar, out, force=force, as_json=as_json)
