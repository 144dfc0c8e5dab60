"""Ctrl-C and SIGTERM, wherever they come: one word, the exit code of the signal, and nothing half-written or still loaded.

tests/test_commands.py has conversions and rounds, tests/test_breaks.py what a session is good for afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PairOf

from llama_sidecar.runtime import Model, load
from llama_sidecar.runtime.library import llama
from llama_sidecar.runtime.whole_calls import call_whole

# A process that gets the signal when it calls a function for the first time.
STRUCK = """
import importlib, os, signal, sys
from llama_sidecar.scripts.__main__ import main
module, names, number, *arguments = sys.argv[1:]
*owners, name = names.split(".")
owner = importlib.import_module(module)
for part in owners:
    owner = getattr(owner, part)
original, struck = getattr(owner, name), []
def strike(*arguments, **options):
    if not struck:
        struck.append(True)
        os.kill(os.getpid(), int(number))
    return original(*arguments, **options)
setattr(owner, name, strike)
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background have it ignored
sys.argv = ["llama-sidecar", *arguments]
try:
    main()
finally:
    assert struck, "it was never called"
"""
RUN = ("run", "-p", "def f", "-n", "8")
MOMENTS = {
    "loading": ("llama_cpp.llama_cpp", "llama_model_load_from_file", RUN),
    "making a context": ("llama_cpp.llama_cpp", "llama_init_from_model", RUN),
    "cutting a head": ("llama_sidecar.sidecars.compact", "write_data", (*RUN, "--draft-vocab", "128")),
    "trying kernels": ("llama_sidecar.runtime.kernel_choice", "_measured", RUN),
    "reading a prompt": ("llama_sidecar.runtime.session", "Generation._prefill", RUN),
    "calibrating": ("llama_sidecar.runtime.costs", "_measure", RUN),
    "comparing widths": ("llama_sidecar.runtime.exactness", "_Bed.go_on", (*RUN, "--exact")),
    "bench": ("llama_sidecar.runtime.bench", "_Bench._pair", ("bench",)),
    "tune": ("llama_sidecar.runtime.tuning", "_write", ("tune",)),
    "verify": ("llama_sidecar.runtime.verification", "_Verification._greedy", ("verify",)),
}
SIGNALS = [(moment, signal.SIGINT) for moment in MOMENTS] + [
    (moment, signal.SIGTERM) for moment in ("loading", "cutting a head", "calibrating", "verify")
]


@pytest.mark.parametrize(("moment", "number"), SIGNALS, ids=[f"{m}-{n.name}" for m, n in SIGNALS])
def test_a_command_ends_in_order(
    moment: str, number: signal.Signals, pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path))
    module, name, (command, *options) = MOMENTS[moment]
    arguments = [command, str(pair_of("R", "Q8_0").main), *options, "--threads", "1", "--ctx", "2048"]
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, module, name, str(int(number)), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert ("interrupted" in done.stderr) == (number == signal.SIGINT)
    assert not list(tmp_path.rglob(".*")), "a half-written file"


# Nothing stays loaded


def struck(monkeypatch: pytest.MonkeyPatch, name: str, free: str, when: Callable[[], object]) -> list[Any]:
    """What a function of llama.cpp makes from now on and what is not freed of it; it calls `when` first."""
    lib, made = llama(), list[Any]()
    make, let_go = getattr(lib, name), getattr(lib, free)

    def strike(*arguments: Any) -> Any:
        when()
        result = make(*arguments)
        if result:
            made.append(result)
        return result

    def freed(pointer: Any) -> None:
        made.remove(pointer)
        let_go(pointer)

    monkeypatch.setattr(lib, name, strike)
    monkeypatch.setattr(lib, free, freed)
    return made


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_load_ends_early_and_leaves_no_model(
    ctrl_c: None, pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def once() -> None:
        calls.append(1)
        interrupt()

    made = struck(monkeypatch, "llama_model_load_from_file", "llama_model_free", once)
    with pytest.raises(KeyboardInterrupt):
        load(pair_of("R", "Q8_0").main, ctx=128, threads=1)
    assert calls == [1] and made == []
    monkeypatch.undo()
    with load(pair_of("R", "Q8_0").main, ctx=128, threads=1) as model:
        assert model.generate("a", max_tokens=2, temperature=0, ignore_eos=True).read() is not None


def test_an_interrupted_session_leaves_no_context(
    ctrl_c: None, pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(pair_of("R", "Q8_0").main, ctx=128, threads=1, depth=2) as model:
        for n in (1, 2):  # the target's context, and the drafter's
            calls = list[int]()

            def nth(n: int = n, calls: list[int] = calls) -> None:
                calls.append(1)
                if len(calls) == n:
                    interrupt()

            with monkeypatch.context() as patch:
                made = struck(patch, "llama_init_from_model", "llama_free", nth)
                with pytest.raises(KeyboardInterrupt):
                    model.session()
                assert len(calls) == n and made == []
        goes_on(model)


def goes_on(model: Model) -> None:
    with model.session() as session:
        text = session.generate("a", max_tokens=4, temperature=0, ignore_eos=True)
        text.read()
        assert len(text.tokens) == 4


# call_whole by itself


def test_what_came_too_late_is_freed_and_the_maker_is_told(ctrl_c: None) -> None:
    freed = list[int]()
    for n in range(1, 301):  # now and then the signal comes just before the caller's wait begins

        def make(unwanted: threading.Event, n: int = n) -> int:
            interrupt()
            assert unwanted.wait(10)
            return n

        with pytest.raises(KeyboardInterrupt):
            call_whole(make, freed.append)
        assert freed == list(range(1, n + 1))


def test_what_is_made_in_time_is_kept_and_errors_come_through() -> None:
    freed = list[int]()
    assert call_whole(lambda unwanted: 7, freed.append) == 7

    def fail(unwanted: threading.Event) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        call_whole(fail, freed.append)
    assert freed == []
