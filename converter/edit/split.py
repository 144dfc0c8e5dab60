"""`split`: a main file with its head inside -> the main file without it, and the sidecar that llama.cpp's `--mtp` would write.

Nothing is converted: every tensor keeps its bytes and its type. The embeddings, the output and whatever else belongs to no
block go into both files, as llama.cpp loads an MTP sidecar only with its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llama_sidecar.converter.edit import origin
from llama_sidecar.converter.edit.header import keys_of
from llama_sidecar.converter.edit.layers import is_head_block, is_trunk_block, without_head
from llama_sidecar.converter.edit.output import (
    EditResult,
    check_folder,
    gguf_file,
    main_name,
    relabelled,
    sidecar_name,
    write,
)
from llama_sidecar.converter.edit.stored import Stored
from llama_sidecar.converter.errors import NoHead
from llama_sidecar.converter.writer import Progress
from llama_sidecar.sidecars import KINDS, MainFile, Match, check_pair, open_main, open_sidecar
from llama_sidecar.sidecars.kind import n_blocks
from llama_sidecar.sidecars.sidecar import check_format


def split(
    main: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    sidecar_only: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> EditResult:
    """Split a main file with its head inside into a main file without it and a sidecar.

    `out` is the folder to write to, made if need be; the files are called as the main file is. `sidecar_only` leaves the main
    file out, where the head is wanted for another. `force` replaces existing files (never the one that is read), and
    `progress(done_bytes, total_bytes, tensor_name)` is called after every slice. Holds a few megabytes beside the vocabulary.
    Either all files are there and whole, or none is.

    Raises NoHead, OutputExists, InputGiven, NotEnoughSpace, OutputFailed, and what `open_main` raises.

    >>> split("NAME-Q8_0.gguf", "apart").sidecar  # doctest: +SKIP
    PosixPath('apart/mtp-NAME-Q8_0.gguf')
    """
    out = Path(out)
    check_folder(out)
    whole = open_main(main)
    kind = _head_kind(whole)
    header, n_layers = whole.header, whole.n_layers
    stored = [Stored(info) for info in header.tensors.values()]
    trunk = [tensor for tensor in stored if not is_head_block(tensor.name, n_layers)]
    head = [tensor for tensor in stored if not is_trunk_block(tensor.name, n_layers)]
    KINDS[kind].check(replace(header, tensors={tensor.name: tensor.info for tensor in head}))

    file_keys = keys_of(header)
    main_keys = without_head(whole.arch, file_keys, n_layers, n_blocks(header) - n_layers)
    main_keys = relabelled(origin.without_head(main_keys), stored, trunk)
    sidecar_keys = relabelled(origin.of_split(file_keys, whole), stored, head)
    files = {"sidecar": gguf_file(out / sidecar_name(header, kind), sidecar_keys, head)}
    if not sidecar_only:
        files["main"] = gguf_file(out / main_name(header), main_keys, trunk)
    matches: list[Match] = []

    def check(written: Mapping[str, Path]) -> None:
        its_main = open_main(written["main"]) if "main" in written else whole
        matches.append(check_pair(its_main, open_sidecar(written["sidecar"]), force=True))

    n_bytes = write(files, [header], force=force, check=check, progress=progress)
    return EditResult(
        main=None if sidecar_only else files["main"].path,
        sidecar=files["sidecar"].path,
        main_bytes=n_bytes.get("main", 0),
        sidecar_bytes=n_bytes["sidecar"],
        match=matches[0].status,
        detail=matches[0].detail,
    )


def _head_kind(whole: MainFile) -> str:
    check_format(whole.header)
    if whole.head_kind is not None:
        return whole.head_kind
    declared = n_blocks(whole.header) - whole.n_layers
    lost = (
        f", though it declares {declared} MTP blocks: they were lost or are in another file"
        if declared
        else ""
    )
    raise NoHead(
        f"{whole.path}: this main file holds no head to split off{lost}; give one with its head inside"
    )
