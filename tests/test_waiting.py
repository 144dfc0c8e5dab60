"""How OpenMP's threads wait: they spin for a moment, then sleep, and leave no team behind that slows another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PairOf

from llama_sidecar.runtime import _native
from llama_sidecar.runtime.library import llama

N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
linux = pytest.mark.skipif(not Path("/proc/self/task").exists() or N_CPUS < 2, reason="Linux, several cores")


def computes_on_libgomp() -> bool:
    llama()
    return _native.openmp_library() is not None


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
def test_others_leave_too_little_room(room: float, n_threads: int, sleeping: bool, expected: bool) -> None:
    assert _native.is_crowded(room, n_threads, sleeping) == expected


@pytest.mark.parametrize(
    ("n_others", "n_cpus", "sleeping", "expected"),
    [
        (1.0, 2, False, False),  # two threads of ours share a processor
        (2.0, 2, False, True),
        (1.5, 2, True, False),  # not yet
        (1.5, 2, False, True),
        (2.0, 2, True, True),
        (6.0, 8, False, False),
    ],
)
def test_others_fill_all_processors(n_others: float, n_cpus: int, sleeping: bool, expected: bool) -> None:
    assert _native.is_full(n_others, n_cpus, sleeping) == expected


OTHERS = """
import os, subprocess, sys, time
from llama_sidecar.runtime import _native, load
def n_running():
    with open("/proc/stat") as stat:
        return next(int(line.split()[1]) for line in stat if line.startswith("procs_running"))
def others_run():
    looks = []
    for _ in range(40):
        time.sleep(0.01)
        looks.append(n_running() - 1)
    return sum(looks) > 0.3 * len(looks)
if others_run():
    sys.exit(print("others"))
"""

BUSY = (
    OTHERS
    + """
def wait_for(expected, text):
    until = time.monotonic() + 10
    while time.monotonic() < until and text.stats.waiting != expected:
        text = model.generate("hello", max_tokens=16, temperature=0, ignore_eos=True)
        text.read()
    return text.stats.waiting
with load(sys.argv[1], ctx=128, threads={n_cpus}, depth=2) as model:
    text = model.generate("hello", max_tokens=16, temperature=0, ignore_eos=True)
    text.read()
    print(wait_for("spin 1 ms", text))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"])]
    try:
        print(wait_for("sleep", text))
        loops += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range({n_cpus})]
        print(wait_for("spin 1 ms", text))
    finally:
        for loop in loops:
            loop.kill()
"""
)


@linux
def test_threads_sleep_while_others_use_some_of_the_processors(pair_of: PairOf) -> None:
    """Else they spin: alone, and where each processor is shared with another program."""
    if not computes_on_libgomp():
        pytest.skip("ggml was built without libgomp")
    found = run(BUSY.format(n_cpus=N_CPUS), pair_of("R", "Q8_0").main)
    if found == "others":
        pytest.skip("other programs run")
    assert found.splitlines() == ["spin 1 ms", "sleep", "spin 1 ms"]


BURST = (
    OTHERS
    + """
def is_noticed_soon(model):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range({n_cpus} - 1)]
    time.sleep(0.3)
    text = model.generate("hello", max_tokens=4000, temperature=0, ignore_eos=True)
    began = time.monotonic()
    next(text)
    sleeps = _native.waiting() == "sleep"
    for loop in loops:
        loop.kill()
    for loop in loops:
        loop.wait()
    while sleeps and _native.waiting() == "sleep" and time.monotonic() < began + 0.24:
        next(text)
    return sleeps and _native.waiting() != "sleep" and time.monotonic() < began + 0.24
with load(sys.argv[1], ctx=4096, threads={n_cpus}, depth=2) as model:
    model.generate("hello", max_tokens=16).read()
    noticed, until = False, time.monotonic() + 20
    while not noticed and time.monotonic() < until:
        noticed = is_noticed_soon(model)
    print("as expected" if noticed else "others" if others_run() else "too late")
"""
)


@linux
def test_a_burst_when_a_text_begins_does_not_slow_it_for_long(pair_of: PairOf) -> None:
    """Other programs are looked at every 250 ms, but what ran at the beginning of a text is looked at again before."""
    if not computes_on_libgomp():
        pytest.skip("ggml was built without libgomp")
    found = run(BURST.format(n_cpus=N_CPUS), pair_of("R", "Q8_0").main)
    if found == "others":
        pytest.skip("other programs run")
    assert found == "as expected"


WAITING = """
import os, sys
{first}
before = dict(os.environ)
from llama_sidecar.runtime import load
with load(sys.argv[1], ctx=128, threads=2, depth=2) as model:
    text = model.generate("hello", max_tokens=4, temperature=0, ignore_eos=True)
    text.read()
print(text.stats.waiting, dict(os.environ) == before, sep=", ")
"""


@linux
@pytest.mark.parametrize(
    ("first", "environment", "expected"),
    [
        ("", {}, "spin 1 ms"),
        ("", {"GOMP_SPINCOUNT": "20"}, "as it is"),
        ("", {"OMP_WAIT_POLICY": "active"}, "as it is"),
        ("import llama_cpp", {}, "spin"),  # as long as libgomp likes
        ("import llama_sidecar.runtime.placement as placement; placement.gpus()", {}, "spin 1 ms"),
    ],
)
def test_threads_spin_for_a_moment_unless_the_user_has_chosen(
    pair_of: PairOf, first: str, environment: dict[str, str], expected: str
) -> None:
    found = run(WAITING.format(first=first), pair_of("R", "Q8_0").main, **environment)
    state, unchanged = found.split(", ")
    if state == "sleep" and expected != "as it is":
        state = expected  # beside another program
    assert (state, unchanged) == (expected if computes_on_libgomp() else "as it is", "True")


def test_looks_are_counted_by_the_time_they_take() -> None:
    short, long = _native.spins_in(0.001), _native.spins_in(0.01)
    assert 1000 < short < 10_000_001, "a pause takes up to 140 cycles"
    assert 2 * short < long < 50 * short, "another program may run meanwhile"


TOLD = """
import ctypes, os, sys, time
from llama_sidecar.runtime import _native, load
load(sys.argv[1], ctx=128, threads=2, depth=2).close()
_native.release_team()
with open("/proc/self/maps") as maps:
    path = next(line.split()[-1] for line in maps if "libgomp" in line)
omp = ctypes.CDLL(path)
work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
threads = set(os.listdir("/proc/self/task"))
omp.GOMP_parallel(work, None, 2, 0)
(other,) = set(os.listdir("/proc/self/task")) - threads
used = lambda: int(open(f"/proc/self/task/{other}/schedstat").read().split()[0]) / 1e6
before = used()
time.sleep(0.2)
print(used() - before)
"""


@linux
def test_libgomp_has_heard_it(pair_of: PairOf) -> None:
    """A thread that waits for the next product spins for a millisecond, not for libgomp's own 3 and more."""
    if not computes_on_libgomp():
        pytest.skip("ggml was built without libgomp")
    main = pair_of("R", "Q8_0").main
    assert 0.0 <= float(run(TOLD, main)) < 2.5
    assert float(run(TOLD, main, GOMP_SPINCOUNT=str(_native.spins_in(0.05)))) > 10


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
