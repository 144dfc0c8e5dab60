"""Prints the table of families for the README, from the scan of families and what the tests hold them to.

    scripts/dev/family_table.py

Every family here is converted, loaded and drafted with in tests/test_families.py. "Files" says how its tiny checkpoints' files
compare with those of llama.cpp's converter (tests/data/listings), "logits" whether transformers computes the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.families import Family, families

LISTINGS = Path(__file__).parents[2] / "tests" / "data" / "listings"
HEADER = (
    "| checkpoints (`architectures` in config.json) | GGUF architecture | blocks of the head | files | logits |",
    "|---|---|---|---|---|",
)


@click.command(help=__doc__)
def main() -> None:
    print("\n".join([*HEADER, *rows()]))


def rows() -> list[str]:
    """One line for each family, in the order of the scan."""
    return [
        f"| {', '.join(f'`{name}`' for name in family.CLASSES)} | `{family.ARCH}` | {_blocks(family)} | {_files(name, family)} "
        f"| {_logits(name, family)} |"
        for name, family in families().items()
    ]


def _blocks(family: Family) -> str:
    counts = {family.layout(Config(root), names).n_head_layers for root, names in family.TINY.values()}
    return " or ".join(map(str, sorted(counts)))


def _files(name: str, family: Family) -> str:
    (variant, *_) = family.TINY
    peer = json.loads((LISTINGS / f"{name}-{variant}-F32.json").read_text(encoding="utf-8"))
    if peer["sidecar"]:
        return "as llama.cpp's"
    has_head = any("nextn" in tensor for tensor in peer["main"]["tensors"])
    return "as llama.cpp's, which makes one file" if has_head else "as llama.cpp's, which drops the head"


def _logits(name: str, family: Family) -> str:
    stored = (LISTINGS / f"reference{part}_logits.json" for part in ("", "_head"))
    known = [json.loads(path.read_text(encoding="utf-8")) for path in stored]
    main, head = (any(f"{name}-{variant}" in one for variant in family.TINY) for one in known)
    return ("main and head" if head else "main") if main else "not known to transformers"


if __name__ == "__main__":
    main()
