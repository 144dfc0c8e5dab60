"""Step-3.5 and the text of Step-3.7: gated heads, windows in most layers with more heads, experts, several MTP blocks.

Facts: transformers' modeling_step3p7.py for the checkpoint's names, llama.cpp's src/models/step35.cpp for the file's. Norm
weights are stored zero-centred and written plus one. Each block of the head has an output of its own. Llama 3's scaling of
the rotary frequencies is a tensor, for the layers without a window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from llama_sidecar.converter.config import Config, Key, checked_number, shared_keys
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place
from llama_sidecar.converter.families.qwen35 import plus_one

ARCH = "step35"
CLASSES = ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
DROPPED = re.compile(r"^(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\.|\.inv_freq$")
PREFIX = "model."
VOCABULARY = Vocabulary("deepseek-v3")
FULL, WINDOWED = "full_attention", "sliding_attention"


def canonical(name: str) -> str:
    """The name without `model.` and `language_model.`, and of the head's without `transformer.`: `layers.45.eh_proj...`."""
    return name.replace("language_model.", "").replace(".transformer.", ".").removeprefix("model.")


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    n_blocks = _parts.n_layers_of(config) + n_head_layers
    is_windowed = _is_windowed(config, n_blocks)
    thetas = _thetas(config)
    plain = Config(
        dict(config) | {
            "num_key_value_heads": config["num_attention_groups"], "rope_theta": thetas[0],
            "rope_scaling": None, "rope_parameters": None,
        }
    )  # fmt: skip
    n_experts = config.integer("moe_num_experts")
    own: dict[str, Key] = {
        "attention.head_count": [_n_heads(config, w)[0] for w in is_windowed],
        "attention.head_count_kv": [_n_heads(config, w)[1] for w in is_windowed],
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": is_windowed,
        "expert_count": n_experts,
        "expert_used_count": config.integer("moe_top_k", n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("share_expert_dim"),
        "expert_gating_func": _parts.SIGMOID,
        "leading_dense_block_count": min(_mixed(config), default=0),
        "moe_every_n_layers": config.integer("moe_every_n_layer") if "moe_every_n_layer" in config else 1,
    }
    if len(thetas) > 1:
        own["rope.freq_base_swa"] = checked_number("rope_theta", thetas[1])
    if config.get("moe_router_scaling_factor") is not None:
        own["expert_weights_scale"] = config.number("moe_router_scaling_factor")
    if config.get("norm_expert_weight") is not None:
        own["expert_weights_norm"] = bool(config["norm_expert_weight"])
    for name, key in {
        "swiglu_limits": "swiglu_clamp_exp",
        "swiglu_limits_shared": "swiglu_clamp_shexp",
    }.items():
        if config.get(name) is not None:
            own[key] = _parts.limits(config, name, n_blocks)
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    return shared_keys(plain, ARCH, n_blocks) | {f"{ARCH}.{name}": value for name, value in own.items()}


def _thetas(config: Config) -> list[Any]:
    """The rotary base of all layers, or one for each block; what it is worth is not checked."""
    theta = config["rope_theta"]
    return theta if isinstance(theta, list) and theta else [theta]


def _is_windowed(config: Config, n_blocks: int) -> list[bool]:
    """Which blocks look at a window; `layer_types` goes on for the head's, which are full where it does not."""
    types = config.get("layer_types") or []
    if not isinstance(types, list) or not all(kind in (FULL, WINDOWED) for kind in types):
        raise BadConfig(
            f"config.json has layer_types = {types!r}; expected a list of '{FULL}' and '{WINDOWED}'"
        )
    return [kind == WINDOWED for kind in (types + [FULL] * n_blocks)[:n_blocks]]


def _n_heads(config: Config, is_windowed: bool) -> tuple[int, int]:
    """The numbers of query heads and of key-value heads."""
    names = ("num_attention_heads", "num_attention_groups")
    other = config.get("attention_other_setting") if is_windowed else None
    said = Config(dict(config) | other) if isinstance(other, dict) else config
    n_q, n_kv = (said.integer(name) for name in names)
    return n_q, n_kv


def _mixed(config: Config) -> set[int]:
    """Which blocks have experts: `moe_layers_enum`, numbers with commas between them."""
    said = config.get("moe_layers_enum") or ""
    if not isinstance(said, str) or not re.fullmatch(r"\s*([0-9]{1,4}(\s*,\s*[0-9]{1,4})*)?\s*", said):
        raise BadConfig(
            f"config.json has moe_layers_enum = {said!r}; expected numbers with commas between them"
        )
    return {int(i) for i in said.split(",") if i.strip()}


def rotary_factors(config: Config) -> tuple[float, ...] | None:
    """What each rotary frequency is divided by (Llama 3's scaling), ones after those that full layers rotate."""
    rope = config.rope
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return None
    base, head = checked_number("rope_theta", _thetas(config)[0]), config.integer("head_dim")
    n_rotary = head // 2  # llama.cpp rotates half of a head in full layers
    factor, low, high = (
        checked_number(n, rope.get(n)) for n in ("factor", "low_freq_factor", "high_freq_factor")
    )
    n_trained = checked_number(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings")
    )
    if not (base and factor and high > low):
        raise BadConfig(
            f"config.json has rope scaling {dict(rope)!r}; expected factors above 0 and a higher high_freq_factor"
        )
    frequencies = 1.0 / np.float32(base) ** (np.arange(0, n_rotary, 2, dtype=np.float32) / n_rotary)
    factors = []
    for frequency in frequencies.tolist():
        n_turns = n_trained * frequency / (2 * math.pi)
        smooth = min(1.0, max(0.0, (n_turns - low) / (high - low)))
        factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors + [1.0] * (head // 2 - len(factors)))


def _attention(config: Config, source: str, target: str, is_windowed: bool) -> Iterator[Placement]:
    hidden, head = config.integer("hidden_size"), config.integer("head_dim")
    n_heads, n_kv = _n_heads(config, is_windowed)
    yield place(f"{target}attn_q.weight", f"{source}q_proj.weight", n_heads * head, hidden)
    yield place(f"{target}attn_k.weight", f"{source}k_proj.weight", n_kv * head, hidden)
    yield place(f"{target}attn_v.weight", f"{source}v_proj.weight", n_kv * head, hidden)
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, n_heads * head)
    yield place(f"{target}attn_gate.weight", f"{source}g_proj.weight", n_heads, hidden)
    yield place(f"{target}attn_q_norm.weight", f"{source}q_norm.weight", head, transform=plus_one)
    yield place(f"{target}attn_k_norm.weight", f"{source}k_norm.weight", head, transform=plus_one)


def _mixture(config: Config, source: str, target: str) -> Iterator[Placement]:
    hidden, ff = config.integer("hidden_size"), config.integer("moe_intermediate_size")
    n_experts = config.integer("moe_num_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}moe.gate.weight", n_experts, hidden)
    yield place(f"{target}exp_probs_b.bias", f"{source}moe.router_bias", n_experts)
    for part, shape in {"gate": (ff, hidden), "up": (ff, hidden), "down": (hidden, ff)}.items():
        yield place(f"{target}ffn_{part}_exps.weight", f"{source}moe.{part}_proj.weight", n_experts, *shape)
    shared_ff = config.integer("share_expert_dim")
    yield from _parts.dense_ffn(config, f"{source}share_expert.", target, shared_ff, "_shexp")


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    n_layers, n_head_layers = _parts.n_layers_of(config), _parts.n_appended(config, names)
    is_windowed, mixed = _is_windowed(config, n_layers + n_head_layers), _mixed(config)

    def block(i: int) -> Iterator[Placement]:
        source, target = f"layers.{i}.", f"blk.{i}."
        yield place(
            f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden, transform=plus_one
        )
        yield from _attention(config, f"{source}self_attn.", target, is_windowed[i])
        norm = f"{source}post_attention_layernorm.weight"
        yield place(f"{target}ffn_norm.weight", norm, hidden, transform=plus_one)
        if i in mixed:
            yield from _mixture(config, source, target)
        else:
            yield from _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))

    shared = _parts.shared(config, names, plus_one)
    factors = rotary_factors(config)
    if factors:
        shared.append(Placement("rope_freqs.weight", (len(factors),), values=factors))
    trunk = [p for i in range(n_layers) for p in block(i)]
    head: list[Placement] = []
    for i in range(n_layers, n_layers + n_head_layers):
        source, target = f"layers.{i}.", f"blk.{i}."
        head += [*block(i), *_parts.projection(config, source, target, plus_one)]
        norm, output = f"{source}shared_head.norm.weight", f"{source}shared_head.output.weight"
        head.append(place(f"{target}nextn.shared_head_norm.weight", norm, hidden, transform=plus_one))
        head.append(place(f"{target}nextn.shared_head_head.weight", output, vocabulary, hidden))
    where = _parts.appended_names(config)
    said = list(_parts.warnings(config, names, n_head_layers, "num_nextn_predict_layers", where))
    return Layout(shared, trunk, head, n_head_layers, said, where)


_TYPES = [FULL, WINDOWED, WINDOWED, WINDOWED]
_TINY: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 3,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_layers_enum": "1,2,3",
    "moe_every_n_layer": 1,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "share_expert_dim": 64,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 32,
    "attention_other_setting": {
        "attention_type": WINDOWED, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32,
    },
    "layer_types": _TYPES + [WINDOWED] * 3,
    "sliding_window": 5,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] + [1.0] * 3,
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] + [10000.0] * 3,
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0] + [0.0] * 3,
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0] + [0.0] * 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
_HEADS = frozenset({"lm_head.weight"} | {f"layers.{i}.eh_proj.weight" for i in (4, 5, 6)})
TINY = {
    "plain": (_TINY, _HEADS),
    "scaled": (
        _TINY
        | {
            "rope_scaling": {
                "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            }
        },
        _HEADS,
    ),
}  # fmt: skip
