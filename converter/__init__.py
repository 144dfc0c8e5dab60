"""From a Hugging Face checkpoint to a main GGUF and its sidecar GGUF, and from such files to others (edit/).

Nothing here imports the runtime, and torch is imported only when a `.bin` shard is read.

    >>> from llama_sidecar.converter import convert
    >>> result = convert("Qwen3.5-0.8B", "models")            # doctest: +SKIP
    >>> result.main                                            # doctest: +SKIP
    PosixPath('models/Qwen3.5-0.8B-Q8_0.gguf')
"""

from __future__ import annotations

from importlib.metadata import version

from llama_sidecar.converter.convert import ConvertResult, convert
from llama_sidecar.converter.dry_run import DryRun, dry_run
from llama_sidecar.converter.edit import EditResult, graft, merge, requant, split
from llama_sidecar.converter.errors import ConversionError
from llama_sidecar.converter.recipe import KEPT_TYPES, TYPES

__all__ = [
    "KEPT_TYPES",
    "TYPES",
    "ConversionError",
    "ConvertResult",
    "DryRun",
    "EditResult",
    "convert",
    "dry_run",
    "graft",
    "merge",
    "requant",
    "split",
]
__version__ = version("llama-sidecar")
