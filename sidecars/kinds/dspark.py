"""DSpark: DFlash with a Markov head that ties each drafted token to the one before it, and perhaps a confidence head.

Facts from llama.cpp's src/models/dflash.cpp.
"""

from __future__ import annotations

from llama_sidecar.sidecars import keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.kind import Kind, check_tensors, n_draft_vocab
from llama_sidecar.sidecars.kinds import dflash


def is_sidecar(header: GGUFHeader) -> bool:
    return header.arch == dflash.ARCH and dflash.MARKOV_W1 in header.tensors


def check(header: GGUFHeader) -> None:
    dflash.check(header)
    n_vocab = len(header.strings(keys.TOKENS))
    rank = header.tensors[dflash.MARKOV_W1].shape[0]
    check_tensors(
        header, {dflash.MARKOV_W1: (rank, n_vocab), "markov_w2.weight": (rank, n_draft_vocab(header))}
    )


KIND = Kind(
    name="dspark",
    title="DSpark",
    rank=2,
    prefix="dspark-",
    llama_name="draft-dspark",
    is_sidecar=is_sidecar,
    check=check,
    target=dflash.target,
)
