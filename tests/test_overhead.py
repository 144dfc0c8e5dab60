"""What the loop adds to llama.cpp's own work: microseconds a round, nothing that grows with the number of requests."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import gguf
import models
import pytest
from conftest import PairOf

from llama_sidecar.runtime import Session, load

PROMPT = list(b"def main():")


def rounds(session: Session, n: int = 250) -> list[tuple[float, float]]:
    """Seconds of choosing, and of what is neither drafting nor verifying nor choosing, of each round of a text."""
    running = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
    next(running)
    found = []

    def counts() -> tuple[int, float, float]:
        stats = running.stats
        return stats.n_rounds, stats.accept_s, stats.draft_s + stats.verify_s + stats.accept_s

    before, started = counts(), time.perf_counter()
    for _ in running:
        whole_s, now = time.perf_counter() - started, counts()
        n_rounds, choice_s, native_s = (b - a for a, b in zip(before, now, strict=True))
        found.append((choice_s / n_rounds, (whole_s - native_s) / n_rounds))
        before, started = now, time.perf_counter()
    return found


@pytest.mark.parametrize("depth", [0, 3])
def test_a_round_takes_less_than_50_microseconds_beside_llama_cpp(pair_of: PairOf, depth: int) -> None:
    """The quickest round of several texts counts: the others tell of other programs."""
    with (
        load(pair_of("R", "Q8_0").main, ctx=512, threads=1, depth=3) as loaded,
        loaded.session(depth=depth) as session,
    ):
        rest_s = min(rest_s for _ in range(4) for _, rest_s in rounds(session))
    assert rest_s < 50e-6


def test_reading_a_row_of_248k_logits_takes_less_than_50_microseconds(tmp_path: Path) -> None:
    pair = models.write_pair(tmp_path, n_vocab=248_320, type=gguf.GGMLQuantizationType.Q8_0)
    with load(pair.main, ctx=512, threads=1, spec_type="none") as loaded, loaded.session() as session:
        choice_s = min(choice_s for choice_s, _ in rounds(session))
    assert choice_s < 50e-6


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
