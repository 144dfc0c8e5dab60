"""DeepSeek-V4's DSpark: blocks of the model's own kind without compression, in the model's checkpoint in its MTP block's place.

config.json's `dspark_*` say so. Of each stage `mtp.S.` is a block; the projection of the layers' outputs, the output mix and norm,
the Markov head and the confidence head stand in whichever stage has them. Embeddings and output are the model's. Facts from
llama.cpp's conversion/deepseek.py and src/models/dflash.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from llama_sidecar.converter.config import Config, Key, checked_integer, shared_keys
from llama_sidecar.converter.drafts import _parts
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.errors import TensorMismatch
from llama_sidecar.converter.families import Placement, deepseek4, place
from llama_sidecar.sidecars.kinds.dflash import ARCH, MAX_BLOCK_SIZE

KIND = "dspark"
CLASSES: tuple[str, ...] = ()
INSIDE = dict.fromkeys(deepseek4.CLASSES, (deepseek4.DSPARK, "mtp."))
REFUSED: dict[str, str] = {}
STAGE = re.compile(r"mtp\.(\d{1,3})\.(.+)")
OF_NO_STAGE = re.compile(
    r"(main_(proj|norm)|norm|markov_head\.markov_w[12]|confidence_head\.proj)\.weight|hc_head_(fn|base|scale)"
)
DROPPED = re.compile(
    r"\.ffn\.gate\.(bias_vl|tid2eid)$"
)  # what routes by picture or token, which no stage does
CONFIDENCE = "confidence_head.proj.weight"


prepared = deepseek4.published


def canonical(name: str, config: Config) -> str:
    """`layers.S...`, or the name without its stage; "" for the model's own tensors."""
    found = STAGE.fullmatch(name)
    if not found or DROPPED.search(name):
        return ""
    return found[2] if OF_NO_STAGE.fullmatch(found[2]) else f"layers.{found[1]}.{found[2]}"


def d2t(config: Config) -> int | None:
    return None


def n_stages(names: Collection[str]) -> int:
    """How many blocks there are. Raises TensorMismatch for none."""
    found = [int(match[1]) for name in names if (match := re.match(r"layers\.(\d+)\.", name))]
    if not found:
        raise TensorMismatch(
            f"config.json has {deepseek4.DSPARK}, but no tensor is called mtp.*: there is no drafter"
        )
    return max(found) + 1


def keys(config: Config, names: Collection[str], target: Target) -> dict[str, Key]:
    n = n_stages(names)
    own = deepseek4.block_keys(config, n) | {
        "attention.compress_ratios": [0] * n,
        "hash_layer_count": 0,
        "block_size": config.integer("dspark_block_size", MAX_BLOCK_SIZE),
        "target_layers": _parts.layers_after(deepseek4.DSPARK, config[deepseek4.DSPARK], target),
    }
    found = shared_keys(config, ARCH, n) | {f"{ARCH}.{name}": value for name, value in own.items()}
    return found | _parts.mask_key("dspark_noise_token_id", config["dspark_noise_token_id"], target)


def layout(config: Config, names: Collection[str], target: Target) -> tuple[list[Placement], list[str]]:
    hidden, n_vocab = config.integer("hidden_size"), config.integer("vocab_size")
    rank = checked_integer("dspark_markov_rank", config["dspark_markov_rank"])
    n_read = len(_parts.layer_numbers(deepseek4.DSPARK, config[deepseek4.DSPARK]))
    found = [
        place("fc.weight", "main_proj.weight", hidden, n_read * hidden),
        place("enc.output_norm.weight", "main_norm.weight", hidden),
        place("output_norm.weight", "norm.weight", hidden),
        *deepseek4.output_mix(config, ""),
        place("markov_w1.weight", "markov_head.markov_w1.weight", n_vocab, rank),
        place("markov_w2.weight", "markov_head.markov_w2.weight", n_vocab, rank),
    ]
    if CONFIDENCE in names:
        found.append(place("conf_proj.weight", CONFIDENCE, 1, hidden + rank))
    for stage in range(n_stages(names)):
        found += deepseek4.block(config, f"layers.{stage}.", f"blk.{stage}.")
    return found, []


# What the model's configuration says besides (families/deepseek4.py).
TINY = {
    "inside": (
        {
            deepseek4.DSPARK: [0, 2, 3],
            "dspark_block_size": 5,
            "dspark_markov_rank": 32,
            "dspark_noise_token_id": 319,
        },
        frozenset({"layers.1.attn_norm.weight", CONFIDENCE}),
    )
}
