"""Matrices that a checkpoint stores in a type which GGUF has too, NVFP4 or MXFP4, written as they are.

Facts: llama.cpp's block layouts, and the `.scale` tensors that its loader takes for any architecture (src/llama-model.cpp):
NVFP4's factor for a whole matrix, and `.input_scale`, the one for its activations. Knows those tensors by name; neither
families nor how a checkpoint spells the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import UnknownType
from llama_sidecar.converter.families import Placement, Transform
from llama_sidecar.converter.plan import Planned
from llama_sidecar.converter.quantized.fp4 import Factor, Fp4
from llama_sidecar.converter.recipe import TYPES, Recipe

# The matrices that llama.cpp's graph of an architecture multiplies with a factor of their own. Its loader takes the factors of
# many more, and then computes without them (seen by comparing logits: tests/test_quantized.py).
_ATTENTION = r"attn_(q|k|v|output)"
_DENSE, _EXPERTS = r"ffn_(gate|up|down)", r"ffn_(gate|up|down)_(exps|shexp)"
_DELTA = r"attn_(qkv|gate)|ssm_(out|alpha|beta)"
SCALED = {
    arch: re.compile(rf"^blk\.\d+\.({'|'.join(parts)})$")
    for arch, parts in {
        "cohere2moe": (_ATTENTION, _DENSE, _EXPERTS),
        "deepseek2": ("attn_output",),
        "deepseek32": ("attn_output", _DENSE, _EXPERTS),
        "gemma4": (_ATTENTION, _DENSE),
        "glm-dsa": ("attn_output", _DENSE, _EXPERTS),
        "glm4moe": (_ATTENTION,),
        "hy_v3": (_ATTENTION, _DENSE, _EXPERTS),
        "mimo2": ("attn_output",),
        "nemotron_h_moe": (_ATTENTION, _EXPERTS),
        "qwen35": (_ATTENTION, _DENSE, _DELTA),
        "qwen35moe": (_ATTENTION, _EXPERTS, _DELTA),
        "qwen3next": (_ATTENTION, _EXPERTS),
        "step35": (_ATTENTION,),
    }.items()
}
NONE = re.compile(r"(?!)")


def keep(tensors: Iterable[Planned], recipe: Recipe, arch: str) -> list[Planned]:
    """A file's tensors, those that are stored in the type that the recipe keeps as they are, with their factors beside them.

    What needs a factor that the architecture's graph does not apply is not kept.

    Raises UnknownType where no matrix is.
    """
    kind = recipe.mix.keeps
    if kind is None:
        return list(tensors)
    found = [part for tensor in tensors for part in _kept(tensor, kind, SCALED.get(arch, NONE))]
    if not any(tensor.type == kind for tensor in found):
        raise UnknownType(
            f"the type asked for is {recipe.name}, in which only what a checkpoint stores so can be written, and nothing of "
            f"this file is that llama.cpp computes with here: ask for one of {', '.join(TYPES)}"
        )
    return found


def _kept(tensor: Planned, kind: GGMLType, scaled: re.Pattern[str]) -> Iterator[Planned]:
    place, stem = tensor.placement, tensor.name.removesuffix(".weight")
    stored = [
        source for source, _, _ in tensor.pieces if isinstance(source, Fp4) and source.dtype == kind.name
    ]
    n_matrices = tensor.shape[0] if len(tensor.shape) > 2 else 1
    sources = list({source.name: source for source in stored}.values())
    has_factors = any(source.factor is not None for source in sources)
    order = (
        _group_order(place.transform, tensor.n_cols, sources[0].group)
        if place.transform and sources
        else None
    )
    if (
        tensor.type == GGMLType.F32
        or not sources
        or len(stored) < len(tensor.pieces)
        or len(sources) not in (1, n_matrices)
        or tensor.n_cols % GGML_QUANT_SIZES[kind][0]
        or place.transposed
        or (place.transform and order is None)
        or (has_factors and not scaled.search(stem))
    ):
        yield tensor
        return
    pieces = zip(stored, tensor.pieces, strict=True)
    yield Planned(
        replace(place, transform=None),
        kind,
        tuple((replace(s, order=order), a, b) for s, (_, a, b) in pieces),
    )
    yield from _factors(f"{stem}.scale", [source.factor for source in sources], n_matrices)
    yield from _factors(f"{stem}.input_scale", [source.input for source in sources], n_matrices)


def _factors(name: str, factors: list[Factor | None], n: int) -> Iterator[Planned]:
    """The tensor of `n` factors, from one source or as many; none where they change nothing."""
    found = np.concatenate([np.ones(1, np.float32) if one is None else one.values() for one in factors])
    values = np.repeat(found, n) if len(found) == 1 else found
    if not np.allclose(values, 1, atol=1e-6, rtol=0):
        yield Planned(Placement(name, (n,), values=tuple(values.tolist())), GGMLType.F32, ())


def _group_order(transform: Transform, n_cols: int, group: int) -> tuple[int, ...] | None:
    """The order in which a transform puts whole groups of columns; None if it does anything else."""
    probe = np.arange(n_cols, dtype=np.float32)
    order = transform(probe[None])[0].astype(np.int64)
    if not np.array_equal(np.sort(order), np.arange(n_cols)):
        return None
    other = np.sqrt(probe + 2)
    groups = order.reshape(-1, group)
    moves_groups = (
        np.array_equal(groups, groups[:, :1] + np.arange(group)) and not (groups[:, 0] % group).any()
    )
    if not moves_groups or not np.array_equal(transform(other[None])[0], other[order]):
        return None
    return tuple(int(first) // group for first in groups[:, 0])
