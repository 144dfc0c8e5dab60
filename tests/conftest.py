"""Fixtures shared by the runtime's tests: the tiny pairs T and R, written once a run."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before llama_cpp loads OpenMP: tests share the cores

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import models
import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's own cache is never touched."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("LLAMA_SIDECAR_CACHE", str(folder))
        yield folder


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


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT as a program in the foreground has it: a shell's background job has it ignored."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are told to the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
