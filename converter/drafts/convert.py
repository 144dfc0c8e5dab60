"""The conversion of a stand-alone drafter, top to bottom: its target, the plan, the file, the check."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.converter.config import Config
from llama_sidecar.converter.drafts import Draft
from llama_sidecar.converter.drafts.target import open_target
from llama_sidecar.converter.errors import NoTarget, TensorMismatch, UnsupportedModel
from llama_sidecar.converter.families import Layout
from llama_sidecar.converter.general import add_general_keys, file_name
from llama_sidecar.converter.plan import Planned, account, plan
from llama_sidecar.converter.quantize import check_libggml
from llama_sidecar.converter.recipe import head_warnings, model_of, sidecar_recipe
from llama_sidecar.converter.shards import Tensor
from llama_sidecar.converter.writer import (
    GGUFFile,
    Progress,
    add_keys,
    check_targets,
    new_header,
    write_files,
)
from llama_sidecar.sidecars import KINDS, keys, open_sidecar

D2T = "d2t"
INTEGERS = {"I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True)
class Converted:
    """What a conversion of a drafter wrote."""

    path: Path
    n_bytes: int
    n_tensors: int
    type_name: str
    warnings: list[str]


@dataclass(frozen=True)
class _Ids:
    """`d2t`: for each row of the drafter's output the target's token id (n,)."""

    ids: npt.NDArray[np.int64]
    name: str = keys.D2T
    type: GGMLType = GGMLType.I64
    n_cols: int = 1
    row_bytes: int = 8

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.ids),)

    @property
    def n_rows(self) -> int:
        return len(self.ids)

    @property
    def n_bytes(self) -> int:
        return 8 * len(self.ids)

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.ids[start:stop].astype("<i8").view(np.uint8).reshape(-1, 8)


def convert_draft(
    opened: Checkpoint,
    draft: Draft,
    target_path: str | Path | None,
    out: Path,
    sidecar_type: str | None,
    *,
    name: str | None = None,
    source: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Converts an opened drafter for its target; `source` as GGUFFile has it. Raises NoTarget without one, and what a conversion raises."""
    if target_path is None:
        raise NoTarget(
            f"{opened.folder} is {KINDS[draft.KIND].title} ({opened.config.architecture}), which drafts for another model: "
            f"give that with --target, as a checkpoint or a main GGUF"
        )
    for file, content in draft.REFUSED.items():
        if os.path.exists(opened.folder / file):
            raise UnsupportedModel(f"{opened.folder / file} holds {content}, which is not converted here")
    target = open_target(target_path)
    config = draft.prepared(opened.config)
    tensors = _canonical(opened, draft, config)
    ids = tensors.pop(D2T, None)
    own_keys = draft.keys(config, tensors.keys(), target)
    placements, warnings = draft.layout(config, tensors.keys(), target)
    account(Layout([], [], placements, 0), tensors)

    file_keys = dict(target.vocabulary) | own_keys | dict(target.fingerprints)
    recipe = sidecar_recipe(sidecar_type)
    types = recipe.types([(p.name, p.shape) for p in placements], model_of(draft.ARCH, file_keys))
    planned: list[Planned | _Ids] = [
        *plan(placements, tensors, types),
        *_ids(config, draft, ids, target.n_vocab),
    ]
    path = out / file_name(name or target.name, recipe.name, KINDS[draft.KIND].prefix)
    check_targets([path], force)
    check_libggml(t.type for t in planned if t.type != GGMLType.I64)
    header = new_header(draft.ARCH, planned)
    add_general_keys(header, opened, name, recipe.file_type)
    add_keys(header, file_keys)

    def check(written: Mapping[str, Path]) -> None:
        open_sidecar(written["sidecar"])
        check_targets([path], force)

    n_bytes = write_files(
        {"sidecar": GGUFFile(path, header, planned, source)}, check, progress, opened.place.reading
    )["sidecar"]
    warnings += head_warnings({t.name: (t.type, t.n_rows * t.n_cols) for t in planned})
    return Converted(path, n_bytes, len(planned), recipe.name, opened.warnings + warnings)


def _canonical(opened: Checkpoint, draft: Draft, config: Config) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in opened.tensors.items():
        canonical = draft.canonical(name, config)
        if canonical in found:
            raise TensorMismatch(f"{name} and {found[canonical].name} are the same tensor")
        if canonical:
            found[canonical] = tensor
    return found


def _ids(config: Config, draft: Draft, stored: Tensor | None, n_vocab: int) -> list[_Ids]:
    """The absolute ids: a checkpoint stores each less its row's number. Raises TensorMismatch."""
    n = draft.d2t(config)
    if n is None:
        return []  # it drafts every token; some exports store a table of zeros all the same
    if stored is None or stored.dtype not in INTEGERS or stored.n_rows * stored.n_cols != n:
        found = f"{stored.dtype} {list(stored.shape)}" if stored else "missing"
        raise TensorMismatch(
            f"{D2T} is {found}; {n} integers are expected, one for each row of the drafter's output"
        )
    raw = stored.raw_rows(0, stored.n_rows)
    ids = raw.reshape(-1).view(INTEGERS[stored.dtype]).astype(np.int64) + np.arange(n)
    if ids.min() < 0 or ids.max() >= n_vocab or np.unique(ids).size != n:
        raise TensorMismatch(
            f"{D2T} gives token ids from {ids.min()} to {ids.max()}, {n - np.unique(ids).size} of them twice; "
            f"different ones below {n_vocab} are expected"
        )
    return [_Ids(ids)]
