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

    `width` is the length of the hidden row it takes, `n_layers` the trunk's exact number of layers, `n_vocab` that of its tokens
    where the sidecar borrows the output. `layers` are those whose inputs it reads, in its order (the number of layers means: the
    last output); none means the hidden row after the last layer.
    """

    arch: str | None = None
    width: int | None = None
    n_layers: int | None = None
    n_vocab: int | None = None
    layers: tuple[int, ...] = ()


def _never(header: GGUFHeader) -> bool:
    return False


def _cannot_cut(header: GGUFHeader) -> list[str]:
    return []


def _no_limit(header: GGUFHeader) -> int | None:
    return None


@dataclass(frozen=True)
class Kind:
    """One kind of sidecar. `rank` 1 is taken first; file names start with `prefix`; `llama_name` is llama.cpp's.

    `vocab_tensors` names the tensors with one row per token, which a compact sidecar holds some rows of; none: it cannot be cut.
    `output_tensors` names those with one row per token that can be drafted, where a `d2t` may say which those are (cut_output.py):
    `output.weight`, which the main model's may stand for, and what goes with it.
    `max_depth` says how many tokens its drafter can draft at once; None: any number, `has_confidence` whether it
    also says how likely each is to stand. `last_is_hidden_row` says what a layer whose
    number is the number of layers means to it: the hidden row that an MTP head would take, or the last layer's plain output.
    `in_one_pass`: all drafts of a round come of one decode, so that a further one costs next to nothing.
    """

    name: str
    title: str
    rank: int
    prefix: str
    llama_name: str
    is_sidecar: Callable[[GGUFHeader], bool]
    check: Callable[[GGUFHeader], None]
    target: Callable[[GGUFHeader], Target]
    is_embedded: Callable[[GGUFHeader], bool] = _never
    vocab_tensors: Callable[[GGUFHeader], list[str]] = _cannot_cut
    output_tensors: Callable[[GGUFHeader], list[str]] = _cannot_cut
    max_depth: Callable[[GGUFHeader], int | None] = _no_limit
    has_confidence: Callable[[GGUFHeader], bool] = _never
    last_is_hidden_row: bool = False
    in_one_pass: bool = False


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


def output_tensors(header: GGUFHeader, *more: str) -> list[str]:
    """Return the output of a drafter that drafts all of its vocabulary and what goes with it; none where a `d2t` has cut it."""
    return [] if keys.D2T in header.tensors else [keys.OUTPUT, *more]


def check_own_vocabulary(header: GGUFHeader) -> None:
    """Check `d2t`, the token of each row of a drafter's own output: llama.cpp ends the process where a row is for no token.

    Raises MissingTensors, BadTensorType, BadRows.
    """
    if keys.D2T not in header.tensors:
        return
    if keys.OUTPUT not in header.tensors:
        raise errors.MissingTensors(
            f"{header.path}: {keys.D2T} says which token each row of {keys.OUTPUT} is for, which is missing"
        )
    kind = header.tensors[keys.D2T].type_name
    if kind != "I64":
        raise errors.BadTensorType(f"{header.path}: {keys.D2T} is {kind}; I64 is expected")
    ids, n_vocab = header.tensor_bytes(keys.D2T).view("<i8"), len(header.strings(keys.TOKENS))
    if ids.size and not (ids.min() >= 0 and ids.max() < n_vocab):
        raise errors.BadRows(
            f"{header.path}: {keys.D2T} has ids from {ids.min()} to {ids.max()}; token ids from 0 to {n_vocab - 1} are expected"
        )
    if np.unique(ids).size != ids.size:
        raise errors.BadRows(f"{header.path}: {keys.D2T} has an id twice; a row for each token is expected")


def check_head_sizes(header: GGUFHeader) -> None:
    """Raise WrongKey where keys and values of a block's heads differ in size: llama.cpp's drafters need them equal."""
    sizes = [header.uint(name, default=0) for name in (keys.KEY_LENGTH, keys.VALUE_LENGTH)]
    if sizes[0] != sizes[1]:
        raise errors.WrongKey(
            f"{header.path}: {header.key(keys.KEY_LENGTH)} is {sizes[0]} and {header.key(keys.VALUE_LENGTH)} is {sizes[1]}; "
            f"equal sizes are expected"
        )


def check_tensors(
    header: GGUFHeader, required: Mapping[str, Shape | None], optional: Mapping[str, Shape] | None = None
) -> None:
    """Check that tensors are there and have the shapes (ggml order) that the keys call for; None allows any shape.

    Raises MissingTensors or WrongTensorShape, each with all names at once.
    """
    missing = [name for name in required if name not in header.tensors]
    if missing:
        raise errors.MissingTensors(f"{header.path}: required tensors are missing: {errors.listed(missing)}")
    wrong = [
        f"{name} is {list(header.tensors[name].shape)}, {list(shape)} is expected"
        for name, shape in {**required, **(optional or {})}.items()
        if shape is not None and name in header.tensors and header.tensors[name].shape != shape
    ]
    if wrong:
        raise errors.WrongTensorShape(f"{header.path}: {errors.listed(wrong)}")
