"""Families: how one kind of checkpoint is spelled, ONE file each, found by scanning this package.

A family's module holds

    ARCH            the GGUF architecture, which is also the module's name
    CLASSES         the Hugging Face classes it converts
    DROPPED         a regular expression for tensors that are left out on purpose (vision towers)
    TINY            name of a variant -> (config.json, optional tensors it has): random checkpoints for the tests
    canonical(name) the name without the prefixes that differ between classes of one family
    keys(config, n_head_layers)   the GGUF keys under the architecture's prefix, for a file with that many head blocks
    layout(config, names)         what becomes of the checkpoint's tensors: a Layout

Here are the words those modules speak in. This file knows no architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection
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
    of one value.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    rows: tuple[range, ...] | None = None
    transform: Transform | None = None


@dataclass(frozen=True)
class Layout:
    """Where every tensor goes. `shared` go to both files, `trunk` to the main file, `head` to the sidecar."""

    shared: list[Placement]
    trunk: list[Placement]
    head: list[Placement]
    n_head_layers: int
    warnings: list[str] = field(default_factory=list)


class Family(Protocol):
    """What a module of this package offers; the package's docstring explains each."""

    ARCH: str
    CLASSES: tuple[str, ...]
    DROPPED: re.Pattern[str]
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
) -> Placement:
    """The GGUF tensor `name` of `shape` (slowest first) from one checkpoint tensor, of the same shape unless given."""
    return Placement(name, shape, (Source(source, source_shape or shape),), rows, transform)


@cache
def families() -> dict[str, Family]:
    """Every family by its architecture, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.ARCH: cast(Family, module) for module in modules}


def family_of(config: Config) -> Family:
    """The family that converts the configuration's architecture. Raises UnsupportedModel, listing what is known."""
    for family in families().values():
        if config.architecture in family.CLASSES:
            return family
    known = ", ".join(name for family in families().values() for name in family.CLASSES)
    raise UnsupportedModel(
        f"config.json says the architecture is {config.architecture}; expected one of {known}"
    )
