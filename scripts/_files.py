"""Arguments that are GGUF files: here, or on the Hugging Face Hub, from where they are fetched. No command itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llama_sidecar.sidecars.hub import fetch, fetch_sidecar


class _File(click.Path):
    def __init__(self, fetch: Callable[[Path], Path]) -> None:
        super().__init__(path_type=Path)
        self._fetch = fetch

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)  # by path_type
        return self._fetch(path)


MODEL = _File(fetch)  # with the sidecar beside it
MAIN = _File(lambda path: fetch(path, "none"))
SIDECAR = _File(fetch_sidecar)
