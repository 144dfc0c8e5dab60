"""Families: how one kind of checkpoint is spelled, ONE file each, found by scanning this package.

A family's module holds

    ARCH            the GGUF architecture; several families may share one
    CLASSES         the Hugging Face classes it converts
    DROPPED         a regular expression for tensors that are left out on purpose (vision towers)
    PREFIX          what stands before a trunk tensor's canonical name in published checkpoints
    VOCABULARY      what its vocabulary has of its own: a Vocabulary
    TINY            name of a variant -> (config.json, optional tensors it has): random checkpoints for the tests
    canonical(name) the name without the prefixes that differ between classes of one family
    keys(config, n_head_layers)   the GGUF keys under the architecture's prefix, for a file with that many head blocks
    layout(config, names)         what becomes of the checkpoint's tensors: a Layout

A module whose name begins with an underscore holds what several families share. Here are the words those modules speak
in. This file knows no architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.errors import UnsupportedModel

F32 = npt.NDArray[np.float32]
Transform = Callable[[F32], F32]  # (n_rows, n_cols) -> (n_rows, n_cols), any rows of a tensor at a time


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor by its canonical name, with the shape that the configuration calls for."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """One GGUF tensor: `sources` stacked along their rows, then `rows` of that stack (None: all), each transformed.

    `shape` is in torch's order (slowest first). A source's rows are all its dimensions but the last; a vector has rows
    of one value. `transposed`: each matrix of the stack (its rows as many as the tensor's columns) is written with rows
    and columns exchanged. `values`: the tensor is computed from the configuration, and there are no sources. `beside`: each of
    `sources` is a part of every row, rather than some of the rows. `below`: it holds integers from 0 on, below this one.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    rows: tuple[range, ...] | None = None
    transform: Transform | None = None
    transposed: bool = False
    values: tuple[float, ...] | None = None
    beside: bool = False
    below: int | None = None


@dataclass(frozen=True)
class Vocabulary:
    """`pre` is llama.cpp's name for the family's pre-tokenizer, where several names stand for one pattern.

    `special` gives tokens a role by their texts: GGUF's name of the role ("bos", "eot") -> the text. Of the classes `suppressing`,
    generation_config.json says which tokens are never to be written.
    """

    pre: str
    special: Mapping[str, str] = field(default_factory=dict)
    suppressing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Where every tensor goes. `shared` go to both files, `trunk` to the main file, `head` to the sidecar.

    `head_names` says what the head's tensors are called in a checkpoint, for whoever misses them.
    """

    shared: list[Placement]
    trunk: list[Placement]
    head: list[Placement]
    n_head_layers: int
    warnings: list[str] = field(default_factory=list)
    head_names: str = "mtp.*"


class Family(Protocol):
    """What a module of this package offers; the package's docstring explains each."""

    ARCH: str
    CLASSES: tuple[str, ...]
    DROPPED: re.Pattern[str]
    PREFIX: str
    VOCABULARY: Vocabulary
    TINY: dict[str, tuple[dict[str, object], frozenset[str]]]

    def canonical(self, name: str) -> str: ...
    def keys(self, config: Config, n_head_layers: int) -> dict[str, Key]: ...
    def layout(self, config: Config, names: Collection[str]) -> Layout: ...


def place(
    name: str,
    source: str,
    *shape: int,
    rows: tuple[range, ...] | None = None,
    transform: Transform | None = None,
    source_shape: tuple[int, ...] | None = None,
    transposed: bool = False,
) -> Placement:
    """The GGUF tensor `name` of `shape` (slowest first) from one checkpoint tensor, of the same shape unless given."""
    return Placement(name, shape, (Source(source, source_shape or shape),), rows, transform, transposed)


@cache
def families() -> dict[str, Family]:
    """Every family by its module's name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {name: cast(Family, importlib.import_module(f"{__name__}.{name}")) for name in names}


def family_of(config: Config) -> Family:
    """The family that converts the configuration's architecture. Raises UnsupportedModel, listing what is known."""
    for family in families().values():
        if config.architecture in family.CLASSES:
            return family
    known = ", ".join(name for family in families().values() for name in family.CLASSES)
    raise UnsupportedModel(
        f"config.json says the architecture is {config.architecture}; expected one of {known}"
    )
