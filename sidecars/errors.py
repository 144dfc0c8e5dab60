"""Every way a file or a pair of files can break the contract, one named error each.

The message is one line: what was found, what was expected, what to do. This module knows no file format.
`LlamaSidecarError` is the base of every error that the whole project raises on purpose.
"""

from __future__ import annotations

import collections.abc

MAX_MESSAGE = 8000  # characters: names and values come from files, which may be hostile


def printable(text: str) -> str:
    """Escape what a hostile file or name may hold beside text (line ends, terminal codes), so that it is one printable line.

    >>> printable("mtp-\\x1b[31mred")
    'mtp-\\\\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed(names: collections.abc.Iterable[str], most: int = 30) -> str:
    """Join names for a message, of many the first ones and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most:,} more" if len(found) > most else "")


class LlamaSidecarError(Exception):
    """Base of every error this project raises on purpose; `str` of it is one printable line of bounded length."""

    def __str__(self) -> str:
        text = printable(super().__str__())
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


class UnreadableFile(LlamaSidecarError):
    """The path is missing, is not a regular file, or the system refuses to read it."""


class UnwritableFile(LlamaSidecarError):
    """The system refuses to write a file: no permission, a full disk."""


# A GGUF container that breaks its own rules.


class GGUFError(LlamaSidecarError):
    """The file is not a GGUF that can be trusted."""


class NotGGUF(GGUFError):
    """The first four bytes are not `GGUF`."""


class UnsupportedVersion(GGUFError):
    """The GGUF version is neither 2 nor 3, or the file is big-endian."""


class TruncatedFile(GGUFError):
    """The file ends before its header, or before the tensor data its header declares."""


class HeaderTooLarge(GGUFError):
    """The header declares more keys, tensors, nesting or bytes than any model has."""


class BadName(GGUFError):
    """A key or tensor name is empty, too long, or not UTF-8."""


class DuplicateName(GGUFError):
    """A key, a tensor name or a token's text occurs twice."""


class BadValueType(GGUFError):
    """A key's value has a type that GGUF does not define."""


class BadShape(GGUFError):
    """A tensor has no or too many dimensions, an empty or overflowing one, or rows that no whole blocks fill."""


class BadTensorType(GGUFError):
    """A tensor has a type of unknown block size."""


class BadAlignment(GGUFError):
    """`general.alignment` is not a U32 power of two."""


class BadOffset(GGUFError):
    """A tensor overlaps the one before it, leaves a gap, or is not aligned."""


class BadShards(GGUFError):
    """A sharded file lacks a shard, its shards disagree, or a later shard was given instead of the first."""


# A sound GGUF that is not what it was given as.


class MissingKey(LlamaSidecarError):
    """A key that the role or the kind requires is absent."""


class WrongKey(LlamaSidecarError):
    """A key's value has another type than it must have, or is out of its range."""


class NotAModel(LlamaSidecarError):
    """The file is neither a main model nor a sidecar."""


class NotAMain(LlamaSidecarError):
    """A sidecar was given where a main model is needed."""


class NotASidecar(LlamaSidecarError):
    """A main model was given where a sidecar is needed."""


class CompactGiven(LlamaSidecarError):
    """A compact sidecar was given where a standard sidecar or a main model is needed."""


class NotCompact(LlamaSidecarError):
    """The file is not a compact sidecar."""


class CannotCut(LlamaSidecarError):
    """The head cannot be cut to some rows of its vocabulary: there is none, or its kind needs every row."""


class BadRows(LlamaSidecarError):
    """The rows of a compact sidecar are not ascending token ids of its target, one for each row it holds."""


class MissingTensors(LlamaSidecarError):
    """Tensors that the kind requires are absent; the message lists all of them."""


class WrongTensorShape(LlamaSidecarError):
    """Tensors do not have the shape that the file's own keys call for; the message lists all of them."""


class StrayTensors(LlamaSidecarError):
    """A sidecar holds tensors of the trunk; the message lists them."""


class ForeignHead(LlamaSidecarError):
    """An MTP head of a form that llama.cpp does not draft with: rows for some tokens alone, or borrowed matrices."""


class UnsupportedFormat(LlamaSidecarError):
    """`sidecar.format` is newer than this version reads."""


class BadFingerprint(LlamaSidecarError):
    """A fingerprint key is not 64 hexadecimal digits."""


# Files that are sound alone and do not belong together.


class PairMismatch(LlamaSidecarError):
    """The sidecar belongs to another main model."""


class AmbiguousSidecar(LlamaSidecarError):
    """Several sidecars fit equally well; the message lists them."""


class NoSuchSidecar(LlamaSidecarError):
    """The kind asked for is not there; the message lists what is."""


class UnknownKind(LlamaSidecarError):
    """The name asked for is no kind of sidecar; the message lists the names."""
