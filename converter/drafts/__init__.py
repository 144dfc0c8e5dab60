"""Stand-alone drafters: models of their own that are converted for a main model, ONE file each, found by scanning.

Unlike a family's head (families/) such a drafter has no tokenizer, and some of its sizes follow from the main model. It is a
checkpoint of its own, converted with `--target`, or it lies in the main model's. A module holds

    KIND            the kind of the sidecar it becomes (sidecars/kinds/)
    ARCH            its GGUF architecture
    CLASSES         the Hugging Face classes it converts
    INSIDE          class of a main model that may hold it -> what says so in config.json, and how its tensors' names begin
    TINY            name of a variant -> (config.json, optional tensors it has): random checkpoints for the tests
    prepared(config)              the configuration without what differs between exports
    canonical(name, config)       a tensor's name without what differs between exports; "" for one that is dropped
    keys(config, names, target)   the GGUF keys, the vocabulary's apart
    layout(config, names, target) what becomes of the checkpoint's tensors: placements, and warnings
    REFUSED                       name of a file that it may come with and that cannot be converted -> what is in it
    d2t(config)                   how many tokens it drafts where they are some of the main model's (`d2t` says which), else None

A module whose name begins with an underscore holds what several share. This file knows no architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from functools import cache
from typing import Protocol, cast

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.families import Placement


class Draft(Protocol):
    """What a module of this package offers; the package's docstring explains each."""

    KIND: str
    ARCH: str
    CLASSES: tuple[str, ...]
    INSIDE: dict[str, tuple[str, str]]
    REFUSED: dict[str, str]
    TINY: dict[str, tuple[dict[str, object], frozenset[str]]]

    def prepared(self, config: Config) -> Config: ...
    def canonical(self, name: str, config: Config) -> str: ...
    def keys(self, config: Config, names: Collection[str], target: Target) -> dict[str, Key]: ...
    def layout(
        self, config: Config, names: Collection[str], target: Target
    ) -> tuple[list[Placement], list[str]]: ...
    def d2t(self, config: Config) -> int | None: ...


@cache
def drafts() -> dict[str, Draft]:
    """Every kind of stand-alone drafter by its module's name, in alphabetical order."""
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_") and module.name not in ("convert", "target")
    )
    return {name: cast(Draft, importlib.import_module(f"{__name__}.{name}")) for name in names}


def draft_of(config: Config) -> Draft | None:
    """The module that converts the configuration's architecture; None where it is no stand-alone drafter's."""
    for draft in drafts().values():
        if config.architecture in draft.CLASSES:
            return draft
    return None


def draft_inside(config: Config) -> tuple[Draft, str] | None:
    """The drafter that lies in a main model's checkpoint, and how its tensors' names begin; None where there is none."""
    for draft in drafts().values():
        key, prefix = draft.INSIDE.get(config.architecture, (None, ""))
        if key and config.get(key) is not None:
            return draft, prefix
    return None
