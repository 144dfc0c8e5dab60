"""Is the speculative text the plain one, and where it is not, was it a near-tie? For `bench`, `verify` and the checks on new backends.

A decode of several rows may round otherwise than one of a single row, so texts may part where the two best tokens are all
but equal. Anything else is a fault. How much the widths differ is measured here, without any rewind; knows no verdicts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _native
from .library import llama
from .llm import Model
from .sampling import address
from .session import N_PIECE, Scripted, Session
from .weights import free_context, make_target_context

Row = npt.NDArray[np.float32]  # logits (n_vocab,)
TOP_K = 40  # candidates of a draw where draws are compared


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
        plain = session.generate(prompt, max_tokens=n, temperature=0, repeat_penalty=1, ignore_eos=True)
        plain.read()
    script = [*prompt, *plain.tokens]
    for depth in depths:
        drafters: dict[str, Scripted | None] = {f"mix({j})": Scripted(script, j) for j in range(depth + 1)}
        if model.kind is not None:
            drafters[model.kind] = None
        for name, scripted in drafters.items():
            with model.session(depth=depth, scripted=scripted) as session:
                text = session.generate(
                    prompt, max_tokens=n, temperature=0, repeat_penalty=1, ignore_eos=True
                )
                text.read()
            at = first_divergence(plain.tokens, text.tokens)
            margin = None if at is None else top_two_margin(model, script[: len(prompt) + at])
            yield Check(name, depth, len(text.tokens), text.stats.mean_accepted_length, at, margin)


# Logits themselves


def logits(session: Session, row: int | None = None) -> Row:
    """Logits (n_vocab,) of a row of the last decode of the session's first context, or behind a prompt; a view that the next
    one overwrites."""
    row = session._native.last_row if row is None else row
    pointer = llama().llama_get_logits_ith(session._contexts[0], row)
    return np.ctypeslib.as_array(pointer, (session.model.vocab.n_tokens,))


def feed(session: Session, tokens: Sequence[int], *, one_by_one: bool = False) -> None:
    """Decodes `tokens` behind what the session holds, in a prompt's pieces or each alone; the last has logits. It drafts nothing."""
    piece = 1 if one_by_one else session._n_piece
    for start in range(0, len(tokens), piece):
        with session.model.turns:
            session._native.feed(list(tokens[start : start + piece]), start + piece >= len(tokens))


@dataclass
class Rounding:
    """How far the logits of decodes of 2 .. depth+1 rows are from those of one row, along texts and without any rewind.

    `difference` is the largest of any logit at any of `n_rows` positions, `spread` the mean standard deviation of a position's
    logits beside it. `flips` is how many draws, of all positions together, are expected to fall otherwise with the same
    random numbers. `margins` are the plain logits of the text's tokens less those of rivals at the same (position, rival).
    """

    n_rows: int = 0
    difference: float = 0.0
    spread: float = 0.0
    flips: float = 0.0
    margins: dict[tuple[int, int], float] = field(default_factory=dict)

    def include(self, other: Rounding) -> None:
        """Adds what was measured along another text; margins stay with their own text."""
        n_rows = self.n_rows + other.n_rows
        if n_rows:
            self.spread = (self.spread * self.n_rows + other.spread * other.n_rows) / n_rows
        self.n_rows = n_rows
        self.difference = max(self.difference, other.difference)
        self.flips += other.flips


def compare_widths(
    model: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    depth: int,
    temperature: float = 1.0,
    rivals: Mapping[int, Collection[int]] | None = None,
) -> Rounding:
    """Decodes `text` behind `prompt` one by one and in blocks of 2, 3 .. depth+1 rows in turns, and compares every row.

    The blocks hold the text's own tokens, and no row is ever taken back: what differs is rounding and nothing else.

    Args:
        prompt, text: token ids.
        depth: the widest block less one.
        temperature: of the draws whose `flips` are counted.
        rivals: at positions of the text, token ids whose distance to the text's own is wanted.

    Raises:
        LoadError: llama.cpp cannot make the contexts.

    Example:
        >>> compare_widths(model, prompt, plain.tokens, depth=3).difference          # doctest: +SKIP
        0.0
    """
    script = [*prompt, *text]
    chooser = _native.forced_chooser(list(text))  # every draft of the script stands
    found, spreads = Rounding(), list[float]()
    with (
        model.session(spec_type="none") as plain,
        model.session(depth=depth, scripted=Scripted(script, depth)) as wide,
    ):
        feed(plain, prompt)
        feed(wide, prompt)
        wide._native.first(chooser)
        n_drafts, rows = itertools.cycle(range(1, depth + 1)), list[Row]()
        for pos, token in enumerate(text):
            one = logits(plain)
            for rival in (rivals or {}).get(pos, ()):
                found.margins[pos, rival] = float(one[token] - one[rival])
            feed(plain, [token])
            if not rows:
                with model.turns:
                    n_rows = 1 + wide._native.step(chooser, next(n_drafts), True).n_drafted
                rows = [logits(wide, i) for i in range(n_rows)]
            one, several = logits(plain), rows.pop(0)
            found.n_rows += 1
            found.difference = max(found.difference, float(np.max(np.abs(one - several))))
            found.flips += flip_probability(one, several, temperature)
            spreads.append(float(np.std(one)))
    _native.release_team()
    found.spread = float(np.mean(spreads)) if spreads else 0.0
    return found


def flip_probability(a: Row, b: Row, temperature: float) -> float:
    """How probably one random number draws different tokens from two rows of logits, among the TOP_K likeliest of each.

    A draw walks the candidates from the likeliest on (llama.cpp's `dist` sampler after `top_k`): the tokens are the same
    where the intervals of their cumulated probabilities overlap.

    >>> round(flip_probability(np.zeros(2, np.float32), np.log(np.array([3, 1], np.float32)), 1.0), 6)
    0.25
    """
    if np.array_equal(a, b):
        return 0.0
    first, second = _intervals(a, temperature), _intervals(b, temperature)
    same = (
        min(first[token][1], second[token][1]) - max(first[token][0], second[token][0])
        for token in first.keys() & second.keys()
    )
    return max(0.0, float(1.0 - sum(max(0.0, width) for width in same)))


def _intervals(row: Row, temperature: float) -> dict[int, tuple[float, float]]:
    ids = (
        np.argsort(-row, kind="stable")[:TOP_K] if len(row) <= TOP_K else np.argpartition(-row, TOP_K)[:TOP_K]
    )
    ids = ids[np.argsort(-row[ids], kind="stable")]
    weights = np.exp((row[ids].astype(np.float64) - float(row[ids[0]])) / temperature)
    ends = np.cumsum(weights / weights.sum())
    return {
        int(token): (float(start), float(end))
        for token, start, end in zip(ids, [0.0, *ends], ends, strict=False)
    }
