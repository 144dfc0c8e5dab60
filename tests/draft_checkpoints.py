"""Tiny random checkpoints of stand-alone drafters, the same bytes on every machine: every variant of every `TINY` of drafts/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
from checkpoints import DTYPES, Array, make_checkpoint, random_values, write_json, write_safetensors

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.drafts import drafts
from llama_sidecar.converter.drafts.target import Target, open_target

TARGET = ("qwen35", "tied")
FAMILYS_OWN = {"gemma4_assistant": ("gemma4", "dense")}  # drafters of one family: that family's variant
DRAFTS = [
    (name, variant)
    for name, draft in drafts().items()
    if name not in FAMILYS_OWN and not draft.INSIDE
    for variant in draft.TINY
]
INSIDE = {
    "deepseek4_dspark": ("deepseek4", "plain")
}  # drafters in a model's checkpoint: that family's variant


def make_target(parent: Path, name: str = "") -> Path:
    """The checkpoint that a drafter drafts for."""
    return make_checkpoint(parent, *FAMILYS_OWN.get(name, TARGET))


def tiny_config(name: str, variant: str) -> dict[str, Any]:
    return json.loads(json.dumps(drafts()[name].TINY[variant][0]))  # type: ignore[no-any-return]


def tiny_tensors(name: str, variant: str, target: Target, dtype: str = "BF16") -> dict[str, Array]:
    """The variant's tensors under canonical names with what its exports put before them."""
    draft = drafts()[name]
    root, optional = draft.TINY[variant]
    config = draft.prepared(Config(root))
    placements, _ = draft.layout(config, optional, target)
    sources = dict.fromkeys(source for placement in placements for source in placement.sources)
    tensors = {s.name: random_values(s.name, s.shape).astype(DTYPES[dtype]) for s in sources}
    block = "layers.0." if "speculators" in variant else "midlayer."  # EAGLE3's
    tensors = {n.replace("block.", block, 1) if n.startswith("block.") else n: t for n, t in tensors.items()}
    n = draft.d2t(config)
    if n is not None:  # the token of row i is 4 i + 2
        tensors["d2t"] = 3 * np.arange(n, dtype=np.int64) + 2
    if "t2d" in optional:
        tensors["t2d"] = np.zeros(config.integer("vocab_size"), np.int64)
    return tensors


def make_draft(parent: Path, name: str, variant: str, target: Path, **changes: Any) -> Path:
    """Writes a variant's folder, `tiny-NAME-VARIANT`; `changes` replace values of its config.json (None: left out)."""
    folder = parent / f"tiny-{name}-{variant}"
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tiny_tensors(name, variant, open_target(target)))
    config = tiny_config(name, variant) | changes
    write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})
    return folder


def inside_tensors(name: str, variant: str = "inside") -> dict[str, Array]:
    """The model's tensors and the drafter's, whose parts of no stage stand in the last."""
    draft, (arch, of_model) = drafts()[name], INSIDE[name]
    config, optional = inside_config(name, variant), draft.TINY[variant][1]
    n_layers, width = config["num_hidden_layers"], config["hidden_size"]
    target = Target("", n_layers, width, config["vocab_size"], False, {}, {})
    placements, _ = draft.layout(Config(config), optional, target)
    found = checkpoints.tiny_tensors(arch, of_model, config=config)
    for source in dict.fromkeys(source for placement in placements for source in placement.sources):
        stage = source.name.removeprefix("layers.")
        stored = f"mtp.{stage}" if stage != source.name else f"mtp.1.{source.name}"
        dtype = "F32" if stored.endswith(checkpoints.KEPT_F32) else "BF16"
        found[stored] = random_values(stored, source.shape).astype(DTYPES[dtype])
    return found


def inside_config(name: str, variant: str = "inside") -> dict[str, Any]:
    return checkpoints.tiny_config(*INSIDE[name]) | drafts()[name].TINY[variant][0]


def make_inside(parent: Path, name: str, tensors: Mapping[str, Array] | None = None, **changes: Any) -> Path:
    """Writes a model's folder with a drafter inside, `tiny-NAME`; `changes` replace values of its config.json."""
    return make_checkpoint(
        parent,
        *INSIDE[name],
        tensors=inside_tensors(name) if tensors is None else tensors,
        config=inside_config(name) | changes,
        name=f"tiny-{name}",
    )
