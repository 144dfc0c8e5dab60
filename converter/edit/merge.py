"""`merge`: a main file and its sidecar -> one main file with the head inside. The reverse of `split`.

The trunk's tensors and all that belongs to no block are the main file's, the head's blocks the sidecar's, each with its bytes and
type. So the sidecar's own embeddings and output are left out: a head inside a main file drafts with the main file's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from llama_sidecar.converter.edit import origin
from llama_sidecar.converter.edit.header import Keys, keys_of
from llama_sidecar.converter.edit.layers import (
    HEADS_OWN,
    is_head_block,
    is_trunk_block,
    with_head,
    without_head,
)
from llama_sidecar.converter.edit.output import EditResult, check_main_name, gguf_file, relabelled, write
from llama_sidecar.converter.edit.stored import Stored, same_bytes
from llama_sidecar.converter.errors import CannotMerge
from llama_sidecar.converter.writer import Progress
from llama_sidecar.sidecars import (
    KINDS,
    MainFile,
    Sidecar,
    check_pair,
    identify,
    keys,
    open_main,
    open_sidecar,
    read_header,
)
from llama_sidecar.sidecars.errors import PairMismatch
from llama_sidecar.sidecars.kind import n_blocks
from llama_sidecar.sidecars.sidecar import check_format


def merge(
    main: str | os.PathLike[str],
    sidecar: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> EditResult:
    """Merge a main file and its sidecar into one main file with the head inside, which llama.cpp loads as such.

    `out` is the file to write, its folder made if need be. `force` replaces an existing file (never one that is read), and
    `progress(done_bytes, total_bytes, tensor_name)` is called after every slice. What is known of where the head comes from
    stays in the keys. Raises PairMismatch where the two do not belong together, CannotMerge, OutputExists, InputGiven,
    NotEnoughSpace, OutputFailed, and what `open_main` and `open_sidecar` raise.

    >>> merge("NAME-Q8_0.gguf", "mtp-NAME-Q8_0.gguf", "whole/NAME-Q8_0.gguf").main  # doctest: +SKIP
    PosixPath('whole/NAME-Q8_0.gguf')
    """
    out = Path(out)
    check_main_name(out)
    trunk, head = open_main(main), open_sidecar(sidecar)
    check_format(trunk.header)
    _check_kinds(trunk, head)
    match = check_pair(trunk, head)

    own = [Stored(info) for info in trunk.header.tensors.values()]
    tensors = [tensor for tensor in own if not is_head_block(tensor.name, trunk.n_layers)]
    tensors += [
        Stored(info) for name, info in head.header.tensors.items() if is_head_block(name, trunk.n_layers)
    ]
    _check_head(trunk, head, tensors)
    joined, warnings = _joined_keys(trunk, head)
    file_keys = origin.of_merge(joined, trunk, head, keys_of(head.header))

    files = {"main": gguf_file(out, relabelled(file_keys, own, tensors), tensors)}

    def check(written: Mapping[str, Path]) -> None:
        assert identify(read_header(written["main"])).kind == head.kind
        open_main(written["main"])

    warnings += _left_out(trunk, head)
    n_bytes = write(files, [trunk.header, head.header], force=force, check=check, progress=progress)
    return EditResult(
        main=out, main_bytes=n_bytes["main"], match=match.status, detail=match.detail, warnings=warnings
    )


def _check_kinds(trunk: MainFile, head: Sidecar) -> None:
    if trunk.head_kind is not None:
        raise CannotMerge(f"{trunk.path}: there is a head inside already; split it off first")
    if head.target.arch != head.arch:
        raise CannotMerge(
            f"{head.path}: this {KINDS[head.kind].title} sidecar ({head.arch}) is a model of its own, which no main file can hold; "
            f"use it beside the main file as it is"
        )
    if own := [name for name in head.header.tensors if name.startswith(HEADS_OWN)]:
        raise CannotMerge(
            f"{head.path}: the head has {', '.join(own)} of its own, and llama.cpp reads one of each from a file; "
            f"use it beside the main file as it is"
        )


def _joined_keys(trunk: MainFile, head: Sidecar) -> tuple[Keys, list[str]]:
    """The main file's keys with the head's blocks, and what to mind of them.

    Raises PairMismatch, which lists the keys that contradict each other.
    """
    ours, theirs = keys_of(trunk.header), keys_of(head.header)
    n_heads = n_blocks(head.header) - trunk.n_layers
    ours = without_head(trunk.arch, ours, trunk.n_layers, n_blocks(trunk.header) - trunk.n_layers)
    joined, differing = with_head(trunk.arch, ours, theirs, trunk.n_layers, n_heads)
    if differing:
        found = ", ".join(
            f"{name} ({_shown(theirs, name)} instead of {_shown(ours, name)})" for name in differing
        )
        raise PairMismatch(
            f"{head.path} does not go into {trunk.path}: other values of {found}; use the sidecar that was converted from the "
            f"same checkpoint"
        )
    counts = map(trunk.header.key, (keys.BLOCK_COUNT, keys.NEXTN_PREDICT_LAYERS))
    added = sorted(joined.keys() - ours.keys() - {*counts})
    if not added:
        return joined, []
    return joined, [f"{', '.join(added)} is added from the sidecar: the main file does not say it"]


def _shown(file_keys: Keys, name: str) -> str:
    if name not in file_keys:
        return "nothing"
    value = file_keys[name][1]
    return str(value.tolist() if isinstance(value, np.ndarray) else value)[:99]


def _check_head(trunk: MainFile, head: Sidecar, tensors: list[Stored]) -> None:
    """The head must obey its kind's rules with the main file's embeddings and vocabulary, of which a padded sidecar has more."""
    of_head = {t.name: t.info for t in tensors if not is_trunk_block(t.name, trunk.n_layers)}
    file_keys = {**head.header.keys, keys.TOKENS: trunk.tokens}
    KINDS[head.kind].check(replace(head.header, tensors=of_head, keys=file_keys))


def _left_out(trunk: MainFile, head: Sidecar) -> Iterator[str]:
    """What of the sidecar is not in the merged file, where it is not the same as the main file's."""
    for name, info in head.header.tensors.items():
        ours = trunk.header.tensors.get(name)
        start = f"{name} of the sidecar ({info.type_name}) is left out:"
        if is_head_block(name, trunk.n_layers):
            continue
        if ours is None:
            yield f"{start} the main file has none, and the head drafts with what the main file has"
        elif ours.type != info.type:
            yield f"{start} the head drafts with the main file's ({ours.type_name})"
        elif ours.shape != info.shape or not same_bytes(ours, info):
            yield f"{start} it differs from the main file's, with which the head drafts"
