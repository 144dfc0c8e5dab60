"""A file to be, from its plan to its header. Knows no family, and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.converter.config import Key
from llama_sidecar.converter.general import add_general_keys
from llama_sidecar.converter.plan import Planned
from llama_sidecar.converter.recipe import Recipe
from llama_sidecar.converter.writer import Tensor, add_keys, new_header


@dataclass(frozen=True)
class FilePlan:
    """A file to be: its architecture, where, in which types, with which keys of its own, and its tensors in order.

    `ids` are tensors that are no weights: the tokens that a drafter's rows stand for.
    """

    arch: str
    path: Path
    recipe: Recipe
    keys: dict[str, Key]
    weights: list[Planned]
    ids: Sequence[Tensor] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.weights, *self.ids]


def file_header(
    file: FilePlan, checkpoint: Checkpoint, common: Mapping[str, Key], name: str | None
) -> gguf.GGUFWriter:
    """A file's header, `common` being the keys that it shares with the other file."""
    header = new_header(file.arch, file.tensors)
    add_general_keys(header, checkpoint, name, file.recipe.file_type)
    add_keys(header, {**file.keys, **common})
    return header
