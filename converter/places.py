"""Where a checkpoint lies: a folder of this machine, or (hub.py) a repository on the Hugging Face Hub.

A place has its small files in a folder, and its files of weights open for reading in ranges; it counts what is read of those.
Knows no format, nor which file decides over which.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.errors import BadShard, NotACheckpoint, UnsafePath

U8 = npt.NDArray[np.uint8]

# How a model on the Hub is named.
ADDRESS = re.compile(r"(?:hf://|https://huggingface\.co/)([\w.-]+/[\w.-]+)(?:@|/tree/)?([\w./-]*)")
ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
MAX_SMALL_BYTES = 1 << 26  # of a file beside the weights: the largest tokenizers have 35 MB


@dataclass(frozen=True)
class WeightFile:
    """One file of weights, open: `read_into(offset, buffer)` fills the buffer with its bytes from the offset on.

    `where` is what messages call it. Any thread may read.
    """

    name: str
    where: str
    n_bytes: int
    read_into: Callable[[int, U8], None] = field(repr=False)


class Meter:
    """Which files of weights were opened, how large they are (`n_total` bytes), and how much was read of them.

    `versions` is one text for each file. Any thread may count.
    """

    def __init__(self) -> None:
        self.n_read = self.n_total = 0
        self.versions: list[str] = []
        self._lock = threading.Lock()

    def read(self, n_bytes: int) -> None:
        with self._lock:
            self.n_read += n_bytes

    def opened(self, name: str, n_bytes: int, version: str) -> None:
        with self._lock:
            self.n_total += n_bytes
            self.versions.append(f"{name} {n_bytes} {version}")


@dataclass(frozen=True)
class Reading:
    """How a place is best read: `n_threads` at a time, each of them about `n_values` of a tensor."""

    n_threads: int
    n_values: int


DISK = Reading(min(os.cpu_count() or 1, 8), 1 << 20)  # 4 MB as float32: near a core's cache


class Place(Protocol):
    """What the reader of a checkpoint asks of a place. `str` of it is what messages call it."""

    folder: Path  # of the small files: config.json, the index, the tokenizer
    meter: Meter
    reading: Reading

    @property
    def name(self) -> str:
        """What the checkpoint is called there."""
        ...

    def names(self, pattern: str) -> list[str]:
        """The names of files that match, sorted; hidden files are no weights."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        ...

    def open(self, name: str, files: ExitStack) -> WeightFile:
        """Opens a file of weights until `files` is closed. Raises BadShard and UnsafePath."""
        ...

    def path(self, name: str) -> Path:
        """A file of weights as a file of this machine. Raises UnsupportedModel where it is not one."""
        ...


class Folder:
    """A folder of this machine."""

    def __init__(self, folder: Path):
        if not os.path.isdir(folder):  # for os.path a name that is too long is no file, and no exception
            found = "is a file" if os.path.exists(folder) else "does not exist"
            raise NotACheckpoint(
                f"{folder} {found}; expected the folder of a Hugging Face checkpoint (`hf download ORG/NAME --local-dir FOLDER` makes one)"
            )
        if not os.access(folder, os.R_OK | os.X_OK):
            raise NotACheckpoint(f"{folder} cannot be read: permission denied")
        self.folder, self.meter, self.reading = folder, Meter(), DISK

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def name(self) -> str:
        """The folder's name, or the repository's where the folder is a snapshot in a Hugging Face cache."""
        folder = self.folder.resolve()
        cache = _cache_root(folder)
        return cache.name.split("--")[-1] if cache else folder.name

    def names(self, pattern: str) -> list[str]:
        """Hidden files are no shards: other systems leave some beside every file they copy."""
        return sorted(path.name for path in self.folder.glob(pattern) if not path.name.startswith("."))

    def has(self, name: str) -> bool:
        return os.path.exists(self.folder / name)

    def path(self, name: str) -> Path:
        """The file's path, if it is a file and its links stay in the folder, or in the cache whose snapshot the folder is."""
        target = _followed(self.folder, name)
        if not os.path.isfile(target):
            raise BadShard(
                f"{self.folder / name} is a folder, a pipe or a broken link; expected a file of tensors"
            )
        return target

    def open(self, name: str, files: ExitStack) -> WeightFile:
        """Read with pread into small buffers, so that no mapped page counts against the process."""
        path = self.path(name)
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise BadShard(f"{path} cannot be opened: {error.strerror}") from error
        files.callback(os.close, fd)
        found = os.fstat(fd)
        self.meter.opened(name, found.st_size, str(found.st_mtime_ns))

        def read_into(offset: int, buffer: U8) -> None:
            _pread(fd, offset, buffer, path)
            self.meter.read(buffer.nbytes)

        return WeightFile(name, str(path), found.st_size, read_into)


def small_file(folder: Path, name: str) -> Path | None:
    """The path of a file beside the weights; None where there is no file of that name.

    Raises UnsafePath where its links lead out of the folder: a checkpoint's author does not choose which files of the reader's
    machine go into a model.

    >>> small_file(Path("Qwen3.5-0.8B"), "config.json")                             # doctest: +SKIP
    PosixPath('Qwen3.5-0.8B/config.json')
    """
    if not os.path.isfile(folder / name):
        return None
    _followed(folder, name)
    return folder / name


def _followed(folder: Path, name: str) -> Path:
    """Where a file's links lead: into the folder, or into the cache whose snapshot the folder is."""
    root = folder.resolve()
    try:
        target = (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise BadShard(f"{folder / name} is a link that leads nowhere: {error}") from error
    if not target.is_relative_to(_cache_root(root) or root):
        raise UnsafePath(
            f"{folder / name} is a link to {target}, outside the folder: copy the file into the folder"
        )
    return target


def place_of(checkpoint: str | Path) -> Place:
    """The place that a user names: a folder, `hf://ORG/NAME[@REVISION]`, or `ORG/NAME` where no such folder is here.

    Raises NotACheckpoint, and HubFailed where the Hub cannot be reached or has no such model.
    """
    text = str(checkpoint)
    is_address = text.startswith(("hf://", "https://"))
    if not is_address and (os.path.lexists(text) or os.path.isdir(text.split("/")[0])):
        return Folder(Path(checkpoint))
    if named := parse(text):
        from llama_sidecar.converter.hub import Hub  # imports an HTTP client, which a folder does without

        return Hub(*named)
    if is_address:
        raise NotACheckpoint(
            f"{text} names no model on the Hub; expected hf://ORG/NAME or hf://ORG/NAME@REVISION"
        )
    return Folder(Path(checkpoint))


def parse(text: str) -> tuple[str, str | None] | None:
    """Repository and revision of `hf://ORG/NAME[@REVISION]`, a model page's address, or a bare `ORG/NAME`; None for none.

    >>> parse("hf://Qwen/Qwen3.5-0.8B@main")
    ('Qwen/Qwen3.5-0.8B', 'main')
    """
    found = ADDRESS.fullmatch(text.rstrip("/")) or ID.fullmatch(text)
    return (found[1], found[2] or None) if found else None


def _pread(fd: int, offset: int, buffer: U8, path: Path) -> None:
    view = buffer.data
    while view:
        try:
            n = os.preadv(fd, [view], offset)
        except OSError as error:
            raise BadShard(f"{path} cannot be read at {offset}: {error.strerror}") from error
        if n == 0:
            raise BadShard(f"{path} ended at {offset} while it was read: it was changed or cut")
        view, offset = view[n:], offset + n


def _cache_root(folder: Path) -> Path | None:
    """`models--ORG--NAME` for a folder `models--ORG--NAME/snapshots/HASH`, the layout of the Hugging Face cache."""
    return next(
        (p for p in folder.parents if p.name.startswith("models--") and folder.parent == p / "snapshots"),
        None,
    )
