"""EAGLE3: a drafter of one block over the token's embedding and three of the main model's layer inputs (arXiv:2503.01840).

Facts from llama.cpp's src/models/eagle3.cpp.
"""

from __future__ import annotations

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.kind import (
    Kind,
    Shape,
    Target,
    check_head_sizes,
    check_own_vocabulary,
    check_tensors,
    n_blocks,
    n_draft_vocab,
    output_tensors,
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
    if n_blocks(header) != 1:
        raise errors.WrongKey(
            f"{header.path}: {header.key(keys.BLOCK_COUNT)} is {n_blocks(header)}; llama.cpp drafts with exactly 1 block"
        )
    check_head_sizes(header)
    width, target_width = header.uint(keys.EMBEDDING_LENGTH), header.uint(keys.TARGET_HIDDEN_SIZE)
    n_vocab = len(header.strings(keys.TOKENS))
    required: dict[str, Shape | None] = {
        keys.FC: (N_TARGET_LAYERS * target_width, width),
        keys.OUTPUT_NORM: (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.attn_norm_2.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
    }
    if header.flag(keys.NORM_BEFORE_FC, default=False):
        required[keys.ENC_OUTPUT_NORM] = (N_TARGET_LAYERS * target_width,)
    check_tensors(
        header, required, {keys.TOKEN_EMBD: (width, n_vocab), keys.OUTPUT: (width, n_draft_vocab(header))}
    )
    check_own_vocabulary(header)
    borrowed = [name for name in (keys.TOKEN_EMBD, keys.OUTPUT) if name not in header.tensors]
    if borrowed and width != target_width:
        raise errors.MissingTensors(
            f"{header.path}: {' and '.join(borrowed)} missing: they cannot be the main model's, which are {target_width} wide, "
            f"in a drafter {width} wide"
        )


def target(header: GGUFHeader) -> Target:
    n_vocab = None if keys.OUTPUT in header.tensors else len(header.strings(keys.TOKENS))
    return Target(
        width=header.uint(keys.TARGET_HIDDEN_SIZE), n_vocab=n_vocab, layers=tuple(target_layers(header))
    )


KIND = Kind(
    name="eagle3",
    title="EAGLE3",
    rank=4,
    prefix="eagle3-",
    llama_name="draft-eagle3",
    is_sidecar=is_sidecar,
    check=check,
    target=target,
    output_tensors=output_tensors,
    last_is_hidden_row=True,
)
