"""The vocabulary of a compact head: which of the target's tokens it has rows for, now.

A token without a row can neither be drafted nor be told to the head, and a text uses its tokens again: names in code, words of a
language that the head was not cut for. So an eighth of the rows are spare. A token that turns up in a prompt or in a text and has
no row gets the spare one that was used least recently: its weights are read from the head's source and written over those in
memory. All this changes how much is accepted, never what.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llama_sidecar.sidecars import LlamaSidecarError, MainFile, Sidecar
from llama_sidecar.sidecars.compact import Compact, ranked, read_rows, token_types

from .heads import Counts

SPARE_SHARE = 8  # one row in so many is spare


class Rows(Protocol):
    """Where rows are written: the head's loaded weights."""

    def set_rows(self, name: str, rows: Sequence[int], data: NDArray[np.uint8]) -> None: ...


class Reader(Protocol):
    """Who drafts with the head, and has a map of its rows."""

    def set_row(self, row: int, token: int) -> None: ...


class DraftVocab:
    """Shared by the sessions of a model.

    Args:
        source: the file the head was cut from, or its main file: it has the weights of all tokens.
        head: the compact head.
        weights: the head as it is loaded.
        counts: how often each token was seen, where that is known: those seen least are the first to lose their rows.

    Example:
        >>> vocab = DraftVocab(open_sidecar("mtp-NAME.gguf"), open_compact(path), weights)  # doctest: +SKIP
        >>> vocab.adopt([11, 198, 120_000])                                               # doctest: +SKIP
        >>> 120_000 in vocab.ids                                                           # doctest: +SKIP
        True
    """

    def __init__(
        self, source: Sidecar | MainFile, head: Compact, weights: Rows, counts: Counts | None = None
    ) -> None:
        self.ids: list[int] = head.target_ids.tolist()  # (n_rows,) the token of each row
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._source, self._head, self._weights = source, head, weights
        self._has_row = bytearray(head.n_vocab)
        for token in self.ids:
            self._has_row[token] = True
        self._spare = self._choose_spare(counts)
        self._can_give = True

    def _choose_spare(self, counts: Counts | None) -> collections.OrderedDict[int, int]:
        """Token -> row of the spare rows, the next to be given away first: to begin with those least worth drafting."""
        order = ranked(self._source.tokens, token_types(self._source), counts)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        worst = np.argsort(-rank[self.ids])[: max(1, len(self.ids) // SPARE_SHARE)]
        return collections.OrderedDict((self.ids[row], int(row)) for row in worst)

    def adopt(self, tokens: Sequence[int]) -> None:
        """Gives a row to each of these tokens that has none, as far as there are spare ones, and tells the readers.

        Call it in the model's turn, when nothing computes. Once the files cannot be read any more, nothing changes.
        """
        new: dict[int, None] = {}
        for token in tokens:
            if not self._has_row[token]:
                new[token] = None
            elif token in self._spare:
                self._spare.move_to_end(token)
        if new and self._can_give:
            self._give_rows(list(new)[-len(self._spare) :])

    def join(self, reader: Reader) -> None:
        """From now on it is told of each row that another token gets. In the model's turn, as `adopt`."""
        self._readers.add(reader)

    def _give_rows(self, tokens: list[int]) -> None:
        old = list(itertools.islice(self._spare.items(), len(tokens)))
        rows = [row for _, row in old]
        try:
            for name, data in read_rows(self._source, self._head, tokens).items():
                self._weights.set_rows(name, rows, data)
        except LlamaSidecarError:  # drafts are then worse, and nothing else
            self._can_give = False
            return
        readers = list(self._readers)
        for (loser, row), token in zip(old, tokens, strict=True):
            del self._spare[loser]
            self._has_row[loser], self._has_row[token] = False, True
            self._spare[token] = row
            self.ids[row] = token
            for reader in readers:
                reader.set_row(row, token)
