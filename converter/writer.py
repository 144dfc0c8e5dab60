"""GGUF files out: written beside their targets under temporary names, checked, and renamed only when all are whole.

What a conversion that was ended has written is found again by the next one of the same. Knows the container (through the
published gguf package) and threads. Does not know where tensors come from, nor what they are called: a tensor is its name,
shape, type and a function from a range of its rows to bytes.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.config import Key
from llama_sidecar.converter.errors import HubFailed, NotEnoughSpace, OutputExists, OutputFailed
from llama_sidecar.converter.places import DISK, Reading
from llama_sidecar.sidecars import LlamaSidecarError, read_header
from llama_sidecar.sidecars.whole_file import open_left, open_part, part_of, sweep

HUGE_PAGE = 2 << 20  # bytes
_ZEROS = bytes(HUGE_PAGE)
RECORD_S = 10  # between notes of what is on the disk: a conversion that is killed loses so much
KEPT_BYTES = 256 << 20  # less is done again in seconds, and an interrupted conversion leaves nothing behind

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, name of a tensor)


class Tensor(Protocol):
    """What the writer asks of a tensor; `shape` is in torch's order (slowest first)."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> gguf.GGMLQuantizationType | int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_cols(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]: ...


class Header(Protocol):
    """What the writer asks of a header, in this order: a `gguf.GGUFWriter` that knows its keys and tensors has it."""

    def write_header_to_file(self, path: Path) -> None: ...
    def write_kv_data_to_file(self) -> None: ...
    def write_ti_data_to_file(self) -> None: ...
    def close(self) -> None: ...
    @property
    def data_alignment(self) -> int: ...


@dataclass(frozen=True)
class GGUFFile:
    """A file to be: where, its header (which also knows the tensors), and its tensors in the same order.

    `source` names all that decides the tensors' bytes and is not in the header, so that a conversion can go on where another
    stopped; empty for a file that is always begun anew.
    """

    path: Path
    header: Header
    tensors: Sequence[Tensor]
    source: str = ""


def new_header(arch: str, tensors: Sequence[Tensor]) -> gguf.GGUFWriter:
    """A header that knows its architecture and tensors, and takes keys."""
    header = gguf.GGUFWriter(None, arch)
    for t in tensors:
        header.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.type)
    return header


def add_keys(header: gguf.GGUFWriter, keys: dict[str, Key]) -> None:
    """Adds keys, each with the GGUF type of its Python type: bool, u32, f32, string, or an array of i32, bool, string."""
    for name, value in keys.items():
        if isinstance(value, bool):
            header.add_bool(name, value)
        elif isinstance(value, int):
            header.add_uint32(name, value)
        elif isinstance(value, float):
            header.add_float32(name, value)
        elif isinstance(value, str):
            header.add_string(name, value)
        else:
            header.add_array(name, value)


def planned_bytes(file: GGUFFile) -> int:
    """How large a file will be, to the byte; its header is written aside for that, and used up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        _write_header(file, path)
        return _offsets(path.stat().st_size, file)[-1]


def _write_header(file: GGUFFile, path: Path) -> None:
    file.header.write_header_to_file(path)
    file.header.write_kv_data_to_file()
    file.header.write_ti_data_to_file()
    file.header.close()


def _offsets(header_bytes: int, file: GGUFFile) -> list[int]:
    """Where each tensor's data begins, and where the file ends."""
    align = file.header.data_alignment
    sizes = (gguf.GGUFWriter.ggml_pad(n, align) for n in (header_bytes, *(t.n_bytes for t in file.tensors)))
    return list(accumulate(sizes))


def check_targets(paths: Collection[Path], force: bool) -> None:
    """Refuses to write over a folder, or without `force` over any file. Raises OutputExists."""
    existing = [str(path) for path in paths if os.path.lexists(path)]
    if existing and not force:
        raise OutputExists(
            f"{' and '.join(existing)} already there: use --force to replace, or another --out"
        )
    folders = [str(path) for path in paths if os.path.isdir(path)]
    if folders:
        raise OutputExists(
            f"{' and '.join(folders)} already there, as a folder: remove it, or use another --out"
        )


def write_files(
    files: Mapping[str, GGUFFile],
    check: Callable[[Mapping[str, Path]], AbstractContextManager[object] | None],
    progress: Progress | None = None,
    reading: Reading = DISK,
) -> dict[str, int]:
    """Writes all files into one folder or, whatever happens, none; returns their sizes in bytes.

    The caller's keys are kept. `check` gets the written files, still under their temporary names; they are put in place within the
    context that it returns, if it does. `reading` says how many threads read how much of a tensor at a time.

    What a conversion that was killed has written is used where the same is to be written again; what one that was interrupted, or
    lost its connection, has written stays for that where it is KEPT_BYTES or more (a note on the exception says so).
    Raises NotEnoughSpace before any data is written if the disk cannot hold them, or when it fills up; OutputFailed when the system
    refuses otherwise or a file does not read back as planned.
    """
    folder = next(iter(files.values())).path.parent
    made = [f for f in (folder, *folder.parents) if not os.path.lexists(f)]
    started: dict[str, _Started] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, file in files.items():
            started[key] = _Started(file, reading.n_values)
        for file in files.values():
            sweep(file.path.parent, file.path.name)
        _check_space(started.values())
        _write_data(started.values(), progress, reading.n_threads)
        for one in started.values():
            one.check()
        with check({key: one.path for key, one in started.items()}) or nullcontext():
            for one in started.values():
                one.put_in_place()
        n_bytes = {key: one.n_bytes for key, one in started.items()}
        for one in started.values():
            one.close()
        made, started = [], {}
        return n_bytes
    except (KeyboardInterrupt, SystemExit, HubFailed) as error:
        if _keep(started.values(), error):
            started = {}
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpace(
                f"the disk of {folder} filled up while the files were written: free some space and run it again"
            ) from error
        raise OutputFailed(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        for one in started.values():
            one.discard()
        for empty in made:
            with suppress(OSError):
                empty.rmdir()


@dataclass(frozen=True)
class _Slice:
    """Some rows of one tensor, and where in the file its data begins."""

    tensor: Tensor
    offset: int
    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        return (self.stop - self.start) * self.tensor.row_bytes


class _Started:
    """A file under its temporary name, header written, data to come.

    Behind the place of the last tensor stands, until all is written, a byte for each slice: 1 for those that are on the disk.
    The temporary name is made of a hash of all that decides the file's bytes. So a later conversion of the same finds what an
    earlier one has done, whatever ended it.
    """

    def __init__(self, file: GGUFFile, n_values: int):
        self.file = file
        self.can_go_on = False
        self.replaces = False
        self.replaced: Path | None = None  # where what had the file's name is kept
        self.fd, self.path = open_part(file.path)
        try:
            _write_header(file, self.path)
            self._plan(n_values)
            if file.source:
                self._continue(n_values)
        except BaseException:
            self.discard()
            raise

    def _plan(self, n_values: int) -> None:
        header_bytes = self.path.stat().st_size
        *self.offsets, self.n_bytes = _offsets(header_bytes, self.file)
        self.slices = [
            _Slice(tensor, offset, start, min(start + step, tensor.n_rows))
            for tensor, offset in zip(self.file.tensors, self.offsets, strict=True)
            for step in (max(1, n_values // tensor.n_cols),)
            for start in range(0, tensor.n_rows, step)
        ]
        self.header = os.pread(self.fd, header_bytes, 0)
        self.done = bytearray(len(self.slices))
        # Bytes up to where zeros stand for what is to come: at first the whole huge pages that the header reaches into.
        self.laid_out = -(-header_bytes // HUGE_PAGE) * HUGE_PAGE

    def _continue(self, n_values: int) -> None:
        """Takes over what an earlier conversion of the same has left; else takes the name under which that would be looked for."""
        decides = [self.header, self.file.source.encode(), str(n_values).encode()]
        digest = sha256(b"".join(sha256(part).digest() for part in decides)).hexdigest()
        path = part_of(self.file.path, digest[:16])
        with suppress(OSError):  # there is none, or one that still runs
            earlier = open_left(path)
            done = os.pread(earlier, len(self.slices) + 1, self.n_bytes)
            if os.pread(earlier, len(self.header), 0) == self.header and len(done) == len(self.slices):
                self.discard()
                self.fd, self.path, self.done, self.can_go_on = earlier, path, bytearray(done), True
                return
            path.unlink()
            os.close(earlier)
        with suppress(OSError):  # the one that still runs has the name
            os.link(self.path, path)
            self.path.unlink()
            self.path, self.can_go_on = path, True

    @property
    def n_done(self) -> int:
        """Bytes of data that are written."""
        return sum(part.n_bytes for part, is_done in zip(self.slices, self.done, strict=True) if is_done)

    def record(self) -> None:
        """Notes in the file which slices are on the disk by now, after seeing to it that they are."""
        done = bytes(self.done)
        os.fsync(self.fd)
        os.pwrite(self.fd, done, self.n_bytes)

    def check(self) -> None:
        """Reads the header back and compares it with the plan."""
        os.truncate(self.fd, self.n_bytes)
        os.fsync(self.fd)
        try:
            found = read_header(self.path).tensors
        except LlamaSidecarError as error:
            raise OutputFailed(f"{self.file.path} does not read back: {error}") from error
        planned = [
            (t.name, t.shape[::-1], int(t.type), at)
            for t, at in zip(self.file.tensors, self.offsets, strict=True)
        ]
        if planned != [(t.name, tuple(t.shape), int(t.type), t.offset) for t in found.values()]:
            raise OutputFailed(f"{self.file.path} does not read back as it was planned")

    def put_in_place(self) -> None:
        """Gives the file its name; what had that before is kept until all files are in place."""
        self.replaces = os.path.lexists(self.file.path)
        kept = part_of(self.file.path, secrets.token_hex(4))
        with suppress(OSError):  # there is nothing, or the file system has no links
            os.link(self.file.path, kept)
            self.replaced = kept
        os.replace(self.path, self.file.path)
        self.path = self.file.path

    def discard(self) -> None:
        """Removes the file, wherever it is by now, and puts back what it has replaced; before its lock is gone, as another
        conversion might take it over."""
        is_in_place = self.path == self.file.path
        if is_in_place and self.replaced:
            with suppress(OSError):  # then the new one stays, which is whole
                os.replace(self.replaced, self.path)
                self.replaced = None
        elif not (is_in_place and self.replaces):  # rather the new one than none
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self.replaced:
            self.replaced.unlink(missing_ok=True)
            self.replaced = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _keep(started: Collection[_Started], error: BaseException) -> bool:
    """Leaves what is written for a later conversion, if that is much and can be found again; says so on the exception."""
    kept = [one for one in started if one.can_go_on]
    n_done = sum(one.n_done for one in kept)
    if n_done < KEPT_BYTES:
        return False
    try:
        for one in kept:
            one.record()
    except OSError:
        return False
    for one in started:
        one.close() if one in kept else one.discard()
    note = f"{n_done / 1e9:.2f} GB are done and kept in {kept[0].path.parent} (hidden): the same command goes on from there"
    error.__dict__.setdefault("__notes__", []).append(note)  # add_note, which Python 3.10 lacks
    return True


def _check_space(started: Collection[_Started]) -> None:
    folder = next(iter(started)).path.parent
    needed = sum(max(0, one.n_bytes - os.fstat(one.fd).st_blocks * 512) for one in started)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NotEnoughSpace(
            f"{folder} has {free / 1e9:.2f} GB free; the files need {needed / 1e9:.2f} GB more"
        )


def _write_slice(one: _Started, part: _Slice) -> None:
    view = part.tensor.rows(part.start, part.stop).reshape(-1).data
    at = part.offset + part.start * part.tensor.row_bytes
    assert view.nbytes == part.n_bytes, (
        f"{part.tensor.name}: {view.nbytes} bytes for {part.stop - part.start} rows"
    )
    while view:
        written = os.pwrite(one.fd, view, at)
        view, at = view[written:], at + written


def _lay_out(one: _Started, part: _Slice) -> None:
    """Writes zeros where a slice and those after it will come, in whole huge pages.

    Linux maps a file in pages as large as the pieces in which it came into the page cache: written by slices alone it would be mapped
    by 4 KB until it has left that, and be slower to decode with for as long.
    """
    end = part.offset + part.stop * part.tensor.row_bytes
    while one.laid_out < end and one.laid_out + HUGE_PAGE <= one.n_bytes:
        os.pwrite(one.fd, _ZEROS, one.laid_out)
        one.laid_out += HUGE_PAGE


def _write_data(started: Collection[_Started], progress: Progress | None, n_threads: int) -> None:
    """Slices are independent: each thread reads, converts and writes its own."""
    for one in started:
        os.truncate(one.fd, one.n_bytes + len(one.slices))
    total = sum(t.n_bytes for one in started for t in one.file.tensors)
    done = sum(one.n_done for one in started)
    if progress and done:
        progress(done, total, "going on where it stopped")
    to_do = ((one, i) for one in started for i, is_done in enumerate(one.done) if not is_done)
    fresh = [one for one in started if sys.platform == "linux" and not any(one.done)]
    recorded = time.monotonic()
    with ThreadPoolExecutor(n_threads) as pool:
        try:
            running: dict[Future[None], tuple[_Started, int]] = {}
            while True:
                for one, i in islice(to_do, 4 * n_threads - len(running)):
                    if one in fresh:
                        _lay_out(one, one.slices[i])
                    running[pool.submit(_write_slice, one, one.slices[i])] = one, i
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    one, i = running.pop(future)
                    future.result()
                    one.done[i] = 1
                    done += one.slices[i].n_bytes
                    if progress:
                        progress(done, total, one.slices[i].tensor.name)
                if time.monotonic() > recorded + RECORD_S:
                    for one in started:
                        one.record()
                    recorded = time.monotonic()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
