"""The contract between converter and runtime: what a sidecar is, which one belongs to a main model, and why.

Needs only the standard library, numpy and gguf; knows neither checkpoints nor llama.cpp's library. The rules are in
FORMAT.md. Start with `open_main`, `open_sidecar`, `discover`.
"""

from __future__ import annotations

from importlib.metadata import version

from llama_sidecar.sidecars.discover import Candidate, Found, choose, discover, kind_from_name, survey
from llama_sidecar.sidecars.errors import LlamaSidecarError
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray, TensorInfo
from llama_sidecar.sidecars.gguf_reader import read_header
from llama_sidecar.sidecars.kind import Kind, Target
from llama_sidecar.sidecars.kinds import KINDS
from llama_sidecar.sidecars.pair import Match, check_draft_model, check_pair
from llama_sidecar.sidecars.shards import read_model
from llama_sidecar.sidecars.sidecar import Identity, MainFile, Sidecar, identify, open_main, open_sidecar

__all__ = [
    "KINDS",
    "Candidate",
    "Found",
    "GGUFHeader",
    "Identity",
    "Kind",
    "LlamaSidecarError",
    "MainFile",
    "Match",
    "Sidecar",
    "StringArray",
    "Target",
    "TensorInfo",
    "check_draft_model",
    "check_pair",
    "choose",
    "discover",
    "identify",
    "kind_from_name",
    "open_main",
    "open_sidecar",
    "read_header",
    "read_model",
    "survey",
]
__version__ = version("llama-sidecar")
