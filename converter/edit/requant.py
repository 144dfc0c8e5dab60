"""`requant`: a sidecar at another type, standard or compact, its block's and its vocabulary's chosen apart.

Types go to tensors by the converter's own rules (recipe.py), and what those leave alone stays as it is: norms, routers, lists of
ids. A draft at fewer bits differs now and then, which costs speed and never the text. Measures no acceptance.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_VERSION
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.edit import origin
from llama_sidecar.converter.edit.header import Keys, keys_of, uint
from llama_sidecar.converter.edit.output import (
    EditResult,
    check_folder,
    compact_name,
    gguf_file,
    name_and_type,
    sidecar_name,
    write,
)
from llama_sidecar.converter.edit.stored import FLOATS, Retyped, Stored, check_dequantizable
from llama_sidecar.converter.errors import NothingToDo
from llama_sidecar.converter.quantize import check_libggml
from llama_sidecar.converter.recipe import Recipe, head_warnings, model_of, sidecar_recipe
from llama_sidecar.converter.writer import Progress
from llama_sidecar.sidecars import KINDS, GGUFHeader, Sidecar, TensorInfo, keys, open_sidecar, read_model
from llama_sidecar.sidecars.compact import Compact, open_compact


def requant(
    sidecar: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type_name: str | None = None,
    vocabulary_type: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> EditResult:
    """Write a sidecar, standard or compact, at another type.

    `out` is the folder to write to, made if need be; the file's name gets the new type. `type_name` is the type of the head's block,
    `vocabulary_type` that of the matrices with a row for each token; each one of `TYPES`, or None to leave them as they are. Values
    that are read from quantised types are rounded twice, which the keys of the file tell. `force` replaces an existing file (never
    the one that is read), and `progress(done_bytes, total_bytes, tensor_name)` is called after every slice.

    Raises UnknownType, NothingToDo, CannotDequantize, OutOfRange, MissingDependency (no libggml), OutputExists, InputGiven,
    NotEnoughSpace, OutputFailed, and what `open_sidecar` raises.

    >>> requant("mtp-NAME-BF16.gguf", "small", "Q8_0", "Q4_0").sidecar  # doctest: +SKIP
    PosixPath('small/mtp-NAME-Q8_0.gguf')
    """
    out = Path(out)
    check_folder(out)
    if type_name is None and vocabulary_type is None:
        raise NothingToDo(
            "no type is asked for: give one for the block, one for the vocabulary's matrices, or both"
        )
    source = _open(sidecar)
    header = source.header
    block, vocabulary = (sidecar_recipe(name) if name else None for name in (type_name, vocabulary_type))
    types = _types(source, block, vocabulary)
    if not types:
        raise NothingToDo(f"{source.path}: its tensors are of that type already; use it as it is")
    changed = [header.tensors[name] for name in types]
    check_dequantizable(changed)
    check_libggml(types.values())

    tensors = [
        Retyped(info, types[name]) if name in types else Stored(info) for name, info in header.tensors.items()
    ]
    file_keys = origin.of_requant(_keys(header, block, types.values()), header, _steps(changed, types))
    _, own_type = name_and_type(header)
    path = out / _name(source, type_name or own_type)

    def check(written: Mapping[str, Path]) -> None:
        _open(written["sidecar"])

    n_bytes = write(
        {"sidecar": gguf_file(path, file_keys, tensors)},
        [header],
        force=force,
        check=check,
        progress=progress,
    )
    rounded_twice = sorted({info.type_name for info in changed if info.type not in FLOATS})
    return EditResult(
        sidecar=path,
        sidecar_bytes=n_bytes["sidecar"],
        notes=[f"rounded twice: values come from {', '.join(rounded_twice)}"] if rounded_twice else [],
        warnings=head_warnings({info.name: (types[info.name], info.n_elements) for info in changed}),
    )


def _open(path: str | os.PathLike[str]) -> Sidecar | Compact:
    return open_compact(path) if keys.COMPACT_TARGET_IDS in read_model(path).keys else open_sidecar(path)


def _types(source: Sidecar | Compact, block: Recipe | None, vocabulary: Recipe | None) -> dict[str, GGMLType]:
    """The new type of every tensor that gets one."""
    header = source.header
    of_vocabulary = {keys.TOKEN_EMBD, keys.OUTPUT, *KINDS[source.kind].vocab_tensors(header)}
    found: dict[str, GGMLType] = {}
    for recipe, is_vocabulary in ((block, False), (vocabulary, True)):
        if recipe is not None:
            part = [info for name, info in header.tensors.items() if (name in of_vocabulary) == is_vocabulary]
            found |= _of_recipe(header, part, recipe)
    return found


def _of_recipe(header: GGUFHeader, infos: list[TensorInfo], recipe: Recipe) -> dict[str, GGMLType]:
    """What a recipe makes of tensors, without those that it leaves alone and those of that type already."""
    shapes = [(info.name, info.shape[::-1]) for info in infos]
    model = model_of(header.arch, dict(_integers(header)))
    types = recipe.types(shapes, model)
    # What every recipe has as F32 it leaves alone.
    narrower = recipe if recipe.base != GGMLType.F32 else sidecar_recipe("F16")
    left_alone = {name for name, kind in narrower.types(shapes, model).items() if kind == GGMLType.F32}
    return {
        info.name: types[info.name]
        for info in infos
        if info.name not in left_alone and types[info.name] != info.type
    }


def _integers(header: GGUFHeader) -> Iterator[tuple[str, int | list[int]]]:
    """The keys that are integers or lists of them, as a recipe takes them."""
    for name, value in header.keys.items():
        if isinstance(value, int):
            yield name, value
        elif isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            yield name, value.tolist()


def _steps(changed: Iterable[TensorInfo], types: Mapping[str, GGMLType]) -> list[str]:
    """From which quantised type to which other, for the file's keys."""
    pairs = {(info.type_name, types[info.name].name) for info in changed if info.type not in FLOATS}
    return [f"{before} -> {after}" for before, after in sorted(pairs)]


def _keys(header: GGUFHeader, block: Recipe | None, types: Iterable[GGMLType]) -> Keys:
    file_keys = keys_of(header)
    if block is not None:
        file_keys[keys.FILE_TYPE] = uint(block.file_type)
    if any(kind not in FLOATS for kind in types):
        file_keys[keys.QUANTIZATION_VERSION] = uint(GGML_QUANT_VERSION)
    return file_keys


def _name(source: Sidecar | Compact, type_name: str) -> str:
    if isinstance(source, Compact):
        return compact_name(source.header, type_name, len(source.target_ids))
    return sidecar_name(source.header, source.kind, type_name)
