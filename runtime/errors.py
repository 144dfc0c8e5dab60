"""The runtime's errors, each a `LlamaSidecarError`."""

from __future__ import annotations

from llama_sidecar.sidecars.errors import LlamaSidecarError


class LibraryError(LlamaSidecarError):
    """llama.cpp's library lacks something the loop needs, or refused a call."""


class LoadError(LlamaSidecarError):
    """A model could not be loaded, or what was asked for does not fit it."""


class PromptError(LlamaSidecarError):
    """A prompt or a sampling setting that cannot be used."""


class ArgumentError(PromptError, ValueError):
    """An argument that the drop-in Llama does not take; llama_cpp.Llama raises ValueError for those that it refuses."""


class SessionError(LlamaSidecarError):
    """A session that is closed, or busy in another thread."""


class SessionFileError(LlamaSidecarError):
    """A saved session that cannot be used here, or cannot be written."""


class ConversationFileError(LlamaSidecarError):
    """A saved conversation that cannot be read, or cannot be written."""


class CacheError(LlamaSidecarError):
    """The cache folder cannot be used: not writable, full, or locked for too long."""


class ReportError(LlamaSidecarError):
    """Results that cannot be read, drawn or written."""


class HeadsUnavailable(LlamaSidecarError):
    """There is no compact head; the message says why, and the full head serves instead."""
