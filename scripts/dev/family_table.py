"""Prints the table of families for the README, from the scan of families, what the tests hold them to, and a try of each.

    scripts/dev/family_table.py

"Files" says how the files of its tiny checkpoints compare with those of llama.cpp's converter (tests/data/listings), "logits"
whether transformers computes the same. For "loads" and "drafts" the first of them is converted and loaded, and writes a text with
its head and without: is anything drafted, and are the tokens the same (as tests/test_families.py asks of every variant)?
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import LOGITS_PROMPT, make_checkpoint  # noqa: E402
from quantized import PUBLISHED  # noqa: E402

from llama_sidecar.converter import convert  # noqa: E402
from llama_sidecar.converter.config import Config  # noqa: E402
from llama_sidecar.converter.families import Family, families  # noqa: E402
from llama_sidecar.runtime import Model, load  # noqa: E402
from llama_sidecar.sidecars.errors import LlamaSidecarError  # noqa: E402

LISTINGS = ROOT / "tests" / "data" / "listings"
HEADER = (
    "| checkpoints (`architectures` in config.json) | GGUF architecture | blocks of the head | files | logits | loads | drafts |",
    "|---|---|---|---|---|---|---|",
)
N = 16  # tokens of a text


@click.command(help=__doc__)
def main() -> None:
    print("\n".join([*HEADER, *rows()]))


def rows() -> list[str]:
    """One line for each family, in the order of the scan."""
    return [
        f"| {', '.join(f'`{name}`' for name in family.CLASSES)} | `{family.ARCH}` | {_blocks(family)} | {_files(name, family)} "
        f"| {_logits(name, family)} | {_runs(name, family)} |"
        for name, family in families().items()
    ]


def _blocks(family: Family) -> str:
    counts = {family.layout(Config(root), names).n_head_layers for root, names in family.TINY.values()}
    return " or ".join(map(str, sorted(counts))) if counts != {0} else "none"


def _files(name: str, family: Family) -> str:
    (variant, *_) = family.TINY
    kind = "published" if name in PUBLISHED else "F32"
    peer = json.loads((LISTINGS / f"{name}-{variant}-{kind}.json").read_text(encoding="utf-8"))
    if peer["sidecar"] or _blocks(family) == "none":
        return "as llama.cpp's"
    has_head = any("nextn" in tensor for tensor in peer["main"]["tensors"])
    return "as llama.cpp's, which makes one file" if has_head else "as llama.cpp's, which drops the head"


def _logits(name: str, family: Family) -> str:
    stored = (LISTINGS / f"reference{part}_logits.json" for part in ("", "_head"))
    known = [json.loads(path.read_text(encoding="utf-8")) for path in stored]
    main, head = (any(f"{name}-{variant}" in one for variant in family.TINY) for one in known)
    return ("main and head" if head else "main") if main else "not known to transformers"


def _runs(name: str, family: Family) -> str:
    """Whether its first tiny pair loads and drafts: the two last cells."""
    sidecar_type = None if _blocks(family) == "none" else "F32"
    with tempfile.TemporaryDirectory() as folder:
        result = convert(
            make_checkpoint(Path(folder), name, next(iter(family.TINY))),
            Path(folder) / "out",
            "F32",
            sidecar_type,
        )
        assert result.main
        try:
            with load(result.main, result.sidecar, ctx=128, threads=1, depth=2, flash_attn="off") as model:
                return f"yes | {'yes' if _drafts(model) else 'no'}"
        except LlamaSidecarError:
            return "no | no"


def _drafts(model: Model) -> bool:
    if model.speculation.kind is None:
        return False
    options = {"max_tokens": N, "temperature": 0, "ignore_eos": True}
    with model.session(spec_type="none") as plain, model.session() as session:
        alone, drafted = plain.generate(LOGITS_PROMPT, **options), session.generate(LOGITS_PROMPT, **options)
        alone.read()
        drafted.read()
        return drafted.tokens == alone.tokens and drafted.stats.n_drafted > 0


if __name__ == "__main__":
    main()
