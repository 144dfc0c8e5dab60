"""`llama-sidecar graft`: a head onto a fine-tune of its trunk. Parses and prints; no logic."""

from __future__ import annotations

from pathlib import Path

import click

from llama_sidecar.converter.edit import graft
from llama_sidecar.converter.edit.graft import AUTO, VOCABULARIES

from ._edits import FOLDER, FORCE, JSON, run
from ._files import MAIN, SIDECAR


@click.command()
@click.argument("sidecar", type=SIDECAR)
@click.argument("main", type=MAIN)
@FOLDER
@click.option(
    "--vocab",
    "vocabulary",
    type=click.Choice(VOCABULARIES, case_sensitive=False),
    default=AUTO,
    show_default=True,
    help="Whose embeddings and output the head drafts with; auto: MAIN's where they differ by more than their types.",
)
@FORCE
@JSON
def command(sidecar: Path, main: Path, out: Path, vocabulary: str, force: bool, as_json: bool) -> None:
    """Graft the head of SIDECAR, a base model's, onto MAIN, a fine-tune of that model without a head of its own.

    Writes a sidecar for MAIN with SIDECAR's head, byte for byte. The text stays what MAIN alone writes; how many drafts it accepts
    depends on how far the two have grown apart: llama-sidecar bench measures it. The match is "same family, unverified", never
    "verified".

    \b
    llama-sidecar graft mtp-BASE-Q8_0.gguf TUNED-Q4_K_M.gguf --out models
    """
    run(graft, sidecar, main, out, vocabulary=vocabulary, force=force, as_json=as_json)
