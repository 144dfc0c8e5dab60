"""EAGLE3: a drafter of one or more blocks over the token's embedding and three of the main model's layer inputs.

Facts from llama.cpp's src/models/eagle3.cpp.
"""

from __future__ import annotations

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.kind import (
    Kind,
    Shape,
    Target,
    check_tensors,
    n_blocks,
    n_draft_vocab,
    target_layers,
)

ARCH = "eagle3"
N_TARGET_LAYERS = 3


def is_sidecar(header: GGUFHeader) -> bool:
    return header.arch == ARCH


def check(header: GGUFHeader) -> None:
    layers = target_layers(header)
    if len(layers) != N_TARGET_LAYERS:
        name = header.key(keys.TARGET_LAYERS)
        raise errors.WrongKey(
            f"{header.path}: {name} has {len(layers)} layers; {N_TARGET_LAYERS} are expected"
        )
    width, target_width = header.uint(keys.EMBEDDING_LENGTH), header.uint(keys.TARGET_HIDDEN_SIZE)
    n_vocab = len(header.strings(keys.TOKENS))
    required: dict[str, Shape | None] = {
        keys.FC: (N_TARGET_LAYERS * target_width, width),
        keys.OUTPUT_NORM: (width,),
    }
    for i in range(n_blocks(header)):
        required[f"blk.{i}.attn_norm.weight"] = (width,)
        required[f"blk.{i}.attn_norm_2.weight"] = (width,)
        required[f"blk.{i}.ffn_norm.weight"] = (width,)
    check_tensors(
        header, required, {keys.TOKEN_EMBD: (width, n_vocab), keys.OUTPUT: (width, n_draft_vocab(header))}
    )


def target(header: GGUFHeader) -> Target:
    return Target(width=header.uint(keys.TARGET_HIDDEN_SIZE), deepest_layer=max(target_layers(header)))


KIND = Kind(
    name="eagle3",
    title="EAGLE3",
    rank=4,
    prefix="eagle3-",
    llama_name="draft-eagle3",
    is_sidecar=is_sidecar,
    check=check,
    target=target,
)
