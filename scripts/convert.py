"""`llama-sidecar convert`: a checkpoint into a main GGUF and its sidecar. Parses, shows progress, prints; no logic."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from llama_sidecar.converter import TYPES, ConvertResult, convert
from llama_sidecar.sidecars.errors import printable

from ._progress import progress_bar

NONE = "none"


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to write to; made if need be."
)
@click.option(
    "--main-type",
    type=click.Choice([*TYPES, NONE], case_sensitive=False),
    default="Q8_0",
    show_default=True,
    metavar="TYPE",
    help=f"Type of the main file's weights: {', '.join(TYPES)}; or none, which writes the sidecar alone, for a main file "
    "you have already.",
)
@click.option(
    "--sidecar-type",
    type=click.Choice([*TYPES], case_sensitive=False),
    metavar="TYPE",
    help="Type of the sidecar's weights, of the same list, whatever the main file's is.  [default: Q8_0, with the "
    "vocabulary's matrices at Q4_0]",
)
@click.option(
    "--draft-vocab",
    type=int,
    metavar="N",
    help="Also write a compact sidecar of N rows of the vocabulary, to be named with --sidecar. Without one llama-sidecar makes "
    "its own.",
)
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Importance matrix, as llama-imatrix writes it, for the main file's quantisation.",
)
@click.option("--name", help="Name of the model and of its files.  [default: the checkpoint's]")
@click.option("--force", is_flag=True, help="Replace files that are there already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def command(
    checkpoint: Path,
    out: Path,
    main_type: str,
    sidecar_type: str | None,
    draft_vocab: int | None,
    imatrix: Path | None,
    name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Turn a Hugging Face CHECKPOINT folder into a main GGUF and a small sidecar GGUF that holds its draft head.

    The main file runs in any llama.cpp, alone or with the sidecar beside it. Either both files are written or none.

    \b
    llama-sidecar convert Qwen3.5-0.8B --out models
    llama-sidecar chat models/Qwen3.5-0.8B-Q8_0.gguf
    """
    with progress_bar("reading the checkpoint") as show:
        main = None if main_type.lower() == NONE else main_type
        result = convert(
            checkpoint,
            out,
            main,
            sidecar_type,
            draft_vocab=draft_vocab,
            imatrix=imatrix,
            name=name,
            force=force,
            progress=show,
        )
    for warning in result.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print(json.dumps(result.to_json()) if as_json else _summary(result))


def _summary(result: ConvertResult) -> str:
    lines = []
    if result.main:
        lines.append(f"main     {result.main}  ({result.main_type}, {result.main_bytes / 1e6:,.1f} MB)")
    if result.sidecar:
        lines.append(
            f"sidecar  {result.sidecar}  ({result.sidecar_type}, {result.sidecar_bytes / 1e6:,.1f} MB, "
            f"{result.kind}, {result.n_head_tensors} head tensors)"
        )
    if result.compact:
        lines.append(
            f"compact  {result.compact}  ({result.draft_vocab:,} rows, {result.compact_bytes / 1e6:,.1f} MB)"
        )
    if result.main:
        lines.append(f"llama-sidecar chat {shlex.quote(str(result.main))}")
    else:
        lines.append(f"llama-sidecar chat MAIN --sidecar {shlex.quote(str(result.sidecar))}")
    return "\n".join(lines)
