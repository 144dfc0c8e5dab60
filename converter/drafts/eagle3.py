"""EAGLE3 (arXiv:2503.01840): one Llama block over a token's embedding and three of the main model's layer inputs.

Exports of SGLang and of the paper's authors call the block `midlayer`, those of vLLM's speculators `layers.0` and nest its sizes in
`transformer_layer_config`. Facts from llama.cpp's conversion/llama.py and src/models/eagle3.cpp.
"""

from __future__ import annotations

from collections.abc import Collection

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.drafts import _parts
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import Placement, place
from llama_sidecar.converter.families._parts import head_dim_of, paired_rows
from llama_sidecar.sidecars.kinds.eagle3 import N_TARGET_LAYERS

KIND = "eagle3"
ARCH = "eagle3"
CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
INSIDE: dict[str, tuple[str, str]] = {}
REFUSED: dict[str, str] = {}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def prepared(config: Config) -> Config:
    return _parts.flattened(config, "transformer_layer_config", "eagle_config")


def canonical(name: str, config: Config) -> str:
    """The block is `block.`; `t2d`, the way back from the target's tokens, is not needed."""
    name = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return "block." + name.removeprefix(prefix)
    return "" if name == "t2d" else name


def d2t(config: Config) -> int | None:
    return _parts.n_drafted(config)


def keys(config: Config, names: Collection[str], target: Target) -> dict[str, Key]:
    n_blocks = config.integer("num_hidden_layers")
    if n_blocks != 1:
        raise BadConfig(
            f"config.json has num_hidden_layers = {n_blocks}; llama.cpp drafts with exactly 1 block"
        )
    _parts.check_vocabulary(config, target)
    own: dict[str, Key] = {
        "vocab_size": config.integer("vocab_size"),
        "rope.dimension_count": head_dim_of(config),
        "target_layers": _target_layers(config, target),
        "target_hidden_size": _target_width(config, target),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": bool(config.get("norm_before_fc", False)),
    }
    keys = _parts.block_keys(config, ARCH, n_blocks) | {
        f"{ARCH}.{name}": value for name, value in own.items()
    }
    space = target.settings.get("add_prefix_space")
    if isinstance(space, bool):
        keys["tokenizer.ggml.add_space_prefix"] = space
    return keys


def _target_layers(config: Config, target: Target) -> list[int]:
    """Those of config.json, or the ones the paper's training takes: a low, a middle and a high layer."""
    n = target.n_layers
    said = config.get(LAYER_IDS)
    layers = _parts.layer_numbers(LAYER_IDS, said) if said else [2, n // 2, n - 3]
    if len(layers) != N_TARGET_LAYERS or not all(0 <= layer <= n for layer in layers):
        raise BadConfig(
            f"{LAYER_IDS} is {said or 'not in config.json, which means 2, the middle and the third last'}; expected "
            f"{N_TARGET_LAYERS} layers from 0 to the {n} of {target.name}"
        )
    return layers


def _target_width(config: Config, target: Target) -> int:
    width = config.integer("target_hidden_size") if config.get("target_hidden_size") else target.width
    if width != target.width:
        raise BadConfig(
            f"config.json has target_hidden_size = {width}, the target {target.name} is {target.width} wide: "
            f"give the model that this drafter was trained for"
        )
    return width


def layout(config: Config, names: Collection[str], target: Target) -> tuple[list[Placement], list[str]]:
    hidden, width = config.integer("hidden_size"), N_TARGET_LAYERS * target.width
    placements = [
        place("fc.weight", "fc.weight", hidden, width),
        place("output_norm.weight", "norm.weight", hidden),
    ]
    if config.get("norm_before_fc"):
        placements.append(place("enc.output_norm.weight", "input_norm.weight", width))
    for norm, source in {
        "attn_norm": "input_layernorm",
        "attn_norm_2": "hidden_norm",
        "ffn_norm": "post_attention_layernorm",
    }.items():
        placements.append(place(f"blk.0.{norm}.weight", f"block.{source}.weight", hidden))
    placements += _parts.block(config, "block.", "blk.0.", n_in=2 * hidden, rows_of=paired_rows)
    placements += _parts.own_vocabulary(config, names, _parts.n_drafted(config))
    placements += _parts.rope_factors(config)
    warnings = []
    if not config.get(LAYER_IDS):
        layers = ", ".join(map(str, _target_layers(config, target)))
        warnings.append(
            f"config.json has no {LAYER_IDS}: layers {layers} of {target.name} are taken, as the paper's training does"
        )
    return placements, warnings


_SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
TINY = {
    "sglang": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": 64,
            "rope_theta": 10000.0,
            LAYER_IDS: [1, 2, 3],
            **_SIZES,
        },
        frozenset({"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}),
    ),
    "speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "model_type": "llama",
            "draft_vocab_size": 64,
            "target_hidden_size": 64,
            "norm_before_residual": True,
            "norm_before_fc": True,
            LAYER_IDS: [0, 1, 4],
            "transformer_layer_config": {
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                **_SIZES,
            },
        },
        frozenset({"lm_head.weight", "d2t", "t2d"}),
    ),
}
