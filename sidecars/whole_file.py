"""A file that appears whole or not at all: written beside its place under a hidden name, and renamed when all is on the disk.

Whoever writes one holds a lock on it. So what a killed writer left is told from what another still writes, and removed by the next
writer of the same file. Knows no format. Raises OSError; what a user is told is the caller's matter.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes the place of `path` when the block ends well, and is removed when it does not.

    Args:
        path: one that is there stays as it is until then.
        durable: wait until the data are on the disk before. Without it, after a power failure the file may be empty.

    Raises:
        OSError: the system refuses. A full disk may be found out when the block ends.

    Example:
        >>> with writing("notes.txt") as file:                                # doctest: +SKIP
        ...     file.write(b"all of it")
    """
    path = Path(path)
    sweep(path.parent, path.name)
    fd, part = open_part(path)
    file = open(part, "wb", opener=lambda *_: fd)  # noqa: SIM115
    try:
        yield file
        file.flush()
        if durable:
            os.fsync(fd)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # while it is locked, or another might take it for a left-over
        with suppress(OSError):  # what could not be written has been said
            file.close()


def part_of(path: Path, tag: str) -> Path:
    """The hidden name beside `path` of a file that is to take its place."""
    return path.with_name(f".{path.name}.{tag}.part")


def open_part(path: Path) -> tuple[int, Path]:
    """Opens and locks a new file, for reading and writing, that is to take the place of `path`; and its name until then."""
    while True:
        part = part_of(path, secrets.token_hex(4))
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # a system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(fd, part):
            return fd, part
        os.close(fd)  # another process took it for a left-over before it was locked


def sweep(folder: Path, name: str | None = None) -> None:
    """Removes what killed writers left in a folder, of one file or of all. Where a system has no locks, nothing is removed."""
    pattern = part_of(folder / (glob.escape(name) if name else "*"), "*").name
    for part in folder.glob(pattern):
        with suppress(OSError):
            fd = open_left(part)
            part.unlink(missing_ok=True)
            os.close(fd)


def open_left(part: Path) -> int:
    """Opens and locks what a killed writer has left, for reading and writing.

    Raises OSError where its writer still runs or has just finished, or where there are no locks.
    """
    fd = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(fd, part):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(part))
    except OSError:
        os.close(fd)
        raise
    return fd


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False
