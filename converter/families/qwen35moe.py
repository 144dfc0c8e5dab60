"""Qwen3.5, 3.6 and 3.8 with experts: the dense family with a mixture of experts in place of each feed-forward part.

Facts: transformers' modeling_qwen3_5_moe.py for the checkpoint's names, llama.cpp's src/models/qwen35moe.cpp for the
file's. Experts come one by one (`experts.7.up_proj.weight`) or fused (`experts.gate_up_proj`, gate rows first).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.families import Layout, Placement, _parts, place, qwen35

ARCH = "qwen35moe"
CLASSES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
DROPPED = qwen35.DROPPED
PREFIX = qwen35.PREFIX
VOCABULARY = qwen35.VOCABULARY
canonical = qwen35.canonical


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    return qwen35.keys(config, n_head_layers, ARCH) | expert_keys(config, ARCH)


def expert_keys(config: Config, arch: str) -> dict[str, Key]:
    n_experts = config.integer("num_experts")
    return {
        f"{arch}.expert_count": n_experts,
        f"{arch}.expert_used_count": config.integer("num_experts_per_tok", n_experts),
        f"{arch}.expert_feed_forward_length": config.integer("moe_intermediate_size"),
        f"{arch}.expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
    }


def expert_ffn(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    """The router, the experts stacked in their order, and the expert that all tokens share."""
    hidden, n_experts = config.integer("hidden_size"), config.integer("num_experts")
    shared_ff = config.integer("shared_expert_intermediate_size")
    source += "mlp."
    yield place(f"{target}ffn_gate_inp.weight", f"{source}gate.weight", n_experts, hidden)
    yield from _parts.experts(config, f"{source}experts.", target, n_experts, names)
    yield place(f"{target}ffn_gate_inp_shexp.weight", f"{source}shared_expert_gate.weight", 1, hidden)
    yield from _parts.dense_ffn(config, f"{source}shared_expert.", target, shared_ff, "_shexp")


def layout(config: Config, names: Collection[str]) -> Layout:
    return qwen35.layout(config, names, ffn=expert_ffn)


_TINY, _optional = qwen35.TINY["tied"]
_MOE = {name: value for name, value in _TINY.items() if name != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
TINY = {
    "single": (_MOE, _optional),
    "fused": (
        _MOE | {"tie_word_embeddings": False},
        _optional
        | {"lm_head.weight"}
        | {
            f"{block}.mlp.experts.gate_up_proj"
            for block in ("mtp.layers.0", *(f"layers.{i}" for i in range(4)))
        },
    ),
}
