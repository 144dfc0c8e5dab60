"""How OpenMP's threads wait: they spin on an idle machine, sleep on a busy one, and leave no team behind that slows another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PairOf

from llama_sidecar.runtime import _native

N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
linux = pytest.mark.skipif(not Path("/proc/self/task").exists() or N_CPUS < 2, reason="Linux, several cores")


def run(code: str, main: Path, **environment: str) -> str:
    """What `code` prints in a process of its own, with these and no other OpenMP settings."""
    rest = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(main)],
        env=rest | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("room", "n_threads", "sleeping", "expected"),
    [
        (2.0, 2, False, False),
        (1.6, 2, False, False),  # a little of another program
        (1.4, 2, False, True),  # one busy loop takes a third of the two processors
        (0.7, 2, False, True),
        (1.6, 2, True, True),  # not yet
        (1.8, 2, True, False),
        (15.0, 8, False, False),  # more processors than threads
    ],
)
def test_threads_sleep_while_others_use_their_processors(
    room: float, n_threads: int, sleeping: bool, expected: bool
) -> None:
    assert _native.should_sleep(room, n_threads, sleeping) == expected


BUSY = """
import subprocess, sys, time
from llama_sidecar.runtime import load
loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * {n_cpus})]
try:
    with load(sys.argv[1], ctx=128, threads=2, depth=2) as model:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            text = model.generate(b"hello".decode(), max_tokens=16, temperature=0, ignore_eos=True)
            text.read()
            if text.stats.waiting != "spin":
                break
    print(text.stats.waiting)
finally:
    for loop in loops:
        loop.kill()
"""


@linux
def test_a_busy_machine_is_noticed_and_the_users_own_setting_wins(pair_of: PairOf) -> None:
    main, code = pair_of("R", "Q8_0").main, BUSY.format(n_cpus=N_CPUS)
    user = run(code, main, GOMP_SPINCOUNT="20")
    assert user == "as it is"
    if (found := run(code, main)) == "as it is":
        pytest.skip("ggml was built without libgomp")
    assert found == "sleep"


TEAM = """
import os, sys
from llama_sidecar.runtime import load
count = lambda: len(os.listdir("/proc/self/task"))
with load(sys.argv[1], ctx=128, threads=2, depth=2) as model:
    before = count()
    with model.session() as session:
        made = count() - before
        running = session.generate("hello", max_tokens=8, temperature=0, ignore_eos=True)
        next(running)
        during = count() - before
        running.read()
        print(made, during, count() - before)
"""


@linux
def test_a_finished_text_leaves_no_openmp_team_behind(pair_of: PairOf) -> None:
    """libgomp counts the teams of all threads that have computed: left there, one would slow another thread's text down."""
    made, during, after = run(TEAM, pair_of("R", "Q8_0").main, OMP_WAIT_POLICY="passive").split()
    if during == "0":
        pytest.skip("ggml was built without OpenMP")
    assert (made, during, after) == ("0", "1", "0")
