"""The vocabulary of a compact head: which of the target's tokens it has rows for, and what stands in for the others.

A token without a row is fed to the head as the row whose embedding is nearest to its own. Finding it takes a pass over the
head's embeddings (a tenth of a second for 32,768 rows), so it is done for many tokens at once and where nobody waits, and
remembered. Until then, and where it cannot be found, row 0 stands in, which costs acceptance and changes no text.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from llama_sidecar.sidecars import MainFile, Sidecar
from llama_sidecar.sidecars.compact import Compact, nearest_rows
from llama_sidecar.sidecars.errors import BadTensorType, TruncatedFile, UnreadableFile

MAX_AT_ONCE = 64  # tokens looked up in one pass: hundreds take seconds


class DraftVocab:
    """Shared by the sessions of a model, from any thread.

    Args:
        source: the file the head was cut from, or its main file: it has the embeddings of all tokens.
        head: the compact head.

    Example:
        >>> vocab = DraftVocab(open_sidecar("mtp-NAME.gguf"), open_compact(path))    # doctest: +SKIP
        >>> vocab.coverage([11, 198, 248000])                                        # doctest: +SKIP
        0.67
    """

    def __init__(self, source: Sidecar | MainFile, head: Compact) -> None:
        self.ids: list[int] = head.target_ids.tolist()
        self._source = source
        self._head = head
        self._is_inside = np.zeros(head.n_vocab, dtype=bool)
        self._is_inside[head.target_ids] = True
        self._nearest: dict[int, int] = {}
        self._lock = threading.RLock()  # the collector may end a text, which looks tokens up, at any moment

    def count_inside(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the head has rows for."""
        return int(self._is_inside[list(tokens)].sum())

    def nearest(self) -> dict[int, int]:
        """All stand-ins found so far: token to row."""
        with self._lock:
            return dict(self._nearest)

    def find_nearest(self, tokens: Iterable[int]) -> dict[int, int]:
        """Finds the stand-ins of those tokens that have no row; at most MAX_AT_ONCE of them, found before or not, as
        long as the files can be read and their type is one that gguf knows."""
        outside = [t for t in dict.fromkeys(tokens) if not self._is_inside[t]][:MAX_AT_ONCE]
        with self._lock:
            unknown = [t for t in outside if t not in self._nearest]
            if unknown:
                with contextlib.suppress(
                    UnreadableFile, TruncatedFile, BadTensorType
                ):  # or removed meanwhile
                    self._nearest.update(nearest_rows(self._source, self._head, unknown))
            return {t: self._nearest[t] for t in outside if t in self._nearest}
