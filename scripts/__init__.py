"""The command line: one file is one command."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("llama-sidecar")
