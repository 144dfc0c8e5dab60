"""A Hugging Face checkpoint: its configuration, and the tensors of all its files by name.

Knows which files a checkpoint may have (config.json, the index, shards listed and not) and which one decides. Does not know
where it lies (places.py), how a file stores its tensors, how several of them are one quantised weight, what a tensor means, nor any GGUF name.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import BadShard, MissingShard, NotACheckpoint, NoWeights, UnsafePath
from llama_sidecar.converter.places import MAX_SMALL_BYTES, Place, place_of, small_file
from llama_sidecar.converter.quantized import join_quantized
from llama_sidecar.converter.shards import Stored, Tensor, read_bin, read_safetensors

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
N_READERS = 8  # shards whose headers are read at a time: the place may be far away


@dataclass
class Checkpoint:
    """An opened checkpoint. Use it as a context manager: the shards stay open until it is closed."""

    place: Place
    config: Config
    tensors: dict[str, Tensor]
    warnings: list[str]
    _files: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def folder(self) -> Path:
        """Where its small files are."""
        return self.place.folder

    @property
    def name(self) -> str:
        return self.place.name

    def json(self, name: str) -> dict[str, Any]:
        """The object in one of its JSON files; {} if there is no such file. Raises NotACheckpoint and UnsafePath."""
        path = small_file(self.folder, name)
        return {} if path is None else read_object(path)

    def text(self, name: str) -> str | None:
        """What another of its small files says; None if there is no such file. Raises NotACheckpoint and UnsafePath."""
        path = small_file(self.folder, name)
        try:
            return None if path is None else _read(path, "utf-8")
        except (OSError, ValueError) as error:
            raise NotACheckpoint(f"{path} cannot be read as text: {error}") from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()


def open_checkpoint(checkpoint: str | Path) -> Checkpoint:
    """Opens a checkpoint and reads every shard's header, but no weights.

    The index decides for the names it lists; without one `model.safetensors` does. Tensors that only another file
    holds are taken from there, with a warning that names it. Raises NotACheckpoint, MissingShard, BadShard,
    UnsafePath, BadConfig, UnsupportedModel, and MissingDependency where a `.bin` shard needs torch.

        >>> with open_checkpoint("Qwen3.5-0.8B") as checkpoint:                      # doctest: +SKIP
        ...     checkpoint.tensors["model.norm.weight"].shape
        (1024,)
    """
    place = place_of(checkpoint)
    config = read_config(place)
    with ExitStack() as files:
        tensors, warnings = _collect(place, files)
        return Checkpoint(place, config, join_quantized(tensors, config), warnings, files.pop_all())


def read_config(place: Place) -> Config:
    """The configuration of the checkpoint that lies there. Raises NotACheckpoint and UnsafePath."""
    path = small_file(place.folder, "config.json")
    if path is None:
        raise NotACheckpoint(f"{place} has no config.json; expected the folder of a Hugging Face checkpoint")
    return Config(read_object(path))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises NotACheckpoint when it holds anything else, or far more than any checkpoint's."""
    try:
        value = json.loads(_read(path, "utf-8-sig"))  # some editors begin it with a mark
    except (OSError, ValueError, RecursionError) as error:
        raise NotACheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise NotACheckpoint(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


def _read(path: Path, encoding: str) -> str:
    """A small file. Raises OSError, and ValueError where it is no text or far larger than any checkpoint's."""
    if path.stat().st_size > MAX_SMALL_BYTES:
        raise ValueError(f"it has {path.stat().st_size:,} bytes; at most {MAX_SMALL_BYTES:,} are read")
    return path.read_text(encoding=encoding)


# Which file holds which tensor.


def _collect(place: Place, files: ExitStack) -> tuple[dict[str, Stored], list[str]]:
    folder, shards = place.folder, place.names("*.safetensors")
    if shards or (folder / INDEX).is_file():
        index, single = INDEX, "model.safetensors"
    else:
        shards = place.names("pytorch_model*.bin")
        index, single = BIN_INDEX, "pytorch_model.bin"
    listed = _read_index(folder, index)
    if not shards and not listed:
        raise NoWeights(f"{place} holds no weights; expected *.safetensors or pytorch_model*.bin")

    absent = sorted({file for file in listed.values() if not place.has(file)})
    if absent:
        raise MissingShard(
            f"{folder / index} names {', '.join(absent)}, not in the folder: download the missing files"
        )

    def read(file: str) -> dict[str, Stored]:
        if index == INDEX:
            return read_safetensors(place.open(file, files))
        return read_bin(place.path(file), place.open(file, files))

    shards = sorted({*shards, *listed.values()})
    with ThreadPoolExecutor(N_READERS) as pool:
        held = dict(zip(shards, pool.map(read, shards), strict=True))
    lost = sorted(name for name, file in listed.items() if name not in held[file])
    if lost:
        raise MissingShard(f"{folder / index} lists tensors that their files do not hold: {', '.join(lost)}")

    if not listed and single in held:
        listed = dict.fromkeys(held[single], single)
    tensors = {name: held[file][name] for name, file in listed.items()}
    warnings = []
    for file, found in held.items():
        extra = {name: tensor for name, tensor in found.items() if name not in listed}
        twice = sorted(extra.keys() & tensors.keys())
        if twice:
            others = ", ".join(sorted({tensors[name].file for name in twice}))
            raise BadShard(
                f"{file} and {others} both hold {', '.join(twice)}: remove the one that does not belong here"
            )
        tensors |= extra
        if listed and extra:
            warnings.append(
                f"{file} holds {len(extra)} tensors that {_authority(folder, index, single)} does not list; used"
            )
        elif listed and file not in listed.values():
            warnings.append(
                f"{file} is ignored: {_authority(folder, index, single)} lists other files for its tensors"
            )
    return tensors, warnings


def _authority(folder: Path, index: str, single: str) -> str:
    return index if (folder / index).is_file() else single


def _read_index(folder: Path, name: str) -> dict[str, str]:
    path = small_file(folder, name)
    if path is None:
        return {}
    listed = read_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise NotACheckpoint(f"{path} has no usable 'weight_map'; expected tensor names with file names")
    for file in sorted(set(listed.values())):
        if file != Path(file).name or file in ("", ".", ".."):
            raise UnsafePath(f"{path} names the file {file!r}; expected a plain file name within the folder")
    return listed
