"""Stores transformers' logits for tiny checkpoints, for the tests to hold a converted file's logits against.

    scripts/dev/reference_logits.py [--out tests/data/listings/reference_logits.json]

Needs torch and a transformers that knows Qwen3.5 (5.0 or newer). For each variant: the first eight logits
after `LOGITS_PROMPT`, in float32 on the CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import LOGITS_PROMPT, VARIANTS, make_checkpoint  # noqa: E402


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "tests/data/listings/reference_logits.json"
)
def main(out: Path) -> None:
    logits = {}
    for arch, variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            checkpoint = make_checkpoint(Path(folder), arch, variant)
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
            last = model(torch.tensor([LOGITS_PROMPT])).logits[0, -1, :8]
            logits[f"{arch}-{variant}"] = [round(value, 5) for value in last.tolist()]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in logits.items())
    out.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
