"""Stores transformers' logits for tiny checkpoints, for the tests to hold a converted file's logits against.

    scripts/dev/reference_logits.py [--only deepseek2] [--out tests/data/listings]

Needs torch and a transformers that knows the families (5.24 or newer: it runs MTP blocks too). For each variant: the first
eight logits after `LOGITS_PROMPT` in reference_logits.json, and in reference_head_logits.json those of the head after
the prompt and `DRAFT_TOKEN`, all in float32 on the CPU. The head's first cell is that of the prompt's second token: there
is no hidden row before the first.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import DRAFT_TOKEN, LOGITS_PROMPT, VARIANTS, make_checkpoint  # noqa: E402


@click.command()
@click.option("--only", help="One family's module.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "tests/data/listings")
def main(only: str | None, out: Path) -> None:
    trunk, head = _Stored(out / "reference_logits.json"), _Stored(out / "reference_head_logits.json")
    for arch, variant in VARIANTS:
        if only not in (None, arch):
            continue
        name = f"{arch}-{variant}"
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            checkpoint = make_checkpoint(Path(folder), arch, variant)
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            found = model(torch.tensor([LOGITS_PROMPT]), output_hidden_states=True)
            trunk.add(name, found.logits[0, -1])
            if getattr(model.config.get_text_config(), "num_mtp_layers", None):
                head.add(name, _head_logits(model, found.hidden_states[-1]))
    trunk.write()
    head.write()


def _head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    n_layers = model.config.get_text_config().num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [
        rf"layers\.{n_layers}\.",
        r"^mtp\.",
    ]  # not the published models' numbers
    head = MtpModel.from_pretrained(model).eval()
    with safe_open(Path(model.config.name_or_path) / "model.safetensors", "pt") as stored:
        for part, name in {"embed_tokens": "embed_tokens", "shared_head": "shared_head.head"}.items():
            own = f"model.layers.{n_layers}.{name}.weight"  # published ones repeat the trunk's, ours do not
            if own in stored.keys():  # noqa: SIM118 - no dict
                module = copy.deepcopy(getattr(head, part))
                module.weight.copy_(stored.get_tensor(own))
                setattr(head, part, module)
    cache = MtpCache(config=model.config.get_mtp_config())
    tokens = torch.tensor([[*LOGITS_PROMPT[1:], DRAFT_TOKEN]])
    positions = torch.arange(1, len(LOGITS_PROMPT) + 1)[None]
    rows = head.forward_layer(0, hidden, positions, cache, input_ids=tokens)
    logits: torch.Tensor = head._project_to_logits(rows)[0, -1]
    return logits


class _Stored:
    """A JSON file of the first eight logits by variant; entries that are not made anew stay."""

    def __init__(self, path: Path):
        self._path = path
        self._logits = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def add(self, name: str, logits: torch.Tensor) -> None:
        self._logits[name] = [round(value, 5) for value in logits[:8].tolist()]
        print(self._path.name, name, self._logits[name])

    def write(self) -> None:
        entries = sorted(self._logits.items())
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in entries)
        self._path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
