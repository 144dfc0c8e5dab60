"""Blocks and what is said of each: which tensors are a head's, and keys that hold a value for every block.

A file with N trunk layers and M head blocks has `block_count` N + M and arrays of N + M values, a main file without the head
N. llama.cpp refuses an array of another length (src/llama-model-loader.cpp, get_key_or_arr). Pure functions of names and keys.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from llama_sidecar.converter.edit.header import Keys, Value, holds, same_value
from llama_sidecar.sidecars import keys

# Arrays of a length of their own, which may be the number of blocks by chance.
ARRAYS_OF_THEIR_OWN = ("{arch}.rope.dimension_sections",)
# What llama.cpp does with a head's block where a file does not say it.
HEADS_DEFAULT = {"{arch}.attention.recurrent_layers": False}
# A main file and its head need not agree in these: each has a context of its own, and a sidecar may be padded.
FREE = ("{arch}.context_length", "{arch}.vocab_size")
# Belong to no block, and a head has other values of its own there than the trunk: DeepSeek-V4's output mix.
HEADS_OWN = ("output_hc_",)


def is_trunk_block(name: str, n_layers: int) -> bool:
    """Whether a tensor belongs to one of a trunk's blocks; of those that belong to no block, a head has its own copy.

    >>> is_trunk_block("blk.3.attn_q.weight", 4), is_trunk_block("output.weight", 4)
    (True, False)
    """
    block = _block_of(name)
    return block is not None and block < n_layers


def is_head_block(name: str, n_layers: int) -> bool:
    """Whether a tensor belongs to a block that follows the trunk's.

    >>> is_head_block("blk.4.nextn.eh_proj.weight", 4), is_head_block("output.weight", 4)
    (True, False)
    """
    block = _block_of(name)
    return block is not None and block >= n_layers


def _block_of(name: str) -> int | None:
    found = re.match(r"blk\.([0-9]+)\.", name)
    return int(found[1]) if found else None


def without_head(arch: str, whole: Keys, n_layers: int, n_heads: int) -> Keys:
    """The keys of a main file (n_layers + n_heads blocks) without its head: of n_layers blocks.

    >>> from llama_sidecar.converter.edit.header import uint
    >>> whole = {"a.block_count": uint(5), "a.nextn_predict_layers": uint(1)}
    >>> without_head("a", whole, 4, 1)["a.block_count"][1]
    4
    """
    names = _Names(arch)
    trunk = {
        name: (types, value[:n_layers])
        if names.is_per_layer(name, value, n_layers + n_heads)
        else (types, value)
        for name, (types, value) in whole.items()
        if name != names.head_count
    }
    return trunk | {names.block_count: (whole[names.block_count][0], n_layers)}


def with_head(arch: str, main: Keys, sidecar: Keys, n_layers: int, n_heads: int) -> tuple[Keys, list[str]]:
    """A main file's keys with a sidecar's blocks added, and the architecture's keys in which the two contradict each other.

    Of a key with a value for each block, the trunk's values are the main file's and the head's the sidecar's. What else of the
    architecture only the sidecar says is added: its blocks may need it.
    """
    names = _Names(arch)
    joined, differing = dict(main), []
    for name in dict.fromkeys((*main, *sidecar)):
        if name in (names.block_count, names.head_count):
            joined[name] = sidecar[name]
        elif name.startswith(f"{arch}."):
            value = _joined(names, name, main.get(name), sidecar.get(name), n_layers, n_heads)
            if value is None:
                differing.append(name)
            else:
                joined[name] = value
    return joined, differing


class _Names:
    """What the keys of layers.py are called in files of one architecture."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.block_count, self.head_count = map(self.full, (keys.BLOCK_COUNT, keys.NEXTN_PREDICT_LAYERS))
        self.own_arrays, self.free = [set(map(self.full, names)) for names in (ARRAYS_OF_THEIR_OWN, FREE)]
        self.heads_default = {self.full(name): value for name, value in HEADS_DEFAULT.items()}

    def full(self, template: str) -> str:
        return template.replace("{arch}", self.arch)

    def is_per_layer(self, name: str, value: Any, n_blocks: int) -> bool:
        is_array = isinstance(value, np.ndarray) and len(value) == n_blocks
        return is_array and name.startswith(f"{self.arch}.") and name not in self.own_arrays


def _joined(
    names: _Names, name: str, ours: Value | None, theirs: Value | None, n_layers: int, n_heads: int
) -> Value | None:
    """One key of a main file with its head; None where the two files contradict each other."""
    total = n_layers + n_heads
    arrays = [
        key[0]
        for key, n in ((ours, n_layers), (theirs, total))
        if key is not None and names.is_per_layer(name, key[1], n)
    ]
    if not arrays:
        if ours is None or theirs is None or name in names.free or same_value(ours[1], theirs[1]):
            return ours or theirs
        return None
    head = _blocks(theirs, n_layers, total)
    if head is None and theirs is None and name in names.heads_default:
        head = np.full(n_heads, names.heads_default[name])
    trunk = _blocks(ours or theirs, 0, n_layers)
    if trunk is None or head is None or (theirs and not same_value(trunk, _blocks(theirs, 0, n_layers))):
        return None
    joined = np.concatenate([trunk, head])
    return (arrays[0], joined) if holds(arrays[0], joined) else None


def _blocks(key: Value | None, start: int, stop: int) -> Any:
    """The values for blocks start..stop: a part of an array, or the one number that holds for all; None without any."""
    value = None if key is None else key[1]
    if isinstance(value, np.ndarray):
        return value[start:stop]
    return np.full(stop - start, value) if isinstance(value, (bool, int, float)) else None
