"""Drafters of their own (EAGLE3, DFlash, DSpark) whose output is cut to the rows that are worth drafting.

A decode of such a drafter ends with the product with the whole vocabulary, by the main model's output where it has none of its own.
A cut one is a standard sidecar, as exports with a small vocabulary are: some rows of that matrix, and their token ids in
`d2t`, by which llama.cpp puts the logits in their places. Tokens go in by their own ids, so that none is foreign to it. Which tensors
have a row per drafted token, a kind says (kinds/); which rows are worth it, compact.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import ArrayLike, NDArray

from llama_sidecar.sidecars import errors, keys, whole_file
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray, TensorInfo
from llama_sidecar.sidecars.kinds import KINDS
from llama_sidecar.sidecars.sidecar import MainFile, Sidecar, fingerprint, open_sidecar
from llama_sidecar.sidecars.tensor_rows import (
    Progress,
    Types,
    as_type,
    checked_rows,
    narrowed_type,
    padding,
    pieces,
    refusals,
    value_bytes,
    write_data,
    write_header,
)

HASH_SCHEME = "llama-sidecar drafter 1"
_NOT_COPIED = ("split.", keys.ARCHITECTURE, keys.ALIGNMENT)
_OUTPUT_SCALE = "output.scale"  # a factor of some types that the drafter would lack


@dataclass(frozen=True, eq=False)
class CutOutput:
    """A checked drafter with a cut output.

    `target_ids` (n_rows,) I64, ascending: the token id of each row; `source` is the `content_hash` of what it was cut from.
    """

    path: Path
    header: GGUFHeader
    target_ids: NDArray[np.int64]
    source: str

    @property
    def types(self) -> Types:
        """The type of each tensor."""
        return {info.name: int(info.type) for info in self.header.tensors.values()}


def narrow_types(sidecar: Sidecar, main: MainFile) -> Types:
    """Say which type each tensor of a cut drafter has: that of the source, but no row per token is wider than Q4_0.

    Raises CannotCut.

    >>> narrow_types(open_sidecar("dflash-NAME-Q8_0.gguf"), open_main("NAME-Q8_0.gguf"))["d2t"]  # doctest: +SKIP
    27
    """
    sources, cut = _sources(sidecar, main)
    types = {i.name: narrowed_type(i) if i.name in cut else int(i.type) for i in sources.values()}
    return {name: int(kind) for name, kind in types.items()} | {keys.D2T: int(GGMLQuantizationType.I64)}


def content_hash(sidecar: Sidecar, main: MainFile) -> str:
    """Hash whatever can get into a cut drafter (keys, tensors, the output) to 64 hexadecimal digits.

    Reads those tensors: a second for a gigabyte or two. Raises CannotCut, UnreadableFile and TruncatedFile.
    """
    digest = hashlib.sha256(f"{HASH_SCHEME}\n".encode())
    for name, value in sorted(sidecar.header.keys.items()):
        digest.update(f"{name}\0{sidecar.header.key_types[name]}\0".encode() + value_bytes(value))
    for name, info in sorted(_sources(sidecar, main)[0].items()):
        digest.update(f"{name}\0{int(info.type)}\0{info.shape}\0".encode())
        for piece in pieces(info):
            digest.update(piece.data)
    return digest.hexdigest()


def write_cut(
    sidecar: Sidecar,
    main: MainFile,
    rows: ArrayLike,
    path: str | os.PathLike[str],
    *,
    source_hash: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a drafter with the output's `rows` alone, whole or not at all.

    `rows` (n_rows,) are ascending token ids; `main` has the output that the drafter borrows; `source_hash` is their
    `content_hash` where it is known. Types are those of `narrow_types`. Holds a few MB.
    Raises BadRows, CannotCut, UnwritableFile, and what `open_sidecar` raises.

    >>> write_cut(open_sidecar("dflash-NAME.gguf"), open_main("NAME.gguf"), range(32768), "cut.gguf")  # doctest: +SKIP
    """
    path = Path(path)
    sources, cut = _sources(sidecar, main)
    ids = checked_rows(rows, len(sidecar.tokens), f"the rows for {path}")
    types = narrow_types(sidecar, main)
    plan = [as_type(i, types[i.name], len(ids) if i.name in cut else None) for i in sources.values()]
    header = _new_header(sidecar, plan, len(ids), source_hash or content_hash(sidecar, main))
    with refusals(path), whole_file.writing(path) as out:
        part = Path(out.name)
        write_header(header, out)
        write_data(out, sources, plan, ids, progress)
        out.write(ids.astype("<i8").tobytes())
        out.write(padding(out))
        out.flush()
        open_cut(part)


def open_cut(path: str | os.PathLike[str]) -> CutOutput:
    """Open a drafter that `write_cut` wrote, and check every rule of its kind.

    Raises NotCompact for any other file, and what `open_sidecar` raises.

    >>> len(open_cut("cut.gguf").target_ids)  # doctest: +SKIP
    32768
    """
    sidecar = open_sidecar(path)
    source = fingerprint(sidecar.header, keys.COMPACT_SOURCE)
    if source is None or keys.D2T not in sidecar.header.tensors:
        raise errors.NotCompact(
            f"{path}: this drafter's output was not cut here: {keys.COMPACT_SOURCE} or {keys.D2T} is missing"
        )
    ids = sidecar.header.tensor_bytes(keys.D2T).view("<i8").astype(np.int64)
    return CutOutput(sidecar.path, sidecar.header, ids, source)


def _sources(sidecar: Sidecar, main: MainFile) -> tuple[dict[str, TensorInfo], Sequence[str]]:
    """The tensors of a cut drafter as they lie in its sources, and the names of those that are cut; raises CannotCut."""
    tensors, cut = dict(sidecar.header.tensors), KINDS[sidecar.kind].output_tensors(sidecar.header)
    if not cut:
        raise errors.CannotCut(
            f"{sidecar.path}: the output of this {sidecar.kind} cannot be cut (any further)"
        )
    is_lent = sidecar.target.n_vocab is not None
    lender = main.header if is_lent else sidecar.header
    output = lender.tensors.get(keys.OUTPUT) or lender.tensors[keys.TOKEN_EMBD]
    tensors[keys.OUTPUT] = replace(output, name=keys.OUTPUT)
    if is_lent and _OUTPUT_SCALE in lender.tensors:
        raise errors.CannotCut(
            f"{main.path}: {_OUTPUT_SCALE} goes with the output, and {sidecar.path} has no place for it"
        )
    if {tensors[name].shape[1] for name in cut} != {len(sidecar.tokens)}:
        raise errors.CannotCut(
            f"{sidecar.path}: {' and '.join(cut)} have not the {len(sidecar.tokens)} rows of its vocabulary"
        )
    return tensors, cut


def _new_header(sidecar: Sidecar, plan: list[TensorInfo], n_rows: int, source_hash: str) -> gguf.GGUFWriter:
    header = gguf.GGUFWriter(None, sidecar.arch)
    for name, value in sidecar.header.keys.items():
        if name.startswith(_NOT_COPIED) or (
            isinstance(value, (np.ndarray, StringArray, list)) and not len(value)
        ):
            continue
        kind, *item = sidecar.header.key_types[name]
        values = list(value.iter_raw()) if isinstance(value, StringArray) else list(value) if item else value
        header.add_key_value(name, values, kind, *item)
    header.add_string(keys.COMPACT_SOURCE, source_hash)
    d2t = TensorInfo(keys.D2T, (n_rows,), GGMLQuantizationType.I64, 0, 8 * n_rows, sidecar.path)
    for info in [*plan, d2t]:
        header.add_tensor_info(
            info.name, info.shape[::-1], np.dtype(np.float32), info.n_bytes, raw_dtype=info.type
        )
    return header
