"""The fingerprints of a checkpoint as GGUF keys: what a main file and its sidecars have in common.

Knows where a layout puts tensors; what is hashed, and how, is in sidecars/fingerprint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.families import Layout
from llama_sidecar.converter.plan import values
from llama_sidecar.converter.shards import Tensor
from llama_sidecar.sidecars import fingerprint
from llama_sidecar.sidecars import keys as published


def fingerprint_keys(
    layout: Layout, tensors: Mapping[str, Tensor], config: Config, tokens: Any, n_threads: int
) -> dict[str, Key]:
    """What ties a head to its trunk, the same in both files: hashes of the norms and of sampled rows (FORMAT.md).

    `tokens` is the vocabulary in id order.
    """
    trunk, n_layers = layout.shared + layout.trunk, config.integer("num_hidden_layers")
    norms = [p for p in trunk if fingerprint.is_trunk_norm(p.name, len(p.shape), n_layers)]
    matrices = {tensors[s.name].name: tensors[s.name] for p in trunk for s in p.sources if len(s.shape) > 1}
    sampled = [
        (name, row)
        for name in fingerprint.sample_tensors(matrices)
        for row in fingerprint.sample_rows(name, matrices[name].n_rows)
    ]

    def stored(name: str, row: int) -> tuple[str, int, bytes]:
        return name, row, matrices[name].raw_rows(row, row + 1).tobytes()

    with ThreadPoolExecutor(n_threads) as pool:  # hundreds of small readings, of a place that may be far away
        norm_values = pool.map(lambda p: values(p, tensors), norms)
        rows = pool.map(stored, *zip(*sampled, strict=True))
        return {
            published.FORMAT: published.FORMAT_VERSION,
            published.FINGERPRINT_TRUNK: fingerprint.trunk_fingerprint(
                tokens, {p.name: v for p, v in zip(norms, norm_values, strict=True)}
            ),
            published.FINGERPRINT_ROWS: fingerprint.rows_fingerprint(rows),
        }
