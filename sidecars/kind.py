"""What a kind of sidecar is: the questions every file in kinds/ answers, and the checks they share.

Knows no kind by name; `kinds.KINDS` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader

MAX_BLOCKS = 512  # llama.cpp's limit
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """What a sidecar says about the main model it drafts for; None where it says nothing.

    `width` is the length of the hidden row it takes, `n_layers` the trunk's exact number of layers, `deepest_layer` the
    highest layer whose input it reads (the number of layers means: the last output).
    """

    arch: str | None = None
    width: int | None = None
    n_layers: int | None = None
    deepest_layer: int | None = None


def _in_no_main(header: GGUFHeader) -> bool:
    return False


def _cannot_cut(header: GGUFHeader) -> list[str]:
    return []


@dataclass(frozen=True)
class Kind:
    """One kind of sidecar. `rank` 1 is taken first; file names start with `prefix`; `llama_name` is llama.cpp's.

    `vocab_tensors` names the tensors with one row per token, which a compact sidecar holds some rows of; none: it cannot be cut.
    """

    name: str
    title: str
    rank: int
    prefix: str
    llama_name: str
    is_sidecar: Callable[[GGUFHeader], bool]
    check: Callable[[GGUFHeader], None]
    target: Callable[[GGUFHeader], Target]
    is_embedded: Callable[[GGUFHeader], bool] = _in_no_main
    vocab_tensors: Callable[[GGUFHeader], list[str]] = _cannot_cut


def n_blocks(header: GGUFHeader) -> int:
    """Return `{arch}.block_count`; raises MissingKey or WrongKey."""
    n = header.uint(keys.BLOCK_COUNT)
    if not 1 <= n <= MAX_BLOCKS:
        raise errors.WrongKey(
            f"{header.path}: {header.key(keys.BLOCK_COUNT)} is {n}; 1 to {MAX_BLOCKS} is expected"
        )
    return n


def target_layers(header: GGUFHeader) -> list[int]:
    """Return `{arch}.target_layers`, the layers of the main model whose inputs are read; raises MissingKey or WrongKey."""
    name = header.key(keys.TARGET_LAYERS)
    if name not in header.keys:
        raise errors.MissingKey(
            f"{header.path}: the key {name} is missing; an array of layer numbers is expected"
        )
    value = header.keys[name]
    is_sound = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and 1 <= value.size <= MAX_BLOCKS
    layers = [int(layer) for layer in value] if is_sound else []
    if not layers or not all(0 <= layer <= MAX_BLOCKS for layer in layers):
        raise errors.WrongKey(
            f"{header.path}: {name} is not an array of layer numbers from 0 to {MAX_BLOCKS}"
        )
    return layers


def n_draft_vocab(header: GGUFHeader) -> int:
    """Return how many tokens a drafter with a head of its own can draft: those in `d2t`, or all of its vocabulary."""
    d2t = header.tensors.get(keys.D2T)
    return d2t.n_elements if d2t else len(header.strings(keys.TOKENS))


def check_tensors(
    header: GGUFHeader, required: Mapping[str, Shape | None], optional: Mapping[str, Shape] | None = None
) -> None:
    """Check that tensors are there and have the shapes (ggml order) that the keys call for; None allows any shape.

    Raises MissingTensors or WrongTensorShape, each with all names at once.
    """
    missing = [name for name in required if name not in header.tensors]
    if missing:
        raise errors.MissingTensors(f"{header.path}: required tensors are missing: {', '.join(missing)}")
    wrong = [
        f"{name} is {list(header.tensors[name].shape)}, {list(shape)} is expected"
        for name, shape in {**required, **(optional or {})}.items()
        if shape is not None and name in header.tensors and header.tensors[name].shape != shape
    ]
    if wrong:
        raise errors.WrongTensorShape(f"{header.path}: {'; '.join(wrong)}")
