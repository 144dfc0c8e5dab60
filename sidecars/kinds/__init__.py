"""All kinds of sidecar, by name, best first: every module of this package with a `KIND`. Knows none by name."""

from __future__ import annotations

import importlib
import pkgutil

from llama_sidecar.sidecars.kind import Kind


def _scan() -> dict[str, Kind]:
    modules = (
        importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    )
    kinds: list[Kind] = sorted((module.KIND for module in modules), key=lambda kind: kind.rank)
    return {kind.name: kind for kind in kinds}


KINDS: dict[str, Kind] = _scan()
