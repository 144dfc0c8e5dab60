"""DSpark: DFlash with a Markov head that ties each drafted token to the one before it, and perhaps a confidence head.

Facts from llama.cpp's src/models/dflash.cpp.
"""

from __future__ import annotations

from llama_sidecar.sidecars import keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.kind import Kind, check_tensors, n_draft_vocab, output_tensors
from llama_sidecar.sidecars.kinds import dflash

CONF_PROJ, MARKOV_W2 = "conf_proj.weight", "markov_w2.weight"
N_STREAMS = "hyper_connection.count"  # of DeepSeek-V4's stages


def is_sidecar(header: GGUFHeader) -> bool:
    return header.arch == dflash.ARCH and dflash.MARKOV_W1 in header.tensors


def samples_from_anchor(header: GGUFHeader) -> bool:
    """Return whether the block's first position, that of the known token, predicts a token too."""
    return header.flag(keys.SAMPLE_FROM_ANCHOR, default=True)


def max_depth(header: GGUFHeader) -> int:
    return dflash.block_size(header) - (0 if samples_from_anchor(header) else 1)


def has_confidence(header: GGUFHeader) -> bool:
    """Return whether the drafter also says how likely each token is to stand."""
    return CONF_PROJ in header.tensors and header.flag(keys.HAS_CONFIDENCE_HEAD, default=True)


def check(header: GGUFHeader) -> None:
    header.uint(keys.BLOCK_SIZE)  # llama.cpp has no default for it here
    for flag in (keys.SAMPLE_FROM_ANCHOR, keys.HAS_CONFIDENCE_HEAD):
        header.flag(flag, default=True)
    dflash.check(header)
    width, n_vocab = header.uint(keys.EMBEDDING_LENGTH), len(header.strings(keys.TOKENS))
    rank = header.tensors[dflash.MARKOV_W1].shape[0]
    check_tensors(
        header,
        {dflash.MARKOV_W1: (rank, n_vocab), MARKOV_W2: (rank, n_draft_vocab(header))},
        {CONF_PROJ: (width + rank, 1), "conf_proj.bias": (1,)},
    )


def cut_tensors(header: GGUFHeader) -> list[str]:
    """Return the output and the Markov head's; none of a drafter with DeepSeek-V4's stages, where llama.cpp reads no `d2t`."""
    return [] if header.key(N_STREAMS) in header.keys else output_tensors(header, MARKOV_W2)


KIND = Kind(
    name="dspark",
    title="DSpark",
    rank=2,
    prefix="dspark-",
    llama_name="draft-dspark",
    is_sidecar=is_sidecar,
    check=check,
    target=dflash.target,
    output_tensors=cut_tensors,
    max_depth=max_depth,
    in_one_pass=True,
    has_confidence=has_confidence,
)
