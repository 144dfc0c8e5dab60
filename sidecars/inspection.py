"""What one file is and what beside it belongs to it, as plain values for `llama-sidecar inspect`. Prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_sidecar.sidecars import keys
from llama_sidecar.sidecars.discover import CHOSEN, Candidate, explain, main_paths, survey
from llama_sidecar.sidecars.errors import LlamaSidecarError, NotAMain, NotAModel, PairMismatch
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.memory import Contents, Memory, pair_memory
from llama_sidecar.sidecars.pair import SAME_FAMILY, SAME_TRUNK, UNVERIFIED, VERIFIED, check_pair
from llama_sidecar.sidecars.shards import read_model
from llama_sidecar.sidecars.sidecar import (
    MainFile,
    Sidecar,
    head_fingerprints,
    identify,
    open_main,
    open_sidecar,
    own_fingerprint,
)

N_CTX = 8192  # tokens that memory is told for, where the model has as many


@dataclass(frozen=True)
class TypeUse:
    """How many tensors, elements and bytes of a file have one type."""

    type: str
    n_tensors: int
    n_elements: int
    n_bytes: int


@dataclass(frozen=True)
class Neighbour:
    """A file beside the inspected one: `status` is that of the match, None where it does not fit; `detail` says why.

    `choice`, of a sidecar that fits, says why it is chosen to draft, or passed over.
    """

    path: Path
    kind: str | None
    status: str | None
    detail: str
    choice: str | None = None


@dataclass(frozen=True)
class Origin:
    """Where a file's head comes from, as far as its keys say.

    `grafted_from` is the fingerprint of the trunk it was trained with before it was grafted, empty where that is not known, None for
    a head that was not; `taken_from` the name of another checkpoint than the main file's that it was converted from; `requantised` the types that its values went through; `match`, of a head inside a main file, how sure it is
    that the two belong together (a status of pair.py; a sidecar's depends on the main file beside it).
    """

    grafted_from: str | None
    taken_from: str | None
    requantised: list[str]
    match: str | None


@dataclass(frozen=True)
class Report:
    """All that `inspect` shows. Sizes in bytes; `n_layers` counts the trunk's; `trunk` and `rows` are fingerprints.

    `origin` is None where there is no head. `memory` is what running it takes at a context of N_CTX tokens: of a main model with the
    head inside it or the sidecar beside it that is chosen, of a sidecar without its main model.
    """

    path: Path
    role: str
    kind: str | None
    arch: str
    name: str | None
    file_bytes: int
    n_shards: int
    n_tensors: int
    n_parameters: int
    types: list[TypeUse]
    width: int | None
    n_layers: int | None
    n_vocab: int
    trunk: str | None
    rows: str | None
    origin: Origin | None
    memory: Memory
    neighbours: list[Neighbour]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON's types, with `"schema": 1`; neighbours are apart in "fits" and "passed_over"."""
        values = asdict(self)
        neighbours = [n | {"path": str(n["path"])} for n in values.pop("neighbours")]
        values["fingerprint"] = {"trunk": values.pop("trunk"), "rows": values.pop("rows")}
        values["path"] = str(self.path)
        values["memory"] = self.memory.to_json()
        return {
            "schema": 1,
            **values,
            "fits": [n for n in neighbours if n["status"]],
            "passed_over": [n for n in neighbours if not n["status"]],
        }


def inspect(path: str | os.PathLike[str]) -> Report:
    """Open a main model or a sidecar, check it, and compare it with what lies beside it.

    Raises what `open_main` and `open_sidecar` raise; a broken file beside it is reported, not raised.

    >>> inspect("mtp-NAME-Q8_0.gguf").neighbours[0].status  # doctest: +SKIP
    'verified'
    """
    identity = identify(read_model(path))
    if identity.role == "sidecar":
        sidecar = open_sidecar(path)
        target = sidecar.target
        return _report(
            sidecar, identity.role, sidecar.kind, target.width, target.n_layers, list(_mains_of(sidecar))
        )
    main = open_main(path)
    found = survey(main)
    choices = explain(main, found)
    neighbours = [_as_neighbour(candidate, choices.get(candidate.path)) for candidate in found]
    chosen = next((c.sidecar for c in found if choices.get(c.path, "").startswith(CHOSEN)), None)
    return _report(main, identity.role, main.head_kind, main.width, main.n_layers, neighbours, chosen)


def _as_neighbour(candidate: Candidate, choice: str | None) -> Neighbour:
    kind = candidate.sidecar.kind if candidate.sidecar else None
    return Neighbour(
        candidate.path, kind, candidate.match.status if candidate.match else None, candidate.reason, choice
    )


def _mains_of(sidecar: Sidecar) -> Iterator[Neighbour]:
    for path in main_paths(sidecar.path):
        try:
            main = open_main(path)
        except (NotAMain, NotAModel):
            continue
        except LlamaSidecarError as error:
            yield Neighbour(path, None, None, str(error))
            continue
        try:
            match = check_pair(main, sidecar)
        except PairMismatch as error:
            yield Neighbour(path, main.head_kind, None, str(error))
        else:
            yield Neighbour(path, main.head_kind, match.status, match.detail)


def _report(
    file: MainFile | Sidecar,
    role: str,
    kind: str | None,
    width: int | None,
    n_layers: int | None,
    beside: list[Neighbour],
    drafter: Sidecar | None = None,
) -> Report:
    header = file.header
    types = _types(header)
    return Report(
        path=file.path,
        role=role,
        kind=kind,
        arch=file.arch,
        name=header.string(keys.NAME, default="") or None,
        file_bytes=header.file_bytes,
        n_shards=len(header.paths),
        n_tensors=len(header.tensors),
        n_parameters=sum(use.n_elements for use in types),
        types=types,
        width=width,
        n_layers=n_layers,
        n_vocab=len(file.tokens),
        trunk=file.trunk,
        rows=file.rows,
        origin=_origin(file) if kind else None,
        memory=_memory(file, drafter),
        neighbours=beside,
    )


def _memory(file: MainFile | Sidecar, drafter: Sidecar | None) -> Memory:
    contents = Contents.of(file.header)
    n_ctx = min(contents.trained_ctx or N_CTX, N_CTX)
    if isinstance(file, Sidecar):
        return pair_memory(None, contents, n_ctx, is_head=file.kind == "mtp")
    if drafter is not None:
        return pair_memory(contents, Contents.of(drafter.header), n_ctx, is_head=drafter.kind == "mtp")
    embedded = file.head_kind is not None
    return pair_memory(contents, contents if embedded else None, n_ctx, embedded=embedded)


def _origin(file: MainFile | Sidecar) -> Origin:
    header = file.header
    grafted = keys.GRAFT_TRUNK in header.keys
    return Origin(
        grafted_from=own_fingerprint(header, keys.GRAFT_TRUNK, None) or "" if grafted else None,
        taken_from=header.string(keys.MTP_FROM) if keys.MTP_FROM in header.keys else None,
        requantised=list(header.strings(keys.REQUANT_FROM)) if keys.REQUANT_FROM in header.keys else [],
        match=_match_inside(file, grafted) if isinstance(file, MainFile) else None,
    )


def _match_inside(main: MainFile, grafted: bool) -> str:
    trunk, rows = head_fingerprints(main)
    if trunk is None or trunk != main.trunk or (rows is not None and rows != main.rows):
        return UNVERIFIED
    if grafted:
        return SAME_FAMILY
    return SAME_TRUNK if rows is None else VERIFIED


def _types(header: GGUFHeader) -> list[TypeUse]:
    """What each type takes, the largest first."""
    names = {info.type_name for info in header.tensors.values()}
    uses = []
    for name in sorted(names):
        infos = [info for info in header.tensors.values() if info.type_name == name]
        uses.append(
            TypeUse(name, len(infos), sum(i.n_elements for i in infos), sum(i.n_bytes for i in infos))
        )
    return sorted(uses, key=lambda use: -use.n_bytes)
