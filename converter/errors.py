"""Every way a conversion can fail on purpose, one named error each.

The message is one line: what was found, what was expected, what to do. This module knows no file format.
"""

from __future__ import annotations

from llama_sidecar.sidecars.errors import LlamaSidecarError
from llama_sidecar.sidecars.hub import HubFailed as HubFailed


class ConversionError(LlamaSidecarError):
    """Base of every error the converter raises on purpose."""


class NotACheckpoint(ConversionError):
    """The path is no Hugging Face checkpoint folder, or one of its JSON files cannot be used."""


class NoWeights(NotACheckpoint):
    """There is a config.json, and no file of weights beside it."""


class MissingShard(ConversionError):
    """The index names a file that is not there, or a tensor that its file does not hold."""


class BadShard(ConversionError):
    """A weight file is truncated or breaks the rules of its format."""


class UnsafePath(ConversionError):
    """The index or a link leads out of the checkpoint's folder."""


class BadConfig(ConversionError):
    """config.json lacks a value, or has one that cannot be."""


class UnsupportedModel(ConversionError):
    """No family converts this architecture, this quantization or this data type."""


class BadTokenizer(ConversionError):
    """The tokenizer's files are missing, broken, or of a kind that GGUF has no name for."""


class TensorMismatch(ConversionError):
    """Tensors are missing, left over or misshapen; the message lists all of them."""


class NoHead(ConversionError):
    """A sidecar was asked for, and the checkpoint or main file holds no draft head."""


class NoTarget(ConversionError):
    """A stand-alone drafter was given without the model it drafts for, or such a model where nothing drafts for another."""


class HeadMismatch(ConversionError):
    """The checkpoint that a head is to be taken from is another model's, or the one to convert has a head."""


class UnknownType(ConversionError):
    """The type asked for is not one the converter writes."""


class BadImatrix(ConversionError):
    """The importance matrix cannot be read, is another model's, or would change nothing."""


class BadDraftVocab(ConversionError):
    """A compact sidecar of no rows, or of all that there are, was asked for."""


class MissingDependency(ConversionError):
    """An optional library is needed for this and is not installed."""


class OutputExists(ConversionError):
    """A file that would be written is there already."""


class NotEnoughSpace(ConversionError):
    """The disk is too small for the files, or filled up while they were written."""


class OutputFailed(ConversionError):
    """A file cannot be written, or does not read back as it was planned."""


# GGUF files made from GGUF files.


class CannotMerge(ConversionError):
    """The head cannot be put into the main file: there is one inside, or this one is a model of its own."""


class CannotGraft(ConversionError):
    """The head cannot be grafted onto the main file, or belongs to it already."""


class CannotDequantize(ConversionError):
    """A tensor has a type whose values libggml cannot read."""


class OutOfRange(ConversionError):
    """A tensor has values that the type asked for cannot hold."""


class NothingToDo(ConversionError):
    """The file would be the same as the one given."""


class InputGiven(ConversionError):
    """A file that would be written is one of those that are read."""
