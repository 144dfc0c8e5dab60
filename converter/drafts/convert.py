"""The conversion of a drafter that is a model of its own, top to bottom: its target, the plan, the file, the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.drafts import Draft
from llama_sidecar.converter.drafts.target import Target, open_target
from llama_sidecar.converter.errors import NoTarget, TensorMismatch, UnsupportedModel
from llama_sidecar.converter.families import Layout
from llama_sidecar.converter.file_plan import FilePlan, file_header
from llama_sidecar.converter.general import file_name
from llama_sidecar.converter.kept import keep
from llama_sidecar.converter.plan import account, plan
from llama_sidecar.converter.quantize import check_libggml
from llama_sidecar.converter.recipe import head_warnings, model_of, sidecar_recipe
from llama_sidecar.converter.shards import Tensor
from llama_sidecar.converter.writer import GGUFFile, Progress, check_targets, write_files
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
class Ids:
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


@dataclass(frozen=True)
class Opened:
    """A drafter's own keys, and its tensors by canonical name with where they go; `ids` says which tokens its rows are for."""

    draft: Draft
    target: Target
    keys: dict[str, Key]
    layout: Layout
    tensors: dict[str, Tensor]
    ids: list[Ids]

    @property
    def as_head(self) -> Layout:
        """The layout with all of its tensors in the sidecar, as a head's are."""
        return replace(self.layout, trunk=[], head=self.layout.trunk)


def open_draft(opened: Checkpoint, draft: Draft, target: Target) -> Opened:
    """What a checkpoint's drafter is made of. Raises UnsupportedModel, BadConfig and TensorMismatch; misses no tensors yet."""
    for file, content in draft.REFUSED.items():
        if opened.place.has(file):
            raise UnsupportedModel(f"{opened.place}: {file} holds {content}, which is not converted here")
    config = draft.prepared(opened.config)
    tensors = _canonical(opened, draft, config)
    ids = _ids(config, draft, tensors.pop(D2T, None), target.n_vocab)
    own_keys = draft.keys(config, tensors.keys(), target)
    placements, warnings = draft.layout(config, tensors.keys(), target)
    return Opened(draft, target, own_keys, Layout([], placements, [], 0, warnings), tensors, ids)


def plan_draft(one: Opened, out: Path, sidecar_type: str | None, name: str | None) -> FilePlan:
    """The sidecar to write, called after its target unless `name` says otherwise. Raises UnknownType."""
    file_keys = dict(one.target.vocabulary) | one.keys | dict(one.target.fingerprints)
    recipe, placements = sidecar_recipe(sidecar_type, may_keep=True), one.layout.trunk
    types = recipe.types([(p.name, p.shape) for p in placements], model_of(one.draft.ARCH, file_keys))
    weights = keep(plan(placements, one.tensors, types), recipe, one.draft.ARCH)
    path = out / file_name(name or one.target.name, recipe.name, KINDS[one.draft.KIND].prefix)
    return FilePlan(one.draft.ARCH, path, recipe, file_keys, weights, one.ids)


def target_for(opened: Checkpoint, draft: Draft, target: str | Path | None) -> Target:
    """The model that a drafter's own checkpoint is converted for. Raises NoTarget without one."""
    if target is None:
        raise NoTarget(
            f"{opened.place} is {KINDS[draft.KIND].title} ({opened.config.architecture}), which drafts for another model: "
            f"give that with --target, as a checkpoint or a main GGUF"
        )
    return open_target(target)


def convert_draft(
    opened: Checkpoint,
    draft: Draft,
    target: str | Path | None,
    out: Path,
    sidecar_type: str | None,
    *,
    name: str | None = None,
    source: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Converts an opened drafter for its target; `source` as GGUFFile has it. Raises NoTarget without one, and what a conversion raises."""
    one = open_draft(opened, draft, target_for(opened, draft, target))
    account(one.layout, one.tensors)
    file = plan_draft(one, out, sidecar_type, name)
    check_targets([file.path], force)
    check_libggml(t.type for t in file.weights)

    def check(written: Mapping[str, Path]) -> None:
        open_sidecar(written["sidecar"])
        check_targets([file.path], force)

    whole = GGUFFile(file.path, file_header(file, opened, {}, name), file.tensors, source)
    n_bytes = write_files({"sidecar": whole}, check, progress, opened.place.reading)["sidecar"]
    said = opened.warnings + one.layout.warnings + draft_warnings(file)
    return Converted(file.path, n_bytes, len(file.tensors), file.recipe.name, said)


def draft_warnings(file: FilePlan) -> list[str]:
    """What the types of its weights may cost."""
    return head_warnings({t.name: (t.type, t.n_rows * t.n_cols) for t in file.weights})


def _canonical(opened: Checkpoint, draft: Draft, config: Config) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in opened.tensors.items():
        canonical = draft.canonical(name, config)
        if canonical in found:
            raise TensorMismatch(f"{name} and {found[canonical].name} are the same tensor")
        if canonical:
            found[canonical] = tensor
    return found


def _ids(config: Config, draft: Draft, stored: Tensor | None, n_vocab: int) -> list[Ids]:
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
    return [Ids(ids)]
