"""Gemma 4: windows in most layers, wider heads in the others, and as the sizes go experts or embeddings for each layer.

Facts: transformers' modeling_gemma4.py for the checkpoint's names, llama.cpp's src/models/gemma4.cpp for the file's. Norm
weights are written as they are. The last `num_kv_shared_layers` layers have no keys and values of their own. Full layers
rotate a part of a head only, in its own order, which is written as factors by which the other frequencies vanish. The
drafter is a checkpoint of its own (drafts/gemma4_assistant.py): there is no head in this one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llama_sidecar.converter.config import Config, Key, checked_number, shared_keys
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, place

ARCH = "gemma4"
UNIFIED = ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM")  # without towers
CLASSES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", *UNIFIED)
DROPPED = re.compile(
    r"^(model\.)?(vision_tower|audio_tower|vision_embedder|embed_vision|embed_audio)\.|\.rotary_emb\.|\.(input|output)_(min|max)$"
)
PREFIX = "model."
VOCABULARY = Vocabulary("gemma4", suppressing=UNIFIED)
FULL, WINDOWED = "full_attention", "sliding_attention"
VANISHING = 1e30  # what a frequency is divided by that does not rotate


def canonical(name: str) -> str:
    """The name without `model.` and `language_model.`: `layers.0...`, `embed_tokens...`."""
    return name.replace("language_model.", "").removeprefix("model.")


def is_windowed(config: Config) -> list[bool]:
    """Which layers look at a window. Raises BadConfig."""
    types, n_layers = config.get("layer_types"), _parts.n_layers_of(config)
    if (
        not isinstance(types, list)
        or len(types) != n_layers
        or not all(kind in (FULL, WINDOWED) for kind in types)
    ):
        raise BadConfig(
            f"config.json has layer_types = {types!r}; expected {n_layers} times '{FULL}' or '{WINDOWED}'"
        )
    return [kind == WINDOWED for kind in types]


def rope_of(config: Config, kind: str) -> Mapping[str, Any]:
    """The rotary values of one kind of layer. Raises BadConfig where config.json has none, or a kind that is not known."""
    both = config.get("rope_parameters")
    rope = both.get(kind) if isinstance(both, dict) else None
    allowed = ("proportional",) if kind == FULL else ("default", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in allowed:
        raise BadConfig(
            f"config.json has rope_parameters = {both!r}; expected '{WINDOWED}' of type 'default' and '{FULL}' of type 'proportional'"
        )
    return rope


def n_kv_shared(config: Config) -> int:
    """How many of the last layers take keys and values of earlier ones."""
    value, n_layers = config.get("num_kv_shared_layers") or 0, _parts.n_layers_of(config)
    if type(value) is not int or not 0 <= value <= n_layers:
        raise BadConfig(f"config.json has num_kv_shared_layers = {value!r}; expected 0 to {n_layers}")
    return value


def _n_per_layer(config: Config) -> int:
    """The width of the embeddings that each layer has of its own; 0 for none."""
    name = "hidden_size_per_layer_input"
    return config.integer(name) if config.get(name) else 0


def _n_kv(config: Config, windowed: bool) -> int:
    is_own = not windowed and config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")
    return config.integer("num_global_key_value_heads" if is_own else "num_key_value_heads")


def head_of(config: Config, windowed: bool) -> int:
    return config.integer("head_dim" if windowed else "global_head_dim")


def _n_ff(config: Config) -> list[int]:
    """The inner values of every layer's feed-forward part."""
    n_layers, ff = _parts.n_layers_of(config), config.integer("intermediate_size")
    if not config.get("use_double_wide_mlp"):
        return [ff] * n_layers
    first_shared = n_layers - n_kv_shared(config)
    return [ff if i < first_shared else 2 * ff for i in range(n_layers)]


def keys(config: Config, n_head_layers: int, arch: str = ARCH) -> dict[str, Key]:
    windowed = is_windowed(config)
    plain = Config(dict(config) | {"rope_parameters": None, "rope_scaling": None, "rope_theta": None})
    swa = rope_of(config, WINDOWED)
    head, head_swa = head_of(config, False), head_of(config, True)
    share = checked_number("partial_rotary_factor", swa.get("partial_rotary_factor", 1.0), 1)
    own: dict[str, Key] = {
        "attention.shared_kv_layers": n_kv_shared(config),
        "embedding_length_per_layer_input": _n_per_layer(config),
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": windowed,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.key_length_swa": head_swa,
        "attention.value_length_swa": head_swa,
        "rope.dimension_count": head,
        "rope.dimension_count_swa": int(head_swa * share),
        "rope.freq_base": checked_number("rope_theta", rope_of(config, FULL).get("rope_theta")),
        "rope.freq_base_swa": checked_number("rope_theta", swa.get("rope_theta")),
    }
    if len({_n_kv(config, w) for w in windowed}) > 1:
        own["attention.head_count_kv"] = [_n_kv(config, w) for w in windowed]
    if config.get("use_double_wide_mlp"):
        own["feed_forward_length"] = _n_ff(config)
    if config.get("final_logit_softcapping"):
        own["final_logit_softcapping"] = config.number("final_logit_softcapping")
    if config.get("enable_moe_block"):
        n_experts = config.integer("num_experts")
        own |= {
            "expert_count": n_experts,
            "expert_used_count": config.integer("top_k_experts", n_experts),
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        }
    shared = shared_keys(plain, arch, len(windowed))
    return shared | {f"{arch}.{name}": value for name, value in own.items()}


def rotary_factors(config: Config) -> Placement:
    """By what the frequencies of full layers are divided: one for those that rotate."""
    half = head_of(config, False) // 2
    share = checked_number(
        "partial_rotary_factor", rope_of(config, FULL).get("partial_rotary_factor", 1.0), 1
    )
    n_rotated = int(2 * half * share / 2)
    return Placement(
        "rope_freqs.weight", (half,), values=(1.0,) * n_rotated + (VANISHING,) * (half - n_rotated)
    )


def _attention(
    config: Config, source: str, target: str, names: Collection[str], windowed: bool, is_shared: bool
) -> Iterator[Placement]:
    hidden, head = config.integer("hidden_size"), head_of(config, windowed)
    n_q, n_kv = config.integer("num_attention_heads") * head, _n_kv(config, windowed) * head
    yield place(f"{target}attn_q.weight", f"{source}q_proj.weight", n_q, hidden)
    yield place(f"{target}attn_q_norm.weight", f"{source}q_norm.weight", head)
    if not is_shared or f"{source}k_proj.weight" in names:  # published ones may keep what is not used
        yield place(f"{target}attn_k.weight", f"{source}k_proj.weight", n_kv, hidden)
        yield place(f"{target}attn_k_norm.weight", f"{source}k_norm.weight", head)
        if windowed or not config.get("attention_k_eq_v"):
            yield place(f"{target}attn_v.weight", f"{source}v_proj.weight", n_kv, hidden)
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, n_q)


def _experts(config: Config, source: str, target: str) -> Iterator[Placement]:
    """Experts beside the dense part, their gate and up rows in one; the router has scales of its own."""
    hidden, ff = config.integer("hidden_size"), config.integer("moe_intermediate_size")
    n_experts = config.integer("num_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}router.proj.weight", n_experts, hidden)
    yield place(f"{target}ffn_gate_inp.scale", f"{source}router.scale", hidden)
    yield place(f"{target}ffn_down_exps.scale", f"{source}router.per_expert_scale", n_experts)
    yield place(
        f"{target}ffn_gate_up_exps.weight", f"{source}experts.gate_up_proj", n_experts, 2 * ff, hidden
    )
    yield place(f"{target}ffn_down_exps.weight", f"{source}experts.down_proj", n_experts, hidden, ff)
    for norm, name in {
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    }.items():
        yield place(f"{target}{norm}.weight", f"{source}{name}.weight", hidden)


def norms_and_scale(config: Config, source: str, target: str) -> Iterator[Placement]:
    """A layer's four norms, and what its whole output is multiplied with."""
    for norm, name in {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }.items():
        yield place(f"{target}{norm}.weight", f"{source}{name}.weight", config.integer("hidden_size"))
    yield place(f"{target}layer_output_scale.weight", f"{source}layer_scalar", 1)


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden, windowed, ff = config.integer("hidden_size"), is_windowed(config), _n_ff(config)
    n_layers, n_own = len(windowed), _n_per_layer(config)
    first_shared = n_layers - n_kv_shared(config)
    trunk = [rotary_factors(config)]
    if n_own:
        n_all, n_vocab = n_own * n_layers, config.integer("vocab_size_per_layer_input")
        trunk += [
            place("per_layer_token_embd.weight", "embed_tokens_per_layer.weight", n_vocab, n_all),
            place("per_layer_model_proj.weight", "per_layer_model_projection.weight", n_all, hidden),
            place("per_layer_proj_norm.weight", "per_layer_projection_norm.weight", n_own),
        ]
    for i in range(n_layers):
        source, target = f"layers.{i}.", f"blk.{i}."
        trunk += norms_and_scale(config, source, target)
        trunk += _attention(config, f"{source}self_attn.", target, names, windowed[i], i >= first_shared)
        trunk += _parts.dense_ffn(config, f"{source}mlp.", target, ff[i])
        if config.get("enable_moe_block"):
            trunk += _experts(config, source, target)
        if n_own:
            trunk += [
                place(f"{target}inp_gate.weight", f"{source}per_layer_input_gate.weight", n_own, hidden),
                place(f"{target}proj.weight", f"{source}per_layer_projection.weight", hidden, n_own),
                place(f"{target}post_norm.weight", f"{source}post_per_layer_input_norm.weight", hidden),
            ]
    said = list(_parts.warnings(config, names, 0, "num_nextn_predict_layers", "mtp.*"))
    return Layout(
        _parts.shared(config, names), trunk, [], 0, said, "mtp.*, and its assistant is another checkpoint"
    )


_TINY: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 320,
    "intermediate_size": 96,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [WINDOWED, FULL, WINDOWED, FULL],
    "sliding_window": 5,
    "rope_parameters": {
        WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
TINY = {
    "dense": (_TINY | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, frozenset[str]()),
    "layered": (
        _TINY | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        frozenset[str](),
    ),
    "unified": (
        {
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "text_config": {
                name: value
                for name, value in (_TINY | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}).items()
                if name != "architectures"
            }
            | {"model_type": "gemma4_unified_text"},
        },
        frozenset[str](),
    ),
    "experts": (
        _TINY
        | {
            "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        frozenset[str](),
    ),
}  # fmt: skip
