"""DFlash (arXiv:2602.06036) and DFlash2: Qwen 3 blocks that fill a block of masks over the main model's layer inputs.

Facts from llama.cpp's conversion/qwen.py and src/models/dflash.cpp. dspark.py adds to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, checked_integer, checked_number
from llama_sidecar.converter.drafts import _parts
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import Placement, place
from llama_sidecar.converter.families._parts import halved_rows, head_dim_of, n_layers_of
from llama_sidecar.sidecars.kinds.dflash import DEFAULT_BLOCK_SIZE, MAX_BLOCK_SIZE

KIND = "dflash"
ARCH = "dflash"
CLASSES = ("DFlashDraftModel", "DFlash2DraftModel")
INSIDE: dict[str, tuple[str, str]] = {}
REFUSED = {"mask_embedding.pt": "an embedding of the mask token apart from the others"}
CONVOLUTIONS = {"attn": "attention_conv", "ffn": "mlp_conv"}


def prepared(config: Config) -> Config:
    return config


def own(config: Config, name: str, usual: Any = None) -> Any:
    """A value of `dflash_config`, or else of the root."""
    nested = config.get("dflash_config")
    said = nested.get(name) if isinstance(nested, dict) else None
    return said if said is not None else config.get(name, usual)


def canonical(name: str, config: Config) -> str:
    name = name.removeprefix("model.")
    if name.endswith("sinks"):
        return f"{name}.weight"
    return "" if name == "embed_tokens.weight" and config.get("has_embed_tokens") is False else name


def d2t(config: Config) -> int | None:
    return None


def keys(config: Config, names: Collection[str], target: Target) -> dict[str, Key]:
    _parts.check_vocabulary(config, target)
    if config.integer("hidden_size") != target.width:
        raise BadConfig(
            f"config.json has hidden_size = {config.integer('hidden_size')}, the target {target.name} is {target.width} wide: "
            f"give the model that this drafter was trained for"
        )
    found = _parts.block_keys(config, ARCH, n_layers_of(config))
    found |= {f"{ARCH}.{name}": value for name, value in _own_keys(config, names, target).items()}
    return found | _parts.mask_key("mask_token_id", own(config, "mask_token_id"), target)


def _own_keys(config: Config, names: Collection[str], target: Target) -> dict[str, Key]:
    head = head_dim_of(config)
    keys: dict[str, Key] = {
        "block_size": checked_integer(
            "block_size", own(config, "block_size", DEFAULT_BLOCK_SIZE), MAX_BLOCK_SIZE
        ),
        "target_layers": target_layers(config, target),
    }
    if (share := config.rope.get("partial_rotary_factor")) is not None:
        keys["rope.dimension_count"] = int(head * checked_number("partial_rotary_factor", share, 1))
    for name, key in {
        "attention_value_scale": "attention.value_scale",
        "output_multiplier": "logit_scale",
        "final_logit_softcapping": "final_logit_softcapping",
        "input_embedding_scale": "embedding_scale",
    }.items():
        if (value := own(config, name)) is not None and (value or name != "final_logit_softcapping"):
            keys[key] = checked_number(name, value)
    if _has_selector(names):
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            keys[name] = checked_integer(name, own(config, name))
    keys |= _window(config)
    causal = config.get("is_causal")
    if (causal := own(config, "causal") if causal is None else causal) is not None:
        keys["attention.causal"] = bool(causal)
    if target.has_sections:
        keys["rope.dimension_sections"] = [head // 2, 0, 0, 0]
    return keys


def _window(config: Config) -> dict[str, Key]:
    """Sliding attention, in all layers or in those that `layer_types` says."""
    everywhere = bool(own(config, "use_swa"))
    window = own(config, "swa_window_size") or config.get("sliding_window")
    if not (window and (everywhere or config.get("use_sliding_window"))):
        return {}
    n, kinds = n_layers_of(config), config.get("layer_types") or []
    pattern = [True] * n if everywhere else [kind == "sliding_attention" for kind in kinds]
    if len(pattern) != n:
        raise BadConfig(f"config.json has layer_types of {len(pattern)} layers; {n} are expected")
    return {
        "attention.sliding_window": checked_integer("sliding_window", window),
        "attention.sliding_window_pattern": pattern,
    }


def target_layers(config: Config, target: Target) -> list[int]:
    """The layers whose inputs are read: a checkpoint says whose outputs."""
    return _parts.layers_after("target_layer_ids", own(config, "target_layer_ids"), target)


def _has_selector(names: Collection[str]) -> bool:
    return any(name.startswith("candidate_selector.") for name in names)


def layout(config: Config, names: Collection[str], target: Target) -> tuple[list[Placement], list[str]]:
    return list(placements(config, names, target)), []


def placements(config: Config, names: Collection[str], target: Target) -> Iterator[Placement]:
    """All tensors but those that follow from a drafted vocabulary of its own."""
    hidden, n_vocab = config.integer("hidden_size"), config.integer("vocab_size")
    yield place("fc.weight", "fc.weight", hidden, len(target_layers(config, target)) * hidden)
    yield place("enc.output_norm.weight", "hidden_norm.weight", hidden)
    yield place("output_norm.weight", "norm.weight", hidden)
    for i in range(n_layers_of(config)):
        yield from _block(config, names, f"layers.{i}.", f"blk.{i}.")
    if _has_selector(names):
        rank = checked_integer("selector_rank", own(config, "selector_rank"))
        for part in ("predecessor", "successor"):
            yield place(f"selector_{part}.weight", f"candidate_selector.{part}_codebook", n_vocab, rank)
        yield place("selector_hidden.weight", "candidate_selector.hidden_projection.weight", rank, hidden)
    yield from _parts.own_vocabulary(config, names, _parts.n_drafted(config))


def _block(config: Config, names: Collection[str], source: str, target: str) -> Iterator[Placement]:
    hidden, head = config.integer("hidden_size"), head_dim_of(config)
    rows_of = halved_rows if config.get("rope_is_neox_style") is False else None
    yield place(f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden)
    yield place(f"{target}ffn_norm.weight", f"{source}post_attention_layernorm.weight", hidden)
    for part in "qk":
        rows = rows_of(1, head) if rows_of else None
        yield place(
            f"{target}attn_{part}_norm.weight", f"{source}self_attn.{part}_norm.weight", head, rows=rows
        )
    for placement in _parts.block(config, source, target, n_in=hidden, rows_of=rows_of):
        if placement.name.endswith("attn_v.weight") and placement.sources[0].name not in names:
            continue  # the keys serve as values
        yield placement
    if (sinks := f"{source}self_attn.sinks.weight") in names:
        yield place(f"{target}attn_sinks.weight", sinks, config.integer("num_attention_heads"))
    if not _has_selector(names):
        return
    kernel = checked_integer("conv_kernel_size", own(config, "conv_kernel_size"))
    n_groups = hidden // checked_integer("conv_group_size", own(config, "conv_group_size"))
    for part, name in CONVOLUTIONS.items():
        yield place(f"{target}{part}_conv_base", f"{source}{name}.base_kernel", 2, kernel, hidden)
        yield place(
            f"{target}{part}_conv_proj.weight",
            f"{source}{name}.kernel_projection.weight",
            2 * kernel * n_groups,
            hidden,
        )


SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
}
_VALUES = frozenset(f"layers.{i}.self_attn.v_proj.weight" for i in range(2))
TINY = {
    "zlab": (
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": 8,
            "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
            **SIZES,
        },
        _VALUES,
    ),
    "windowed": (
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "is_causal": False,
            "rope_is_neox_style": False,
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "dflash_config": {
                "mask_token_id": 7,
                "block_size": 6,
                "target_layer_ids": [1, 1, 2],
                "attention_value_scale": 0.5,
                "input_embedding_scale": 2.0,
            },
            **SIZES,
        },
        _VALUES
        | {f"layers.{i}.self_attn.sinks.weight" for i in range(2)}
        | {"embed_tokens.weight", "lm_head.weight"},
    ),
    "two": (
        {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "dflash_config": {
                "mask_token_id": 319,
                "block_size": 8,
                "target_layer_ids": [0, 2],
                "conv_kernel_size": 3,
                "conv_group_size": 16,
                "selector_rank": 32,
                "selector_top_k": 4,
                "causal": False,
            },
            **SIZES,
        },
        _VALUES | {"candidate_selector.hidden_projection.weight"},
    ),
}
