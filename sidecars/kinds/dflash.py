"""DFlash: a drafter of its own that fills a block of mask tokens in one decode, over the main model's layer inputs.

Facts from llama.cpp's src/models/dflash.cpp. dspark.py adds to it: both have the architecture `dflash`.
"""

from __future__ import annotations

from llama_sidecar.sidecars import keys
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

ARCH = "dflash"
MARKOV_W1 = "markov_w1.weight"  # its presence makes the file a DSpark drafter


def is_sidecar(header: GGUFHeader) -> bool:
    return header.arch == ARCH and MARKOV_W1 not in header.tensors


def check(header: GGUFHeader) -> None:
    header.uint(keys.BLOCK_SIZE, default=16)
    header.uint(keys.MASK_TOKEN_ID)
    width, n_vocab = header.uint(keys.EMBEDDING_LENGTH), len(header.strings(keys.TOKENS))
    required: dict[str, Shape | None] = {
        keys.FC: (len(target_layers(header)) * width, width),
        "enc.output_norm.weight": (width,),
        keys.OUTPUT_NORM: (width,),
        **{f"blk.{i}.attn_norm.weight": (width,) for i in range(n_blocks(header))},
    }
    check_tensors(
        header, required, {keys.TOKEN_EMBD: (width, n_vocab), keys.OUTPUT: (width, n_draft_vocab(header))}
    )


def target(header: GGUFHeader) -> Target:
    return Target(width=header.uint(keys.EMBEDDING_LENGTH), deepest_layer=max(target_layers(header)))


KIND = Kind(
    name="dflash",
    title="DFlash",
    rank=3,
    prefix="dflash-",
    llama_name="draft-dflash",
    is_sidecar=is_sidecar,
    check=check,
    target=target,
)
