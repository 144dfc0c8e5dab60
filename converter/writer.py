"""GGUF files out: written beside their targets under temporary names, checked, and renamed only when all are whole.

Knows the container (through the published gguf package) and threads. Does not know where tensors come from, nor what
they are called: a tensor is its name, shape, type and a function from a range of its rows to bytes.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.config import Key
from llama_sidecar.converter.errors import NotEnoughSpace, OutputExists, OutputFailed
from llama_sidecar.sidecars import LlamaSidecarError, read_header

SLICE_VALUES = 1 << 20  # values of a tensor that one thread holds at a time: 4 MB as float32, near its cache
MAX_THREADS = 8

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
    """A file to be: where, its header (which also knows the tensors), and its tensors in the same order."""

    path: Path
    header: Header
    tensors: Sequence[Tensor]


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
) -> dict[str, int]:
    """Writes all files into one folder or, whatever happens, none; returns their sizes in bytes.

    The caller's keys are kept. `check` gets the written files, still under their temporary names; they are put in place within the
    context that it returns, if it does. Raises NotEnoughSpace
    before any data is written if the disk cannot hold them, or when it fills up; OutputFailed when the system refuses
    otherwise or a file does not read back as planned.
    """
    folder = next(iter(files.values())).path.parent
    made = [f for f in (folder, *folder.parents) if not os.path.lexists(f)]
    started: dict[str, _Started] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, file in files.items():
            _sweep(file.path)
            started[key] = _Started(file)
        _check_space(started.values())
        _write_data(started.values(), progress)
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


class _Started:
    """A file under its temporary name, header written, data to come."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.path = _part(file.path, secrets.token_hex(4))
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(OSError):  # a file system without locks: then nothing is ever swept there
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.header.write_header_to_file(self.path)
            file.header.write_kv_data_to_file()
            file.header.write_ti_data_to_file()
            file.header.close()
        except BaseException:
            self.discard()
            raise
        align = file.header.data_alignment
        self.header_bytes = self.path.stat().st_size
        self.offsets = []
        end = gguf.GGUFWriter.ggml_pad(self.header_bytes, align)
        for tensor in file.tensors:
            self.offsets.append(end)
            end += gguf.GGUFWriter.ggml_pad(tensor.n_bytes, align)
        self.n_bytes = end

    def check(self) -> None:
        """Reads the header back and compares it with the plan."""
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
        os.replace(self.path, self.file.path)
        self.path = self.file.path

    def discard(self) -> None:
        """Removes the file, wherever it is by now."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _part(path: Path, tag: str) -> Path:
    return path.with_name(f".{path.name}.{tag}.part")


def _sweep(path: Path) -> None:
    """Removes what killed conversions left of a file; one that still runs holds a lock."""
    for part in path.parent.glob(_part(Path(glob.escape(path.name)), "*").name):
        with suppress(OSError):
            fd = os.open(part, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(fd)


def _check_space(started: Collection[_Started]) -> None:
    folder = next(iter(started)).path.parent
    needed = sum(one.n_bytes - one.header_bytes for one in started)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NotEnoughSpace(
            f"{folder} has {free / 1e9:.2f} GB free; the files need {needed / 1e9:.2f} GB more"
        )


def _slices(started: Collection[_Started]) -> Iterator[tuple[_Started, Tensor, int, int, int]]:
    """(file, tensor, its offset in the file, first row, last row + 1)."""
    for one in started:
        for tensor, offset in zip(one.file.tensors, one.offsets, strict=True):
            step = max(1, SLICE_VALUES // tensor.n_cols)
            for start in range(0, tensor.n_rows, step):
                yield one, tensor, offset, start, min(start + step, tensor.n_rows)


def _write_slice(one: _Started, tensor: Tensor, offset: int, start: int, stop: int) -> tuple[int, str]:
    view = tensor.rows(start, stop).reshape(-1).data
    n_bytes, at = view.nbytes, offset + start * tensor.row_bytes
    assert n_bytes == (stop - start) * tensor.row_bytes, (
        f"{tensor.name}: {n_bytes} bytes for {stop - start} rows"
    )
    while view:
        written = os.pwrite(one.fd, view, at)
        view, at = view[written:], at + written
    return n_bytes, tensor.name


def _write_data(started: Collection[_Started], progress: Progress | None) -> None:
    """Slices are independent: each thread reads, converts and writes its own."""
    for one in started:
        os.truncate(one.fd, one.n_bytes)
    total = sum(t.n_bytes for one in started for t in one.file.tensors)
    done = 0
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        try:
            futures = [pool.submit(_write_slice, *part) for part in _slices(started)]
            for future in as_completed(futures):
                n_bytes, name = future.result()
                done += n_bytes
                if progress:
                    progress(done, total, name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
