"""Nemotron-H with experts (Nemotron 3): Mamba-2, attention and mixture layers in a pattern, and an MTP head of two parts.

Facts: transformers' modeling_nemotron_h.py for the checkpoint's names, llama.cpp's src/models/nemotron-h.cpp for the file's.
A layer is one mixer behind one norm. The head's two layers, attention and mixture, are written as one block. Attention
knows no positions; its queries and keys are written in llama.cpp's order of rotary pairs all the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.errors import BadConfig, UnsupportedModel
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place
from llama_sidecar.converter.families.qwen35 import minus_exp
from llama_sidecar.sidecars.kind import MAX_BLOCKS

ARCH = "nemotron_h_moe"
CLASSES = ("NemotronHForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "backbone."
VOCABULARY = Vocabulary("pixtral")
LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E"}


def canonical(name: str) -> str:
    """The name without `backbone.`: `layers.0.mixer...`, `mtp.layers.0...`, `embeddings...`, `lm_head...`."""
    return name.removeprefix("backbone.")


def _pattern(config: Config) -> str:
    """One letter for each layer: M for Mamba-2, * for attention, E for experts."""
    said = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    kinds = said if isinstance(said, list) else []
    letters = said if isinstance(said, str) else "".join(LETTERS.get(str(kind), "-") for kind in kinds)
    if len(letters) > MAX_BLOCKS or not re.fullmatch("[M*E]+", letters):
        raise BadConfig(
            f"config.json has the layers {said!r}; expected M, * or E for each of at most {MAX_BLOCKS}: Nemotron-H without experts has no head"
        )
    return letters


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    pattern = _pattern(config)
    is_attention = [letter == "*" for letter in pattern] + [True] * n_head_layers
    is_mixture = [letter == "E" for letter in pattern] + [True] * n_head_layers
    n_kv, ff = config.integer("num_key_value_heads"), config.integer("moe_intermediate_size")
    n_experts, head = config.integer("n_routed_experts"), config.integer("head_dim")
    own: dict[str, Key] = {
        "vocab_size": config.integer("vocab_size"),
        "context_length": 1 << 20,  # without positions there is no limit; llama.cpp's converter writes this
        "attention.head_count_kv": [n_kv if is_one else 0 for is_one in is_attention],
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon"),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": config.integer("hidden_size") // config.integer("num_attention_heads"),
        "rope.scaling.finetuned": False,
        "feed_forward_length": [ff if is_one else 0 for is_one in is_mixture],
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": ff,
        "expert_shared_feed_forward_length": config.integer("moe_shared_expert_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        **_parts.expert_group_keys(config, n_experts),
        "ssm.conv_kernel": config.integer("conv_kernel"),
        "ssm.state_size": config.integer("ssm_state_size"),
        "ssm.group_count": config.integer("n_groups"),
        "ssm.inner_size": _n_inner(config),
        "ssm.time_step_rank": config.integer("mamba_num_heads"),
    }
    if config.get("moe_latent_size") is not None:
        own["moe_latent_size"] = config.integer("moe_latent_size")
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    epsilon = "norm_eps" if config.get("norm_eps") is not None else None  # llama.cpp falls back to the other
    shared = shared_keys(config, ARCH, len(is_attention), epsilon=epsilon)
    return shared | {f"{ARCH}.{name}": value for name, value in own.items()}


def _n_inner(config: Config) -> int:
    return config.integer("mamba_num_heads") * config.integer("mamba_head_dim")


def _mamba(config: Config, source: str, target: str) -> Iterator[Placement]:
    hidden, n_heads, n_inner = (
        config.integer("hidden_size"),
        config.integer("mamba_num_heads"),
        _n_inner(config),
    )
    n_groups, kernel = config.integer("n_groups"), config.integer("conv_kernel")
    channels = n_inner + 2 * n_groups * config.integer("ssm_state_size")
    yield place(f"{target}ssm_in.weight", f"{source}in_proj.weight", n_inner + channels + n_heads, hidden)
    conv, conv_shape = f"{source}conv1d.weight", (channels, 1, kernel)
    yield place(f"{target}ssm_conv1d.weight", conv, channels, kernel, source_shape=conv_shape)
    if config.get("use_conv_bias", True):
        yield place(f"{target}ssm_conv1d.bias", f"{source}conv1d.bias", channels)
    yield place(f"{target}ssm_dt.bias", f"{source}dt_bias", n_heads)
    one_each = (n_heads,)
    yield place(f"{target}ssm_a", f"{source}A_log", n_heads, 1, source_shape=one_each, transform=minus_exp)
    yield place(f"{target}ssm_d", f"{source}D", n_heads, 1, source_shape=one_each)
    norm = f"{source}norm.weight"
    yield place(f"{target}ssm_norm.weight", norm, n_groups, n_inner // n_groups, source_shape=(n_inner,))
    yield place(f"{target}ssm_out.weight", f"{source}out_proj.weight", hidden, n_inner)


def _attention(config: Config, source: str, target: str) -> Iterator[Placement]:
    hidden, head = config.integer("hidden_size"), config.integer("head_dim")
    n_q, n_kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    for part, n_heads in {"q": n_q, "k": n_kv}.items():
        name, stored = f"{target}attn_{part}.weight", f"{source}{part}_proj.weight"
        yield place(name, stored, n_heads * head, hidden, rows=_parts.paired_rows(n_heads, head))
    yield place(f"{target}attn_v.weight", f"{source}v_proj.weight", n_kv * head, hidden)
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, n_q * head)


def _mixture(config: Config, source: str, target: str) -> Iterator[Placement]:
    """Experts without a gate, in a narrower space where config.json names one, and the one that all tokens share."""
    hidden, ff = config.integer("hidden_size"), config.integer("moe_intermediate_size")
    n_experts, shared_ff = (
        config.integer("n_routed_experts"),
        config.integer("moe_shared_expert_intermediate_size"),
    )
    width = hidden
    yield place(f"{target}ffn_gate_inp.weight", f"{source}gate.weight", n_experts, hidden)
    yield place(f"{target}exp_probs_b.bias", f"{source}gate.e_score_correction_bias", n_experts)
    if config.get("moe_latent_size") is not None:
        width = config.integer("moe_latent_size")
        yield place(f"{target}ffn_latent_down.weight", f"{source}fc1_latent_proj.weight", width, hidden)
        yield place(f"{target}ffn_latent_up.weight", f"{source}fc2_latent_proj.weight", hidden, width)
    for part, shape in {"up": (ff, width), "down": (width, ff)}.items():
        name = f"{target}ffn_{part}_exps.weight"
        yield _parts.stacked(name, f"{source}experts.{{}}.{part}_proj.weight", n_experts, shape)
    for part, shape in {"up": (shared_ff, hidden), "down": (hidden, shared_ff)}.items():
        yield place(f"{target}ffn_{part}_shexp.weight", f"{source}shared_experts.{part}_proj.weight", *shape)


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden, vocabulary, pattern = (
        config.integer("hidden_size"),
        config.integer("vocab_size"),
        _pattern(config),
    )
    mixers = {"M": _mamba, "*": _attention, "E": _mixture}
    shared = [
        place("token_embd.weight", "embeddings.weight", vocabulary, hidden),
        place("output_norm.weight", "norm_f.weight", hidden),
    ]
    if "lm_head.weight" in names:
        shared.append(place("output.weight", "lm_head.weight", vocabulary, hidden))
    trunk = []
    for i, letter in enumerate(pattern):
        trunk.append(place(f"blk.{i}.attn_norm.weight", f"layers.{i}.norm.weight", hidden))
        trunk += mixers[letter](config, f"layers.{i}.mixer.", f"blk.{i}.")
    head, n_parts = [], _parts.n_indices(names, "mtp.")
    if n_parts > 2:
        raise UnsupportedModel(
            f"the head has {n_parts} layers (mtp.layers.*); llama.cpp drafts with one block of two here"
        )
    if n_parts:
        target, first, second = f"blk.{len(pattern)}.", "mtp.layers.0.", "mtp.layers.1."
        head = [
            *_parts.projection(config, first, target),
            place(f"{target}attn_norm.weight", f"{first}norm.weight", hidden),
            *_attention(config, f"{first}mixer.", target),
            place(f"{target}post_attention_norm.weight", f"{second}norm.weight", hidden),
            *_mixture(config, f"{second}mixer.", target),
            place(f"{target}nextn.shared_head_norm.weight", f"{second}final_layernorm.weight", hidden),
        ]
    n_head_layers = int(n_parts > 0)
    said = _parts.warnings(config, names, n_head_layers, "num_nextn_predict_layers", "mtp.*")
    return Layout(shared, trunk, head, n_head_layers, list(said))


_TINY: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "ME*EM",
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "vocab_size": 320,
    "intermediate_size": 96,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "use_conv_bias": True,
    "use_bias": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_HEAD = frozenset({"lm_head.weight", "mtp.layers.0.eh_proj.weight", "mtp.layers.1.norm.weight"})
TINY = {"wide": (_TINY, _HEAD), "latent": (_TINY | {"moe_latent_size": 32, "norm_eps": 1e-5}, _HEAD)}
