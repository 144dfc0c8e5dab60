"""Sessions in threads of their own take turns: short rounds share one, nobody waits for long, and they compute on one team."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PairOf

from llama_sidecar.runtime import Model, Session, load
from llama_sidecar.runtime._native import Turns
from llama_sidecar.runtime.session import N_PIECE

PROMPT = list(b"hello world, this is where it starts")
N_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
SECONDS = 60.0  # that nothing here takes


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of("R", "Q8_0").main, ctx=4096, threads=2, depth=2) as loaded:
        yield loaded


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Writer:
    """A session that writes text upon text in a thread of its own, until it is to stop."""

    def __init__(self, model: Model, prompt: list[int], stretch_s: float = 0.0) -> None:
        self.session = model.session()
        self.n_pieces = 0
        self._prompt, self._stretch_s, self._stops = prompt, stretch_s, False
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        while not self._stops:
            text = self.session.generate(self._prompt, max_tokens=3000, temperature=0, ignore_eos=True)
            text.stretch(self._stretch_s)
            for _ in text:
                self.n_pieces += 1

    def __enter__(self) -> Writer:
        self._thread.start()
        until(lambda: self.n_pieces > 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stops = True
        while self._thread.is_alive():  # one that begins takes a cancel() back
            self.session.cancel()
            self._thread.join(0.1)
        self.session.close()


def ids(session: Session, n: int = 40) -> list[int]:
    text = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
    text.read()
    return text.tokens


def test_a_turn_is_over_after_a_while_and_only_while_others_wait() -> None:
    turns = Turns()
    with turns:
        time.sleep(0.05)
        assert not turns.is_over

        def work() -> None:
            with turns:
                pass

        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: turns.is_over)
    thread.join()


def test_who_goes_ahead_leaves_every_second_turn_to_others() -> None:
    turns, order = Turns(), list[str]()

    def work(name: str) -> None:
        with turns.ahead if name == "ahead" else turns:
            order.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ["in order"] * 3 + ["ahead"] * 2]
    with turns:
        for thread in threads:
            thread.start()
        until(lambda: turns.n_waiting == 5)
        assert turns.is_over, "at once for whoever goes ahead"
    for thread in threads:
        thread.join()
    assert order == ["ahead", "in order", "ahead", "in order", "in order"]


def test_the_first_piece_of_a_prompt_goes_ahead_and_no_other(model: Model) -> None:
    fed: list[int] = []
    with model.session() as session:
        text = session.generate(PROMPT * 20, max_tokens=1)

        def other() -> None:
            with model.turns:
                fed.append(session._native.n_past)

        threads = [threading.Thread(target=work) for work in (other, other, text.read)]
        with model.turns:
            for i, thread in enumerate(threads):
                thread.start()
                until(lambda i=i: model.turns.n_waiting == i + 1)  # type: ignore[misc]
        for thread in threads:
            thread.join()
    assert fed == [N_PIECE, N_PIECE]


def test_one_that_does_not_look_up_for_minutes_leaves_turns_to_others(model: Model) -> None:
    with model.session() as alone:
        expected = ids(alone)
    with model.session() as other, model.session() as session:
        long = other.generate(PROMPT, max_tokens=4000, temperature=0, ignore_eos=True)
        next(long)
        long.stretch(600)
        thread = threading.Thread(target=lambda: [None for _ in long])
        thread.start()
        text = session.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
        next(text)
        assert not long.finished
        text.read()
        assert text.tokens == expected
        other.cancel()
        thread.join(SECONDS)
        assert not thread.is_alive() and long.finish_reason == "cancelled"


@pytest.mark.parametrize("stretch_s", [0.0, 0.5])
def test_texts_are_what_they_are_alone(model: Model, stretch_s: float) -> None:
    with model.session() as session:
        alone = ids(session)
        with Writer(model, PROMPT[::-1], stretch_s), Writer(model, PROMPT[5:], stretch_s):
            for _ in range(10):
                assert ids(session) == alone


@pytest.mark.skipif(not Path("/proc/self/task").exists() or N_CPUS < 2, reason="Linux, several cores")
def test_they_compute_on_one_team_which_ends_with_them(model: Model) -> None:
    def n_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = n_threads()
    with Writer(model, PROMPT), Writer(model, PROMPT), Writer(model, PROMPT), Writer(model, PROMPT):
        seen = []
        for _ in range(41):
            time.sleep(0.01)
            seen.append(n_threads() - before - 4)
        assert sorted(seen)[20] <= 2, "the thread that computes for all, and its team of two"
    until(lambda: n_threads() <= before + 1)


def test_an_error_reaches_the_thread_whose_round_it_was(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(model, PROMPT), model.session(ctx=256, spec_type="none") as session:
        alone = ids(session)
        with monkeypatch.context() as patch:
            patch.setattr(session, "n_ctx", 4096)  # more than there is
            with pytest.raises(RuntimeError, match="does not fit"):
                ids(session, 1000)
        assert ids(session) == alone


def test_ctrl_c_ends_a_text_beside_another(ctrl_c: None, model: Model) -> None:
    with Writer(model, PROMPT) as writer, model.session() as session:
        alone = ids(session)
        for delay in (0.0, 0.003, 0.02, 0.05):
            timer = threading.Timer(delay, signal.raise_signal, (signal.SIGINT,))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                for _ in range(100):
                    ids(session, 3000)
            timer.join()
            n = writer.n_pieces
            until(lambda n=n: writer.n_pieces > n)  # type: ignore[misc]
            assert ids(session) == alone
