"""Compact heads in the user's cache folder: found, or made from whatever head a model has, and shared by processes.

An MTP head becomes a compact sidecar, a drafter of another kind one with a cut output. A head is named by its source's content, its number of rows and its types, and checked whenever it is used. No type is wider than
those the converter writes by default, so that anybody's sidecar drafts as cheaply. Its rows are the first in merge order; once
enough of what a model really writes has been counted and those rows miss too much of it, they follow the counts.
Counts are one number per token, never text, and old ones fade. Knows what the files are from sidecars/compact.py and
sidecars/cut_output.py; decodes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_sidecar.sidecars import LlamaSidecarError, MainFile, Sidecar, compact, cut_output
from llama_sidecar.sidecars.tensor_rows import Progress, Types

from .cache_folder import CacheFolder
from .errors import CacheError, HeadsUnavailable

MIN_COUNTED = 1_000  # tokens: fewer say too little to choose rows by
MAX_MISSED = 0.01  # of the tokens counted, more than the best rows would miss
MAX_COUNTED = 1 << 20  # tokens: beyond, all counts are halved, so that the rows follow what is written now
COUNTS_TIMEOUT_S = 1.0  # counting keeps nobody waiting

Counts = NDArray[np.uint32]


def compact_head(
    source: Sidecar | MainFile,
    *,
    n_rows: int | None = None,
    counts: Counts | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Finds or makes the compact sidecar of a head, in the user's cache folder.

    Args:
        source: an MTP sidecar, or a main file with a head inside.
        n_rows: rows of the vocabulary to keep, best a multiple of 64; by default what `compact.default_n_rows` says.
        counts: `counts_for(main)`, to choose the rows by what the model writes; by default they come in merge order.
        cache_dir: another folder than the user's cache.
        progress: called with (bytes done, bytes in all, tensor's name) while a head is written.

    Raises:
        HeadsUnavailable: cutting does not pay or cannot be done, or the cache cannot be used: the full head serves.

    Example:
        >>> compact_head(open_sidecar("mtp-NAME-Q8_0.gguf")).name                # doctest: +SKIP
        'compact-NAME-Q8_0-32768-f1d4457261cbe6f5.gguf'
    """
    return _made(lambda: _of_head(source), source, n_rows, counts, cache_dir, progress)


def cut_drafter(
    sidecar: Sidecar,
    main: MainFile,
    *,
    n_rows: int | None = None,
    counts: Counts | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Finds or makes an EAGLE3, DFlash or DSpark sidecar with a cut output, in the user's cache folder.

    Args:
        sidecar: the drafter.
        main: its main file, whose output it may borrow.
        n_rows: as of `compact_head`, as are the others.

    Raises:
        HeadsUnavailable: as `compact_head`.

    Example:
        >>> cut_drafter(open_sidecar("dflash-NAME-Q8_0.gguf"), open_main("NAME-Q8_0.gguf")).name   # doctest: +SKIP
        'compact-NAME-Q8_0-32768-0c6f7a6d4c3ab1de.gguf'
    """
    return _made(lambda: _of_drafter(sidecar, main), sidecar, n_rows, counts, cache_dir, progress)


def counts_for(main: MainFile, *, cache_dir: str | os.PathLike[str] | None = None) -> Counts:
    """How often this model has written each of its tokens, `(n_vocab,)`; all 0 where nothing is known.

    Counts belong to the trunk, whatever the file's type or name.

    Example:
        >>> counts_for(open_main("NAME-Q8_0.gguf")).argmax()                     # doctest: +SKIP
        198
    """
    n_vocab = len(main.tokens)
    name = _counts_name(main)
    if name is not None:
        with suppress(OSError, CacheError):
            data = CacheFolder(cache_dir).path("counts", name).read_bytes()
            if len(data) == 4 * n_vocab:
                return np.frombuffer(data, "<u4").astype(np.uint32)
    return np.zeros(n_vocab, np.uint32)


def add_counts(
    main: MainFile, ids: Sequence[int], *, cache_dir: str | os.PathLike[str] | None = None
) -> None:
    """Counts tokens that a model has written; takes about a millisecond, whatever other processes do.

    A main file whose trunk has no fingerprint is not counted. Raises CacheError where the cache cannot be used.

    Example:
        >>> add_counts(main, generation.tokens)                                  # doctest: +SKIP
    """
    name = _counts_name(main)
    if name is None or not len(ids):
        return
    folder = CacheFolder(cache_dir)
    with folder.locked("counts", COUNTS_TIMEOUT_S):
        is_new = not os.path.exists(folder.path("counts", name))
        total = counts_for(main, cache_dir=cache_dir) + np.bincount(ids, minlength=len(main.tokens))
        while total.sum() > MAX_COUNTED:
            total >>= 1
        folder.write("counts", name, total.astype("<u4").tobytes())
    if is_new:
        folder.trim(keep=folder.path("counts", name))


def _counts_name(main: MainFile) -> str | None:
    return f"{main.trunk[:32]}.u32" if main.trunk else None


@dataclass(frozen=True)
class _Cut:
    """How a head is cut: its `source`, all `paths` that are read, the `types` it gets, and what hashes, writes and opens it."""

    source: Sidecar | MainFile
    paths: Sequence[Path]
    types: Types
    content_hash: Callable[[], str]
    write: Callable[..., None]
    open: Callable[[Path], Any]


def _of_head(source: Sidecar | MainFile) -> _Cut:
    return _Cut(
        source,
        source.header.paths,
        compact.narrow_types(source),
        partial(compact.content_hash, source),
        partial(compact.write_compact, source, narrow=True),
        compact.open_compact,
    )


def _of_drafter(sidecar: Sidecar, main: MainFile) -> _Cut:
    return _Cut(
        sidecar,
        (*sidecar.header.paths, *main.header.paths),
        cut_output.narrow_types(sidecar, main),
        partial(cut_output.content_hash, sidecar, main),
        partial(cut_output.write_cut, sidecar, main),
        cut_output.open_cut,
    )


@dataclass(frozen=True)
class _Wanted:
    """The types and rows that a head should have; where rows follow `counts`, others with a coverage of `floor` do as well."""

    types: Types
    rows: NDArray[np.int32]
    counts: Counts | None
    floor: float

    def is_met_by(self, path: Path, source_hash: str, cut: _Cut) -> bool:
        try:
            found = cut.open(path)
        except LlamaSidecarError:  # absent, or damaged: then it is made anew
            return False
        if (
            found.source != source_hash
            or found.types != self.types
            or len(found.target_ids) != len(self.rows)
        ):
            return False
        if self.counts is None:
            return bool(np.array_equal(found.target_ids, self.rows))
        return compact.coverage(found.target_ids, self.counts) >= self.floor


def _wanted(cut: _Cut, n_rows: int, counts: Counts | None) -> _Wanted:
    source, types, token_types = cut.source, cut.types, compact.token_types(cut.source)
    merge_order = compact.choose_rows(source.tokens, token_types, n_rows)
    if counts is not None and counts.sum() >= MIN_COUNTED:
        best = compact.choose_rows(source.tokens, token_types, n_rows, counts)
        floor = compact.coverage(best, counts) - MAX_MISSED
        if compact.coverage(merge_order, counts) < floor:
            return _Wanted(types, best, counts, floor)
    return _Wanted(types, merge_order, None, 0.0)


def _made(
    cut_of: Callable[[], _Cut],
    source: Sidecar | MainFile,
    n_rows: int | None,
    counts: Counts | None,
    cache_dir: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> Path:
    n_vocab = len(source.tokens)
    n_kept = compact.default_n_rows(n_vocab) if n_rows is None else n_rows
    if n_kept is None or n_kept >= n_vocab:
        raise HeadsUnavailable(f"a vocabulary of {n_vocab:,} tokens is drafted whole")
    try:
        return _find_or_make(cut_of(), n_kept, counts, CacheFolder(cache_dir), progress)
    except LlamaSidecarError as error:
        raise HeadsUnavailable(f"there is no compact head: {error}") from error


def _find_or_make(
    cut: _Cut, n_rows: int, counts: Counts | None, folder: CacheFolder, progress: Progress | None
) -> Path:
    wanted = _wanted(cut, n_rows, counts)
    source_hash = _content_hash(cut, folder)
    path = folder.path("heads", _head_name(cut.source, source_hash, wanted))
    if not wanted.is_met_by(path, source_hash, cut):
        with folder.locked("heads"):
            folder.sweep("heads")
            if not wanted.is_met_by(
                path, source_hash, cut
            ):  # still: another process may have made it meanwhile
                cut.write(wanted.rows, path, source_hash=source_hash, progress=progress)
                folder.trim(keep=path)
    folder.touch(path)
    return path


def _head_name(source: Sidecar | MainFile, source_hash: str, wanted: _Wanted) -> str:
    """Rows in merge order and rows that follow counts have a file each; the second is replaced when the counts move on."""
    n_rows = len(wanted.rows)
    stem = compact.file_name(source.path, n_rows).removesuffix(".gguf")[:48]
    types = json.dumps(wanted.types, sort_keys=True)
    key = hashlib.sha256(f"{source_hash} {n_rows} {types}".encode()).hexdigest()[:16]
    return f"{stem}-{key}{'' if wanted.counts is None else '-learned'}.gguf"


def _content_hash(cut: _Cut, folder: CacheFolder) -> str:
    """The content hash of what is cut, remembered for as long as its files keep their sizes and times."""
    files = [[str(path.absolute()), *_size_and_time(path)] for path in cut.paths]
    scheme = " ".join(
        [compact.HASH_SCHEME, *(str(path.absolute()) for path in (cut.source.path, *cut.paths))]
    )
    name = f"{hashlib.sha256(scheme.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        memo = folder.read_json("hashes", name)
        if isinstance(memo, dict) and memo.get("files") == files and isinstance(memo.get("hash"), str):
            return str(memo["hash"])
    content = cut.content_hash()
    with suppress(CacheError):
        folder.write("hashes", name, json.dumps({"files": files, "hash": content}).encode())
    return content


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise HeadsUnavailable(f"{path}: {error.strerror or error}") from error
    return status.st_size, status.st_mtime_ns
