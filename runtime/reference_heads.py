"""Each kind's drafter in plain Python: reference.py's second half, for the tests. One class is one kind; slow and simple.

Every one drops what it drafted, then takes in what stands, in a decode of its own, before it drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .library import llama
from .reference import LAST_HIDDEN, Context, staging


class Head(Protocol):
    """`layers` are those of the target that `rows` are made of."""

    context: Context
    layers: Sequence[int]

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        """Takes in tokens that stand from `pos` on, and the target's rows (n, width) there."""

    def propose(self, last: int, n: int) -> list[int]:
        """Drafts n tokens after `last`, whose position is the number of tokens taken in."""


def make_head(kind: str, pointer: Any, *, n_layers: int) -> Head:
    """The head of a kind over its own context; `n_layers` are the target's."""
    n_heads = llama().llama_model_n_layer_nextn(llama().llama_get_model(pointer))
    heads: dict[str, Any] = {
        "mtp": Chain if n_heads > 1 else Mtp,
        "eagle3": Eagle3,
        "dflash": DFlash,
        "dspark": DSpark,
        "model": DraftModel,
        "gemma4-assistant": Gemma4Assistant,
    }
    return heads[kind](pointer, n_layers)  # type: ignore[no-any-return]


def target_layers(model: Any) -> list[int]:
    """The layers that a loaded drafter says it reads."""
    n = staging("llama_model_target_layer_ids_n")(model)
    return list(staging("llama_model_target_layer_ids")(model)[:n])


class Mtp:
    """The cell at p encodes (the target's row of p-1, the token of p)."""

    def __init__(self, pointer: Any, n_layers: int) -> None:
        self.context, self.layers = Context(pointer, masked=True), [LAST_HIDDEN]
        self.row, self.n = np.zeros(self.context.n_embd), 0

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        self.context.trim(pos)
        self.context.decode(tokens, pos, [], [self.row, *rows[:-1]])
        self.row, self.n = rows[-1], pos + len(tokens)

    def propose(self, last: int, n: int) -> list[int]:
        drafts: list[int] = []
        token, row = last, self.row
        for i in range(n):
            self.context.decode([token], self.n + i, [0], [row])
            token, row = self.context.greedy(0), self.context.hidden(0)
            drafts.append(token)
        return drafts


class Chain(Mtp):
    """Several heads, one for each step, which share the cells: every head decodes all that stands, row by row."""

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        for head in range(llama().llama_model_n_layer_nextn(self.context.model)):
            self.context.trim(pos)
            self.context.choose_head(head)
            self.context.decode(tokens, pos, [], [self.row, *rows[:-1]])
        self.row, self.n = rows[-1], pos + len(tokens)

    def propose(self, last: int, n: int) -> list[int]:
        tokens, rows = [last], [self.row]
        for head in range(n):
            self.context.trim(self.n)
            self.context.choose_head(head)
            for i in range(head + 1):
                self.context.decode([tokens[i]], self.n + i, [0] if i == head else [], [rows[i]])
            tokens.append(self.context.greedy(0))
            rows.append(self.context.hidden(0))
        return tokens[1:]


class Eagle3:
    """The cell at p encodes (what the encoder makes of the target's row of p, the token of p+1)."""

    def __init__(self, pointer: Any, n_layers: int) -> None:
        self.context = Context(pointer, masked=True)
        self.layers = [
            LAST_HIDDEN if layer == n_layers else layer for layer in target_layers(self.context.model)
        ]
        self.row, self.n = np.zeros(self.context.n_embd), 0

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        first = 0 if pos else 1  # the cell before the first token does not exist
        self.context.trim(max(0, pos - 1))
        self.context.decode(None, max(0, pos - 1), range(len(rows)), rows, encode=True)
        encoded = [self.row, *self.context.all_hidden(len(rows))]
        if len(tokens) > first:
            self.context.decode(tokens[first:], pos - 1 + first, [], encoded[first:-1])
        self.row, self.n = encoded[-1], pos + len(tokens)

    def propose(self, last: int, n: int) -> list[int]:
        if n:
            self.context.trim(self.n - 1)
        drafts: list[int] = []
        token, row = last, self.row
        for i in range(n):
            self.context.decode([token], self.n - 1 + i, [0], [row])
            token, row = self.context.greedy(0), self.context.hidden(0)
            drafts.append(token)
        return drafts


class DFlash:
    """The block [last, mask, mask, ...]: the mask's rows say the tokens; what it attends to are injected rows of the target."""

    first = 1  # the first row that predicts a token

    def __init__(self, pointer: Any, n_layers: int) -> None:
        lib = llama()
        self.top_k = staging("llama_model_dflash_selector_top_k")(lib.llama_get_model(pointer))
        self.context = Context(pointer, masked=False if self.top_k > 0 else None)
        self.layers, self.n = target_layers(self.context.model), 0
        self.mask = lib.llama_vocab_mask(lib.llama_model_get_vocab(self.context.model))
        lib.llama_set_causal_attn(pointer, self.context.meta("dflash.attention.causal") == "true")

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        self.context.trim(pos)
        self.context.decode(None, pos, [], rows)
        self.n = pos + len(tokens)

    def propose(self, last: int, n: int) -> list[int]:
        if not n:
            return []
        block = [last, *[self.mask] * (n + self.first - 1)]
        self.context.trim(self.n)
        self.context.decode(block, self.n, [] if self.top_k > 0 else range(len(block)))
        if self.top_k > 0:
            return self._walk(self.context.all_hidden(len(block))[1:])
        return [self.context.greedy(self.first + i) for i in range(n)]

    def _walk(self, lattice: Any) -> list[int]:
        """DFlash2: rows of k token ids, then for each candidate of the row before the k scores of these."""
        k, best, drafts = self.top_k, 0, []
        for row in lattice:
            scores = row[k : k + k * k].reshape(k, k)
            best = int(np.argmax(scores[best]))
            drafts.append(int(row[best]))
        return drafts


class DSpark(DFlash):
    """In most files the known token's own row predicts the first token; the graph chains from token to token itself."""

    def __init__(self, pointer: Any, n_layers: int) -> None:
        super().__init__(pointer, n_layers)
        if self.context.meta("dflash.sample_from_anchor") != "false":
            self.first = 0


class Gemma4Assistant:
    """All drafts of a round stand at the last token's position, over the target's own cells."""

    def __init__(self, pointer: Any, n_layers: int) -> None:
        self.context, self.layers = Context(pointer, masked=True), [LAST_HIDDEN]
        self.row, self.n = np.zeros(self.context.n_embd), 0

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        self.row, self.n = rows[-1], pos + len(tokens)

    def propose(self, last: int, n: int) -> list[int]:
        drafts: list[int] = []
        token, row = last, self.row
        for _ in range(n):
            self.context.decode([token], self.n, [0], [row])
            token, row = self.context.greedy(0), self.context.hidden(0)
            drafts.append(token)
        return drafts


class DraftModel:
    """A model by itself: it reads the whole text anew for every draft."""

    def __init__(self, pointer: Any, n_layers: int) -> None:
        self.context, self.layers = Context(pointer), list[int]()
        self.text: list[int] = []

    def observe(self, pos: int, tokens: Sequence[int], rows: Any) -> None:
        self.text[pos:] = tokens

    def propose(self, last: int, n: int) -> list[int]:
        self.context.clear()
        text, drafts = [*self.text, last], list[int]()
        for pos, token in enumerate(text):
            self.context.decode([token], pos, [0])
        for _ in range(n):
            drafts.append(self.context.greedy(0))
            self.context.decode(drafts[-1:], len(text) + len(drafts) - 1, [0])
        return drafts
