"""Opens a file, says what it is, and checks every rule of FORMAT.md before anything of it is used.

The header decides, never the file's name. Knows roles, and of a kind only what kinds/ says of it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.fingerprint import main_trunk_fingerprint
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray
from llama_sidecar.sidecars.kind import Target, n_blocks
from llama_sidecar.sidecars.kinds import KINDS
from llama_sidecar.sidecars.model_rules import check_model, check_vocabulary
from llama_sidecar.sidecars.shards import read_model


@dataclass(frozen=True)
class Identity:
    """What a file is: `role` is "main", "main+head" (a head is inside it) or "sidecar"; `kind` is None for "main"."""

    role: str
    kind: str | None

    def __str__(self) -> str:
        if self.kind is None:
            return "a main model"
        title = KINDS[self.kind].title
        return (
            f"a sidecar ({title})" if self.role == "sidecar" else f"a main model with its {title} head inside"
        )


@dataclass(frozen=True)
class MainFile:
    """A checked main model. `n_layers` counts the trunk; `head_kind` is the kind of the head inside it, or None."""

    path: Path
    header: GGUFHeader
    arch: str
    width: int
    n_layers: int
    tokens: StringArray
    head_kind: str | None
    rows: str | None

    @cached_property
    def trunk(self) -> str | None:
        """The trunk's fingerprint, recomputed from the file (the key it may have is not needed)."""
        return main_trunk_fingerprint(self.header, self.n_layers)


@dataclass(frozen=True)
class Sidecar:
    """A checked sidecar. `target` is what it needs of its main model; `trunk` and `rows` are its fingerprints, if any."""

    path: Path
    header: GGUFHeader
    kind: str
    arch: str
    tokens: StringArray
    target: Target
    trunk: str | None
    rows: str | None


# general.type of files that lie beside models.
_OTHER_FILES = {
    "mmproj": "a projector of images or sounds (mmproj)",
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
}


def identify(header: GGUFHeader) -> Identity:
    """Say what a file is from its header alone, by the rules llama.cpp's loader and drafters use.

    Raises CompactGiven for a compact sidecar (compact.py opens it), NotAModel where it is neither a main model nor a sidecar,
    MissingKey where it has no block count.

    >>> identify(read_header("mtp-NAME-Q8_0.gguf"))  # doctest: +SKIP
    Identity(role='sidecar', kind='mtp')
    """
    if keys.COMPACT_TARGET_IDS in header.keys:
        raise errors.CompactGiven(
            f"{header.path}: this is a compact sidecar, which has its own token ids and serves --sidecar alone; "
            f"give the sidecar or main model that it was cut from"
        )
    other = _OTHER_FILES.get(str(header.keys.get(keys.TYPE)))
    if other is not None:
        raise errors.NotAModel(
            f"{header.path}: this is {other}, which cannot be used here; give a model's own GGUF"
        )
    for kind in KINDS.values():
        if kind.is_sidecar(header):
            return Identity("sidecar", kind.name)
    last = header.uint(keys.BLOCK_COUNT) - 1
    if keys.FIRST_ATTN_NORM in header.tensors:
        embedded = [kind.name for kind in KINDS.values() if kind.is_embedded(header)]
        return Identity("main+head", embedded[0]) if embedded else Identity("main", None)
    n_heads = header.uint(keys.NEXTN_PREDICT_LAYERS, default=0)
    promised = f" though it declares {n_heads} MTP blocks: its head was lost in conversion" if n_heads else ""
    raise errors.NotAModel(
        f"{header.path}: neither a main model nor a sidecar: {header.arch} with neither {keys.FIRST_ATTN_NORM} "
        f"nor {keys.NEXTN_EH_PROJ.format(i=last)}{promised}"
    )


def open_main(path: str | os.PathLike[str]) -> MainFile:
    """Open a main model (given its first shard: all of them) and check it.

    Raises NotAMain where the file is a sidecar, and every error of `read_model` and of FORMAT.md's rules.

    >>> open_main("NAME-Q8_0.gguf").width  # doctest: +SKIP
    1024
    """
    header = read_model(path)
    identity = identify(header)
    if identity.role == "sidecar":
        raise errors.NotAMain(
            f"{path}: this is {identity}, not a main model; give the main model, and this file as its --sidecar"
        )
    check_model(header)
    check_vocabulary(header)
    return MainFile(
        path=header.path,
        header=header,
        arch=header.arch,
        width=header.uint(keys.EMBEDDING_LENGTH),
        n_layers=_n_trunk_layers(header),
        tokens=_tokens(header),
        head_kind=identity.kind,
        rows=fingerprint(header, keys.FINGERPRINT_ROWS),
    )


def open_sidecar(path: str | os.PathLike[str]) -> Sidecar:
    """Open a sidecar and check every rule of FORMAT.md.

    Raises NotASidecar where the file is a main model, and every error of `read_model` and of FORMAT.md's rules.

    >>> open_sidecar("mtp-NAME-Q8_0.gguf").kind  # doctest: +SKIP
    'mtp'
    """
    header = read_model(path)
    identity = identify(header)
    if identity.role != "sidecar" or identity.kind is None:
        advice = (
            "it needs no sidecar"
            if identity.kind
            else "give a file that llama-sidecar convert made beside it"
        )
        raise errors.NotASidecar(f"{path}: this is {identity} ({header.arch}), not a sidecar; {advice}")
    kind = KINDS[identity.kind]
    check_format(header)
    kind.check(header)
    check_model(header)
    check_vocabulary(header)
    return Sidecar(
        path=header.path,
        header=header,
        kind=kind.name,
        arch=header.arch,
        tokens=_tokens(header),
        target=kind.target(header),
        trunk=fingerprint(header, keys.FINGERPRINT_TRUNK),
        rows=fingerprint(header, keys.FINGERPRINT_ROWS),
    )


def _n_trunk_layers(header: GGUFHeader) -> int:
    total, n_heads = n_blocks(header), header.uint(keys.NEXTN_PREDICT_LAYERS, default=0)
    if n_heads >= total:
        name = header.key(keys.NEXTN_PREDICT_LAYERS)
        raise errors.WrongKey(
            f"{header.path}: {name} is {n_heads}; fewer than its {total} blocks are expected"
        )
    return total - n_heads


def _tokens(header: GGUFHeader) -> StringArray:
    """The vocabulary. llama.cpp ends the process where two ids have one text (it names empty ones by itself)."""
    tokens = header.strings(keys.TOKENS)
    seen = set(tokens.iter_raw())
    if len(seen) < len(tokens):
        counts = Counter(text for text in tokens.iter_raw() if text)
        twice = [text[:99].decode("utf-8", "replace") for text, n in counts.items() if n > 1]
        if twice:
            raise errors.DuplicateName(
                f"{header.path}: {keys.TOKENS} holds {', '.join(map(repr, twice[:5]))} more than once; a text for each id is expected"
            )
    return tokens


def check_format(header: GGUFHeader) -> None:
    """Raise UnsupportedFormat where `sidecar.format` is one that this version does not read."""
    version = header.uint(keys.FORMAT, default=keys.FORMAT_VERSION)
    if version != keys.FORMAT_VERSION:
        raise errors.UnsupportedFormat(
            f"{header.path}: {keys.FORMAT} is {version}; {keys.FORMAT_VERSION} is expected: install a newer llama-sidecar"
        )


def fingerprint(header: GGUFHeader, key: str) -> str | None:
    """Return a key that holds a SHA-256, None where it is absent; raises BadFingerprint, WrongKey."""
    if key not in header.keys:
        return None
    value = header.string(key)
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise errors.BadFingerprint(
            f"{header.path}: {key} is {value[:80]!r}; 64 hexadecimal digits are expected"
        )
    return value


def own_fingerprint(header: GGUFHeader, key: str, default: str | None) -> str | None:
    """Return what a head says of itself: a SHA-256, None where it says that it has none, the default where it says nothing.

    Raises BadFingerprint, WrongKey.
    """
    if key not in header.keys:
        return default
    return fingerprint(header, key) if header.string(key) else None


def head_fingerprints(source: Sidecar | MainFile) -> tuple[str | None, str | None]:
    """Return the fingerprints (trunk, rows) of a head, which inside a main file need not be the main file's.

    Raises BadFingerprint, WrongKey.
    """
    if isinstance(source, Sidecar):
        return source.trunk, source.rows
    header = source.header
    trunk = own_fingerprint(header, keys.MERGED_TRUNK, source.trunk)
    return trunk, own_fingerprint(header, keys.MERGED_ROWS, source.rows)
