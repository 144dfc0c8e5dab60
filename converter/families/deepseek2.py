"""DeepSeek-V3, V3.1 and R1: latent attention, a mixture of experts, and one MTP block after the trunk's.

Facts: transformers' modeling_deepseek_v3.py for the checkpoint's names, llama.cpp's src/models/deepseek2.cpp for the
file's. llama.cpp runs the head, although its own converter drops it. Nothing is permuted: both pair the rotary values
as neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place

ARCH = "deepseek2"
CLASSES = ("DeepseekV3ForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "model."
VOCABULARY = Vocabulary("deepseek-v3")
canonical = _parts.without_model


def keys(config: Config, n_head_layers: int, arch: str = ARCH) -> dict[str, Key]:
    own = _parts.latent_keys(config) | _parts.deepseek_moe_keys(config)
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    n_blocks = _parts.n_layers_of(config) + n_head_layers
    return shared_keys(config, arch, n_blocks) | {f"{arch}.{name}": value for name, value in own.items()}


def block(config: Config, names: Collection[str], i: int, source: str, target: str) -> Iterator[Placement]:
    """Block `i`, of the trunk or the head: attention, then a dense part or a mixture."""
    hidden = config.integer("hidden_size")
    yield place(f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden)
    yield from _parts.latent_attention(config, f"{source}self_attn.", target)
    yield place(f"{target}ffn_norm.weight", f"{source}post_attention_layernorm.weight", hidden)
    if _parts.is_dense(config, i):
        yield from _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))
    else:
        yield from _parts.deepseek_moe(config, f"{source}mlp.", target, names)


def layout(config: Config, names: Collection[str]) -> Layout:
    return _parts.appended_layout(
        config, names, lambda i, source, target: block(config, names, i, source, target)
    )


_TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
}
_OWN = frozenset({"lm_head.weight", "layers.3.embed_tokens.weight", "layers.3.shared_head.head.weight"})
TINY = {
    "yarn": (
        _TINY
        | {
            "rope_scaling": {
                "type": "yarn", "factor": 4, "original_max_position_embeddings": 128,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            }
        },
        _OWN,
    ),
    "plain": (_TINY, _OWN - {"layers.3.embed_tokens.weight"}),
}  # fmt: skip
