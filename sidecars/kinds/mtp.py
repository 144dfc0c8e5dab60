"""Multi-token prediction: the checkpoint's own MTP block(s), as upstream's converter writes them with `--mtp`.

The main model's architecture and keys, and only the blocks from N on, with the embeddings they need. Gemma 4's
assistant is the same to a runtime and has an architecture of its own: it takes the main model's hidden row (B wide)
through a projection. Facts from llama.cpp's src/models and common/speculative.cpp.
"""

from __future__ import annotations

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.kind import Kind, Shape, Target, check_tensors, n_blocks

CHAINED = ("mimo2", "step35", "hy_v3")  # draft with several heads, one for each step
ASSISTANTS = {"gemma4-assistant": "gemma4"}  # architecture of the drafter -> of its main model


def has_head(header: GGUFHeader) -> bool:
    last = header.uint(keys.BLOCK_COUNT, default=0) - 1
    return keys.NEXTN_EH_PROJ.format(i=last) in header.tensors


def is_sidecar(header: GGUFHeader) -> bool:
    return header.arch in ASSISTANTS or (keys.FIRST_ATTN_NORM not in header.tensors and has_head(header))


def is_embedded(header: GGUFHeader) -> bool:
    return keys.FIRST_ATTN_NORM in header.tensors and has_head(header)


def n_heads(header: GGUFHeader) -> int:
    """Return `{arch}.nextn_predict_layers`: the last blocks, which are the MTP blocks."""
    n, total = header.uint(keys.NEXTN_PREDICT_LAYERS), n_blocks(header)
    if not 1 <= n <= total:
        name = header.key(keys.NEXTN_PREDICT_LAYERS)
        raise errors.WrongKey(f"{header.path}: {name} is {n}; 1 to {total} (all blocks) is expected")
    return n


def max_depth(header: GGUFHeader) -> int | None:
    """Return the number of heads where each drafts one step, None where one drafts them all; raises WrongKey for what cannot draft."""
    if header.arch in ASSISTANTS or n_heads(header) == 1:
        return None
    if header.arch not in CHAINED:
        raise errors.WrongKey(
            f"{header.path}: {header.key(keys.NEXTN_PREDICT_LAYERS)} is {n_heads(header)}; llama.cpp drafts with exactly 1 "
            f"head of a {header.arch} model"
        )
    return n_heads(header)


def check_form(header: GGUFHeader) -> None:
    """Raise ForeignHead for forms met in the wild that llama.cpp's MTP graphs do not know, before their tensors are compared."""
    advice = "get the whole head (llama-sidecar convert CHECKPOINT --sidecar-only), which is cut to the rows worth drafting by itself"
    of_rows = [name for name in header.tensors if keys.D2T in name.split(".")]
    if of_rows:
        output = header.tensors.get(keys.OUTPUT)
        n_rows = f"{output.shape[-1]:,}" if output else "some"
        raise errors.ForeignHead(
            f"{header.path}: an MTP head with an output of {n_rows} rows of its own, whose tokens {of_rows[0]} names; llama.cpp drafts "
            f"with an output for every token alone: {advice}"
        )
    borrowed = [
        name for name in header.keys if name.endswith(keys.NEXTN_SHARED_TARGET_TENSORS) and header.keys[name]
    ]
    if borrowed:
        raise errors.ForeignHead(
            f"{header.path}: an MTP head that borrows its main model's embeddings or output ({borrowed[0]}), which llama.cpp does not "
            f"lend: {advice}"
        )


def check(header: GGUFHeader) -> None:
    check_form(header)
    width, n_vocab = header.uint(keys.EMBEDDING_LENGTH), len(header.strings(keys.TOKENS))
    required: dict[str, Shape | None] = {keys.TOKEN_EMBD: (width, n_vocab), keys.OUTPUT_NORM: (width,)}
    optional: dict[str, Shape] = {keys.OUTPUT: (width, n_vocab)}
    if header.arch in ASSISTANTS:
        target_width = header.uint(keys.EMBEDDING_LENGTH_OUT)
        required["nextn.pre_projection.weight"] = (2 * target_width, width)
        required["nextn.post_projection.weight"] = (width, target_width)
        check_tensors(header, required, optional)
        return
    total = n_blocks(header)
    n_layers = total - n_heads(header)
    for i in range(n_layers, total):
        required[keys.NEXTN_EH_PROJ.format(i=i)] = (2 * width, width)
        required[keys.NEXTN_ENORM.format(i=i)] = (width,)
        required[keys.NEXTN_HNORM.format(i=i)] = (width,)
        optional[f"blk.{i}.nextn.shared_head_norm.weight"] = (width,)
        optional[keys.NEXTN_SHARED_HEAD_HEAD.format(i=i)] = (width, n_vocab)
        optional[keys.NEXTN_EMBED_TOKENS.format(i=i)] = (width, n_vocab)
    check_tensors(header, required, optional)
    trunk = tuple(f"blk.{i}." for i in range(n_layers))
    stray = [name for name in header.tensors if name.startswith(trunk)]
    if stray:
        raise errors.StrayTensors(
            f"{header.path}: a sidecar holds no blocks below {n_layers}, but {errors.listed(stray)}"
        )


def target(header: GGUFHeader) -> Target:
    if header.arch in ASSISTANTS:
        return Target(arch=ASSISTANTS[header.arch], width=header.uint(keys.EMBEDDING_LENGTH_OUT))
    width, n_layers = header.uint(keys.EMBEDDING_LENGTH), n_blocks(header) - n_heads(header)
    return Target(arch=header.arch, width=width, n_layers=n_layers)


def vocab_tensors(header: GGUFHeader) -> list[str]:
    if header.arch in ASSISTANTS:  # reads the main model's embeddings, by the main model's ids
        return []
    total = n_blocks(header)
    blocks = range(total - n_heads(header), total)
    own = [
        name.format(i=i) for i in blocks for name in (keys.NEXTN_EMBED_TOKENS, keys.NEXTN_SHARED_HEAD_HEAD)
    ]
    return [name for name in (keys.TOKEN_EMBD, keys.OUTPUT, *own) if name in header.tensors]


KIND = Kind(
    name="mtp",
    title="MTP",
    rank=1,
    prefix="mtp-",
    llama_name="draft-mtp",
    is_sidecar=is_sidecar,
    is_embedded=is_embedded,
    check=check,
    target=target,
    vocab_tensors=vocab_tensors,
    max_depth=max_depth,
)
