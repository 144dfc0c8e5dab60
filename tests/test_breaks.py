"""What broke the runtime once: threads that meet, Ctrl-C at any moment, odd ends and odd arguments. Each must stay mended."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from conftest import PairOf

from llama_sidecar.runtime import (
    LoadError,
    Model,
    PromptError,
    Scripted,
    Session,
    SessionError,
    load,
    placement,
)
from llama_sidecar.runtime import session as session_module

PROMPT = list(b"hello world, this is where it starts")


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as loaded:
        yield loaded


def ids(session: Session, prompt: list[int] = PROMPT, n: int = 12) -> list[int]:
    generation = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    generation.read()
    return generation.tokens


# Ends


@pytest.mark.parametrize("n_right", [4, 16])
def test_accepted_drafts_do_not_run_past_the_context_s_end(pair_of: PairOf, n_right: int) -> None:
    """llama.cpp pads a context of 64 to 256 cells; a drafter that is right must not write into the padding."""
    prompt = (PROMPT * 2)[:56]
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=16) as model:
        with model.session(spec_type="none") as plain:
            script = prompt + ids(plain, prompt, 40)
        with model.session(ctx=64, scripted=Scripted(script, n_right)) as session:
            generation = session.generate(prompt, temperature=0, ignore_eos=True)
            generation.read()
            assert generation.finish_reason == "length"
            assert generation.tokens == script[56 : 56 + 9]
            assert session._native.n_past == 64


# Ctrl-C


def test_ctrl_c_at_any_moment_leaves_a_usable_session_and_a_usable_model(model: Model) -> None:
    """Python looks for signals where a function begins and where a C function has returned: at each of them in turn."""
    with model.session() as session:
        expected = ids(session, n=6)
        for moment in range(10_000):
            countdown = moment

            def interrupt(_frame: FrameType, event: str, _arg: object) -> None:
                nonlocal countdown
                if event in ("call", "c_return"):
                    countdown -= 1
                    if countdown < 0:
                        sys.setprofile(None)
                        raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                found = ids(session, n=6)
            except KeyboardInterrupt as error:  # with its traceback alive, as in an interactive Python
                assert error is not None
                assert ids(session, n=6) == expected, moment
            else:
                assert found == expected
                break
            finally:
                sys.setprofile(None)
        assert moment > 100


def test_the_log_runs_no_python(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    """llama.cpp logs in the middle of a decode: a Python callback would swallow a Ctrl-C there."""
    import ctypes

    from llama_cpp import llama_cpp

    callback, user = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user))
    assert ctypes.cast(callback, ctypes.c_void_p).value == session_module._native.log_callback()
    with model.session() as session:
        ids(session)
    assert capfd.readouterr() == ("", "")


# Threads


def test_turns_are_taken_in_the_order_they_were_asked_for() -> None:
    turns, order = session_module._native.Turns(), list[int]()

    def work(i: int) -> None:
        for _ in range(3):
            with turns:
                order.append(i)
                time.sleep(0.02)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    with turns:
        for thread in threads:
            thread.start()
            time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2] * 3


def test_two_threads_that_ask_one_session_at_the_same_time_get_one_text(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second must not slip in between the first one's look and its start."""

    class Slow(session_module.Generation):
        def __init__(self, *args: object) -> None:
            time.sleep(0.1)
            super().__init__(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(session_module, "Generation", Slow)
    with model.session() as session:
        expected, seen = ids(session), list[object]()

        def work() -> None:
            try:
                generation = session.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
                time.sleep(0.2)
                generation.read()
                seen.append(generation.tokens)
            except SessionError:
                seen.append("refused")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "refused" in seen and expected in seen


def test_sessions_in_threads_of_their_own_write_what_they_write_alone(pair_of: PairOf) -> None:
    """Two processors' threads each: OpenMP teams come and go with the turns."""
    seen: list[list[list[int]]] = [[], [], []]
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=2, depth=3) as model:

        def work(i: int) -> None:
            for _ in range(5):
                with model.session() as session:
                    seen[i].append(ids(session, [*PROMPT, i], 24))

        for i in range(3):
            work(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [10 * [texts[0]] for texts in seen]


def test_a_text_that_another_thread_is_about_to_finish_is_left_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.session(learn=True) as session:
        counting, go_on = threading.Event(), threading.Event()

        def slow_count(_tokens: object) -> None:
            counting.set()
            go_on.wait(10)

        monkeypatch.setattr(model, "count", slow_count)
        thread = threading.Thread(target=ids, args=(session,))
        thread.start()
        counting.wait(10)
        for action in (lambda: session.generate(PROMPT), session.close, lambda: session.time_rows([1], 1, 1)):
            with pytest.raises(SessionError, match="another thread"):
                action()
        go_on.set()
        thread.join()
        assert len(ids(session)) == 12


def test_a_text_left_by_a_thread_that_ended_or_cancelled_does_not_block_the_session(model: Model) -> None:
    with model.session() as session:
        expected, go_on = ids(session), threading.Event()

        def leave(waits: bool) -> None:
            next(session.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True))
            if waits:
                left.set()
                go_on.wait(10)

        thread = threading.Thread(target=leave, args=(False,))
        thread.start()
        thread.join()
        assert ids(session) == expected
        left = threading.Event()
        thread = threading.Thread(target=leave, args=(True,))
        thread.start()
        left.wait(10)
        with pytest.raises(SessionError, match="another thread"):
            session.generate(PROMPT)
        session.cancel()
        assert ids(session) == expected
        go_on.set()
        thread.join()


def test_pieces_of_text_are_right_in_two_threads(model: Model) -> None:
    wrong = 0

    def work(token: int) -> None:
        nonlocal wrong
        for _ in range(20_000):
            wrong += model.vocab.piece(token) != bytes([token])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(token,)) for token in b"AB"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == 0


def test_the_interpreter_may_end_while_a_daemon_thread_generates(pair_of: PairOf) -> None:
    code = f"""
import threading
from llama_sidecar.runtime import load
model = load({str(pair_of("R").main)!r}, ctx=2048, threads=1, depth=3)
session, running = model.session(), threading.Event()
def work():
    while True:
        for _ in session.generate(list(range(1, 250)) * 6, max_tokens=50, temperature=0, ignore_eos=True):
            running.set()
threading.Thread(target=work, daemon=True).start()
running.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "call", ["generation.tokens, generation.text, generation.stats", "_native.release_team()"]
)
def test_the_interpreter_may_end_while_daemon_threads_do_what_takes_no_turn(
    pair_of: PairOf, call: str
) -> None:
    code = f"""
import threading, time
from llama_sidecar.runtime import _native, load
model = load({str(pair_of("R").main)!r}, ctx=256, threads=1, depth=3)
generation = model.generate("hello", max_tokens=20, temperature=0, ignore_eos=True)
generation.read()
def work():
    while True:
        {call}
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_handler_may_read_a_text_at_any_moment(model: Model) -> None:
    """Also while what it has interrupted reads: at each function's beginning, and where a C function has returned."""
    with model.session() as session:
        generation = session.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
        generation.read()
        seen, n_tokens = list[list[int]](), list[int]()

        def read() -> None:
            inside = False

            def handle(_frame: FrameType, event: str, _arg: object) -> None:
                nonlocal inside
                if event in ("call", "c_return") and not inside:
                    inside = True
                    seen.append(generation.tokens)
                    inside = False

            sys.setprofile(handle)
            try:
                seen.append(generation.tokens)
                n_tokens.append(generation.stats.n_tokens)
            finally:
                sys.setprofile(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert n_tokens == [12] and seen.count(generation.tokens) == len(seen) > 2


def test_counts_that_a_slow_thread_read_do_not_replace_newer_ones(model: Model) -> None:
    with model.session() as session:
        generation = session.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        native, has_read, may_go_on = generation._native, threading.Event(), threading.Event()

        class Slow:
            def __getattr__(self, name: str) -> object:
                found = getattr(native, name)
                if name == "counts" and threading.current_thread() is thread:
                    has_read.set()
                    may_go_on.wait(0.5)
                return found

        thread = threading.Thread(target=lambda: generation.stats)
        next(generation)
        generation._native = Slow()
        thread.start()
        assert has_read.wait(20)
        generation._native = native
        for _ in generation:
            pass
        stats = generation.stats
        assert stats.n_tokens == 20
        may_go_on.set()
        thread.join()
        assert stats.n_tokens == 20


def test_what_threads_read_of_a_text_only_grows(model: Model) -> None:
    with model.session() as session:
        generation = session.generate(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
        wrong = list[object]()

        def read() -> None:
            tokens, n = list[int](), 0
            while not generation.finished:
                found = generation.tokens
                if found[: len(tokens)] != tokens or generation.stats.n_tokens < n:
                    wrong.append((tokens, found))
                tokens, n = found, len(found)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        pieces = list(generation)
        for thread in threads:
            thread.join()
        assert not wrong and "".join(pieces) == generation.text and len(generation.tokens) == 200


# Lifetimes


def test_a_text_that_is_kept_keeps_nothing_of_a_closed_session(model: Model) -> None:
    """Else its buffers stay, and outlive the contexts that they are of."""
    session = model.session()
    left, whole = (session.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True) for _ in range(2))
    next(left, None)
    text, native = whole.read(), session._native
    session.close()
    assert sys.getrefcount(native) == 2  # `native` and the argument
    assert whole.text == text and len(whole.tokens) == whole.stats.n_tokens == 12
    session.cancel()


@pytest.mark.parametrize("n_pieces", [0, 1, 3])
def test_a_session_whose_text_was_left_in_the_middle_is_collected(model: Model, n_pieces: int) -> None:
    session = model.session()
    generation = session.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    for _ in range(n_pieces):
        next(generation)
    freed = session._free
    del session, generation
    gc.collect()
    assert not freed.alive


def test_a_session_that_has_generated_goes_with_its_last_reference(model: Model) -> None:
    session = model.session()
    ids(session)
    freed = session._free
    gc.disable()
    try:
        del session
        assert not freed.alive
    finally:
        gc.enable()


def test_ctrl_c_while_a_session_is_closed_loses_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = list[object]()
    free_context = session_module.free_context

    def interrupted(context: object) -> None:
        free_context(context)
        freed.append(context)
        if len(freed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(session_module, "free_context", interrupted)
    session = model.session()
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert session.closed and len(freed) == 1
    session.close()
    assert len(freed) == 2


def test_a_session_that_could_not_be_made_leaves_no_context_behind(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = list[object]()
    free_context = session_module.free_context
    monkeypatch.setattr(session_module, "free_context", lambda c: (freed.append(c), free_context(c)))

    def refuse(*_: object, **__: object) -> None:
        raise LoadError("no draft context")

    monkeypatch.setattr(model, "make_draft_context", refuse)
    with pytest.raises(LoadError, match="no draft") as error:
        model.session()
    assert error.traceback and len(freed) == 1, "the traceback must not keep the target's context"


def test_a_closed_model_refuses_text_too(pair_of: PairOf) -> None:
    model = load(pair_of("R").main, ctx=64, threads=1, depth=3)
    session, vocab = model.session(), model.vocab
    model.close()
    for action in (
        lambda: session.generate("text"),
        lambda: session.chat([{"role": "user", "content": "hi"}]),
        lambda: model.generate("text"),
        lambda: vocab.tokenize("text"),
        lambda: vocab.piece(65),
        lambda: session.n_restores,
    ):
        with pytest.raises(SessionError, match="closed"):
            action()


def test_a_vocabulary_outlives_its_model(pair_of: PairOf) -> None:
    vocab = load(pair_of("R").main, ctx=64, threads=1).vocab
    gc.collect()
    assert vocab.text_of(vocab.tokenize("text")) == "text"


def test_a_sidecar_that_is_removed_while_loaded_costs_no_text(pair_of: PairOf, tmp_path: Path) -> None:
    pair = pair_of("R", "Q8_0")
    main = shutil.copy(pair.main, tmp_path / "main.gguf")
    sidecar = shutil.copy(pair.sidecar, tmp_path / "mtp-main.gguf")
    with load(main, ctx=256, threads=1, depth=3, draft_vocab=128) as model, model.session() as session:
        assert model.draft_vocab is not None
        os.unlink(sidecar)
        with model.session(spec_type="none") as plain:
            assert ids(session) == ids(plain)


# Arguments


def test_any_number_of_tokens_may_be_asked_for(model: Model) -> None:
    with model.session() as session:
        for n in (255, 256, 2**31, 2**70):
            generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=1)  # type: ignore[arg-type]
            generation.read()
            assert (generation.finish_reason, len(generation.tokens)) == ("length", 256 - len(PROMPT) + 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 100_000}, "threads 100000 is not a whole number between 1 and 512"),
        ({"threads": 1.5}, "threads 1.5"),
        ({"ctx": 2**32}, "context length 4294967296"),
        ({"batch": 2**32}, "batch 4294967296"),
    ],
)
def test_sizes_that_llama_cpp_would_wrap_or_die_of_are_refused(
    pair_of: PairOf, options: dict[str, int], words: str
) -> None:
    with pytest.raises(LoadError, match=words):
        load(pair_of("R").main, **options)  # type: ignore[arg-type]


def test_a_session_s_sizes_are_checked_like_the_model_s(model: Model) -> None:
    for options, words in (
        ({"ctx": -5}, "context length -5"),
        ({"ctx": 0}, "context length 0"),
        ({"n_slots": -1}, "-1 rollback slots"),
    ):
        with pytest.raises(LoadError, match=words):
            model.session(**options)  # type: ignore[arg-type]


def test_sampling_takes_whole_numbers_where_llama_cpp_does(model: Model) -> None:
    for options in ({"top_k": 3.5}, {"seed": 1.5}):
        with pytest.raises(PromptError, match="whole number"):
            model.generate("x", temperature=1.0, **options)  # type: ignore[arg-type]


def test_rows_to_time_fit_the_batch(pair_of: PairOf) -> None:
    with load(pair_of("R").main, ctx=64, threads=1, depth=4, batch=2) as model, model.session() as session:
        assert len(session.time_rows([1, 2], 2, 2)) == 2
        with pytest.raises(SessionError, match="has 1 to 2"):
            session.time_rows([1, 2], 3, 2)


def test_a_session_of_depth_0_says_that_this_is_why(model: Model) -> None:
    with model.session(depth=0) as session:
        stats = session.generate("x", max_tokens=1, temperature=0).stats
    assert (stats.speculation, stats.why) == ("off", "depth 0 was asked for")


def test_file_names_that_are_no_text_load(pair_of: PairOf, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/main-\xff.gguf"
    try:
        shutil.copy(pair_of("R").main, path)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    with load(os.fsdecode(path), ctx=64, threads=1) as model:
        assert model.kind is None


def test_a_prompt_and_its_options_of_other_types_are_refused_before_anything_runs(model: Model) -> None:
    for prompt, options, words in (
        (["a"], {}, "neither text nor token ids"),
        ([3.7], {}, "neither text nor token ids"),
        (7, {}, "neither text nor token ids"),
        ("x", {"max_tokens": 1.5}, "max_tokens 1.5"),
        ("x", {"depth": 1.5}, "depth 1.5"),
        ("x", {"stop": [3]}, "stop strings"),
    ):
        with pytest.raises(PromptError, match=words):
            model.generate(prompt, **options)  # type: ignore[arg-type]
    with model.session() as session, pytest.raises(PromptError, match="acceptance of nan"):
        session.generate_synthetic(PROMPT, p_accept=float("nan"), max_tokens=4)


def test_spaces_in_a_list_of_devices_do_not_lose_a_device_s_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [placement.Gpu("CUDA0", 1 << 40), placement.Gpu("CUDA1", 0)]
    monkeypatch.setattr(placement, "gpus", lambda: gpus)
    monkeypatch.setattr(model, "settings", replace(model.settings, device="CUDA1, CUDA0"))
    assert model._place(None, model.n_ctx) == placement.ALL_LAYERS


def test_an_error_in_a_with_block_is_told_although_a_thread_still_generates(pair_of: PairOf) -> None:
    started, thread = threading.Event(), None

    def work(session: Session) -> None:
        for _ in session.generate(PROMPT, max_tokens=200, temperature=0, ignore_eos=True):
            started.set()

    with (
        pytest.raises(ZeroDivisionError),
        load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model,
        model.session() as session,
    ):
        thread = threading.Thread(target=work, args=(session,))
        thread.start()
        started.wait(10)
        1 / 0  # noqa: B018
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive(), "it is cancelled"
