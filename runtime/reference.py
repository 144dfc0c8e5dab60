"""The round in plain Python, greedy: the oracle of the tests. Slow and simple on purpose.

It makes its own calls through llama_cpp's ctypes functions and shares no code with the native loop. It also goes the
other, wasteful way round: every rewind at once, and the head's catch-up apart from its first draft.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .library import llama
from .llm import Model
from .weights import free_context, make_draft_context, make_target_context


def generate(model: Model, prompt: list[int], n_tokens: int, depth: int) -> tuple[list[int], list[list[int]]]:
    """Generates `n_tokens` ids after `prompt`, drafting `depth` a round; returns the ids and every round's drafts.

    Example:
        >>> generate(model, [1, 2, 3], n_tokens=8, depth=2)                     # doctest: +SKIP
    """
    from llama_cpp import llama_cpp_ext as ext

    lib = llama()
    n_embd: int = lib.llama_model_n_embd_out(model.weights.model)
    target = make_target_context(model.weights, model.settings, n_ctx=model.n_ctx, depth=depth, n_slots=depth)
    head = make_draft_context(model.head_weights, model.settings, n_ctx=model.n_ctx)
    ext.llama_set_embeddings_nextn(target, True, False)
    ext.llama_set_embeddings_nextn(head, True, True)

    def decode(ctx: Any, tokens: list[int], pos: int, outputs: list[int], hidden: Any = None) -> None:
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        rows = np.ascontiguousarray(hidden, dtype=np.float32) if hidden is not None else None
        if rows is not None:
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, pos + i, 1, 0
            batch.logits[i] = i in outputs
        assert lib.llama_decode(ctx, batch) == 0
        batch.embd = ctypes.POINTER(ctypes.c_float)()  # numpy owns the rows
        lib.llama_batch_free(batch)

    def greedy(ctx: Any, row: int) -> int:
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(lib.llama_get_model(ctx)))
        return int(np.argmax(np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, row), (n_vocab,))))

    def hidden_of(ctx: Any, row: int) -> Any:
        return np.ctypeslib.as_array(ext.llama_get_embeddings_nextn_ith(ctx, row), (n_embd,)).copy()

    def trim(ctx: Any, pos: int) -> None:
        assert lib.llama_memory_seq_rm(lib.llama_get_memory(ctx), 0, pos, -1)

    decode(target, prompt, 0, [len(prompt) - 1])
    hidden = [hidden_of(target, i) for i in range(len(prompt))]
    decode(head, prompt, 0, [], [np.zeros(n_embd), *hidden[:-1]])  # the cell at p encodes (h of p-1, x of p)
    text = [*prompt, greedy(target, len(prompt) - 1)]
    n_past, all_drafts = len(prompt), []
    while len(text) < len(prompt) + n_tokens:
        drafts: list[int] = []
        token, h = text[-1], hidden[-1]
        for i in range(min(depth, len(prompt) + n_tokens - len(text) - 1)):
            decode(head, [token], n_past + i, [0], [h])
            token, h = greedy(head, 0), hidden_of(head, 0)
            drafts.append(token)
        block = [text[-1], *drafts]
        decode(target, block, n_past, list(range(len(block))))
        n_rows = 0
        while True:
            text.append(greedy(target, n_rows))
            n_rows += 1
            if n_rows == len(block) or text[-1] != drafts[n_rows - 1]:
                break
        rows = [hidden_of(target, i) for i in range(n_rows)]
        if n_rows < len(block):
            trim(target, n_past + n_rows)
        trim(head, n_past)
        decode(head, block[:n_rows], n_past, [], [hidden[-1], *rows[:-1]])
        hidden += rows
        n_past += n_rows
        all_drafts.append(drafts)
    free_context(target)
    free_context(head)
    return text[len(prompt) :], all_drafts
