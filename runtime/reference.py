"""The round in plain Python, greedy: the oracle of the tests. Slow and simple on purpose.

It makes its own calls through llama_cpp's ctypes functions and shares no code with the native loop. It also goes the
other, wasteful way round: every rewind at once, and the head's catch-up apart from its first draft. What a drafter of each kind
does is in reference_heads.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from .errors import LibraryError
from .library import llama
from .llm import Model
from .weights import free_context, make_target_context

LAST_HIDDEN = -1  # in place of a layer's number: the hidden row after the last layer


class Context:
    """One llama.cpp context with one sequence, decoded through llama_cpp's ctypes functions.

    `layers` are those whose inputs `rows` hands out, of every row; `masked` says whose hidden rows `hidden` hands out: those of
    the output rows, or (the default) those of all.
    """

    def __init__(self, pointer: Any, *, layers: Sequence[int] = (), masked: bool | None = None) -> None:
        from llama_cpp import llama_cpp_ext

        self._lib, self._ext, self.pointer = llama(), llama_cpp_ext, pointer
        self.model = self._lib.llama_get_model(pointer)
        self.n_embd: int = self._lib.llama_model_n_embd_out(self.model)
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self.model))
        self.layers = layers
        if masked is not None or LAST_HIDDEN in layers:
            self._ext.llama_set_embeddings_nextn(pointer, True, bool(masked))
        for layer in layers:
            if layer != LAST_HIDDEN:
                staging("llama_set_embeddings_layer_inp")(pointer, layer, True)

    def decode(
        self,
        tokens: Sequence[int] | None,
        pos: int,
        outputs: Collection[int],
        hidden: Any = None,
        *,
        encode: bool = False,
    ) -> None:
        """Decodes `tokens` at positions from `pos` on; `outputs` are the rows with logits, `hidden` is (n, n_embd).

        Without tokens the hidden rows are the input; with `encode` they go through the model's encoder.
        """
        rows = np.ascontiguousarray(hidden, dtype=np.float32) if hidden is not None else None
        n = len(rows) if tokens is None and rows is not None else len(tokens or ())
        seq_id = ctypes.c_int32(0)
        batch = self._lib.llama_batch()
        batch.n_tokens = n
        if tokens is not None:
            batch.token = (ctypes.c_int32 * n)(*tokens)
        if rows is not None:
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        # A row without a token may have four positions.
        batch.pos = (ctypes.c_int32 * (4 * n))(*[*range(pos, pos + n)] * 3, *[0] * n)
        batch.n_seq_id = (ctypes.c_int32 * n)(*[1] * n)
        batch.seq_id = (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.pointer(seq_id)] * n)
        batch.logits = (ctypes.c_int8 * n)(*[i in outputs for i in range(n)])
        code = (self._lib.llama_encode if encode else self._lib.llama_decode)(self.pointer, batch)
        if code != 0:
            raise LibraryError(f"llama_decode returned {code}")

    def logits(self, row: int) -> Any:
        """Logits (n_vocab,) of a row of the last decode."""
        return np.ctypeslib.as_array(
            self._lib.llama_get_logits_ith(self.pointer, row), (self.n_vocab,)
        ).copy()

    def hidden(self, row: int) -> Any:
        """Hidden row (n_embd,) of a row of the last decode."""
        found = self._ext.llama_get_embeddings_nextn_ith(self.pointer, row)
        return np.ctypeslib.as_array(found, (self.n_embd,)).copy()

    def all_hidden(self, n: int) -> Any:
        """Hidden rows (n, n_embd) of the last decode or encode."""
        found = self._ext.llama_get_embeddings_nextn(self.pointer)
        return np.ctypeslib.as_array(found, (n, self.n_embd)).copy()

    def rows(self, n: int) -> Any:
        """Of the first n rows of the last decode, the inputs of `layers` side by side: (n, n_embd for each of them)."""
        n_embd = self._lib.llama_model_n_embd(self.model)
        parts = []
        for layer in self.layers:
            if layer == LAST_HIDDEN:
                parts.append(self.all_hidden(n))
                continue
            found = staging("llama_get_embeddings_layer_inp")(self.pointer, layer)
            parts.append(np.ctypeslib.as_array(found, (n, n_embd)).copy())
        return np.concatenate(parts, axis=1) if parts else np.zeros((n, 0), np.float32)

    def greedy(self, row: int) -> int:
        return int(np.argmax(self.logits(row)))

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self.pointer), True)

    def trim(self, pos: int) -> None:
        """Removes the positions from `pos` on."""
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self.pointer), 0, pos, -1):
            raise LibraryError(f"llama_memory_seq_rm refused position {pos}")

    def choose_head(self, head: int) -> None:
        """Has the following decodes compute this one of the model's MTP heads."""
        self._ext.llama_set_nextn_layer_offset(self.pointer, head)

    def meta(self, key: str) -> str | None:
        """A key of the model's file as llama.cpp spells it, or None."""
        buffer = ctypes.create_string_buffer(64)
        n = self._lib.llama_model_meta_val_str(self.model, key.encode(), buffer, 64)
        return buffer.value.decode() if n >= 0 else None

    def close(self) -> None:
        free_context(self.pointer)


_STAGING: dict[
    str, tuple[str, Any, list[Any]]
] = {  # what llama_cpp has no binding for: mangled name, result, arguments
    "llama_set_embeddings_layer_inp": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        None,
        [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool],
    ),
    "llama_get_embeddings_layer_inp": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        ctypes.POINTER(ctypes.c_float),
        [ctypes.c_void_p, ctypes.c_uint32],
    ),
    "llama_model_target_layer_ids": (
        "_Z28llama_model_target_layer_idsPK11llama_model",
        ctypes.POINTER(ctypes.c_int32),
        [ctypes.c_void_p],
    ),
    "llama_model_target_layer_ids_n": (
        "_Z30llama_model_target_layer_ids_nPK11llama_model",
        ctypes.c_uint32,
        [ctypes.c_void_p],
    ),
    "llama_model_dflash_selector_top_k": (
        "_Z33llama_model_dflash_selector_top_kPK11llama_model",
        ctypes.c_int32,
        [ctypes.c_void_p],
    ),
}


def staging(name: str) -> Any:
    """One of llama.cpp's staging functions, which have C++ linkage."""
    import llama_cpp.llama_cpp

    mangled, result, arguments = _STAGING[name]
    function = getattr(llama_cpp.llama_cpp._lib, mangled)
    function.restype, function.argtypes = result, arguments
    return function


def contexts(model: Model, depth: int) -> tuple[Context, Context]:
    """Fresh contexts for the target and for its MTP head."""
    target = make_target_context(model.weights, model.settings, n_ctx=model.n_ctx, depth=depth, n_slots=depth)
    head = model.make_draft_context(model.settings, n_ctx=model.n_ctx, target=target)
    return Context(target, masked=False), Context(head, masked=True)


def generate(model: Model, prompt: list[int], n_tokens: int, depth: int) -> tuple[list[int], list[list[int]]]:
    """Generates `n_tokens` ids after `prompt`, drafting `depth` a round; returns the ids and every round's drafts.

    Example:
        >>> generate(model, [1, 2, 3], n_tokens=8, depth=2)                     # doctest: +SKIP
    """
    from .reference_heads import make_head

    pointer = make_target_context(
        model.weights, model.settings, n_ctx=model.n_ctx, depth=depth, n_slots=depth
    )
    draft = model.make_draft_context(model.settings, n_ctx=model.n_ctx, target=pointer)
    head = make_head(str(model.drafter), draft, n_layers=llama().llama_model_n_layer(model.weights.model))
    target = Context(pointer, layers=head.layers)

    target.decode(prompt, 0, [len(prompt) - 1])
    head.observe(0, prompt, target.rows(len(prompt)))
    text = [*prompt, target.greedy(len(prompt) - 1)]
    n_past, all_drafts = len(prompt), []
    while len(text) < len(prompt) + n_tokens:
        drafts = head.propose(text[-1], min(depth, len(prompt) + n_tokens - len(text) - 1))
        block = [text[-1], *drafts]
        target.decode(block, n_past, range(len(block)))
        n_rows = 0
        while True:
            text.append(target.greedy(n_rows))
            n_rows += 1
            if n_rows == len(block) or text[-1] != drafts[n_rows - 1]:
                break
        rows = target.rows(n_rows)
        if n_rows < len(block):
            target.trim(n_past + n_rows)
        head.observe(n_past, block[:n_rows], rows)
        n_past += n_rows
        all_drafts.append(drafts)
    head.context.close()
    target.close()
    return text[len(prompt) :], all_drafts
