"""The user's cache folder: what can be made again, kept between runs within bounds and shared by processes.

A reader sees a whole file or none (sidecars/whole_file.py); writers that build on what they read hold a lock. Every sort of file has a sub-folder and a pattern in SORTS, and nothing else there is ever listed or removed.
Knows no file's content, only that some is JSON.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_sidecar.sidecars import whole_file

from .errors import CacheError

VARIABLE = "LLAMA_SIDECAR_CACHE"
MAX_BYTES = 4 << 30  # of all files that are trimmed; the least recently used go first
MAX_FILES = 256  # of each sort
LOCK_TIMEOUT_S = 30.0
SORTS = {  # sub-folder -> pattern of its files
    "heads": "compact-*.gguf",  # compact sidecars
    "counts": "*.u32",  # how often a model wrote each token
    "hashes": "*.json",  # content hashes of heads, by file
    "costs": "*.json",  # what rounds cost here, by model and settings
    "exactness": "*.json",  # which numbers of rows decode equally here, by model and settings
    "kernels": "*.json",  # how fast products are here, by machine and library
    "predict": "*-random-*.gguf",  # models of random weights, while a prediction runs or because it was told to keep them
}
NOT_TRIMMED = ("predict",)  # as large as it takes: the next prediction removes them, or clear()
_POLL_S = 0.05


@dataclass(frozen=True)
class Entry:
    """One cached file; `used_s` is when it was last used, in seconds since the epoch."""

    sort: str
    path: Path
    n_bytes: int
    used_s: float


def default_root() -> Path:
    """The user's cache folder: $LLAMA_SIDECAR_CACHE, else the platform's place for one; raises CacheError without a home.

    Example:
        >>> default_root()                                                   # doctest: +SKIP
        PosixPath('/home/me/.cache/llama-sidecar')
    """
    own = os.environ.get(VARIABLE)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser()
        if os.path.isabs(xdg):
            return Path(xdg) / "llama-sidecar"
        caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
        return Path.home() / caches / "llama-sidecar"
    except RuntimeError as error:
        raise CacheError(
            f"there is no home folder for a cache ({error}): set {VARIABLE} to a folder"
        ) from error


def problem() -> str | None:
    """Why nothing can be kept in the user's cache folder, in one line; None where it can.

    Example:
        >>> problem()                                                        # doctest: +SKIP
        'the cache cannot be used: /home/me/.cache: Permission denied'
    """
    try:
        folder = CacheFolder()
        for sort in SORTS:
            folder.prepare(sort)
            with _refusals():
                if not os.access(folder.root / sort, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder.root / sort))
    except CacheError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turns the system's refusals into a CacheError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CacheError(f"the cache cannot be used: {where}{error.strerror or error}") from error


class CacheFolder:
    """A cache folder, made when it is first written to. Its methods raise CacheError where the system refuses.

    Example:
        >>> CacheFolder().entries()                                          # doctest: +SKIP
        [Entry(sort='heads', path=..., n_bytes=41233184, used_s=1764440000.0)]
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()

    def path(self, sort: str, name: str) -> Path:
        """Where a file of one of SORTS lies."""
        assert Path(name).match(SORTS[sort]), f"{name} is not {SORTS[sort]}"
        return self.root / sort / name

    @_refusals()
    def prepare(self, sort: str) -> None:
        """Makes the sub-folder of a sort; private, for it tells what its user runs."""
        for folder in (self.root, self.root / sort):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @_refusals()
    def write(self, sort: str, name: str, data: bytes) -> None:
        """Writes a small file, whole or not at all; after a power failure it may be empty, which readers take for none."""
        self.prepare(sort)
        self.sweep(sort)
        with whole_file.writing(self.path(sort, name), durable=False) as file:
            file.write(data)

    def read_json(self, sort: str, name: str) -> Any:
        """What stands in a small file. Raises OSError, and ValueError where that is no JSON."""
        try:
            return json.loads(self.path(sort, name).read_bytes())
        except RecursionError as error:
            raise ValueError(f"{sort}/{name} is nested too deeply") from error

    @contextlib.contextmanager
    def locked(self, sort: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Holds the lock of a sort, against other processes and threads; who dies gives it back.

        Raises CacheError where another holds it for longer than `timeout_s` seconds.
        """
        self.prepare(sort)
        path = self.root / f"{sort}.lock"
        with _refusals():
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise CacheError(f"another process has held {path} for more than {timeout_s:.0f} seconds")
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)

    def touch(self, path: Path) -> None:
        """Notes that a file has been used; in a folder that cannot be written, nothing does."""
        with contextlib.suppress(OSError):
            os.utime(path)

    @_refusals()
    def entries(self) -> list[Entry]:
        """All cached files, least recently used first."""
        found = []
        for sort, pattern in SORTS.items():
            for path in (self.root / sort).glob(pattern):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        found.append(Entry(sort, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used_s)

    @_refusals()
    def trim(self, keep: Path) -> None:
        """Removes the least recently used files beyond MAX_BYTES and MAX_FILES, but never `keep`."""
        entries = [entry for entry in self.entries() if entry.sort not in NOT_TRIMMED]
        n_bytes = sum(entry.n_bytes for entry in entries)
        n_files = collections.Counter(entry.sort for entry in entries)
        for entry in entries:
            if entry.path != keep and (n_bytes > MAX_BYTES or n_files[entry.sort] > MAX_FILES):
                entry.path.unlink(missing_ok=True)
                n_bytes -= entry.n_bytes
                n_files[entry.sort] -= 1

    @_refusals()
    def sweep(self, sort: str) -> None:
        """Removes what killed writers left."""
        whole_file.sweep(self.root / sort)

    @_refusals()
    def clear(self) -> list[Entry]:
        """Removes all cached files and returns them; who has one open can read on."""
        removed = []
        for sort in SORTS:
            if not (self.root / sort).is_dir():
                continue
            with self.locked(sort):
                self.sweep(sort)
                for entry in self.entries():
                    if entry.sort == sort:
                        entry.path.unlink(missing_ok=True)
                        removed.append(entry)
        return removed


@_refusals()
def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
