"""What the methods share: the settings they are told, what they find, and the geometry of scales over a weight.

Knows how scales may lie over a weight: one for all, for each matrix, each row, each group of a row's columns, or each
block. Knows no method's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import BadConfig, BadShard, UnsupportedModel
from llama_sidecar.converter.shards import F32, Stored, Tensor


@dataclass(frozen=True)
class Joined:
    """A weight, and the names of the checkpoint's tensors that it is made of."""

    weight: Tensor
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """What config.json says of the quantisation: `method` or None, and the rest as it stands."""

    method: str | None
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: Config) -> Settings:
        for name in ("quantization_config", "compression_config"):
            values = config.get(name)
            if values is not None and not isinstance(values, dict):
                raise BadConfig(f"config.json has {name} = {values!r}; expected an object")
            if values:
                return cls(values.get("quant_method"), values)
        return cls(None, {})

    def groups(self) -> Iterator[Mapping[str, Any]]:
        """What compressed-tensors says of the weights, for each of its groups."""
        groups = self.values.get("config_groups") or {}
        for group in groups.values() if isinstance(groups, dict) else ():
            if isinstance(group, dict) and isinstance(group.get("weights"), dict):
                yield group["weights"]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The blocks of (rows, columns) that share a scale, as config.json gives them."""
        said = [
            self.values.get("weight_block_size"),
            *(group.get("block_structure") for group in self.groups()),
        ]
        for block in said:
            if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):
                block = [int(n) for n in block.split("x")]
            if block is None:
                continue
            if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) <= 0:
                raise UnsupportedModel(
                    f"config.json has a block of weights {block!r}; expected two positive integers"
                )
            yield block[0], block[1]

    def integers(self, name: str) -> list[int]:
        """A value of compressed-tensors' groups, wherever it is a positive integer."""
        found = [group.get(name) for group in self.groups()]
        return [value for value in found if type(value) is int and value > 0]


@dataclass(frozen=True)
class Grid:
    """Numbers that lie over a weight: of each matrix `n_rows` rows of them, one for each `block` of (rows, columns).

    A single one, `is_shared`, lies over all matrices.
    """

    numbers: Stored
    n_rows: int
    block: tuple[int, int]
    matrix_rows: int
    n_cols: int
    is_shared: bool = False

    def over(self, start: int, stop: int) -> F32:
        """The numbers over rows start..stop of the weight: (stop - start, n_cols), or one column that is all of them."""
        matrix, row = np.divmod(np.arange(start, stop), self.matrix_rows)
        index = (0 if self.is_shared else matrix) * self.n_rows + row // self.block[0]
        if not len(index):
            return np.ones((0, 1), np.float32)
        first = int(index[0])
        found = self.numbers.rows(first, int(index[-1]) + 1)
        numbers: F32 = found.reshape(int(index[-1]) + 1 - first, -1)[index - first]
        if numbers.shape[1] == 1:
            return numbers
        repeated: F32 = np.repeat(numbers, self.block[1], axis=1)[:, : self.n_cols]
        return repeated


def grid(numbers: Stored, weight: str, shape: tuple[int, ...], blocks: Iterator[tuple[int, int]]) -> Grid:
    """How numbers lie over a weight of a shape; `blocks` are the ones to try. Raises BadShard where they do not fit it.

    What the blocks do not explain is one number for all, for each matrix, for each row, or for each of a row's groups,
    which then are all of one size.
    """
    if len(shape) < 2:
        raise BadShard(f"{numbers.name} scales {weight} of {shape}; expected a matrix")
    *stack, n_rows, n_cols = shape
    lead, found = tuple(stack), numbers.shape
    tried = [*blocks]
    for rows, cols in ((max(1, min(r, n_rows)), max(1, min(c, n_cols))) for r, c in tried):
        if found == (*lead, -(-n_rows // rows), -(-n_cols // cols)):
            return Grid(numbers, found[-2], (rows, cols), n_rows, n_cols)
    whole = (max(1, n_rows), max(1, n_cols))
    if prod(found) == 1:
        return Grid(replace(numbers, shape=(1, 1)), 1, whole, n_rows, n_cols, is_shared=True)
    column = replace(numbers, shape=(prod(found), 1))
    if lead and found in (lead, (*lead, 1), (*lead, 1, 1)):
        return Grid(column, 1, whole, n_rows, n_cols)
    if found in ((*lead, n_rows), (*lead, n_rows, 1)):
        return Grid(column, n_rows, (1, whole[1]), n_rows, n_cols)
    if found[:-1] == (*lead, n_rows) and found[-1] > 0 and n_cols % found[-1] == 0:
        return Grid(numbers, n_rows, (1, n_cols // found[-1]), n_rows, n_cols)
    sizes = " or ".join(f"{rows}x{cols}" for rows, cols in tried)
    expected = (
        f"for blocks of {sizes}" if tried else "one for all, for each row, or for each of a row's groups"
    )
    raise BadShard(f"{numbers.name} has shape {found} for {weight} of {shape}; expected {expected}")
