"""Which rows of a compact head are spare, and where the weights of the other tokens lie: what native/draft_vocab.h works with.

An eighth of the rows are spare: to begin with those least worth drafting. Knows files; computes nothing.
"""

from __future__ import annotations

import numpy as np

from llama_sidecar.sidecars import MainFile, Sidecar
from llama_sidecar.sidecars.compact import Compact, ranked, token_types
from llama_sidecar.sidecars.kinds import KINDS

from ._native import DraftVocab
from .heads import Counts
from .sampling import address
from .weights import Weights

SPARE_SHARE = 8  # one row in so many is spare


def make_draft_vocab(
    source: Sidecar | MainFile, head: Compact, weights: Weights, counts: Counts | None = None
) -> DraftVocab:
    """The vocabulary of a loaded compact head, shared by the sessions of a model.

    Args:
        source: the file the head was cut from, or its main file: it has the weights of all tokens. Where it lacks a matrix that
            the head has, rows stay as they are.
        head: the compact head.
        weights: the head as it is loaded, writable; it must outlive what adopts.
        counts: how often each token was seen, where that is known: those seen least are the first to lose their rows.

    Example:
        >>> vocab = make_draft_vocab(open_sidecar("mtp-NAME.gguf"), open_compact(path), weights)  # doctest: +SKIP
        >>> vocab.adopt([11, 198, 120_000])                                                # doctest: +SKIP
        >>> 120_000 in vocab.ids                                                            # doctest: +SKIP
        True
    """
    matrices: list[tuple[str, str, int, int, int, int, int]] = []
    for name in KINDS[head.kind].vocab_tensors(head.header):
        old, new = source.header.tensors.get(name), head.header.tensors[name]
        if old is None or old.shape[0] != new.shape[0]:
            matrices.clear()
            break
        row_bytes = old.n_bytes // old.shape[1]
        matrices.append(
            (name, str(old.path), old.offset, row_bytes, int(old.type), int(new.type), old.shape[0])
        )
    order = ranked(source.tokens, token_types(source), counts)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    spare = np.argsort(-rank[head.target_ids])[: max(1, len(head.target_ids) // SPARE_SHARE)]
    return DraftVocab(
        address(weights.model), head.n_vocab, head.target_ids.tolist(), spare.tolist(), matrices
    )
