"""Qwen3-Next: the mixture-of-experts family before Qwen3.5, with its gated-delta projections joined in two tensors.

Facts: transformers' modeling_qwen3_next.py for the checkpoint's names, llama.cpp's src/models/qwen3next.cpp for the
file's. `in_proj_qkvz` holds each key head's query, key, value and gate rows together; the file wants all queries, all
keys and all values in one tensor and all gates in another. Value heads keep their order here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, place, qwen35, qwen35moe

ARCH = "qwen3next"
CLASSES = ("Qwen3NextForCausalLM",)
DROPPED = qwen35.DROPPED
PREFIX = qwen35.PREFIX
VOCABULARY = Vocabulary("qwen2")
canonical = qwen35.canonical


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    return qwen35.line_keys(config, n_head_layers, ARCH) | qwen35moe.expert_keys(config, ARCH)


def delta_net(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    """A gated-delta mixer whose projections come joined."""
    hidden, kernel = config.integer("hidden_size"), config.integer("linear_conv_kernel_dim")
    n_k, n_v = qwen35.delta_heads(config)
    head_k, head_v = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    n_value, channels = n_v * head_v, 2 * n_k * head_k + n_v * head_v
    per_key = n_value // n_k
    group = 2 * head_k + 2 * per_key

    def of_every_head(start: int, length: int) -> tuple[range, ...]:
        return tuple(range(k * group + start, k * group + start + length) for k in range(n_k))

    query, key = of_every_head(0, head_k), of_every_head(head_k, head_k)
    value, gate = of_every_head(2 * head_k, per_key), of_every_head(2 * head_k + per_key, per_key)
    source += "linear_attn."
    joined, joined_shape = f"{source}in_proj_qkvz.weight", (channels + n_value, hidden)
    yield place(
        f"{target}attn_qkv.weight",
        joined,
        channels,
        hidden,
        rows=query + key + value,
        source_shape=joined_shape,
    )
    yield place(f"{target}attn_gate.weight", joined, n_value, hidden, rows=gate, source_shape=joined_shape)
    yield place(f"{target}ssm_ba.weight", f"{source}in_proj_ba.weight", 2 * n_v, hidden)
    yield place(
        f"{target}ssm_conv1d.weight",
        f"{source}conv1d.weight",
        channels,
        kernel,
        source_shape=(channels, 1, kernel),
    )
    yield place(f"{target}ssm_a", f"{source}A_log", n_v, transform=qwen35.minus_exp)
    yield place(f"{target}ssm_dt.bias", f"{source}dt_bias", n_v)
    yield place(f"{target}ssm_norm.weight", f"{source}norm.weight", head_v)
    yield place(f"{target}ssm_out.weight", f"{source}out_proj.weight", hidden, n_value)


def layout(config: Config, names: Collection[str]) -> Layout:
    return qwen35.layout(config, names, mixer=delta_net, ffn=qwen35moe.expert_ffn)


_MOE, _optional = qwen35moe.TINY["single"]
_NEXT = {
    name: value for name, value in _MOE.items() if name not in ("mtp_num_hidden_layers", "rope_parameters")
} | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 96,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
}
TINY = {
    "tiled": (_NEXT, _optional | {"lm_head.weight"}),
    "paired": (_NEXT | {"linear_num_key_heads": 4}, _optional | {"lm_head.weight"}),
}
