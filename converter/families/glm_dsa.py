"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's architecture with GLM's vocabulary; layers may share the indexer before them.

Facts: transformers' modeling_glm_moe_dsa.py for the checkpoint's names, llama.cpp's src/models/glm-dsa.cpp for the file's.
A layer that shares has no indexer of its own; the head's block has one where the checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import (
    Layout,
    Placement,
    Vocabulary,
    _parts,
    deepseek2,
    deepseek32,
)

ARCH = "glm-dsa"
CLASSES = ("GlmMoeDsaForCausalLM",)
DROPPED = deepseek2.DROPPED
PREFIX = deepseek2.PREFIX
VOCABULARY = Vocabulary("glm4", _parts.GLM_ROLES)
canonical = deepseek2.canonical


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    result = deepseek32.keys(config, n_head_layers, ARCH)
    if config.get("indexer_types") is not None:
        result[f"{ARCH}.attention.indexer.types"] = _has_indexer(config)
    return result


def _has_indexer(config: Config) -> list[bool]:
    """Which layers of the trunk have an indexer of their own."""
    types, n_layers = config.get("indexer_types"), _parts.n_layers_of(config)
    if types is None:
        return [True] * n_layers
    is_list = isinstance(types, list) and len(types) == n_layers
    if not is_list or not all(kind in ("full", "shared") for kind in types):
        raise BadConfig(
            f"config.json has indexer_types = {types!r}; expected {n_layers} times 'full' or 'shared'"
        )
    return [kind == "full" for kind in types]


def layout(config: Config, names: Collection[str]) -> Layout:
    has_indexer = _has_indexer(config)

    def block(i: int, source: str, target: str) -> Iterator[Placement]:
        yield from deepseek2.block(config, names, i, source, target)
        source += "self_attn.indexer."
        if has_indexer[i] if i < len(has_indexer) else f"{source}wq_b.weight" in names:
            yield from deepseek32.indexer(config, source, target)

    return _parts.appended_layout(config, names, block)


_SPARSE, _optional = deepseek32.TINY["all"]
_TINY = {name: value for name, value in _SPARSE.items() if name not in ("rope_scaling", "rope_theta")} | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "index_topk": 4,
}
TINY = {
    "full": (_TINY, _optional | {"layers.3.self_attn.indexer.wq_b.weight"}),
    "shared": (
        _TINY | {"indexer_types": ["full", "full", "shared"]},
        _optional | {"layers.3.self_attn.indexer.wq_b.weight"},
    ),
}
