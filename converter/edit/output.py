"""What the commands that make GGUF files from GGUF files share: names, targets, writing, and what they report.

No input is ever overwritten. Knows what files are called and nothing of their insides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llama_sidecar.converter.edit.header import Header, Keys, Value, text
from llama_sidecar.converter.errors import InputGiven, OutputFailed
from llama_sidecar.converter.general import file_name
from llama_sidecar.converter.writer import GGUFFile, Progress, Tensor, check_targets, write_files
from llama_sidecar.sidecars import KINDS, GGUFHeader, compact, keys
from llama_sidecar.sidecars.discover import TYPE_WORD
from llama_sidecar.sidecars.shards import shard_name


@dataclass(frozen=True)
class EditResult:
    """What was written; a path is None, and a size 0, for a file that was not.

    `match` says how sure it is that main file and head belong together (a status of sidecars/pair.py, None where there is one
    file alone) and `detail` why; `notes` say what was chosen, `warnings` what to mind.
    """

    main: Path | None = None
    sidecar: Path | None = None
    main_bytes: int = 0
    sidecar_bytes: int = 0
    match: str | None = None
    detail: str | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON object, with the schema's version first."""
        return {"schema": 1} | {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}


def gguf_file(path: Path, file_keys: Keys, tensors: Sequence[Tensor]) -> GGUFFile:
    """A file to be written, of these keys and tensors."""
    return GGUFFile(path, Header(file_keys, tensors), tensors)


def write(
    files: Mapping[str, GGUFFile],
    inputs: Collection[GGUFHeader],
    *,
    force: bool,
    check: Callable[[Mapping[str, Path]], None],
    progress: Progress | None,
) -> dict[str, int]:
    """Write all files or none, and return their sizes in bytes; `check` gets them while they still have temporary names.

    Raises InputGiven, OutputExists, and what `write_files` raises.
    """
    paths = [file.path for file in files.values()]
    _check_targets(paths, inputs, force)

    def check_all(written: Mapping[str, Path]) -> None:
        check(written)
        _check_targets(paths, inputs, force)  # again: somebody else may have been faster

    return write_files(files, check_all, progress)


def relabelled(file_keys: Keys, before: Sequence[Tensor], after: Sequence[Tensor]) -> Keys:
    """The keys with the size label of other tensors, where the label counts the tensors and does not come from a name.

    So a main file and a sidecar are labelled as llama.cpp's converter labels them.
    """
    label = file_keys.get(keys.SIZE_LABEL)
    if label is None or label != _size_label(before) or (counted := _size_label(after)) is None:
        return file_keys
    return file_keys | {keys.SIZE_LABEL: counted}


def _size_label(tensors: Sequence[Tensor]) -> Value | None:
    """The label that llama.cpp's converter counts; None where an older gguf package cannot, for vectors of experts."""
    counter = gguf.GGUFWriter(None, "")
    for t in tensors:
        counter.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.type)
    try:
        return text(gguf.size_label(*counter.get_total_parameter_count()))
    except IndexError:
        return None


def _check_targets(paths: Collection[Path], inputs: Collection[GGUFHeader], force: bool) -> None:
    for path in filter(os.path.lexists, paths):
        if any(_is_same(path, other) for header in inputs for other in header.paths):
            raise InputGiven(f"{path} is one of the files that are read: use another --out")
    check_targets(paths, force)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # a link that leads nowhere
        return False


def check_folder(out: Path) -> None:
    """Raises OutputFailed for a file's name where a folder is wanted."""
    if out.suffix == ".gguf":
        raise OutputFailed(f"{out} is a file's name; expected the folder to write to")


def check_main_name(path: Path) -> None:
    """Raises OutputFailed for a name by which llama.cpp would take a main file for a sidecar, or that is no GGUF's."""
    if path.suffix != ".gguf":
        raise OutputFailed(f"{path} does not end in .gguf; expected the name of the file to write")
    taken = [kind.prefix for kind in KINDS.values() if kind.prefix in path.name.lower()]
    if taken:
        raise OutputFailed(
            f"{path} has {taken[0]} in its name, by which llama.cpp takes it for a sidecar: use another name"
        )


def main_name(header: GGUFHeader) -> str:
    """What a main file made from another is called: as the other is.

    >>> main_name(read_model("NAME-Q4_K_M-00001-of-00003.gguf"))  # doctest: +SKIP
    'NAME-Q4_K_M.gguf'
    """
    return file_name(*name_and_type(header))


def sidecar_name(header: GGUFHeader, kind: str, type_name: str | None = None) -> str:
    """What the sidecar of a file is called, with the file's own type unless another is named.

    >>> sidecar_name(read_model("NAME-Q4_K_M.gguf"), "mtp")  # doctest: +SKIP
    'mtp-NAME-Q4_K_M.gguf'
    """
    name, own = name_and_type(header)
    return file_name(name, type_name or own, KINDS[kind].prefix)


def compact_name(header: GGUFHeader, type_name: str, n_rows: int) -> str:
    """What a compact sidecar made from another is called.

    >>> compact_name(read_header("compact-NAME-Q8_0-32768.gguf"), "Q4_0", 32768)  # doctest: +SKIP
    'compact-NAME-Q4_0-32768.gguf'
    """
    stem = header.path.stem.removeprefix("compact-").removesuffix(f"-{n_rows}")
    name, _ = name_and_type(replace(header, path=header.path.with_name(f"{stem}.gguf")))
    return compact.file_name(Path(file_name(name, type_name)), n_rows)


def name_and_type(header: GGUFHeader) -> tuple[str, str]:
    """The name of the model and of its type, from a file's name; without a type there, that of most of its bytes."""
    shard = shard_name(header.path)
    stem = shard[0] if shard else header.path.stem
    for kind in KINDS.values():
        stem = stem.removeprefix(kind.prefix)
    found = [match for match in TYPE_WORD.finditer(stem) if match.end() == len(stem) and match.start() > 0]
    if found:
        return stem[: found[0].start()], stem[found[0].start() + 1 :]
    return stem, main_type(header)


def main_type(header: GGUFHeader) -> str:
    """The type of most bytes of a file."""
    n_bytes: dict[str, int] = {}
    for info in header.tensors.values():
        n_bytes[info.type_name] = n_bytes.get(info.type_name, 0) + info.n_bytes
    return max(n_bytes, key=lambda name: n_bytes[name], default="F32")
