"""Stores what llama.cpp's own converter makes of every tiny checkpoint, for the tests to compare with.

    scripts/dev/peer_listings.py PEER_CONVERT [--only qwen35-tied] [--out tests/data/listings]

PEER_CONVERT is a command `PEER_CONVERT CHECKPOINT OUT --pre NAME [converter's options]` that runs convert_hf_to_gguf.py
with its pre-tokenizer table replaced by NAME (a self-made vocabulary is in no table). Each listing holds names, shapes,
types and hashes of the tensors and all keys of both files, for one variant of one family and one type. Where the converter
drops a family's head, its main file is made without a switch, and the sidecar's listing is null. Of a family that it reads as
published alone, quantised, each file is listed once, in the types that it gives it. Of the quantised checkpoints of
tests/quantized.py (--only quantized-METHOD) the main file's tensors at F32 are listed, for the methods that it reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import VARIANTS, listing, make_checkpoint, write_tokenizer  # noqa: E402
from draft_checkpoints import (  # noqa: E402
    DRAFTS,
    FAMILYS_OWN,
    INSIDE,
    TARGET,
    inside_config,
    inside_tensors,
    make_draft,
    make_target,
)
from quantized import METHODS, PUBLISHED, make_published, make_quantized  # noqa: E402

from llama_sidecar.converter.drafts import drafts  # noqa: E402
from llama_sidecar.converter.families import families  # noqa: E402

TYPES = ("F32", "BF16", "Q8_0")
SWITCHES = {"main": "--no-mtp", "sidecar": "--mtp"}


@click.command()
@click.argument("peer_convert", type=click.Path(exists=True, resolve_path=True, path_type=Path))
@click.option("--only", help="One variant, FAMILY-VARIANT, or a drafter inside a model.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "tests/data/listings")
def main(peer_convert: Path, only: str | None, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for arch, variant in VARIANTS:
        if only in (None, f"{arch}-{variant}"):
            with tempfile.TemporaryDirectory() as folder:
                _list_variant(peer_convert, arch, variant, Path(folder), out)
    of_families = [(name, variant) for name in FAMILYS_OWN for variant in drafts()[name].TINY]
    for name, variant in [*DRAFTS, *of_families]:
        if only in (None, f"{name}-{variant}"):
            with tempfile.TemporaryDirectory() as folder:
                _list_draft(peer_convert, name, variant, Path(folder), out)
    for name in INSIDE:
        if only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                _list_inside(peer_convert, name, Path(folder), out)
    for method in METHODS:
        if only in (None, f"quantized-{method}"):
            with tempfile.TemporaryDirectory() as folder:
                _list_quantized(peer_convert, method, Path(folder), out)


def _list_variant(peer_convert: Path, arch: str, variant: str, folder: Path, out: Path) -> None:
    is_published = arch in PUBLISHED
    checkpoint = (
        make_published(folder, arch, variant)[0] if is_published else make_checkpoint(folder, arch, variant)
    )
    pre = families()[arch].VOCABULARY.pre
    for kind in TYPES[:1] if is_published else TYPES:
        found = {}
        for role, switch in SWITCHES.items():
            target = folder / f"{role}-{kind}.gguf"
            call = [peer_convert, checkpoint, target, "--pre", pre, "--outtype", kind.lower()]
            run = subprocess.run([*call, switch], capture_output=True, text=True)
            if "not supported for" in run.stderr and role == "main":
                run = subprocess.run(call, capture_output=True, text=True)
            elif "not supported for" in run.stderr:
                found[role] = None
                continue
            if run.returncode:
                raise click.ClickException(f"{' '.join(map(str, run.args))}:\n{run.stderr}")
            found[role] = listing(target)
        _write(out / f"{arch}-{variant}-{'published' if is_published else kind}.json", found)


def _list_quantized(peer_convert: Path, method: str, folder: Path, out: Path) -> None:
    checkpoint, _ = make_quantized(folder, method)
    pre, target = families()["qwen35"].VOCABULARY.pre, folder / "main.gguf"
    call = [peer_convert, checkpoint, target, "--pre", pre, "--outtype", "f32", SWITCHES["main"]]
    run = subprocess.run(call, capture_output=True, text=True)
    if "is not yet supported" in run.stderr:
        print(f"{method}: {run.stderr.strip().splitlines()[-1]}")
    elif run.returncode:
        raise click.ClickException(f"{' '.join(map(str, call))}:\n{run.stderr}")
    else:
        _write(out / f"quantized-{method}.json", listing(target)["tensors"])


def _list_inside(peer_convert: Path, name: str, folder: Path, out: Path) -> None:
    checkpoint, _ = make_published(folder, *INSIDE[name], inside_tensors(name), inside_config(name))
    pre = families()[INSIDE[name][0]].VOCABULARY.pre
    found = {}
    switches = {"main": [SWITCHES["main"]], "sidecar": ["--dspark", "--target-model-dir", checkpoint]}
    for role, more in switches.items():
        target = folder / f"{role}.gguf"
        call = [peer_convert, checkpoint, target, "--pre", pre, "--outtype", "f32", *more]
        run = subprocess.run(call, capture_output=True, text=True)
        if run.returncode:
            raise click.ClickException(f"{' '.join(map(str, call))}:\n{run.stderr}")
        found[role] = listing(target)
    _write(out / f"{name}-published.json", found)


def _write(path: Path, found: object) -> None:
    path.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


def _list_draft(peer_convert: Path, name: str, variant: str, folder: Path, out: Path) -> None:
    target = make_target(folder, name)
    draft = make_draft(folder, name, variant, target)
    arch, _ = FAMILYS_OWN.get(name, TARGET)
    pre = families()[arch].VOCABULARY.pre
    if name in FAMILYS_OWN:  # it is published with its target's tokenizer
        write_tokenizer(draft, arch)
    for kind in TYPES:
        made = folder / f"{kind}.gguf"
        call = [
            peer_convert,
            draft,
            made,
            "--pre",
            pre,
            "--outtype",
            kind.lower(),
            *([] if name in FAMILYS_OWN else ["--target-model-dir", target]),
        ]
        run = subprocess.run(call, capture_output=True, text=True)
        if run.returncode:
            raise click.ClickException(f"{' '.join(map(str, call))}:\n{run.stderr}")
        path = out / f"{name}-{variant}-{kind}.json"
        path.write_text(
            json.dumps({"sidecar": listing(made)}, indent=0, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(path)


if __name__ == "__main__":
    main()
