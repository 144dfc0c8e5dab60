"""GLM-4.5, 4.6 and 4.7, with experts: grouped attention, DeepSeek's mixture, and one MTP block after the trunk's.

Facts: transformers' modeling_glm4_moe.py for the checkpoint's names, llama.cpp's src/models/glm4-moe.cpp for the file's.
Published heads hold copies of the embeddings and of the output; they are kept, as the loader would take others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place

ARCH = "glm4moe"
CLASSES = ("Glm4MoeForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "model."
VOCABULARY = Vocabulary("glm4", _parts.GLM_ROLES)
canonical = _parts.without_model


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    own = {"rope.dimension_count": _parts.n_rotary(config, 0.5)} | _parts.deepseek_moe_keys(config)
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    n_blocks = _parts.n_layers_of(config) + n_head_layers
    return shared_keys(config, ARCH, n_blocks) | {f"{ARCH}.{name}": value for name, value in own.items()}


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden = config.integer("hidden_size")

    def block(i: int, source: str, target: str) -> Iterator[Placement]:
        yield place(f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden)
        yield from _parts.attention(config, f"{source}self_attn.", target, names)
        yield place(f"{target}post_attention_norm.weight", f"{source}post_attention_layernorm.weight", hidden)
        if _parts.is_dense(config, i):
            yield from _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))
        else:
            yield from _parts.deepseek_moe(config, f"{source}mlp.", target, names)

    return _parts.appended_layout(config, names, block)


_TINY: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_OWN = frozenset({"lm_head.weight", "layers.3.embed_tokens.weight", "layers.3.shared_head.head.weight"})
_NORMS = frozenset({f"layers.{i}.self_attn.q_norm.weight" for i in range(4)})
_BIASES = frozenset({f"layers.{i}.self_attn.q_proj.bias" for i in range(4)})
TINY = {
    "norms": (_TINY, _OWN | _NORMS | _BIASES),
    "air": (_TINY | {"use_qk_norm": False}, _OWN | _BIASES),
    "shared": (
        _TINY | {"use_qk_norm": False, "attention_bias": False, "rope_theta": 10000},
        frozenset({"lm_head.weight", "layers.3.eh_proj.weight"}),
    ),
}
