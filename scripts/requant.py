"""`llama-sidecar requant`: a sidecar at another type. Parses and prints; no logic."""

from __future__ import annotations

from pathlib import Path

import click

from llama_sidecar.converter import TYPES
from llama_sidecar.converter.edit import requant

from ._edits import FOLDER, FORCE, JSON, run
from ._files import SIDECAR

TYPE = click.Choice([*TYPES], case_sensitive=False)


@click.command()
@click.argument("sidecar", type=SIDECAR)
@FOLDER
@click.option(
    "--type",
    "type_name",
    type=TYPE,
    metavar="TYPE",
    help=f"Type of the head's block: {', '.join(TYPES)}.  [default: as it is]",
)
@click.option(
    "--vocab-type",
    "vocabulary_type",
    type=TYPE,
    metavar="TYPE",
    help="Type of the matrices with a row for each token, which are most of a sidecar.  [default: as it is]",
)
@FORCE
@JSON
def command(
    sidecar: Path,
    out: Path,
    type_name: str | None,
    vocabulary_type: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write SIDECAR, standard or compact, at another type, without its checkpoint.

    Norms and routers stay as they are. Smaller types make a draft cheaper and less often right, and never change the text.
    Converting the checkpoint again rounds once instead of twice.

    \b
    llama-sidecar requant mtp-NAME-BF16.gguf --type Q8_0 --vocab-type Q4_0 --out small
    """
    run(requant, sidecar, out, type_name, vocabulary_type, force=force, as_json=as_json)
