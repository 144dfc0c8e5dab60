"""An importance matrix: how much each column of a matrix counts, measured by llama-imatrix on some text.

Facts: llama.cpp's tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp for the two formats (GGUF, and the older .dat),
tools/quantize/quantize.cpp for what becomes of the sums and which keys record it. Knows no model, and no type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.config import Key
from llama_sidecar.converter.errors import BadImatrix
from llama_sidecar.sidecars import LlamaSidecarError, read_header
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray

F32 = npt.NDArray[np.float32]

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, N_CHUNKS = "imatrix.datasets", "imatrix.chunk_count"
MAX_NAME_BYTES = 512  # of a tensor, in the older format; ggml's limit is 63
_I32 = struct.Struct("<i")


@dataclass(frozen=True)
class Imatrix:
    """`entries` by a matrix's GGUF name: the mean square of each of its inputs, (n_matrices * n_cols,) in F32.

    Experts come one after the other. `dataset` is the text that was used and `n_chunks` how much of it, "" and 0 if unknown.
    """

    path: Path
    entries: Mapping[str, F32]
    dataset: str = ""
    n_chunks: int = 0

    def of(self, name: str, shape: Sequence[int]) -> F32 | None:
        """What weighs the columns of a matrix of this shape (slowest first): (n_matrices, n_cols), or None.

        Raises BadImatrix where the entry is of another size.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        n_matrices = int(np.prod(shape[:-2], dtype=np.int64))
        if entry.size != n_matrices * shape[-1]:
            raise BadImatrix(
                f"{self.path} has {entry.size} values for {name}, which has {n_matrices * shape[-1]} columns: "
                "it is another model's; give the one that was made with this model"
            )
        return entry.reshape(n_matrices, shape[-1])

    def warnings(self, names: Iterable[str]) -> list[str]:
        """What to say of matrices without an entry; llama-imatrix has none for the embeddings, nor by default the output.

        Raises BadImatrix where not one of the names has an entry.
        """
        blocks = [name for name in names if name.startswith("blk.")]
        missing = [name for name in blocks if name not in self.entries]
        if blocks and missing == blocks:
            raise BadImatrix(
                f"{self.path} has entries for {_some(self.entries)}, and none for a matrix of this model: "
                "give the one that was made with this model"
            )
        if not missing:
            return []
        return [
            f"{self.path} has no entry for {len(missing)} of {len(blocks)} matrices, which are quantised without: {_some(missing)}"
        ]

    def keys(self) -> dict[str, Key]:
        """The keys that llama-quantize records it by; of the path the file's name only."""
        found: dict[str, Key] = {"quantize.imatrix.file": self.path.name}
        if self.dataset:
            found["quantize.imatrix.dataset"] = self.dataset
        found["quantize.imatrix.entries_count"] = len(self.entries)
        if self.n_chunks:
            found["quantize.imatrix.chunks_count"] = self.n_chunks
        return found


def read_imatrix(path: str | Path) -> Imatrix:
    """Reads an importance matrix as llama-imatrix writes it, in either format. Raises BadImatrix.

    >>> read_imatrix("imatrix.gguf").of("blk.0.attn_q.weight", (2048, 1024)).shape     # doctest: +SKIP
    (1, 1024)
    """
    path = Path(path)
    if not path.is_file():
        raise BadImatrix(f"{path} is no file; expected an importance matrix as llama-imatrix writes it")
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            found = _of_gguf(path, read_header(path)) if is_gguf else _of_dat(path, file)
    except OSError as error:
        raise BadImatrix(f"{path} cannot be read: {error.strerror or error}") from error
    except LlamaSidecarError as error:
        raise error if isinstance(error, BadImatrix) else BadImatrix(str(error)) from error
    if not found.entries:
        raise _no_imatrix(path, "holds no entry")
    broken = [name for name, values in found.entries.items() if not np.isfinite(values).all()]
    if broken:
        raise BadImatrix(
            f"{path} has values that are not finite for {_some(broken)}: it is damaged; make it anew"
        )
    return found


def _of_gguf(path: Path, header: GGUFHeader) -> Imatrix:
    """Sums of squares, and how many rows each is a sum over: one number, or one for each expert."""
    entries = {}
    for name in (name.removesuffix(SUMS) for name in header.tensors if name.endswith(SUMS)):
        sums, counts = _values(header, name + SUMS), _values(header, name + COUNTS)
        if sums.size % counts.size:
            raise _no_imatrix(path, f"has {sums.size} sums and {counts.size} counts for {name}")
        by_matrix = sums.reshape(counts.size, -1)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused by read_imatrix
            counts = np.rint(counts)
            seen = counts > 0
            by_matrix[seen] /= counts[seen, None]
        by_matrix[~seen] = 1  # an expert that the text never chose
        entries[name] = sums
    if not entries:
        raise _no_imatrix(path, "is a GGUF file without an entry")
    datasets, n_chunks = header.keys.get(DATASETS), header.keys.get(N_CHUNKS)
    return Imatrix(
        path,
        entries,
        datasets[0] if isinstance(datasets, StringArray) and len(datasets) else "",
        n_chunks if isinstance(n_chunks, int) else 0,
    )


def _values(header: GGUFHeader, name: str) -> F32:
    info = header.tensors.get(name)
    if info is None or info.type_name != "F32" or not info.n_elements:
        found = "lacks" if info is None else f"has as {info.type_name}"
        raise _no_imatrix(header.path, f"{found} {name}")
    return header.tensor_bytes(name).view("<f4")


def _of_dat(path: Path, file: BinaryIO) -> Imatrix:
    """Means of squares times the number of calls; the text's name and length follow, if they do."""

    def integer() -> int:
        data = file.read(4)
        return int(_I32.unpack(data)[0]) if len(data) == 4 else -1

    def text(n_bytes: int) -> str:
        data = file.read(n_bytes) if 0 < n_bytes <= MAX_NAME_BYTES else b""
        return data.decode("utf-8", "replace") if len(data) == n_bytes else ""

    n_bytes = path.stat().st_size
    entries: dict[str, F32] = {}
    n_entries = integer()
    for i in range(n_entries if 0 < n_entries < n_bytes else 0):
        name, n_calls, n_values = text(integer()), integer(), integer()
        if not name or n_calls < 0 or not 0 < n_values <= n_bytes // 4:
            raise _no_imatrix(path, f"has no name and size where entry {i + 1} of {n_entries} begins")
        data = file.read(4 * n_values)
        if len(data) != 4 * n_values:
            raise _no_imatrix(path, f"ends within entry {i + 1} of {n_entries}")
        values = np.frombuffer(data, "<f4").astype(np.float32)
        with np.errstate(invalid="ignore"):  # what is not finite is refused by read_imatrix
            entries[name] = values / np.float32(n_calls) if n_calls else values
    n_chunks = integer()
    return Imatrix(path, entries, text(integer()), max(n_chunks, 0))


def _no_imatrix(path: Path, found: str) -> BadImatrix:
    return BadImatrix(
        f"{path} {found}; expected an importance matrix as llama-imatrix writes it (GGUF or .dat)"
    )


def _some(names: Iterable[Any]) -> str:
    """The first three of the names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
