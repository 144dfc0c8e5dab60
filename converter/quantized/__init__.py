"""Quantised checkpoints: the tensors that make one weight joined to it, ONE file for each way of storing, found by scanning.

A method's module holds

    METHODS   what config.json calls it under `quantization_config.quant_method`
    find(stored, settings) -> Iterator[Joined]    the weights that are stored in its way

What a weight is comes from the tensors that are there, one by one: a head in BF16 beside a quantised trunk is read as
it is. config.json only says what they cannot: the sizes of blocks, and which of two conventions holds. Everything is
read when its rows are asked for. This package knows no family and no GGUF name.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Protocol, cast

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import BadShard, MissingShard, UnsupportedModel
from llama_sidecar.converter.quantized._joined import Joined, Settings
from llama_sidecar.converter.shards import Stored, Tensor
from llama_sidecar.sidecars.errors import listed

# What belongs to activations and to the KV cache, which a GGUF stores in types of its own.
NOT_WEIGHTS = re.compile(
    r"(^|\.)((input|output|activation|[qkv]|kv|kv_cache)_(scale|zero_point|global_scale)|qscale_act)$|_activation_scale$"
)


class Method(Protocol):
    """What a module of this package offers; the package's docstring explains each."""

    METHODS: tuple[str, ...]

    def find(self, stored: Mapping[str, Stored], settings: Settings) -> Iterator[Joined]: ...


@cache
def methods() -> dict[str, Method]:
    """Every method by its module's name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return {name: cast(Method, importlib.import_module(f"{__name__}.{name}")) for name in names}


def join_quantized(stored: Mapping[str, Stored], config: Config) -> dict[str, Tensor]:
    """The weights of a checkpoint by name, those that are stored as several tensors joined and dequantised on read.

    Raises UnsupportedModel for a method that is not known, BadConfig, BadShard for parts that do not fit each other, and
    MissingShard for scales without their weight.
    """
    settings = Settings.of(config)
    known = [name for method in methods().values() for name in method.METHODS]
    if settings.method not in (None, *known):
        raise UnsupportedModel(
            f"config.json says the weights are quantized by {settings.method!r}; expected none or one of "
            f"{', '.join(dict.fromkeys(known))}: convert the unquantized checkpoint"
        )
    joined = [found for method in methods().values() for found in method.find(stored, settings)]
    if not joined and settings.method is None:
        return dict(stored)
    used = {part for found in joined for part in found.parts}
    empty = sorted(part for part in used if not math.prod(stored[part].shape))
    if empty:
        raise BadShard(
            f"{listed(empty)}: a part of a quantized weight has no values; expected every size above 0"
        )
    weights: dict[str, Tensor] = {
        name: tensor for name, tensor in stored.items() if name not in used and not NOT_WEIGHTS.search(name)
    }
    orphans = sorted(name for name in weights if name.endswith("_scale_inv"))
    if orphans:
        raise MissingShard(f"{', '.join(orphans)} scale weights that are not in the checkpoint")
    return weights | {found.weight.name: found.weight for found in joined}
