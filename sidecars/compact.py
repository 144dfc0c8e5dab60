"""Compact sidecars: a head cut to the rows of its vocabulary that are worth drafting.

Most of a draft step is the product with the whole vocabulary. A compact sidecar holds the same blocks and some rows of each
matrix that has one row per token, copied byte for byte or in narrower types, with a list of the target's token ids they stand
for. What a draft is made of never changes the text. FORMAT.md has the contract. Knows files and arrays; which tensors have a row
per token, a kind says (kinds/); where files are kept, the caller.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGUFValueType, TokenType
from numpy.typing import ArrayLike, NDArray

from llama_sidecar.sidecars import errors, keys, whole_file
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray, TensorInfo
from llama_sidecar.sidecars.gguf_reader import read_header
from llama_sidecar.sidecars.kind import Target
from llama_sidecar.sidecars.kinds import KINDS
from llama_sidecar.sidecars.model_rules import check_model
from llama_sidecar.sidecars.shards import shard_name
from llama_sidecar.sidecars.sidecar import (
    MainFile,
    Sidecar,
    check_format,
    fingerprint,
    head_fingerprints,
    own_fingerprint,
)
from llama_sidecar.sidecars.tensor_rows import (
    Progress,
    Types,
    as_type,
    checked_rows,
    narrowed_type,
    pieces,
    refusals,
    value_bytes,
    write_data,
    write_header,
)

N_ROWS = 32_768  # of 248,320 in merge order: 95 % of English and code; with fewer a draft step gains less than it loses
SMALL_VOCAB = 65_536  # up to here a cut costs more acceptance than it saves time
HASH_SCHEME = "llama-sidecar head 1"

_ALWAYS = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE)
_STRINGS = (GGUFValueType.ARRAY, GGUFValueType.STRING)
_KIND_PREFIX = re.compile("|".join(re.escape(kind.prefix) for kind in KINDS.values()), re.IGNORECASE)
_NOT_COPIED = ("tokenizer.", "split.", "sidecar.", keys.ARCHITECTURE, keys.ALIGNMENT)


@dataclass(frozen=True, eq=False)
class Compact:
    """A checked compact sidecar.

    `target_ids` (n_rows,) I32, ascending: the target's token id of each draft id; `tokens` (n_rows,) their texts; `n_vocab`
    counts the source's tokens; `source` is the `content_hash` of the head it was cut from. The rest is as in `Sidecar`.
    """

    path: Path
    header: GGUFHeader
    kind: str
    target_ids: NDArray[np.int32]
    tokens: StringArray
    n_vocab: int
    source: str
    target: Target
    trunk: str | None
    rows: str | None

    @property
    def types(self) -> Types:
        """The type of each tensor."""
        return {info.name: int(info.type) for info in self.header.tensors.values()}


def default_n_rows(n_vocab: int) -> int | None:
    """Return how many rows are worth keeping of a vocabulary of `n_vocab` tokens; None where cutting does not pay.

    >>> default_n_rows(248_320), default_n_rows(32_000)
    (32768, None)
    """
    return N_ROWS if n_vocab > SMALL_VOCAB else None


def choose_rows(
    tokens: Sequence[str | bytes], token_types: ArrayLike | None, n_rows: int, counts: ArrayLike | None = None
) -> NDArray[np.int32]:
    """Choose which tokens to draft: `(n_rows,)` token ids, ascending; all of them where there are no more.

    First the special and byte tokens (so that any text can be spelled and ended), then the tokens counted, most frequent
    first, then the lowest ids (a vocabulary of merges is in order of frequency), unused ones last. `tokens` and
    `token_types` (n_vocab,; None: all normal) are the GGUF's; `counts` says how often each id was seen, missing ones never.
    Raises BadRows where `n_rows` is less than 1 or `token_types` has another length than `tokens`.

    >>> choose_rows(["a", "th", "the", "cat", "<end>"], [1, 1, 1, 1, 3], 3, counts=[0, 0, 0, 7])
    array([0, 3, 4], dtype=int32)
    """
    if n_rows < 1:
        raise errors.BadRows(f"{n_rows} rows were asked for; at least 1 is expected")
    return np.sort(ranked(tokens, token_types, counts)[:n_rows]).astype(np.int32)


def ranked(
    tokens: Sequence[str | bytes], token_types: ArrayLike | None, counts: ArrayLike | None = None
) -> NDArray[np.int64]:
    """Order all token ids (n_vocab,) by how much they are worth drafting, best first; arguments as of `choose_rows`.

    >>> ranked(["a", "th", "the", "cat", "<end>"], [1, 1, 1, 1, 3], counts=[0, 0, 0, 7])
    array([0, 4, 3, 1, 2])
    """
    n_vocab = len(tokens)
    types = np.full(n_vocab, TokenType.NORMAL) if token_types is None else np.asarray(token_types)
    if types.shape != (n_vocab,):
        raise errors.BadRows(f"there are types of {types.size} tokens; {n_vocab} are expected")
    seen = np.zeros(n_vocab, np.int64)
    known = np.asarray(() if counts is None else counts, np.int64)[:n_vocab]
    seen[: known.size] = known
    texts = tokens.iter_raw() if isinstance(tokens, StringArray) else tokens
    always = np.isin(types, _ALWAYS) | np.fromiter((text in _BYTE_TOKENS for text in texts), bool, n_vocab)
    unused = (types == TokenType.UNUSED) & (seen == 0)
    return np.lexsort((-seen, unused, ~always))  # stable: of equals the lowest ids first


def _byte_tokens() -> frozenset[str | bytes]:
    """The 256 bytes as byte-level BPE spells them: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(code) for code in (*printable, *range(0x100, 0x200 - len(printable)))}
    return frozenset(letters | {letter.encode() for letter in letters})


_BYTE_TOKENS = _byte_tokens()


def coverage(rows: ArrayLike, counts: ArrayLike) -> float:
    """Return the share of the tokens counted that are among `rows` (token ids); 1 where none was counted.

    >>> coverage([0, 2], [6, 2, 2])
    0.8
    """
    seen, ids = np.asarray(counts, np.int64), np.asarray(rows)
    total = int(seen.sum())
    return int(seen[ids[ids < seen.size]].sum()) / total if total else 1.0


def token_types(source: Sidecar | MainFile) -> NDArray[np.int32] | None:
    """Return the types of a source's tokens (n_vocab,), None where the file has none; raises WrongKey."""
    types = source.header.keys.get(keys.TOKEN_TYPES)
    if types is None:
        return None
    if not (isinstance(types, np.ndarray) and types.dtype.kind in "iu" and types.size == len(source.tokens)):
        raise errors.WrongKey(
            f"{source.path}: {keys.TOKEN_TYPES} is not an array of {len(source.tokens)} integers, one for each token"
        )
    return types.astype(np.int32)


def file_name(source: Path, n_rows: int) -> str:
    """Name a compact sidecar so that llama.cpp does not take it for a standard one.

    >>> file_name(Path("mtp-NAME-Q8_0.gguf"), 32768)
    'compact-NAME-Q8_0-32768.gguf'
    """
    shard = shard_name(source)
    stem = shard[0] if shard else source.stem
    while _KIND_PREFIX.search(f"{stem}-"):
        stem = _KIND_PREFIX.sub("", f"{stem}-").rstrip("-")
    return f"compact-{stem or 'head'}-{n_rows}.gguf"


def content_hash(source: Sidecar | MainFile) -> str:
    """Hash whatever of a head can get into a compact sidecar (keys, tokens, tensors) to 64 hexadecimal digits.

    Reads the head's tensors: a second for a gigabyte or two. Raises CannotCut, UnreadableFile, TruncatedFile and the errors of
    FORMAT.md's rules.
    """
    head = _head(source)
    digest = hashlib.sha256(f"{HASH_SCHEME}\n".encode())
    for name in sorted(head.keys):
        digest.update(f"{name}\0{head.key_types[name]}\0".encode() + value_bytes(head.keys[name]))
    for info in (head.tensors[name] for name in sorted(head.tensors)):
        digest.update(f"{info.name}\0{int(info.type)}\0{info.shape}\0".encode())
        for piece in pieces(info):
            digest.update(piece.data)
    return digest.hexdigest()


def narrow_types(source: Sidecar | MainFile) -> Types:
    """Say which type each tensor of a head has in a compact sidecar written with `narrow`.

    Matrices wider than Q4_0 become that (F16 where a row is not whole blocks). Narrower ones stay as they are, and so do norms,
    routers, and types that cannot be dequantised here. Raises CannotCut and the errors of FORMAT.md's rules.

    >>> narrow_types(open_sidecar("mtp-NAME-BF16.gguf"))["token_embd.weight"]  # doctest: +SKIP
    2
    """
    return {info.name: int(narrowed_type(info)) for info in _head(source).tensors.values()}


def write_compact(
    source: Sidecar | MainFile,
    rows: ArrayLike,
    path: str | os.PathLike[str],
    *,
    narrow: bool = False,
    source_hash: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the rows of a head (a sidecar's, or the one inside a main model) as a compact sidecar; whole or not at all.

    `rows` are token ids, ascending; a multiple of 64 of them keeps the fast kernels. `narrow` writes the types of
    `narrow_types`; else every type stays. `source_hash` is the source's `content_hash` where it is known. Holds a few MB.
    Raises BadRows, CannotCut, UnwritableFile, and what `content_hash` raises.

    >>> write_compact(open_sidecar("mtp-NAME-Q8_0.gguf"), range(32768), "compact-NAME-Q8_0-32768.gguf")  # doctest: +SKIP
    """
    with writing_compact(source, rows, path, narrow=narrow, source_hash=source_hash, progress=progress):
        pass


@contextmanager
def writing_compact(
    source: Sidecar | MainFile,
    rows: ArrayLike,
    path: str | os.PathLike[str],
    *,
    narrow: bool = False,
    source_hash: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Path]:
    """Write as `write_compact`, for a `with` block: the file gets its name only when the block ends well.

    Yields the path it has until then. What killed writers left of this file is removed.

    >>> with writing_compact(source, rows, "compact-NAME-Q8_0-32768.gguf"):    # doctest: +SKIP
    ...     put_the_other_files_in_place()
    """
    path = Path(path)
    head = _head(source)
    ids = checked_rows(rows, len(source.tokens), f"the rows for {path}")
    types = narrow_types(source) if narrow else {info.name: int(info.type) for info in head.tensors.values()}
    cut = KINDS[_kind(source)].vocab_tensors(head)
    plan = [
        as_type(info, types[info.name], len(ids) if info.name in cut else None)
        for info in head.tensors.values()
    ]
    header = _new_header(source, head, ids, plan, source_hash or content_hash(source))
    with ExitStack() as stack:  # so that the refusals which the block meets stay what they are
        with refusals(path):
            out = stack.enter_context(whole_file.writing(path))
            part = Path(out.name)
            write_header(header, out)
            write_data(out, head.tensors, plan, ids, progress)
            out.flush()
            open_compact(part)
        yield part
        with refusals(path):
            stack.close()


def open_compact(path: str | os.PathLike[str]) -> Compact:
    """Open a compact sidecar and check every rule of FORMAT.md.

    Raises NotCompact for any other file, BadRows, and what `open_sidecar` raises.

    >>> len(open_compact("compact-NAME-Q8_0-32768.gguf").target_ids)  # doctest: +SKIP
    32768
    """
    header = read_header(path)
    if keys.COMPACT_TARGET_IDS not in header.keys:
        raise errors.NotCompact(f"{path}: this is not a compact sidecar: it has no {keys.COMPACT_TARGET_IDS}")
    check_format(header)
    found = [kind for kind in KINDS.values() if kind.is_sidecar(header) and kind.vocab_tensors(header)]
    if not found:
        raise errors.NotCompact(
            f"{path}: this is no compact sidecar: {header.arch} without a head that can be cut"
        )
    kind = found[0]
    kind.check(header)  # the rules of its kind, for a vocabulary of its own
    check_model(header)
    tokens = header.strings(keys.TOKENS)
    n_rows, n_vocab = len(tokens), header.uint(keys.COMPACT_N_VOCAB)
    if header.uint(keys.VOCAB_SIZE) != n_rows:
        raise errors.WrongKey(
            f"{path}: {header.key(keys.VOCAB_SIZE)} is {header.uint(keys.VOCAB_SIZE)}; {n_rows}, its number of tokens, is expected"
        )
    ids = checked_rows(header.keys[keys.COMPACT_TARGET_IDS], n_vocab, f"{path}: {keys.COMPACT_TARGET_IDS}")
    if len(ids) != n_rows:
        raise errors.BadRows(
            f"{path}: {keys.COMPACT_TARGET_IDS} has {len(ids)} ids; {n_rows}, one a row, are expected"
        )
    source = fingerprint(header, keys.COMPACT_SOURCE)
    if source is None:
        raise errors.MissingKey(
            f"{path}: the key {keys.COMPACT_SOURCE} is missing; 64 hexadecimal digits are expected"
        )
    return Compact(
        path=header.path,
        header=header,
        kind=kind.name,
        target_ids=ids,
        tokens=tokens,
        n_vocab=n_vocab,
        source=source,
        target=kind.target(header),
        trunk=fingerprint(header, keys.FINGERPRINT_TRUNK),
        rows=fingerprint(header, keys.FINGERPRINT_ROWS),
    )


def _kind(source: Sidecar | MainFile) -> str:
    kind = source.kind if isinstance(source, Sidecar) else source.head_kind
    if kind is None:
        raise errors.CannotCut(f"{source.path}: there is no head inside this main model to cut")
    return kind


def _head(source: Sidecar | MainFile) -> GGUFHeader:
    """A source's header with the keys and tensors of its head alone, checked by the rules of its kind."""
    header, kind = source.header, KINDS[_kind(source)]
    n_layers = source.n_layers if isinstance(source, MainFile) else 0
    trunk = tuple(f"blk.{i}." for i in range(n_layers))
    tensors = {name: info for name, info in header.tensors.items() if not name.startswith(trunk)}
    copied = {name: value for name, value in header.keys.items() if _is_copied(name, value)}
    head = replace(
        header, keys={**copied, keys.ARCHITECTURE: header.arch, keys.TOKENS: source.tokens}, tensors=tensors
    )
    if not kind.vocab_tensors(head):
        raise errors.CannotCut(
            f"{source.path}: a head of the kind {kind.name} ({header.arch}) works only with the whole vocabulary"
        )
    kind.check(head)
    return head


def _is_copied(name: str, value: object) -> bool:
    """Whether a key describes the head; arrays that are empty or nested (lists) are read by no architecture."""
    if name.startswith(_NOT_COPIED) or isinstance(value, list):
        return False
    return not isinstance(value, (np.ndarray, StringArray)) or len(value) > 0


def _new_header(
    source: Sidecar | MainFile,
    head: GGUFHeader,
    ids: NDArray[np.int32],
    plan: list[TensorInfo],
    source_hash: str,
) -> gguf.GGUFWriter:
    header = gguf.GGUFWriter(None, head.arch)
    for name, value in head.keys.items():
        if _is_copied(name, value) and name != head.key(keys.VOCAB_SIZE):
            kind, *item = head.key_types[name]
            header.add_key_value(name, list(value) if item else value, kind, *item)
    # llama.cpp takes this vocabulary for N nameless tokens: no merges to read, nothing to tokenize with.
    header.add_string(keys.TOKENIZER_MODEL, "none")
    header.add_uint32(head.key(keys.VOCAB_SIZE), len(ids))
    texts = [source.tokens.raw(i) for i in ids]
    header.add_key_value(keys.TOKENS, texts, GGUFValueType.ARRAY, GGUFValueType.STRING)
    header.add_uint32(keys.FORMAT, keys.FORMAT_VERSION)
    for key, value in _origin(source):
        header.add_key_value(key, value, *([GGUFValueType.STRING] if isinstance(value, str) else _STRINGS))
    header.add_key_value(keys.COMPACT_TARGET_IDS, ids.tolist(), GGUFValueType.ARRAY, GGUFValueType.INT32)
    header.add_uint32(keys.COMPACT_N_VOCAB, len(source.tokens))
    header.add_string(keys.COMPACT_SOURCE, source_hash)
    for info in plan:
        header.add_tensor_info(
            info.name, info.shape[::-1], np.dtype(np.float32), info.n_bytes, raw_dtype=info.type
        )
    return header


def _origin(source: Sidecar | MainFile) -> Iterator[tuple[str, str | list[str]]]:
    """What a compact sidecar keeps of where its head comes from."""
    trunk, rows = head_fingerprints(source)
    if trunk is not None:
        yield keys.FINGERPRINT_TRUNK, trunk
    if rows is not None:
        yield keys.FINGERPRINT_ROWS, rows
    if keys.GRAFT_TRUNK in source.header.keys:
        yield keys.GRAFT_TRUNK, own_fingerprint(source.header, keys.GRAFT_TRUNK, None) or ""
    if keys.REQUANT_FROM in source.header.keys and (steps := list(source.header.strings(keys.REQUANT_FROM))):
        yield keys.REQUANT_FROM, steps
    if origin := source.header.string(keys.MTP_FROM, default=""):
        yield keys.MTP_FROM, origin
