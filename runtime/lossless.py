"""Is the speculative text the plain one, and where it is not, was it a near-tie? For `bench` and the checks on new backends.

A decode of several rows may round otherwise than one of a single row, so texts may part where the two best tokens are all
but equal. Anything else is a fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from . import _native
from .library import llama
from .llm import Model
from .sampling import address
from .session import N_PIECE, Scripted
from .weights import free_context, make_target_context


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts' token ids first differ (one that ends early differs there), or None.

    >>> first_divergence([1, 2, 3], [1, 2, 4]), first_divergence([1], [1, 2]), first_divergence([1], [1])
    (2, 1, None)
    """
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def top_two_margin(model: Model, tokens: Sequence[int]) -> float:
    """How far apart the target's two largest logits are after `tokens`, decoded plainly."""
    piece = min(N_PIECE, model.settings.batch, model.n_ctx)
    with contextlib.ExitStack() as undo:
        context = make_target_context(model.weights, model.settings, n_ctx=model.n_ctx, depth=0, n_slots=0)
        undo.callback(free_context, context)
        target = _native.Session(address(context))
        with model.turns:
            for start in range(0, len(tokens), piece):
                target.feed(list(tokens[start : start + piece]), start + piece >= len(tokens))
            row = np.ctypeslib.as_array(llama().llama_get_logits_ith(context, -1), (model.vocab.n_tokens,))
            second, first = np.partition(row, -2)[-2:]
        del target  # before its context
    return float(first - second)


@dataclass(frozen=True)
class Check:
    """One speculative text against the plain one: `divergence` is None where their ids are equal, else the position in
    the text, and `margin` how near a tie that was."""

    drafter: str
    depth: int
    n_tokens: int
    mean_accepted_length: float
    divergence: int | None
    margin: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(model: Model, prompt: Sequence[int], *, depths: Iterable[int], n: int) -> Iterator[Check]:
    """Writes `n` tokens greedily with every scripted drafter (right for the first j of a draft, j = 0 .. depth) and with the
    model's own, at every depth, and compares the token ids with the plain text's."""
    with model.session(spec_type="none") as session:
        plain = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
        plain.read()
    script = [*prompt, *plain.tokens]
    for depth in depths:
        drafters: dict[str, Scripted | None] = {f"mix({j})": Scripted(script, j) for j in range(depth + 1)}
        if model.kind is not None:
            drafters[model.kind] = None
        for name, scripted in drafters.items():
            with model.session(depth=depth, scripted=scripted) as session:
                text = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
                text.read()
            at = first_divergence(plain.tokens, text.tokens)
            margin = None if at is None else top_two_margin(model, script[: len(prompt) + at])
            yield Check(name, depth, len(text.tokens), text.stats.mean_accepted_length, at, margin)
