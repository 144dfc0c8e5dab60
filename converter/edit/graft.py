"""`graft`: a head onto a fine-tune of the trunk it was trained with, and nothing claimed that is not known.

A fine-tune mostly keeps its base's vocabulary and shape but not its head. The base's head still drafts for it, less often right
the further the two have grown apart, and a draft never changes the text. The new sidecar fits the fine-tune alone and says that
its head is another's. Checks files against each other; measures no acceptance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.edit import origin
from llama_sidecar.converter.edit.header import Keys, keys_of
from llama_sidecar.converter.edit.layers import (
    HEADS_OWN,
    is_head_block,
    is_trunk_block,
    with_head,
    without_head,
)
from llama_sidecar.converter.edit.output import (
    EditResult,
    check_folder,
    gguf_file,
    name_and_type,
    relabelled,
    sidecar_name,
    write,
)
from llama_sidecar.converter.edit.stored import Stored, check_dequantizable, rounding, same_bytes
from llama_sidecar.converter.errors import CannotGraft
from llama_sidecar.converter.writer import Progress
from llama_sidecar.sidecars import (
    MainFile,
    Match,
    Sidecar,
    TensorInfo,
    check_pair,
    keys,
    open_main,
    open_sidecar,
)
from llama_sidecar.sidecars.kind import n_blocks
from llama_sidecar.sidecars.pair import VERIFIED
from llama_sidecar.sidecars.sidecar import check_format

AUTO, MAIN, SIDECAR = "auto", "main", "sidecar"
VOCABULARIES = (AUTO, MAIN, SIDECAR)
N_PIECES, PIECE_ROWS = 16, 64  # of a matrix, to see whether two are the same but for their types


def graft(
    sidecar: str | os.PathLike[str],
    main: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    vocabulary: str = AUTO,
    force: bool = False,
    progress: Progress | None = None,
) -> EditResult:
    """Write a sidecar for a main file from the sidecar of another main file of its family.

    `out` is the folder to write to, made if need be; the file is called as `main` is. The head's blocks are the sidecar's.
    `vocabulary` says whose embeddings and output it drafts with: the "sidecar"'s own, those of "main", or ("auto") those of
    `main` where the two differ by more than their types explain; `notes` says which and why. `force` replaces an existing file
    (never one that is read), and `progress(done_bytes, total_bytes, tensor_name)` is called after every slice.

    Raises PairMismatch where architecture, width, layers or the text of a token differ, CannotGraft, CannotDequantize,
    OutputExists, InputGiven, NotEnoughSpace, OutputFailed, and what `open_main` and `open_sidecar` raise.

    >>> graft("mtp-BASE-Q8_0.gguf", "TUNED-Q4_K_M.gguf", "models").sidecar  # doctest: +SKIP
    PosixPath('models/mtp-TUNED-Q8_0.gguf')
    """
    out = Path(out)
    check_folder(out)
    head, trunk = open_sidecar(sidecar), open_main(main)
    check_format(trunk.header)
    _check_is_needed(trunk, head)
    takes, why = _vocabulary(trunk, head, vocabulary)
    own = [Stored(info) for info in head.header.tensors.values()]
    tensors = _with_vocabulary_of(trunk, head) if takes == MAIN else own

    file_keys = origin.of_graft(_keys(trunk, head, takes), trunk, head)
    _, type_name = name_and_type(head.header)
    path = out / sidecar_name(trunk.header, head.kind, type_name)
    matches: list[Match] = []

    def check(written: Mapping[str, Path]) -> None:
        matches.append(check_pair(trunk, open_sidecar(written["sidecar"])))

    n_bytes = write(
        {"sidecar": gguf_file(path, relabelled(file_keys, own, tensors), tensors)},
        [trunk.header, head.header],
        force=force,
        check=check,
        progress=progress,
    )
    return EditResult(
        sidecar=path,
        sidecar_bytes=n_bytes["sidecar"],
        match=matches[0].status,
        detail=matches[0].detail,
        notes=[
            f"embeddings and output are those of the {'main file' if takes == MAIN else 'sidecar'}: {why}"
        ],
        warnings=list(_differing_keys(trunk, head)),
    )


def _check_is_needed(trunk: MainFile, head: Sidecar) -> None:
    """Raises PairMismatch where the head cannot draft for the trunk, CannotGraft where it does so as it is."""
    if check_pair(trunk, head, force=True).status == VERIFIED:
        raise CannotGraft(
            f"{head.path} comes from the same checkpoint as {trunk.path}: use it with that main file as it is"
        )


def _vocabulary(trunk: MainFile, head: Sidecar, asked: str) -> tuple[str, str]:
    """Whose embeddings and output the head is to draft with, and why."""
    if asked not in VOCABULARIES:
        raise CannotGraft(f"the vocabulary asked for is {asked!r}; expected one of {', '.join(VOCABULARIES)}")
    if head.target.arch != head.arch:  # a model of its own, with a width and often a vocabulary of its own
        if asked == MAIN:
            raise CannotGraft(
                f"{head.path}: a drafter of the architecture {head.arch} has a vocabulary of its own; leave it"
            )
        return SIDECAR, f"a drafter of the architecture {head.arch} has its own"
    if asked != AUTO:
        return asked, "asked for"
    differences = list(_differences(trunk, head))
    if differences:
        return MAIN, "; ".join(differences)
    return SIDECAR, "the main file's are the same but for their types"


def _differences(trunk: MainFile, head: Sidecar) -> Iterator[str]:
    """How a main file's embeddings and output differ from a sidecar's, beyond what their types explain."""
    for name in (keys.TOKEN_EMBD, keys.OUTPUT):
        ours, theirs = trunk.header.tensors.get(name), head.header.tensors.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            has, lacks = ("main file", "sidecar") if ours else ("sidecar", "main file")
            yield f"the {has} has {name}, the {lacks} has none"
        elif ours.type == theirs.type and ours.shape == theirs.shape:
            if not same_bytes(ours, theirs):
                yield f"{name} differs by {_shown(_distance(ours, theirs))}"
        elif (distance := _distance(ours, theirs)) > (explained := rounding(ours) + rounding(theirs)):
            yield (
                f"{name} ({ours.type_name}) differs from the sidecar's ({theirs.type_name}) by {_shown(distance)}, "
                f"of which the types explain {_shown(explained)}"
            )


def _distance(ours: TensorInfo, theirs: TensorInfo) -> float:
    """How far two matrices are apart, in some rows of both, as a share of the first's length. Raises CannotDequantize."""
    check_dequantizable([ours, theirs])
    one, other = Stored(ours), Stored(theirs)
    n_rows = min(one.n_rows, other.n_rows)
    starts = np.unique(np.linspace(0, max(0, n_rows - PIECE_ROWS), N_PIECES).astype(int))
    apart = length = 0.0
    for start in starts.tolist():
        stop = min(start + PIECE_ROWS, n_rows)
        values = one.values(start, stop)
        apart += _squares(values - other.values(start, stop))
        length += _squares(values)
    return float(np.sqrt(apart / length)) if length else float(apart > 0)


def _squares(values: npt.NDArray[np.float32]) -> float:
    return float(np.einsum("ij,ij->", values, values, dtype=np.float64))


def _shown(share: float) -> str:
    return f"{100 * share:.2g} %"


def _with_vocabulary_of(trunk: MainFile, head: Sidecar) -> list[Stored]:
    """The head's blocks and what else is the head's alone, and whatever of the main file belongs to no block besides."""
    n_layers = trunk.n_layers
    shared = [
        Stored(info)
        for name, info in trunk.header.tensors.items()
        if not is_trunk_block(name, n_layers)
        and not is_head_block(name, n_layers)
        and not name.startswith(HEADS_OWN)
    ]
    return shared + [
        Stored(info)
        for name, info in head.header.tensors.items()
        if is_head_block(name, n_layers) or name.startswith(HEADS_OWN)
    ]


def _keys(trunk: MainFile, head: Sidecar, takes: str) -> Keys:
    """The sidecar's keys under the main file's name, with the main file's tokens where its embeddings are taken."""
    theirs, ours = keys_of(head.header), keys_of(trunk.header)
    if keys.NAME in ours:
        theirs[keys.NAME] = ours[keys.NAME]
    if takes == SIDECAR:
        return theirs
    of_vocabulary = ("tokenizer.", head.header.key(keys.VOCAB_SIZE))
    kept = {name: value for name, value in theirs.items() if not name.startswith(of_vocabulary)}
    return kept | {name: value for name, value in ours.items() if name.startswith(of_vocabulary)}


def _differing_keys(trunk: MainFile, head: Sidecar) -> Iterator[str]:
    """One line where the two architectures' keys differ, which the head's block may live with."""
    if head.target.arch != head.arch:
        return
    ours = without_head(
        trunk.arch, keys_of(trunk.header), trunk.n_layers, n_blocks(trunk.header) - trunk.n_layers
    )
    theirs = keys_of(head.header)
    _, differing = with_head(trunk.arch, ours, theirs, trunk.n_layers, n_blocks(head.header) - trunk.n_layers)
    if differing:
        yield f"the head keeps its own values of {', '.join(differing)}, in which the main file differs"
