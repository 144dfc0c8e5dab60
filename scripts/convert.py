"""`llama-sidecar convert`: a checkpoint into a main GGUF and its sidecar. Parses, shows progress, prints; no logic."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from llama_sidecar.converter import KEPT_TYPES, TYPES, ConvertResult, convert
from llama_sidecar.converter import dry_run as what_it_would_do
from llama_sidecar.converter.dry_run import ACCEPTANCE, N_CTX
from llama_sidecar.converter.errors import TensorMismatch
from llama_sidecar.sidecars.errors import printable

from ._dry_run import summary as dry_run_summary
from ._progress import progress_bar

NONE = "none"


@click.command()
@click.argument("checkpoint")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder to write to; made if need be.  [required]"
)
@click.option(
    "--main-type",
    type=click.Choice([*TYPES, *KEPT_TYPES, NONE], case_sensitive=False),
    metavar="TYPE",
    help=f"Type of the main file's weights: {', '.join(TYPES)}; {' or '.join(KEPT_TYPES)}, where the checkpoint stores them so and "
    "they are to be kept, the rest being Q8_0; or none, which writes the sidecar alone.  [default: Q8_0]",
)
@click.option(
    "--sidecar-only",
    is_flag=True,
    help="Write the sidecar alone, for a main file that you have already: the same as --main-type none.",
)
@click.option(
    "--sidecar-type",
    type=click.Choice([*TYPES, *KEPT_TYPES], case_sensitive=False),
    metavar="TYPE",
    help="Type of the sidecar's weights, of the same list, whatever the main file's is.  [default: Q8_0, with the "
    "vocabulary's matrices at Q4_0]",
)
@click.option(
    "--target",
    metavar="MODEL",
    help="For a drafter's own checkpoint (EAGLE3, DFlash, DSpark): the model it drafts for, a checkpoint or a main GGUF. Then the sidecar alone is "
    "written.",
)
@click.option(
    "--mtp-from",
    metavar="CHECKPOINT",
    help="Take the draft head from this checkpoint, the base model of a quantised or fine-tuned one that lost it.",
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
@click.option(
    "--pre-tokenizer",
    metavar="NAME",
    help="llama.cpp's name of the way the tokenizer splits text, such as deepseek-v3, where tokenizer.json's own is not recognised.",
)
@click.option("--name", help="Name of the model and of its files.  [default: the checkpoint's]")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Write nothing: show files, sizes, memory, what a draft costs, and what becomes of every tensor (of each with --json). "
    "CHECKPOINT may be a config.json.",
)
@click.option(
    "-c",
    "--ctx",
    type=click.IntRange(1),
    metavar="N",
    help="Context in tokens, of --dry-run's memory.  [default: 8192]",
)
@click.option(
    "--acceptance",
    type=click.FloatRange(0, 1),
    metavar="A",
    help="Chance that a draft stands, of --dry-run's speed-up.  [default: 0.8]",
)
@click.option("--force", is_flag=True, help="Replace files that are there already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def command(
    checkpoint: str,
    out: Path | None,
    main_type: str | None,
    sidecar_only: bool,
    sidecar_type: str | None,
    target: str | None,
    mtp_from: str | None,
    draft_vocab: int | None,
    imatrix: Path | None,
    pre_tokenizer: str | None,
    name: str | None,
    dry_run: bool,
    ctx: int | None,
    acceptance: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Turn a Hugging Face CHECKPOINT into a main GGUF and a small sidecar GGUF that holds its draft head.

    CHECKPOINT is a folder, or ORG/NAME or hf://ORG/NAME[@REVISION] on the Hugging Face Hub: of that only what is needed is read,
    with --sidecar-only little more than the head. The main file runs in any llama.cpp, alone or with the sidecar beside it.
    Either both files are written or none; after a crash, a broken connection or Ctrl-C late in a long conversion the same command
    goes on where it stopped.

    \b
    llama-sidecar convert Qwen3.5-0.8B --out models
    llama-sidecar chat models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar convert hf://Qwen/Qwen3.5-27B --sidecar-only --out models
    llama-sidecar convert hf://Qwen/Qwen3.5-27B --dry-run --ctx 32768
    """
    if sidecar_only and main_type not in (None, NONE):
        raise click.UsageError(f"--sidecar-only and --main-type {main_type} contradict each other")
    main = None if sidecar_only or main_type == NONE else main_type or "Q8_0"
    options: dict[str, Any] = {
        "target": target,
        "mtp_from": mtp_from,
        "draft_vocab": draft_vocab,
        "imatrix": imatrix,
        "pre_tokenizer": pre_tokenizer,
        "name": name,
    }
    if dry_run:
        _dry_run(checkpoint, out or Path(), main, sidecar_type, options, ctx, acceptance, as_json)
        return
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    if ctx is not None or acceptance is not None:
        raise click.UsageError("--ctx and --acceptance say what --dry-run shows: nothing of them is written")
    with progress_bar("reading the checkpoint") as show:
        result = convert(
            checkpoint,
            out,
            main,
            sidecar_type,
            **options,
            force=force,
            progress=show,
        )
    for warning in result.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print(json.dumps(result.to_json()) if as_json else _summary(result))


def _dry_run(
    checkpoint: str,
    out: Path,
    main_type: str | None,
    sidecar_type: str | None,
    options: dict[str, Any],
    ctx: int | None,
    acceptance: float | None,
    as_json: bool,
) -> None:
    with progress_bar("reading the checkpoint"):
        found = what_it_would_do(
            checkpoint,
            out,
            main_type,
            sidecar_type,
            **options,
            n_ctx=N_CTX if ctx is None else ctx,
            acceptance=ACCEPTANCE if acceptance is None else acceptance,
        )
    for warning in found.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print(json.dumps(found.to_json()) if as_json else dry_run_summary(found))
    if found.mismatch:
        raise TensorMismatch(str(found.mismatch))


def _summary(result: ConvertResult) -> str:
    lines = []
    if result.main:
        lines.append(f"main     {result.main}  ({result.main_type}, {_mb(result.main_bytes)})")
    if result.sidecar:
        lines.append(
            f"sidecar  {result.sidecar}  ({result.sidecar_type}, {_mb(result.sidecar_bytes)}, "
            f"{result.kind}, {result.n_head_tensors} head tensors)"
        )
    if result.compact:
        lines.append(f"compact  {result.compact}  ({result.draft_vocab:,} rows, {_mb(result.compact_bytes)})")
    if result.read_bytes < result.checkpoint_bytes:
        lines.append(f"read     {_mb(result.read_bytes)} of the checkpoint's {_mb(result.checkpoint_bytes)}")
    if result.main:
        lines.append(f"llama-sidecar chat {shlex.quote(str(result.main))}")
    else:
        lines.append(f"llama-sidecar chat MAIN --sidecar {shlex.quote(str(result.sidecar))}")
    return "\n".join(lines)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"
