"""DSpark: DFlash with a Markov head from each drafted token to the next and, in most exports, a confidence head.

Exports of vLLM's speculators nest the block's sizes in `transformer_layer_config`, count the layers they read by their inputs, and may
draft some of the target's tokens alone. Facts from llama.cpp's conversion/qwen.py.
"""

from __future__ import annotations

from collections.abc import Collection

from llama_sidecar.converter.config import Config, Key, checked_integer
from llama_sidecar.converter.drafts import _parts, dflash
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.errors import UnsupportedModel
from llama_sidecar.converter.families import Placement, place

KIND = "dspark"
ARCH = dflash.ARCH
CLASSES = (
    "Qwen3DSparkModel",
    "DSparkDraftModel",
    "DSparkSpeculator",
    "Lfm2DSparkDraftModel",
    "LingDSparkModel",
)
INSIDE = dflash.INSIDE
REFUSED = dflash.REFUSED
DEFAULT_RANK = 256
INPUTS = "aux_hidden_state_layer_ids"
CONFIDENCE = "confidence_head.proj.weight"


def prepared(config: Config) -> Config:
    """With `sample_from_anchor` said, and the target's layers by their outputs as DFlash has them."""
    is_nested = isinstance(config.get("transformer_layer_config"), dict)
    flat = dict(_parts.flattened(config, "transformer_layer_config"))
    if flat.get("sample_from_anchor") is None:
        flat["sample_from_anchor"] = not (is_nested or INPUTS in config)
    if INPUTS in config and not flat.get("dflash_config"):
        layers = _parts.layer_numbers(INPUTS, config[INPUTS])
        flat["dflash_config"] = {
            "mask_token_id": flat.get("mask_token_id"),
            "target_layer_ids": [layer - 1 for layer in layers],
        }
    return Config(flat)


def canonical(name: str, config: Config) -> str:
    """Without `t2d`, and without an output of the whole vocabulary: the target's is borrowed."""
    name = dflash.canonical(name, config)
    if name == "t2d" or (name == "lm_head.weight" and _parts.n_drafted(config) is None):
        return ""
    return name


def d2t(config: Config) -> int | None:
    return _parts.n_drafted(config)


def keys(config: Config, names: Collection[str], target: Target) -> dict[str, Key]:
    markov = dflash.own(config, "markov_head_type", "vanilla")
    if markov != "vanilla":
        raise UnsupportedModel(f"config.json has markov_head_type = {markov!r}; expected 'vanilla'")
    return dflash.keys(config, names, target) | {
        f"{ARCH}.sample_from_anchor": bool(config["sample_from_anchor"]),
        f"{ARCH}.has_confidence_head": CONFIDENCE in names,
    }


def layout(config: Config, names: Collection[str], target: Target) -> tuple[list[Placement], list[str]]:
    hidden, n_vocab = config.integer("hidden_size"), config.integer("vocab_size")
    rank = checked_integer("markov_rank", dflash.own(config, "markov_rank", DEFAULT_RANK))
    found = list(dflash.placements(config, names, target))
    found.append(place("markov_w1.weight", "markov_head.markov_w1.weight", n_vocab, rank))
    n_drafted = _parts.n_drafted(config) or n_vocab
    found.append(place("markov_w2.weight", "markov_head.markov_w2.weight", n_drafted, rank))
    if CONFIDENCE in names:
        found.append(place("conf_proj.weight", CONFIDENCE, 1, hidden + rank))
        bias = CONFIDENCE.replace("weight", "bias")
        if bias in names:
            found.append(place("conf_proj.bias", bias, 1))
    return found, []


_VALUES = frozenset(f"layers.{i}.self_attn.v_proj.weight" for i in range(2))
TINY = {
    "own": (
        {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "block_size": 7,
            "markov_rank": 32,
            "mask_token_id": 319,
            "target_layer_ids": [0, 1, 2],
            **dflash.SIZES,
        },
        _VALUES | {CONFIDENCE, CONFIDENCE.replace("weight", "bias"), "embed_tokens.weight"},
    ),
    "speculators": (
        {
            "architectures": ["DSparkSpeculator"],
            "model_type": "qwen3",
            "block_size": 8,
            "markov_rank": 32,
            "mask_token_id": 319,
            "draft_vocab_size": 64,
            INPUTS: [1, 3],
            "transformer_layer_config": dflash.SIZES,
        },
        _VALUES | {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"},
    ),
}
