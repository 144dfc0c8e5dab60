"""Load a main GGUF with its sidecar, generate losslessly and faster, chat.

>>> from llama_sidecar.runtime import load            # doctest: +SKIP
>>> with load("demo-Q8_0.gguf") as model:             # doctest: +SKIP
...     for piece in model.generate("def main():"):
...         print(piece, end="")
"""

from __future__ import annotations

from importlib.metadata import version

from .drafter_choice import Speculation
from .drop_in import Llama
from .errors import ArgumentError, LibraryError, LoadError, PromptError, SessionError, SessionFileError
from .llm import Model, load
from .sampling import Sampling
from .session import Generation, Piece, Scripted, Session
from .stats import Stats

__all__ = [
    "ArgumentError",
    "Generation",
    "LibraryError",
    "Llama",
    "LoadError",
    "Model",
    "Piece",
    "PromptError",
    "Sampling",
    "Scripted",
    "Session",
    "SessionError",
    "SessionFileError",
    "Speculation",
    "Stats",
    "load",
]
__version__ = version("llama-sidecar")
