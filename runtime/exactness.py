"""Which numbers of rows in a decode ("widths") have logits that are equal to the bit here: measured, remembered, and chosen from.

A backend may sum in another order when it decodes several rows at once, and another one again beyond some length. So the same
tokens are decoded at every width, at every place in a decode, below, across and above 256 cells, where llama.cpp's CPU backend
changes its path, and the bits of logits and of what goes into every product are compared. `load(exact=True)` decodes only at widths that agree, a lone row among them or not.
What is equal depends on shapes and types, backend, threads and settings, not on weights: those are the key under which it is
kept. Knows no rounds and no drafters; docs/LOSSLESS.md says what follows.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llama_sidecar.sidecars import GGUFHeader

from . import _native
from .cache_folder import CacheFolder
from .costs import MAX_AGE_S, TEXT, target_facts
from .errors import CacheError
from .library import llama
from .sampling import address
from .weights import free_context, make_target_context

if TYPE_CHECKING:
    from .llm import Model

MAX_WIDTH = 8  # rows
SHORT = 256  # cells: llama.cpp pads the KV cache's used part to as many, and chooses by its length
PLACES = (240, 254, 264)  # positions of decodes: of up to 8 rows below 256 cells, across them, and above
N_CTX = 512
N_PIECE = 256  # tokens a decode of the text before
N_PASSES = 8  # other tokens each; fewer where time runs out
PASSES_S = 0.1
SCHEMA = 1

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Exactness:
    """Groups of widths whose logits are equal to the bit, ascending; a width in no group does not even agree with itself.

    Args:
        short: in contexts of up to 256 cells.
        long: in contexts of any length: below, across and above 256 cells.
        on: what it was measured on, in a few words.

    >>> found = Exactness(short=((1, 2, 3, 4), (5,)), long=((1,), (2, 3, 4), (5,)), on="CPU")
    >>> found.widths(256), found.widths(8192)
    ((1, 2, 3, 4), (2, 3, 4))
    >>> str(found)
    'up to 256 cells: 1 2 3 4 | 5; beyond: 1 | 2 3 4 | 5 (CPU)'
    """

    short: Groups
    long: Groups
    on: str = ""

    def groups(self, n_ctx: int) -> Groups:
        """The groups that hold in a context of `n_ctx` cells."""
        return self.short if n_ctx <= SHORT else self.long

    def widths(self, n_ctx: int) -> tuple[int, ...]:
        """The widths to decode with so that all rows agree, plain ones too; none where a lone row agrees with no other width.

        With a lone row among them plain decoding costs nothing more; else the narrowest are taken.
        """
        groups = self.groups(n_ctx)
        best = [group for group in groups if group[0] == 1 and len(group) > 1]
        return min(best or [group for group in groups if group[0] > 1], default=(), key=lambda g: g[0])

    def __str__(self) -> str:
        short, long = (
            " | ".join(" ".join(map(str, g)) for g in groups) for groups in (self.short, self.long)
        )
        cells = short if short == long else f"up to {SHORT} cells: {short}; beyond: {long}"
        return f"{cells} ({self.on})" if self.on else cells

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {"schema": SCHEMA, "short": self.short, "long": self.long, "on": self.on}

    @classmethod
    def from_json(cls, data: Any) -> Exactness:
        """Raises ValueError for anything that `to_json` does not write."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r} is not {SCHEMA}")
            short, long = (
                tuple(tuple(map(int, group)) for group in data[name]) for name in ("short", "long")
            )
            widths = [*itertools.chain(*short, *long)]
            if not all(1 <= width <= MAX_WIDTH for width in widths) or not all([*short, *long]):
                raise ValueError(f"groups of widths {short}, {long}")
            return cls(short, long, str(data["on"]))
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"this is no exactness: {error!r}") from error


# Remembering


def exactness_for(model: Model) -> Exactness:
    """Which widths agree for this model here: remembered, or measured now (a second or two) and remembered.

    Raises:
        LoadError: llama.cpp cannot make the contexts.

    Example:
        >>> exactness_for(model).widths(8192)                                    # doctest: +SKIP
        (1, 2, 3, 4, 5, 6, 7, 8)
    """
    found = remembered(model)
    if found is None:
        found = measure(model)
        with suppress(CacheError):  # then it is measured each time
            _remember(model, found)
    return found


def remembered(model: Model) -> Exactness | None:
    """What is kept for this model and these settings; None where it is to be measured."""
    with suppress(CacheError):
        return _read(exactness_key(model))
    return None


def recall(header: GGUFHeader) -> list[Exactness]:
    """All that is kept of a main file on this machine, one for each of the settings. Measures nothing, loads nothing."""
    with suppress(CacheError, OSError):
        folder = CacheFolder().root / "exactness"
        names = sorted(path.name for path in folder.glob(f"{_trunk(header)}-*.json"))
        return [found for name in names if (found := _read(name)) is not None]
    return []


def exactness_key(model: Model) -> str:
    """What the bits of a model's decodes depend on, but for its weights' values; the name of its file in the cache folder."""
    facts = hashlib.sha256(json.dumps(target_facts(model), sort_keys=True).encode()).hexdigest()
    return f"{_trunk(model.main.header)}-{facts[:32]}.json"


def _trunk(header: GGUFHeader) -> str:
    """Stands for the machine, the library and the file's shapes and types."""
    from .costs import shapes
    from .provenance import library, machine, native  # it imports llm.py, which imports this

    facts = [machine(), library(), native(), shapes(header)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(name: str) -> Exactness | None:
    """None where there is no such file, it is too old or damaged. Raises CacheError without a cache folder."""
    folder = CacheFolder()
    with suppress(OSError, ValueError):
        if time.time() - folder.path("exactness", name).stat().st_mtime < MAX_AGE_S:
            return Exactness.from_json(folder.read_json("exactness", name))
    return None


def _remember(model: Model, found: Exactness) -> None:
    folder, name = CacheFolder(), exactness_key(model)
    folder.write("exactness", name, json.dumps(found.to_json(), indent=2).encode())
    folder.trim(keep=folder.path("exactness", name))


# Measuring


def measure(model: Model) -> Exactness:
    """Decodes the same tokens at every width and place, and sees whose arithmetic is equal to the bit.

    Compared are the logits and what goes into every product before them: a product rounds its input so coarsely that logits show
    one difference in hundreds. Each place has one pass, and more with other tokens while that is quick.

    Raises:
        LoadError: llama.cpp cannot make the contexts.
        LibraryError: this llama.cpp does not show what it computes.

    Example:
        >>> str(measure(model))                                                  # doctest: +SKIP
        'up to 256 cells: 1 2 3 4 5 6 7 8; beyond: 1 | 2 3 4 5 6 7 8 (CPU, 2 threads, flash attention auto, ...)'
    """
    from .provenance import backend

    settings, sums = model.settings, _Sums()
    text = list(itertools.islice(itertools.cycle(model.vocab.tokenize(TEXT)), PLACES[-1] + 1))
    with _Bed(model, n_slots=MAX_WIDTH - 1) as wide, _Bed(model, n_slots=0) as plain:
        for place in PLACES:
            wide.go_on(text[:place])
            state, _ = wide.native.save()
            started = time.perf_counter()
            for i in range(N_PASSES):
                rows = text[(MAX_WIDTH + 1) * i :][: MAX_WIDTH + 1]
                # Looked at a product at a time, and at the last place also all at once, as any other decode is computed.
                for watched, width in itertools.product(
                    (True, False)[: 1 + (place == PLACES[-1])], range(MAX_WIDTH + 1)
                ):
                    bed, width = (wide, width) if width else (plain, 1)
                    bed.native.restore(state, b"", [*text[:place], rows[0]])
                    # Decoded again behind its own first row, every token is one place further up.
                    moves = (place == PLACES[0] and bed.native.can_rewind) or width == 1
                    for first in range(1 + moves):
                        bed.native.rewind(place + first)
                        for row, digests in enumerate(
                            bed.decode(rows[first : first + width], watched), first
                        ):
                            sums.add(width, (place, i, row), digests)
                if time.perf_counter() - started > PASSES_S:
                    break
            wide.native.restore(state, b"", text[: place + 1])
    on = [
        f"{backend(model)}, {settings.n_threads} thread{'s' * (settings.n_threads > 1)}",
        f"flash attention {settings.flash_attn}",
    ]
    on += [
        f"KV {settings.cache_type_k}/{settings.cache_type_v}",
        f"{'our' if model.kernels.ours else 'stock'} kernels",
    ]
    return Exactness(sums.groups(PLACES[:1]), sums.groups(PLACES), ", ".join(on))


class _Bed:
    """A context to measure in, without a drafter: with `n_slots` rollback slots, or as plain sessions have it."""

    def __init__(self, model: Model, *, n_slots: int) -> None:
        self._model = model
        self._inputs = _native.ProductInputs(llama()._lib._handle)
        self._context = make_target_context(
            model.weights,
            replace(model.settings, batch=N_PIECE),
            n_ctx=N_CTX,
            depth=n_slots,
            n_slots=n_slots,
            watched_by=self._inputs,
        )
        self.native = _native.Session(address(self._context))

    def __enter__(self) -> _Bed:
        return self

    def __exit__(self, *_: object) -> None:
        _native.release_team()
        del self.native  # before its context
        free_context(self._context)

    def go_on(self, text: Sequence[int]) -> None:
        """Decodes what is new of the text."""
        for start in range(self.native.n_past, len(text), N_PIECE):
            with self._model.turns:
                self.native.feed(text[start : start + N_PIECE], False)

    def decode(self, rows: Sequence[int], watched: bool) -> list[dict[str, int]]:
        """Of each row: by name the digest of what goes into each product, if `watched`, and of the logits."""
        with self._model.turns:
            if watched:
                self._inputs.start(len(rows))
            self.native.decode(list(rows))
            found = [{"logits": self._logits(row)} for row in range(len(rows))]
            times = collections.Counter[str]()  # weights may be used more than once
            for name, digests in self._inputs.take():
                times[name] += 1
                for row, digest in zip(found, digests, strict=True):
                    row[f"{name} {times[name]}"] = digest
        return found

    def _logits(self, row: int) -> int:
        pointer = llama().llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(pointer, (self._model.vocab.n_tokens,))
        return int.from_bytes(hashlib.blake2b(logits.data, digest_size=8).digest(), "little")


class _Sums:
    """Digests by width and (place, pass, row); which widths contradict themselves or each other.

    >>> sums = _Sums()
    >>> for width, digest in [(1, 5), (2, 5), (3, 6), (4, 6), (4, 7)]:
    ...     sums.add(width, (240, 0, 0), {"logits": digest})
    >>> sums.groups([240])
    ((1, 2), (3,))
    """

    def __init__(self) -> None:
        self._found: dict[int, dict[tuple[int, int, int, str], set[int]]] = {}

    def add(self, width: int, key: tuple[int, int, int], digests: Mapping[str, int]) -> None:
        found = self._found.setdefault(width, {})
        for name, digest in digests.items():
            found.setdefault((*key, name), set()).add(digest)

    def groups(self, places: Collection[int]) -> Groups:
        """Of these places: the widths that agree with themselves and each other wherever they have a row in common."""
        groups: list[list[int]] = []
        for width in sorted(self._found):
            if self._agree([width], places):
                group = next((g for g in groups if self._agree([*g, width], places)), None)
                groups.append([width]) if group is None else group.append(width)
        return tuple(tuple(group) for group in groups)

    def _agree(self, widths: Sequence[int], places: Collection[int]) -> bool:
        joined: dict[tuple[int, int, int, str], set[int]] = {}
        for width in widths:
            for key, digests in self._found[width].items():
                if key[0] in places:
                    joined.setdefault(key, set()).update(digests)
        return all(len(digests) == 1 for digests in joined.values())
