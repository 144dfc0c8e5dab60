"""From a family's layout and a checkpoint's tensors to the tensors of a GGUF file, each a function of its rows.

Accounts for every tensor: all that are missing, left over or misshapen are named in one error, before anything is
written. Knows neither families nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import TensorMismatch, UnsupportedModel
from llama_sidecar.converter.families import Family, Layout, Placement
from llama_sidecar.converter.imatrix import Imatrix
from llama_sidecar.converter.quantize import encode, row_bytes, uses_importance
from llama_sidecar.converter.shards import INTEGERS, Tensor

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Planned:
    """One tensor of a file to be: `rows(start, stop)` are its bytes. `shape` is in torch's order (slowest first)."""

    placement: Placement
    type: GGMLType
    pieces: tuple[
        tuple[Tensor, int, int], ...
    ]  # tensors of the checkpoint and ranges of their rows, in order
    importance: F32 | None = None  # (n_matrices, n_cols), of the columns

    @property
    def name(self) -> str:
        return self.placement.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placement.shape

    @property
    def n_cols(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def n_rows(self) -> int:
        return prod(self.shape) // self.n_cols

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.type, self.n_cols)

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    def rows(self, start: int, stop: int) -> U8:
        """The bytes of rows start..stop: (stop - start, row_bytes). Raises UnsupportedModel for values the type cannot hold."""
        try:
            with np.errstate(over="raise", invalid="ignore"):  # `encode` refuses what is no number
                return self._encoded(start, stop)
        except FloatingPointError as error:
            source = next((tensor.name for tensor, _, _ in self._pieces(start, stop)), self.name)
            advice = "ask for BF16 or F32" if self.type == GGMLType.F16 else "the checkpoint is damaged"
            below = self.placement.below
            allowed = f"the range of {self.type.name}" if below is None else f"0 to {below - 1}"
            raise UnsupportedModel(f"{source} has values beyond {allowed}: {advice}") from error

    def _encoded(self, start: int, stop: int) -> U8:
        place = self.placement
        as_stored = bool(self.pieces) and all(tensor.dtype == self.type.name for tensor, _, _ in self.pieces)
        if as_stored and place.transform is None and not place.transposed:
            return _gathered(self._pieces(start, stop), lambda tensor, a, b: tensor.blocks(a, b))
        rows = self._values(start, stop)
        if place.below is not None and not (rows.min() >= 0 and rows.max() < place.below):
            raise FloatingPointError(f"integers beyond 0 to {place.below - 1}")
        if place.transform:
            rows = place.transform(rows)
        return self._bytes(np.ascontiguousarray(rows), start)

    def _bytes(self, rows: F32, start: int) -> U8:
        """Rows from `start` on as bytes; in a stack of matrices each has an importance of its own."""
        if self.importance is None:
            return encode(rows, self.type)
        n_rows = self.shape[-2]
        cuts = [0, *range(n_rows - start % n_rows, len(rows), n_rows), len(rows)]
        parts = ((rows[a:b], self.importance[(start + a) // n_rows]) for a, b in pairwise(cuts))
        return _joined([encode(part, self.type, importance) for part, importance in parts])

    def _values(self, start: int, stop: int) -> F32:
        """Rows start..stop as float32, before the transform: (stop - start, n_cols)."""
        if self.placement.values is not None:
            return np.array(self.placement.values, np.float32).reshape(-1, self.n_cols)[start:stop]
        if not self.placement.transposed:
            return self._stored(start, stop).reshape(-1, self.n_cols)
        n_rows, n_cols = self.pieces[0][0].n_cols, self.n_cols  # of one matrix as it is written
        first, last = start // n_rows, -(-stop // n_rows)  # the matrices that the rows lie in are read whole
        stored = self._stored(first * n_cols, last * n_cols)
        rows: F32 = stored.reshape(-1, n_cols, n_rows).swapaxes(1, 2).reshape(-1, n_cols)
        return rows[start - first * n_rows : stop - first * n_rows]

    def _stored(self, start: int, stop: int) -> F32:
        return _gathered(self._pieces(start, stop), lambda tensor, a, b: tensor.rows(a, b))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        if self.pieces and not self.placement.transposed:  # a vector's values may be written as a matrix
            per_row = self.n_cols // self.pieces[0][0].n_cols
            start, stop = start * per_row, stop * per_row
        ends = accumulate(b - a for _, a, b in self.pieces)
        for (tensor, a, b), end in zip(self.pieces, ends, strict=True):
            first, last = max(start, end - (b - a)), min(stop, end)
            if first < last:
                yield tensor, b - (end - first), b - (end - last)


def _gathered(
    pieces: Iterable[tuple[Tensor, int, int]], read: Callable[[Tensor, int, int], npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """The rows of all pieces; those of one tensor that only change places are read at once: each reading may be a request."""
    parts: list[npt.NDArray[Any]] = []
    for _, group in groupby(pieces, key=lambda piece: id(piece[0])):
        ranges = list(group)
        tensor = ranges[0][0]
        in_order = sorted((a, b) for _, a, b in ranges)
        (first, _), (_, last) = in_order[0], in_order[-1]
        if len(ranges) > 1 and all(one[1] == next_one[0] for one, next_one in pairwise(in_order)):
            rows = read(tensor, first, last)
            parts += [rows[a - first : b - first] for _, a, b in ranges]
        else:
            parts += [read(tensor, a, b) for _, a, b in ranges]
    return _joined(parts)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class _Beside(Tensor):
    """Matrices of as many rows each as one, whose rows are theirs side by side."""

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, placement: Placement, parts: list[Tensor]) -> _Beside:
        dtypes = sorted({part.dtype for part in parts})
        name = " and ".join(part.name for part in parts)
        return cls(name, " and ".join(dtypes), placement.shape, parts[0].file, tuple(parts))

    def raw_rows(self, start: int, stop: int) -> U8:
        return np.concatenate([part.raw_rows(start, stop) for part in self.parts], axis=1)

    def rows(self, start: int, stop: int) -> F32:
        return np.concatenate([part.rows(start, stop) for part in self.parts], axis=1)

    def blocks(self, start: int, stop: int) -> U8:
        return np.concatenate([part.blocks(start, stop) for part in self.parts], axis=1)

    def check_type(self) -> None:
        for part in self.parts:
            part.check_type()


def canonical_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The tensors that have to go somewhere, by the family's canonical names. Raises TensorMismatch for a clash."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if family.DROPPED.search(name):
            continue
        canonical = family.canonical(name)
        if canonical in found:
            raise TensorMismatch(
                f"{name} in {tensor.file} and {found[canonical].name} in {found[canonical].file} are the same tensor"
            )
        found[canonical] = tensor
    return found


@dataclass(frozen=True)
class Mismatch:
    """What is wrong with a checkpoint's tensors: canonical names that are missing, and a line for each that is wrong."""

    missing: list[str]
    unplaced: list[str]
    misshapen: dict[str, str]

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.missing + other.missing, self.unplaced + other.unplaced, self.misshapen | other.misshapen
        )

    def __bool__(self) -> bool:
        return bool(self.missing or self.unplaced or self.misshapen)

    def __str__(self) -> str:
        findings = {
            "missing": self.missing,
            "no place for": self.unplaced,
            "other shapes than config.json calls for": self.misshapen.values(),
        }
        problems = [f"{what}: {', '.join(names)}" for what, names in findings.items() if names]
        return "the tensors are not those of this architecture; " + "; ".join(problems)


def mismatch(layout: Layout, tensors: Mapping[str, Tensor]) -> Mismatch:
    """Whether every tensor has its place, and every place its tensor in the shape that the configuration calls for."""
    wanted = {s.name: s.shape for p in (*layout.shared, *layout.trunk, *layout.head) for s in p.sources}
    return Mismatch(
        missing=[name for name in wanted if name not in tensors],
        unplaced=[f"{t.name} ({t.file})" for name, t in tensors.items() if name not in wanted],
        misshapen={
            name: f"{tensors[name].name} {_shown(tensors[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        },
    )


def _shown(tensor: Tensor) -> str:
    """A shape; of integers, which a weight is made of together with their scales, what they are."""
    is_code = tensor.dtype in INTEGERS
    return f"{list(tensor.shape)}{f' ({tensor.dtype} codes without scales)' if is_code else ''}"


def account(layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Raises TensorMismatch with all names at once, and UnsupportedModel for a tensor whose values cannot be read."""
    if found := mismatch(layout, tensors):
        raise TensorMismatch(str(found))
    of_integers = {s.name for p in (*layout.shared, *layout.trunk) if p.below is not None for s in p.sources}
    for name, tensor in tensors.items():
        if name not in of_integers:
            tensor.check_type()
        elif tensor.dtype not in INTEGERS:
            raise UnsupportedModel(f"{tensor.name} in {tensor.file} is {tensor.dtype}; expected integers")


def plan(
    placements: Iterable[Placement],
    tensors: Mapping[str, Tensor],
    types: Mapping[str, GGMLType],
    imatrix: Imatrix | None = None,
) -> list[Planned]:
    """The tensors of one file in the order of the placements, each with its type. Raises BadImatrix for another model's."""

    def importance(p: Placement) -> F32 | None:
        return imatrix.of(p.name, p.shape) if imatrix and uses_importance(types[p.name]) else None

    return [
        Planned(
            p,
            types[p.name] if p.below is None else GGMLType.I32,
            tuple(_ranges(p, tensors)),
            importance(p),
        )
        for p in placements
    ]


def values(placement: Placement, tensors: Mapping[str, Tensor]) -> F32:
    """The whole tensor as float32, for small ones."""
    one = Planned(placement, GGMLType.F32, tuple(_ranges(placement, tensors)))
    return one.rows(0, one.n_rows).view(np.float32).reshape(one.shape)


def _ranges(placement: Placement, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    sources = [tensors[source.name] for source in placement.sources]
    if placement.beside:
        yield _Beside.of(placement, sources), 0, sources[0].n_rows
        return
    if placement.rows is None:
        yield from ((tensor, 0, tensor.n_rows) for tensor in sources)
        return
    (tensor,) = sources  # rows are picked from one tensor, or several are stacked whole
    yield from ((tensor, rows.start, rows.stop) for rows in placement.rows)
