"""One model from its shards: `NAME-00001-of-0000N.gguf` and the files it names beside it.

The first shard carries all keys, every shard its own tensors (llama.cpp's gguf-split). Knows no role and no kind.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader, TensorInfo
from llama_sidecar.sidecars.gguf_reader import read_header

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 9999


def shard_name(path: str | os.PathLike[str]) -> tuple[str, int, int] | None:
    """Split a shard's file name into stem, number (from 1) and count: "M-00002-of-00003.gguf" -> ("M", 2, 3)."""
    found = _SHARD_NAME.fullmatch(Path(path).name)
    return (found["stem"], int(found["no"]), int(found["count"])) if found else None


def read_model(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read a GGUF's header, and where it is the first of several shards those of the others, as one.

    Raises what `read_header` raises, and BadShards.

    >>> len(read_model("NAME-00001-of-00003.gguf").paths)  # doctest: +SKIP
    3
    """
    first = read_header(path)
    n_shards = first.uint(keys.SPLIT_COUNT, default=1)
    if n_shards <= 1:
        return first
    named = shard_name(first.path)
    if named is None or named[2] != n_shards or n_shards > MAX_SHARDS:
        raise errors.BadShards(
            f"{first.path}: this is one of {n_shards} shards; a name like NAME-00001-of-{n_shards:05}.gguf is expected"
        )
    stem, no, _ = named
    paths = tuple(first.path.with_name(f"{stem}-{i + 1:05}-of-{n_shards:05}.gguf") for i in range(n_shards))
    if first.uint(keys.SPLIT_NO, default=0) != 0 or no != 1:
        raise errors.BadShards(
            f"{first.path}: this is not the first of {n_shards} shards; give {paths[0].name}"
        )
    absent = [other.name for other in paths if not other.is_file()]
    if absent:
        raise errors.BadShards(
            f"{first.path}: {len(absent)} of {n_shards} shards are missing: {errors.listed(absent)}"
        )
    tensors = dict(first.tensors)
    file_bytes = first.file_bytes
    for i, other in enumerate(paths[1:], start=1):
        shard = read_header(other)
        _check_shard(shard, i, n_shards, tensors)
        tensors.update(shard.tensors)
        file_bytes += shard.file_bytes
    n_declared = first.uint(keys.SPLIT_TENSORS_COUNT, default=len(tensors))
    if n_declared != len(tensors):
        raise errors.BadShards(
            f"{first.path}: the shards hold {len(tensors)} tensors; {n_declared} are expected"
        )
    return replace(first, tensors=tensors, file_bytes=file_bytes, paths=paths)


def _check_shard(shard: GGUFHeader, i: int, n_shards: int, tensors: dict[str, TensorInfo]) -> None:
    found = shard.uint(keys.SPLIT_NO), shard.uint(keys.SPLIT_COUNT)
    if found != (i, n_shards):
        raise errors.BadShards(
            f"{shard.path}: it says shard {found[0] + 1} of {found[1]}; {i + 1} of {n_shards} is expected"
        )
    twice = sorted(tensors.keys() & shard.tensors.keys())
    if twice:
        raise errors.DuplicateName(
            f"{shard.path}: tensors of earlier shards occur again: {errors.listed(twice)}"
        )
