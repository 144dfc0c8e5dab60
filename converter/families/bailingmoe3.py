"""Bailing-MoE-V3 (Ling 3): gated-delta layers with latent attention every few, sigmoid-gated experts, and an MTP block.

Facts: llama.cpp's converter and transformers' conversion_mapping.py (bailing_hybrid) for the published checkpoints' names,
src/models/bailingmoe3.cpp for the file's. The delta layers' gates come from one projection each; checkpoints with narrow ones are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.errors import BadConfig, UnsupportedModel
from llama_sidecar.converter.families import F32, Layout, Placement, Vocabulary, _parts, place

ARCH = "bailingmoe3"
CLASSES = ("BailingMoeV3ForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "model."
VOCABULARY = Vocabulary("bailingmoe2")
canonical = _parts.without_model
WANTED = {"no_kda_lora": True, "kda_safe_gate": True, "gated_attention_proj_granularity_type": "head_wise"}


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    wrong = [f"{name} = {config.get(name)!r}" for name, value in WANTED.items() if config.get(name) != value]
    if wrong:
        expected = ", ".join(f"{name} = {value!r}" for name, value in WANTED.items())
        raise UnsupportedModel(
            f"config.json has {', '.join(wrong)}; llama.cpp runs this architecture with {expected}"
        )
    bound = config["kda_lower_bound"]
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or bound >= 0:
        raise BadConfig(f"config.json has kda_lower_bound = {bound!r}; expected a number below 0")
    n_blocks = _parts.n_layers_of(config) + n_head_layers
    n_experts = config.integer("num_experts")
    own: dict[str, Key] = _parts.latent_keys(config) | {
        "attention.head_count_kv": [int(_is_latent(config, i)) for i in range(n_blocks)],
        "attention.value_length": config.integer("head_dim"),
        "ssm.conv_kernel": config.integer("short_conv_kernel_size"),
        "kda.head_dim": config.integer("head_dim"),
        "kda.safe_gate": True,
        "kda.gate_lower_bound": float(bound),
        "leading_dense_block_count": _parts.n_dense(config),
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("moe_shared_expert_intermediate_size"),
        "expert_shared_count": config.integer("num_shared_experts"),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": _parts.SIGMOID,
        **_parts.expert_group_keys(config, n_experts),
    }
    limits = {
        "expert_swiglu_limit_list": "swiglu_clamp_exp",
        "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
    }
    own |= {
        key: _parts.limits(config, name, n_blocks)
        for name, key in limits.items()
        if config.get(name) is not None
    }
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    plain = Config(dict(config) | {"num_key_value_heads": 1})
    return shared_keys(plain, ARCH, n_blocks) | {f"{ARCH}.{name}": value for name, value in own.items()}


def _is_latent(config: Config, i: int) -> bool:
    """Whether block `i` is latent attention: the last of each group, what is left after the last group, and the head's."""
    n_layers, group = _parts.n_layers_of(config), config.integer("layer_group_size")
    return (i + 1) % group == 0 or i >= n_layers // group * group


def exp(rows: F32) -> F32:
    grown: F32 = np.exp(rows)
    return grown


def _delta(config: Config, source: str, target: str) -> Iterator[Placement]:
    hidden, head, kernel = (
        config.integer("hidden_size"),
        config.integer("head_dim"),
        config.integer("short_conv_kernel_size"),
    )
    n_heads = config.integer("num_attention_heads")
    inner = n_heads * head
    for part in "qkv":
        yield place(f"{target}attn_{part}.weight", f"{source}{part}_proj.weight", inner, hidden)
        conv, stored = f"{target}ssm_conv1d_{part}.weight", (inner, 1, kernel)
        yield place(conv, f"{source}{part}_conv1d.weight", 1, inner, 1, kernel, source_shape=stored)
    yield place(f"{target}ssm_f_a.weight", f"{source}f_proj.weight", inner, hidden)
    yield place(f"{target}ssm_g_a.weight", f"{source}g_proj.weight", inner, hidden)
    yield place(f"{target}ssm_beta.weight", f"{source}b_proj.weight", n_heads, hidden)
    yield place(f"{target}ssm_a", f"{source}A_log", n_heads, 1, source_shape=(n_heads,), transform=exp)
    yield place(f"{target}ssm_dt.bias", f"{source}dt_bias", inner)
    yield place(f"{target}ssm_norm.weight", f"{source}o_norm.weight", head)
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, inner)


def _mixture(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    hidden, n_experts = config.integer("hidden_size"), config.integer("num_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}gate.weight", n_experts, hidden)
    yield place(f"{target}exp_probs_b.bias", f"{source}gate.expert_bias", n_experts)
    yield from _parts.experts(config, f"{source}experts.", target, n_experts, names)
    shared_ff = config.integer("moe_shared_expert_intermediate_size")
    yield from _parts.dense_ffn(config, f"{source}shared_experts.", target, shared_ff, "_shexp")


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    n_heads, n_layers = config.integer("num_attention_heads"), _parts.n_layers_of(config)
    where = _parts.appended_names(config)
    n_head_layers = _parts.one_block(_parts.n_appended(config, names), where)

    def block(i: int) -> Iterator[Placement]:
        source, target = f"layers.{i}.", f"blk.{i}."
        yield place(f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden)
        if _is_latent(config, i):
            yield from _parts.latent_attention(config, f"{source}attention.", target, output="dense")
            yield place(f"{target}attn_gate.weight", f"{source}attention.g_proj.weight", n_heads, hidden)
        else:
            yield from _delta(config, f"{source}attention.", target)
        yield place(f"{target}ffn_norm.weight", f"{source}post_attention_layernorm.weight", hidden)
        if _parts.is_dense(config, i):
            yield from _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))
        else:
            yield from _mixture(config, f"{source}mlp.", target, names)

    shared = [
        place("token_embd.weight", "word_embeddings.weight", vocabulary, hidden),
        place("output_norm.weight", "norm.weight", hidden),
    ]
    if "lm_head.weight" in names:
        shared.append(place("output.weight", "lm_head.weight", vocabulary, hidden))
    trunk = [p for i in range(n_layers) for p in block(i)]
    head: list[Placement] = []
    for i in range(n_layers, n_layers + n_head_layers):
        source, target = f"layers.{i}.", f"blk.{i}."
        head += [*block(i), *_parts.projection(config, source, target)]
        head.append(place(f"{target}layer_output_norm.weight", f"{source}final_layernorm.weight", hidden))
    said = list(_parts.warnings(config, names, n_head_layers, "num_nextn_predict_layers", where))
    return Layout(shared, trunk, head, n_head_layers, said, where)


_TINY: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_moe_v3",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "layer_group_size": 4,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "gated_attention_proj_granularity_type": "head_wise",
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_HEAD = frozenset({"lm_head.weight", "layers.5.eh_proj.weight"})
TINY = {
    "plain": (_TINY, _HEAD),
    "clamped": (_TINY | {"expert_swiglu_limit_list": [None, 7.0], "q_lora_rank": None}, _HEAD),
}
