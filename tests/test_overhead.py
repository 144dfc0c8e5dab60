"""What the loop adds to llama.cpp's own work: microseconds a round, nothing that grows with the number of requests."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import models
import pytest
from conftest import PairOf

from llama_sidecar.runtime import Model, load

PROMPT = list(b"def main():")
N_VOCAB = 248_320  # Qwen3.5's


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder: Path = tmp_path_factory.mktemp("large-vocabulary")
    pair = models.write_pair(folder, n_vocab=N_VOCAB, type=gguf.GGMLQuantizationType.Q8_0)
    with load(pair.main, ctx=512, threads=1, depth=3, draft_vocab=1024) as loaded:
        yield loaded


@pytest.mark.parametrize("depth", [0, 3])
def test_a_round_costs_few_microseconds_beside_llama_cpp(model: Model, depth: int) -> None:
    """The quickest round counts: the others tell of other programs."""
    rest_s, choice_s = [], []
    with model.session(depth=depth) as session:
        running = session.generate(PROMPT, max_tokens=300, temperature=0, ignore_eos=True)
        next(running)
        stats = running.stats
        n_rounds, native_s, accept_s = stats.n_rounds, 0.0, stats.accept_s
        native_s = stats.draft_s + stats.verify_s + stats.accept_s
        started = time.perf_counter()
        for _ in running:
            now = time.perf_counter()
            native_now = stats.draft_s + stats.verify_s + stats.accept_s
            if stats.n_rounds == n_rounds + 1:  # else some rounds ended within a character
                rest_s.append(now - started - (native_now - native_s))
                choice_s.append(stats.accept_s - accept_s)
            n_rounds, native_s, accept_s, started = stats.n_rounds, native_now, stats.accept_s, now
    assert min(rest_s) < 50e-6, sorted(rest_s)[:5]
    assert min(choice_s) < 50e-6, sorted(choice_s)[:5]  # the liar's rounds read one row


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc/self/statm")
@pytest.mark.parametrize("anew", [False, True], ids=["one session", "a session each"])
def test_a_thousand_short_requests_leave_memory_flat(pair_of: PairOf, anew: bool) -> None:
    with load(pair_of("R", "Q8_0").main, ctx=128, threads=1, depth=2) as loaded:

        def ask(n: int) -> int:
            for i in range(n):
                prompt = [*b"request ", i % 200]
                if anew:
                    with loaded.session() as session:
                        session.generate(prompt, max_tokens=3, temperature=0.5, seed=i).read()
                else:
                    loaded.generate(prompt, max_tokens=3, temperature=0.5, seed=i).read()
            gc.collect()
            return resident_bytes()

        after_200, after_1000 = ask(200), ask(800)
    assert after_1000 - after_200 < 4 << 20, (
        f"{(after_1000 - after_200) >> 10} KiB more after 800 more requests"
    )
