"""Checkpoints of real size that take no room: files of holes, which read as zeros."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.families import Source, families

WIDTHS_27B = {
    "hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320, "head_dim": 256,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


def write_sparse(folder: Path, config: Mapping[str, Any], n_shards: int = 1) -> dict[str, Source]:
    """Writes a configuration's tensors, Qwen3.5's, in BF16, in one file or in shards with an index; returns them by name."""
    layout = families()["qwen35"].layout(Config(config), frozenset({"mtp.fc.weight"}))
    sources = {s.name: s for p in layout.shared + layout.trunk + layout.head for s in p.sources}
    if n_shards == 1:
        _write(folder / "model.safetensors", sources)
        return sources
    names, listed = list(sources), {}
    per_shard = -(-len(names) // n_shards)
    for i in range(n_shards):
        part = names[i * per_shard : (i + 1) * per_shard]
        file = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        _write(folder / file, {name: sources[name] for name in part})
        listed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return sources


def n_bytes(source: Source) -> int:
    return 2 * prod(source.shape)


def _write(path: Path, sources: Mapping[str, Source]) -> None:
    header, end = {}, 0
    for source in sources.values():
        offsets = [end, end + n_bytes(source)]
        header[source.name] = {"dtype": "BF16", "shape": source.shape, "data_offsets": offsets}
        end += n_bytes(source)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


# For programs that tell their own peak: `peak_bytes()`. ru_maxrss would count the process that started them, too.
PEAK = """
import resource, sys
def peak_bytes():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
"""
