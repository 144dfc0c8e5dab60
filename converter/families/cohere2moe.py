"""Cohere 2 with experts: attention and feed-forward part side by side behind one norm, windows in most layers, an MTP block.

Facts: transformers' modeling_cohere2_moe.py for the checkpoint's names, llama.cpp's src/models/cohere2moe.cpp for the file's.
Norms have a mean unless config.json has `rms_norm_eps`. A softmax over the chosen experts alone is written as one over all
with normalised weights, which is the same. llama.cpp's converter always puts the head into the main file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.errors import BadConfig, UnsupportedModel
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place

ARCH = "cohere2moe"
CLASSES = ("Cohere2MoeForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "model."
VOCABULARY = Vocabulary("cohere2moe")
canonical = _parts.without_model
GATING = {"softmax": 1, "sigmoid": _parts.SIGMOID}


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    n_experts, head = config.integer("num_experts"), config.integer("head_dim")
    selection, ff = config.get("expert_selection_fn", "softmax"), config.integer("intermediate_size")
    if selection not in list(GATING):  # by equality: JSON's lists and objects have no hash
        raise BadConfig(
            f"config.json has expert_selection_fn = {selection!r}; expected one of {', '.join(GATING)}"
        )
    own: dict[str, Key] = {
        "vocab_size": config.integer("vocab_size"),
        "logit_scale": config.number("logit_scale"),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps"),
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": _is_windowed(config),
        "rope.dimension_count": head,
        "rope.scaling.type": "none",
        "leading_dense_block_count": _n_dense(config),
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": ff,
        "expert_gating_func": GATING[selection],
        "expert_weights_norm": selection == "softmax" or bool(config.get("norm_topk_prob")),
    }
    if config.get("prefix_dense_intermediate_size") is not None:
        own["feed_forward_length"] = config.integer("prefix_dense_intermediate_size")
    if config.get("num_shared_experts"):
        own["expert_shared_count"] = config.integer("num_shared_experts")
        own["expert_shared_feed_forward_length"] = ff * config.integer("num_shared_experts")
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    epsilon = "rms_norm_eps" if config.get("rms_norm_eps") is not None else None
    shared = shared_keys(config, ARCH, _parts.n_layers_of(config) + n_head_layers, epsilon=epsilon)
    return shared | {f"{ARCH}.{name}": value for name, value in own.items()}


def _is_windowed(config: Config) -> list[bool]:
    types, n_layers = config["layer_types"], _parts.n_layers_of(config)
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
        raise BadConfig(
            f"config.json has layer_types = {types!r}; expected {n_layers} times one of {', '.join(known)}"
        )
    return [kind == "sliding_attention" for kind in types]


def _n_dense(config: Config) -> int:
    """How many layers come before the mixtures: `mlp_layer_types` before `first_k_dense_replace`."""
    types = config.get("mlp_layer_types")
    if types is None:
        return _parts.n_dense(config)
    if not isinstance(types, list):
        raise BadConfig(f"config.json has mlp_layer_types = {types!r}; expected a list of texts")
    n_dense = next((i for i, kind in enumerate(types) if kind != "dense"), len(types))
    if "dense" in types[n_dense:]:
        raise UnsupportedModel(
            f"config.json has mlp_layer_types = {types!r}; llama.cpp knows dense layers at the front only"
        )
    return n_dense


def _mixture(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    hidden, ff = config.integer("hidden_size"), config.integer("intermediate_size")
    n_experts = config.integer("num_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}gate.weight", n_experts, hidden)
    yield from _parts.experts(config, f"{source}experts.", target, n_experts, names, ff)
    if config.get("num_shared_experts"):
        n_shared = config.integer("num_shared_experts")
        yield from _parts.dense_ffn(config, f"{source}shared_experts.", target, ff * n_shared, "_shexp")


def layout(config: Config, names: Collection[str]) -> Layout:
    n_dense = _n_dense(config)

    def block(i: int, source: str, target: str) -> Iterator[Placement]:
        yield place(
            f"{target}attn_norm.weight", f"{source}input_layernorm.weight", config.integer("hidden_size")
        )
        yield from _parts.attention(config, f"{source}self_attn.", target, names)
        if i < n_dense:
            ff = config.integer("prefix_dense_intermediate_size")
            yield from _parts.dense_ffn(config, f"{source}mlp.", target, ff)
        else:
            yield from _mixture(config, f"{source}mlp.", target, names)

    return _parts.appended_layout(config, names, block)


_TINY: dict[str, Any] = {
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "vocab_size": 320,
    "intermediate_size": 32,
    "prefix_dense_intermediate_size": 96,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "rope_theta": 50000,
    "logit_scale": 0.25,
    "layer_norm_eps": 1e-5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_HEAD = frozenset({"layers.4.eh_proj.weight"})
TINY = {
    "rms": (_TINY, _HEAD),
    "mean": (
        _TINY | {"rms_norm_eps": None, "expert_selection_fn": "softmax", "num_shared_experts": 0},
        _HEAD,
    ),
}
