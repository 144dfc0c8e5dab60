"""MiMo-V2-Flash: windows in most layers, values narrower than keys, sigmoid-gated experts, and several MTP blocks.

Facts: transformers' modeling_mimo_v2_flash.py and the published checkpoint's own code for its names, llama.cpp's
src/models/mimo2.cpp for the file's. The blocks of the head are windowed and dense. Their queries, keys and values are
written as one tensor, since llama.cpp's graph of the head takes nothing else; its own converter leaves them apart.
Where those are stored joined and quantised, as in V2.5, they lie device by device, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, checked_integer, checked_number, shared_keys
from llama_sidecar.converter.errors import BadConfig, UnsupportedModel
from llama_sidecar.converter.families import Layout, Placement, Source, Vocabulary, _parts, place

ARCH = "mimo2"
CLASSES = ("MiMoV2FlashForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = "model."
VOCABULARY = Vocabulary("qwen2")
HEAD = "model.mtp."


def canonical(name: str) -> str:
    """The name without `model.`, but for the head's: `layers.0...`, `model.mtp.layers.0...`, `lm_head...`."""
    return name if name.startswith(HEAD) else name.removeprefix("model.")


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    windowed = [int(w) for w in _pattern(config, "hybrid_layer_pattern")] + [1] * n_head_layers
    n_kv, n_kv_windowed = config.integer("num_key_value_heads"), config.integer("swa_num_key_value_heads")
    share = checked_number("partial_rotary_factor", config["partial_rotary_factor"], 1)
    n_experts = config.integer("n_routed_experts")
    own: dict[str, Key] = {
        "attention.head_count_kv": [n_kv_windowed if w else n_kv for w in windowed],
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": windowed,
        "attention.value_length": config.integer("v_head_dim"),
        "attention.layer_norm_rms_epsilon": config.number("layernorm_epsilon"),
        "rope.dimension_count": checked_integer(
            "head_dim * partial_rotary_factor", int(config.integer("head_dim") * share)
        ),
        "rope.freq_base_swa": config.number("swa_rope_theta"),
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_gating_func": _parts.SIGMOID,
        **_parts.expert_group_keys(config, n_experts),
    }
    if config.get("attention_value_scale") is not None:
        own["attention.value_scale"] = config.number("attention_value_scale")
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    shared = shared_keys(config, ARCH, len(windowed), epsilon="layernorm_epsilon")
    return shared | {f"{ARCH}.{name}": value for name, value in own.items()}


def _pattern(config: Config, name: str) -> list[bool]:
    """A list of 0 and 1, one for each layer of the trunk."""
    value, n_layers = config[name], _parts.n_layers_of(config)
    if not isinstance(value, list) or len(value) != n_layers or not all(v in (0, 1) for v in value):
        raise BadConfig(f"config.json has {name} = {value!r}; expected {n_layers} times 0 or 1")
    return [bool(v) for v in value]


def _attention(
    config: Config, source: str, target: str, names: Collection[str], is_windowed: bool, is_joined: bool
) -> Iterator[Placement]:
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head, head_v = config.integer("head_dim"), config.integer("v_head_dim")
    n_kv = config.integer("swa_num_key_value_heads" if is_windowed else "num_key_value_heads")
    n_rows = {"q": n_heads * head, "k": n_kv * head, "v": n_kv * head_v}
    joined = f"{source}qkv_proj.weight"
    if joined in names:
        if config.get("quantization_config"):
            raise UnsupportedModel(
                f"{joined} of a quantised checkpoint is joined device by device, in an order that config.json does not tell: "
                f"convert the unquantised checkpoint"
            )
        yield place(f"{target}attn_qkv.weight", joined, sum(n_rows.values()), hidden)
    else:
        parts = {p: Source(f"{source}{p}_proj.weight", (n, hidden)) for p, n in n_rows.items()}
        if is_joined:
            shape = (sum(n_rows.values()), hidden)
            yield Placement(f"{target}attn_qkv.weight", shape, tuple(parts.values()))
        else:
            for part, one in parts.items():
                yield Placement(f"{target}attn_{part}.weight", one.shape, (one,))
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, n_heads * head_v)
    if config.get(f"add_{'swa' if is_windowed else 'full'}_attention_sink_bias"):
        yield place(f"{target}attn_sinks.weight", f"{source}attention_sink_bias", n_heads)


def layout(config: Config, names: Collection[str]) -> Layout:
    hidden, n_layers = config.integer("hidden_size"), _parts.n_layers_of(config)
    windowed, mixed = _pattern(config, "hybrid_layer_pattern"), _pattern(config, "moe_layer_freq")

    def block(
        source: str, target: str, is_windowed: bool, is_mixed: bool, is_head: bool
    ) -> Iterator[Placement]:
        yield place(f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden)
        yield from _attention(config, f"{source}self_attn.", target, names, is_windowed, is_head)
        norm = next(
            (n for n in ("pre_mlp_layernorm.weight",) if f"{source}{n}" in names),
            "post_attention_layernorm.weight",
        )
        yield place(f"{target}ffn_norm.weight", f"{source}{norm}", hidden)
        if is_mixed:
            yield from _parts.routed(config, f"{source}mlp.", target, names)
        else:
            yield from _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))

    trunk = [
        p
        for i in range(n_layers)
        for p in block(f"layers.{i}.", f"blk.{i}.", windowed[i], mixed[i], is_head=False)
    ]
    head: list[Placement] = []
    n_head_layers = _parts.n_indices(names, HEAD)
    for j in range(n_head_layers):
        source, target = f"{HEAD}layers.{j}.", f"blk.{n_layers + j}."
        head += block(source, target, is_windowed=True, is_mixed=False, is_head=True)
        head += _parts.projection(config, source, target)
        head.append(place(f"{target}layer_output_norm.weight", f"{source}final_layernorm.weight", hidden))
    said = _parts.warnings(config, names, n_head_layers, "num_nextn_predict_layers", f"{HEAD}*")
    return Layout(_parts.shared(config, names), trunk, head, n_head_layers, list(said), f"{HEAD}*")


_TINY: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 320,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "swa_v_head_dim": 16,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_HEADS = frozenset({"lm_head.weight"} | {f"{HEAD}layers.{j}.pre_mlp_layernorm.weight" for j in range(3)})
_JOINED = frozenset(
    {f"layers.{i}.self_attn.qkv_proj.weight" for i in range(4)}
    | {f"{HEAD}layers.{j}.self_attn.qkv_proj.weight" for j in range(3)}
)
TINY = {"apart": (_TINY, _HEADS), "joined": (_TINY, _HEADS | _JOINED)}
