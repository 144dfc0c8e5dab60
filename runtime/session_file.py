"""A session in a file: what its target and drafter hold, and the tokens that they hold it for.

    magic (22 bytes), format version (u32), length of the head (u64), the head (JSON), the target's state, the drafter's state,
    SHA-256 of all before (32 bytes); numbers are little-endian

The states are llama.cpp's own, whose layout belongs to one build, and the drafter's rows in the machine's byte order: so a
file is read on the build and the model that wrote it, and refused elsewhere. Lengths and checksum are checked before anything is
used; what llama.cpp reads of a file that somebody has made on purpose is not, so load only files you trust. Knows no sessions.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_sidecar.sidecars import GGUFHeader, read_model, whole_file

from .errors import SessionFileError
from .placement import FLASH_ATTN

if TYPE_CHECKING:
    from .llm import Model

MAGIC = b"llama-sidecar session\n"
VERSION = 3
SAMPLED_BYTES = 512  # of each tensor's beginning, which tell a fine-tune from its base
_FIXED = struct.Struct("<22sIQ")
_N_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Origin:
    """What a state can be used with; all of it must be equal, but for `kind` and `head`, since another drafter begins anew behind
    the text, for `exact` where the session that takes it over is not, and for `flash_attn`, which that session takes over, too.
    """

    model: str  # a hash of the main file: shapes, types and the beginning of every tensor
    library: str  # llama.cpp's commit
    cache_types: tuple[str, str]
    flash_attn: str  # "auto", "on" or "off", which decides how values lie in the cache
    n_ctx: int
    kind: str | None  # of the drafter
    head: str | None  # as `model`, of the file with the drafter's weights
    exact: str | None  # of exact decoding: what its bits depend on

    @classmethod
    def of(cls, model: Model, n_ctx: int, kind: str | None = None, flash_attn: str | None = None) -> Origin:
        """That of a session of `model`, with `kind` where it drafts, and `flash_attn` where it is not the model's."""
        from .exactness import exactness_key  # these two import session.py or llm.py, which import this
        from .provenance import library

        settings, head = model.settings, model.head_weights.path
        return cls(
            model=content_hash(model.main.header),
            library=library()["commit"],
            cache_types=(settings.cache_type_k.lower(), settings.cache_type_v.lower()),
            flash_attn=(flash_attn or settings.flash_attn).lower(),
            n_ctx=n_ctx,
            kind=kind,
            head=content_hash(read_model(head)) if kind else None,
            exact=exactness_key(model) if model.exact else None,
        )

    def differs_from(self, here: Origin) -> str | None:
        """Why a state of this origin cannot be used `here`, or None."""
        if self.model != here.model:
            return "it is of another model"
        if self.library != here.library:
            return f"it was saved with llama.cpp {self.library}, this is {here.library}"
        if self.cache_types != here.cache_types:
            mine, yours = "/".join(self.cache_types), "/".join(here.cache_types)
            return f"its KV cache is {mine}, this session's {yours} (--cache-type-k, --cache-type-v)"
        if self.n_ctx != here.n_ctx:
            return f"its context has {self.n_ctx} tokens, this session's {here.n_ctx} (ctx={self.n_ctx})"
        if here.exact not in (None, self.exact):
            return "it was not decoded with exact on this machine and with these settings: restore it without exact"
        return None


@dataclass(frozen=True)
class SavedSession:
    """The states behind `tokens`, of which the last is not decoded yet; the drafter's may be empty."""

    origin: Origin
    tokens: list[int]
    target: bytes
    drafter: bytes


def content_hash(header: GGUFHeader) -> str:
    """A hash of a model file: shapes, types and the first SAMPLED_BYTES of every tensor; 64 hex digits.

    Example:
        >>> content_hash(read_model("demo-Q8_0.gguf"))[:8]                       # doctest: +SKIP
        '1f0c3a52'
    """
    from .costs import shapes  # it imports session.py, which imports this

    digest = hashlib.sha256(shapes(header).encode())
    for name in sorted(header.tensors):
        info = header.tensors[name]
        digest.update(info.read(n_bytes=min(info.n_bytes, SAMPLED_BYTES)).tobytes())
    return digest.hexdigest()


def write(path: str | os.PathLike[str], saved: SavedSession) -> None:
    """Writes the file, whole or not at all; one that is there is replaced.

    Raises:
        SessionFileError: the system refuses.
    """
    path = Path(path)
    if not path.name or (path.exists() and not path.is_file()):
        raise SessionFileError(f"{path} cannot be written: it is a folder or a device")
    head = json.dumps(
        {
            "origin": asdict(saved.origin),
            "tokens": saved.tokens,
            "bytes": [len(saved.target), len(saved.drafter)],
        }
    ).encode()
    parts: Sequence[bytes] = (_FIXED.pack(MAGIC, VERSION, len(head)), head, saved.target, saved.drafter)
    digest = hashlib.sha256()
    try:
        with whole_file.writing(path) as file:
            for data in parts:
                file.write(data)
                digest.update(data)
            file.write(digest.digest())
    except OSError as error:
        raise SessionFileError(f"{path} cannot be written: {error.strerror or error}") from error


def read(path: str | os.PathLike[str], here: Origin) -> SavedSession:
    """Reads a file that `write` has written, for a session of the origin `here`.

    Raises:
        SessionFileError: there is no such file; it is cut short, damaged, or no saved session; it is of another version, model,
            llama.cpp, KV cache or context size, or not exact where `here` is.

    Example:
        >>> read("talk.session", Origin.of(model, 8192, "mtp")).tokens[:3]       # doctest: +SKIP
        [785, 6722, 315]
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # it may never end
        raise SessionFileError(f"{path}: no saved session, but a device")
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise SessionFileError(f"{path}: {error.strerror or error}") from error
    head, at = _head(path, data)
    try:
        origin = Origin(**{**head["origin"], "cache_types": tuple(map(str, head["origin"]["cache_types"]))})
        tokens = [int(token) for token in head["tokens"]]
        n_target, n_drafter = (int(n) for n in head["bytes"])
        if origin.flash_attn not in FLASH_ATTN:
            raise ValueError(f"flash attention {origin.flash_attn!r}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SessionFileError(f"{path}: its head is none of a saved session ({error!r})") from error
    n_bytes = at + n_target + n_drafter + _N_DIGEST
    if min(n_target, n_drafter) < 0 or len(data) != n_bytes:
        raise SessionFileError(
            f"{path} has {len(data):,} of its {n_bytes:,} bytes: it was cut short or added to"
        )
    if hashlib.sha256(data[:-_N_DIGEST]).digest() != data[-_N_DIGEST:]:
        raise SessionFileError(f"{path} is damaged: its checksum is another")
    if why := origin.differs_from(here):
        raise SessionFileError(f"{path} cannot be restored: {why}")
    if not tokens or len(tokens) > here.n_ctx + 1:
        raise SessionFileError(f"{path} holds {len(tokens)} tokens in a context of {here.n_ctx}")
    target = bytes(data[at : at + n_target])
    return SavedSession(origin, tokens, target, bytes(data[at + n_target : at + n_target + n_drafter]))


def _head(path: Path, data: memoryview) -> tuple[dict[str, Any], int]:
    """What the head says, and where it ends."""
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise SessionFileError(f"{path} is no saved session")
    if len(data) < _FIXED.size + _N_DIGEST:
        raise SessionFileError(f"{path} has {len(data)} bytes: it was cut short")
    _, version, n_head = _FIXED.unpack_from(data)
    if version != VERSION:
        raise SessionFileError(f"{path} is of format version {version}, this reads {VERSION}")
    end = _FIXED.size + n_head
    if end > len(data) - _N_DIGEST:
        raise SessionFileError(f"{path} has {len(data):,} of more than {end:,} bytes: it was cut short")
    try:
        head = json.loads(bytes(data[_FIXED.size : end]))
    except (ValueError, RecursionError) as error:
        raise SessionFileError(f"{path} is damaged: its head is no JSON ({error})") from error
    return head if isinstance(head, dict) else {}, end
