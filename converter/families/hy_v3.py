"""Hunyuan HY-V3: grouped attention with normed queries and keys, sigmoid-gated experts, and MTP blocks after the trunk's.

Facts: transformers' modeling_hy_v3.py for the checkpoint's names, llama.cpp's src/models/hy-v3.cpp for the file's, which
runs several blocks of a head. The bias of the router's choice is written without a suffix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place

ARCH = "hy_v3"
CLASSES = ("HYV3ForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "model."
VOCABULARY = Vocabulary("hunyuan-dense")
canonical = _parts.without_model


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    n_experts = config.integer("num_experts")
    own: dict[str, Key] = {
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": _shared_ff(config),
        "expert_weights_norm": bool(config.get("route_norm", True)),
        "expert_weights_scale": config.number("router_scaling_factor"),
        "expert_gating_func": _parts.SIGMOID,
    }
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    n_blocks = _parts.n_layers_of(config) + n_head_layers
    return shared_keys(config, ARCH, n_blocks) | {f"{ARCH}.{name}": value for name, value in own.items()}


def _shared_ff(config: Config) -> int:
    return config.integer("num_shared_experts") * config.integer("moe_intermediate_size")


def _mixture(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    hidden, n_experts = config.integer("hidden_size"), config.integer("num_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}router.gate.weight", n_experts, hidden)
    yield place(f"{target}exp_probs_b", f"{source}expert_bias", n_experts)
    yield from _parts.experts(config, f"{source}experts.", target, n_experts, names)
    yield from _parts.dense_ffn(config, f"{source}shared_mlp.", target, _shared_ff(config), "_shexp")


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden, n_layers = config.integer("hidden_size"), _parts.n_layers_of(config)
    n_dense = _parts.n_dense(config, usual=1)

    def block(i: int) -> Iterator[Placement]:
        source, target = f"layers.{i}.", f"blk.{i}."
        yield place(f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden)
        yield from _parts.attention(config, f"{source}self_attn.", target, names, has_norms=True)
        yield place(f"{target}ffn_norm.weight", f"{source}post_attention_layernorm.weight", hidden)
        if i < n_dense:
            yield from _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))
        else:
            yield from _mixture(config, f"{source}mlp.", target, names)

    trunk = [p for i in range(n_layers) for p in block(i)]
    head, n_head_layers = list[Placement](), _parts.n_appended(config, names)
    for i in range(n_layers, n_layers + n_head_layers):
        source, target = f"layers.{i}.", f"blk.{i}."
        head += [*block(i), *_parts.projection(config, source, target)]
        norm = f"{source}final_layernorm.weight"
        head.append(place(f"{target}nextn.shared_head_norm.weight", norm, hidden))
    where = _parts.appended_names(config)
    said = list(_parts.warnings(config, names, n_head_layers, "num_nextn_predict_layers", where))
    return Layout(_parts.shared(config, names), trunk, head, n_head_layers, said, where)


_TINY: dict[str, Any] = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_HEAD = frozenset({"lm_head.weight", "layers.3.eh_proj.weight"})
TINY = {
    "one": (_TINY, _HEAD),
    "two": (_TINY | {"num_nextn_predict_layers": 2}, _HEAD | {"layers.4.eh_proj.weight"}),
}
