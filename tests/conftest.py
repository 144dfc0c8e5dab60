"""Fixtures shared by the runtime's tests: the tiny pairs T and R, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import models
import pytest

PairOf = Callable[..., models.Pair]


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> PairOf:
    """`pair_of("R", "Q8_0")`: a tiny pair by letter and type, made at first use."""
    made: dict[tuple[str, str, int], models.Pair] = {}

    def make(letter: str, type: str = "F32", seed: int = 0) -> models.Pair:
        key = (letter, type, seed)
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(f"{letter}-{type}")
            made[key] = models.write_pair(
                folder, recurrent=letter == "R", seed=seed, type=gguf.GGMLQuantizationType[type]
            )
        return made[key]

    return make
