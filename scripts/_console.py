"""Where tables for people go. No command itself, and no llama.cpp needed."""

from __future__ import annotations

import shutil

from rich.console import Console

MIN_COLUMNS = 40


def tables() -> Console:
    """A console as wide as the terminal, but never so narrow that nothing can be read: rich takes COLUMNS=0 at its word."""
    return Console(highlight=False, width=max(MIN_COLUMNS, shutil.get_terminal_size().columns))
