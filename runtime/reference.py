"""The round in plain Python, greedy: the oracle of the tests. Slow and simple on purpose.

It makes its own calls through llama_cpp's ctypes functions and shares no code with the native loop. It also goes the
other, wasteful way round: every rewind at once, and the head's catch-up apart from its first draft.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any

import numpy as np

from .errors import LibraryError
from .library import llama
from .llm import Model
from .weights import free_context, make_draft_context, make_target_context


class Context:
    """One llama.cpp context with one sequence, decoded through llama_cpp's ctypes functions.

    `masked` says whose hidden rows it hands out: those of the output rows, or those of all.
    """

    def __init__(self, pointer: Any, *, masked: bool) -> None:
        from llama_cpp import llama_cpp_ext

        self._lib, self._ext, self._pointer = llama(), llama_cpp_ext, pointer
        model = self._lib.llama_get_model(pointer)
        self.n_embd: int = self._lib.llama_model_n_embd_out(model)
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(model))
        self._ext.llama_set_embeddings_nextn(pointer, True, masked)

    def decode(self, tokens: list[int], pos: int, outputs: Collection[int], hidden: Any = None) -> None:
        """Decodes `tokens` at positions from `pos` on; `outputs` are the rows with logits, `hidden` is (n, n_embd)."""
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        rows = np.ascontiguousarray(hidden, dtype=np.float32) if hidden is not None else None
        if rows is not None:
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, pos + i, 1, 0
            batch.logits[i] = i in outputs
        code = self._lib.llama_decode(self._pointer, batch)
        batch.embd = ctypes.POINTER(ctypes.c_float)()  # numpy owns the rows
        self._lib.llama_batch_free(batch)
        if code != 0:
            raise LibraryError(f"llama_decode returned {code}")

    def logits(self, row: int) -> Any:
        """Logits (n_vocab,) of a row of the last decode."""
        return np.ctypeslib.as_array(
            self._lib.llama_get_logits_ith(self._pointer, row), (self.n_vocab,)
        ).copy()

    def hidden(self, row: int) -> Any:
        """Hidden row (n_embd,) of a row of the last decode."""
        found = self._ext.llama_get_embeddings_nextn_ith(self._pointer, row)
        return np.ctypeslib.as_array(found, (self.n_embd,)).copy()

    def greedy(self, row: int) -> int:
        return int(np.argmax(self.logits(row)))

    def trim(self, pos: int) -> None:
        """Removes the positions from `pos` on."""
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._pointer), 0, pos, -1):
            raise LibraryError(f"llama_memory_seq_rm refused position {pos}")

    def close(self) -> None:
        free_context(self._pointer)


def contexts(model: Model, depth: int) -> tuple[Context, Context]:
    """Fresh contexts for the target and for its head."""
    target = make_target_context(model.weights, model.settings, n_ctx=model.n_ctx, depth=depth, n_slots=depth)
    head = make_draft_context(model.head_weights, model.settings, n_ctx=model.n_ctx)
    return Context(target, masked=False), Context(head, masked=True)


def generate(model: Model, prompt: list[int], n_tokens: int, depth: int) -> tuple[list[int], list[list[int]]]:
    """Generates `n_tokens` ids after `prompt`, drafting `depth` a round; returns the ids and every round's drafts.

    Example:
        >>> generate(model, [1, 2, 3], n_tokens=8, depth=2)                     # doctest: +SKIP
    """
    target, head = contexts(model, depth)
    target.decode(prompt, 0, [len(prompt) - 1])
    hidden = [target.hidden(i) for i in range(len(prompt))]
    head.decode(
        prompt, 0, [], [np.zeros(head.n_embd), *hidden[:-1]]
    )  # the cell at p encodes (h of p-1, x of p)
    text = [*prompt, target.greedy(len(prompt) - 1)]
    n_past, all_drafts = len(prompt), []
    while len(text) < len(prompt) + n_tokens:
        drafts: list[int] = []
        token, h = text[-1], hidden[-1]
        for i in range(min(depth, len(prompt) + n_tokens - len(text) - 1)):
            head.decode([token], n_past + i, [0], [h])
            token, h = head.greedy(0), head.hidden(0)
            drafts.append(token)
        block = [text[-1], *drafts]
        target.decode(block, n_past, range(len(block)))
        n_rows = 0
        while True:
            text.append(target.greedy(n_rows))
            n_rows += 1
            if n_rows == len(block) or text[-1] != drafts[n_rows - 1]:
                break
        rows = [target.hidden(i) for i in range(n_rows)]
        if n_rows < len(block):
            target.trim(n_past + n_rows)
        head.trim(n_past)
        head.decode(block[:n_rows], n_past, [], [hidden[-1], *rows[:-1]])
        hidden += rows
        n_past += n_rows
        all_drafts.append(drafts)
    target.close()
    head.close()
    return text[len(prompt) :], all_drafts
