"""DFlash: a drafter of its own that fills a block of mask tokens in one decode, over the main model's layer inputs.

DFlash2 is the same with convolutions inside the block and a selector over the best candidates of each position.

Facts from llama.cpp's src/models/dflash.cpp. dspark.py adds to it: both have the architecture `dflash`.
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

ARCH = "dflash"
DEFAULT_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 64
SELECTOR_HIDDEN = "selector_hidden.weight"  # its presence makes a DFlash drafter a DFlash2 one
MARKOV_W1 = "markov_w1.weight"  # its presence makes the file a DSpark drafter


def is_sidecar(header: GGUFHeader) -> bool:
    return header.arch == ARCH and MARKOV_W1 not in header.tensors


def block_size(header: GGUFHeader) -> int:
    """Return how many tokens the block that it was trained with has, the known one in front included; raises WrongKey."""
    size = header.uint(keys.BLOCK_SIZE, default=DEFAULT_BLOCK_SIZE)
    if not 2 <= size <= MAX_BLOCK_SIZE:
        raise errors.WrongKey(
            f"{header.path}: {header.key(keys.BLOCK_SIZE)} is {size}; 2 to {MAX_BLOCK_SIZE} is expected"
        )
    return size


def max_depth(header: GGUFHeader) -> int:
    return block_size(header) - 1


def check(header: GGUFHeader) -> None:
    block_size(header)
    check_head_sizes(header)
    width, n_vocab = header.uint(keys.EMBEDDING_LENGTH), len(header.strings(keys.TOKENS))
    mask = header.uint(keys.MASK_TOKEN_ID)
    if mask >= n_vocab:
        raise errors.WrongKey(
            f"{header.path}: {keys.MASK_TOKEN_ID} is {mask}; a token id below {n_vocab} is expected"
        )
    required: dict[str, Shape | None] = {
        keys.FC: (len(target_layers(header)) * width, width),
        keys.ENC_OUTPUT_NORM: (width,),
        keys.OUTPUT_NORM: (width,),
        **{f"blk.{i}.attn_norm.weight": (width,) for i in range(n_blocks(header))},
    }
    if SELECTOR_HIDDEN in header.tensors:
        required |= _selector(header, width, n_vocab)
    check_tensors(
        header, required, {keys.TOKEN_EMBD: (width, n_vocab), keys.OUTPUT: (width, n_draft_vocab(header))}
    )
    check_own_vocabulary(header)


def _selector(header: GGUFHeader, width: int, n_vocab: int) -> dict[str, Shape | None]:
    """The tensors of DFlash2's selector and convolutions; raises MissingKey, WrongKey."""
    kernel, group = header.uint(keys.CONV_KERNEL_SIZE), header.uint(keys.CONV_GROUP_SIZE)
    rank, top_k = header.uint(keys.SELECTOR_RANK), header.uint(keys.SELECTOR_TOP_K)
    if not (kernel and group and rank and top_k) or width % group or width < top_k * (top_k + 1):
        raise errors.WrongKey(
            f"{header.path}: a convolution of {kernel} taps in groups of {group} and a selector of rank {rank} over {top_k} "
            f"candidates; sizes from 1 on are expected, groups that divide the width {width}, and a width of at least "
            f"candidates x (candidates + 1)"
        )
    convolutions: dict[str, Shape | None] = {}
    for i in range(n_blocks(header)):
        for part in ("attn", "ffn"):
            convolutions[f"blk.{i}.{part}_conv_base"] = (width, kernel, 2)
            convolutions[f"blk.{i}.{part}_conv_proj.weight"] = (width, 2 * kernel * (width // group))
    return convolutions | {
        SELECTOR_HIDDEN: (width, rank),
        "selector_predecessor.weight": (rank, n_vocab),
        "selector_successor.weight": (rank, n_vocab),
    }


def target(header: GGUFHeader) -> Target:
    is_own = any(name in header.tensors for name in (keys.OUTPUT, keys.TOKEN_EMBD))
    n_vocab = None if is_own else len(header.strings(keys.TOKENS))
    return Target(
        width=header.uint(keys.EMBEDDING_LENGTH), n_vocab=n_vocab, layers=tuple(target_layers(header))
    )


KIND = Kind(
    name="dflash",
    title="DFlash",
    rank=3,
    prefix="dflash-",
    llama_name="draft-dflash",
    is_sidecar=is_sidecar,
    check=check,
    target=target,
    output_tensors=output_tensors,
    max_depth=max_depth,
    in_one_pass=True,
)
