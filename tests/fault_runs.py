"""What writes files, done again and again with a fault at the next of its system calls: run by test_faults.py under faults.c.

    LD_PRELOAD=faults.so python fault_runs.py OPERATION kill|full|refused|unreadable FOLDER

Each try is a forked child. Prints how many tries there were; an AssertionError says what was found after which call.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from checkpoints import make_checkpoint
from models import write_pair

from llama_sidecar.converter import convert
from llama_sidecar.converter.edit import graft, merge, requant, split
from llama_sidecar.runtime import conversation_file, heads, session_file
from llama_sidecar.runtime.cache_folder import CacheFolder
from llama_sidecar.sidecars import LlamaSidecarError, open_main, open_sidecar
from llama_sidecar.sidecars.compact import write_compact

WRITES = "owtfm"  # what a full disk refuses: see faults.c
NAMES = "rl"
READS = "RO"
MOST_READS = 12  # of the calls that read, unless FAULTS_ALL is set
OK, REFUSED, CRASHED = 0, 3, 4


@dataclass(frozen=True)
class Operation:
    """`make(sources)` makes what `run(sources, out)` reads; `run` writes files into `out`, the same each time, over those there."""

    make: Callable[[Path], object]
    run: Callable[[Path, Path], object]
    files_change_together: bool = True


def _pair(folder: Path) -> None:
    write_pair(folder, recurrent=False, layers=1)


def _whole(folder: Path) -> None:
    write_pair(folder, recurrent=False, layers=1, embedded=True)


def _graft(sources: Path, out: Path) -> None:
    graft(sources / "mtp-main.gguf", sources / "main.gguf", out, force=True)


def _compact(sources: Path, out: Path) -> None:
    write_compact(open_sidecar(sources / "mtp-main.gguf"), range(128), out / "compact-main-128.gguf")


def _session(sources: Path, out: Path) -> None:
    origin = session_file.Origin("model", "library", ("f16", "f16"), "auto", 64, None, None, None)
    session_file.write(out / "a.session", session_file.SavedSession(origin, [1, 2], bytes(100_000), b"rows"))


def _conversation(sources: Path, out: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello " * 999}]
    conversation_file.write(out / "talk.json", conversation_file.SavedConversation("model", "hash", said))


def _counts(sources: Path, out: Path) -> None:
    heads.add_counts(open_main(sources / "main.gguf"), [1, 1, 2], cache_dir=out)


def _head(sources: Path, out: Path) -> None:
    heads.compact_head(open_sidecar(sources / "mtp-main.gguf"), n_rows=128, cache_dir=out)


def _costs(sources: Path, out: Path) -> None:
    CacheFolder(out).write("costs", "key.json", json.dumps(list(range(100))).encode())


OPERATIONS = {
    "convert": Operation(
        lambda sources: make_checkpoint(sources, "qwen35", "tied"),
        lambda sources, out: convert(next(sources.iterdir()), out, force=True),
    ),
    "split": Operation(_whole, lambda sources, out: split(sources / "main.gguf", out, force=True)),
    "merge": Operation(
        _pair,
        lambda sources, out: merge(
            sources / "main.gguf", sources / "mtp-main.gguf", out / "whole.gguf", force=True
        ),
    ),
    "graft": Operation(_pair, _graft),
    "requant": Operation(
        _pair, lambda sources, out: requant(sources / "mtp-main.gguf", out, "Q8_0", force=True)
    ),
    "compact": Operation(_pair, _compact),
    "session": Operation(_pair, _session),
    "conversation": Operation(_pair, _conversation),
    "counts": Operation(_pair, _counts),
    "head": Operation(_pair, _head, files_change_together=False),  # a hash is kept before the head
    "costs": Operation(_pair, _costs),
}


class Trials:
    """An operation, its sources in `folder`, and what it leaves in `out` where nothing goes wrong."""

    def __init__(self, name: str, folder: Path) -> None:
        self.operation = OPERATIONS[name]
        self.sources, self.out = folder / "sources", folder / "out"
        self.said = folder / "said"
        self.sources.mkdir(parents=True)
        self.operation.make(self.sources)
        self._begin_with({})
        assert self._run() == OK, self.said.read_text()
        self.new = self._found()
        self.old = dict.fromkeys(self.new, b"old")
        assert self.new and not self._left_over()

    def _begin_with(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for name, data in files.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(data)

    def _begin_again(self) -> None:
        """Makes the files old again, beside what was left over: a second run may go on from what it finds."""
        for name, data in self.old.items():
            (self.out / name).write_bytes(data)

    def _found(self) -> dict[str, bytes]:
        """The files there are, but for locks and what is hidden."""
        files = (path for path in self.out.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {
            str(path.relative_to(self.out)): path.read_bytes() for path in files if path.suffix != ".lock"
        }

    def _left_over(self) -> list[str]:
        return [path.name for path in self.out.rglob(".*")]

    def _run(self, how: str = "c", n: int = 0, sorts: str = "", under: Path | None = None) -> int:
        """Runs the operation in a child whose nth call is struck: its exit status, or minus the signal that ended it."""
        self.said.write_text("")
        child = os.fork()
        if child == 0:
            status = CRASHED
            try:
                FAULTS.faults_arm(os.fsencode(under or self.out), how.encode(), n, sorts.encode())
                self.operation.run(self.sources, self.out)
                FAULTS.faults_arm(b"/nowhere", b"c", 0, b"") if how != "c" else None
                status = OK
                self.said.write_bytes(FAULTS.faults_log()) if how == "c" else None
            except LlamaSidecarError as error:
                status = REFUSED
                self.said.write_text(str(error))
            except BaseException as error:
                self.said.write_text(repr(error))
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _points(self, sorts: str, under: Path | None = None) -> Iterator[tuple[int, str]]:
        """Which calls to strike, and their letters: all, but of many of one letter in a row the first, one between and the last."""
        self._begin_with(self.old)
        assert self._run("c", 0, sorts, under) == OK, self.said.read_text()
        at = 1
        for letter, run in groupby(self.said.read_text()):
            n = len(list(run))
            yield from ((at + i, letter) for i in sorted({0, n // 2, n - 1}))
            at += n

    def _check(self, where: str, files_change_together: bool) -> None:
        """Every file is whole, the old one or the new one; the old ones, all of them, where files change together."""
        found = self._found()
        assert found.keys() == self.new.keys(), f"a file is lost {where}"
        for name, data in found.items():
            fine = (self.old[name],) if files_change_together else (self.old[name], self.new[name])
            assert data in fine, f"{name} is wrong {where}"

    def kill(self) -> int:
        """Killed before each call, and within each write: every file is the old one or the new one, and a second run ends well."""
        points = list(self._points(""))
        for at, letter in points:
            self._begin_with(self.old)
            how = "t" if letter == "w" else "k"
            assert self._run(how, at) == -signal.SIGKILL, (at, self.said.read_text())
            self._check(f"after call {at} ({letter})", files_change_together=False)
            self._begin_again()
            assert self._run() == OK, self.said.read_text()
            assert self._found() == self.new and not self._left_over(), (at, letter, self._left_over())
        return len(points)

    def full(self) -> int:
        """From each call on the disk is full: one line, no file changed, nothing left over."""
        points = list(self._points(WRITES))
        for at, letter in points:
            self._begin_with(self.old)
            assert self._run(f"e{errno.ENOSPC}", at, WRITES) == REFUSED, (at, letter, self.said.read_text())
            said = self.said.read_text()
            assert "\n" not in said and ("No space left" in said or "filled up" in said), said
            self._check(f"after call {at} ({letter}): {said}", self.operation.files_change_together)
            assert not self._left_over(), (at, letter, self._left_over())
        return len(points)

    def refused(self) -> int:
        """Each call that gives a file its name fails by itself: it was not needed, or one line, and no file changed."""
        points = list(self._points(NAMES))
        for at, letter in points:
            self._begin_with(self.old)
            status = self._run(f"o{errno.EPERM}", at, NAMES)
            said = self.said.read_text()
            may_go_on = letter == "l" or not self.operation.files_change_together
            assert status == REFUSED or (status == OK and may_go_on), (at, letter, status, said)
            if status == OK and self.operation.files_change_together:
                assert self._found() == self.new
            elif status == REFUSED:
                assert "\n" not in said and "Operation not permitted" in said, said
                self._check(f"after call {at} ({letter}): {said}", self.operation.files_change_together)
            assert not self._left_over(), (at, letter, self._left_over())
        return len(points)

    def unreadable(self) -> int:
        """Each call that reads a source fails by itself: one line that names the file, no file changed."""
        points = list(self._points(READS, self.sources))
        if not os.environ.get("FAULTS_ALL"):
            points = points[:: -(-len(points) // MOST_READS)]
        for at, letter in points:
            self._begin_with(self.old)
            assert self._run(f"o{errno.EIO}", at, READS, self.sources) == REFUSED, (
                at,
                letter,
                self.said.read_text(),
            )
            said = self.said.read_text()
            assert "\n" not in said and "Input/output error" in said and str(self.sources) in said, said
            self._check(f"after call {at} ({letter})", self.operation.files_change_together)
            assert not self._left_over(), (at, letter)
        return len(points)


if __name__ == "__main__":
    FAULTS = ctypes.CDLL(os.environ["LD_PRELOAD"])
    FAULTS.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_char_p]
    FAULTS.faults_log.restype = ctypes.c_char_p
    np.zeros(1)
    name, what, folder = sys.argv[1:]
    print(getattr(Trials(name, Path(folder)), what)())
