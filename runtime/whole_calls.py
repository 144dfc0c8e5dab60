"""Calls of llama.cpp that make something and take long: interrupted, they leave nothing behind.

Python tells a thread of Ctrl-C only when it is back from a call, and what that has made is then lost, gigabytes maybe. So such calls
run in another thread, and the caller's waits where it can be interrupted. Threads are kept for later calls: a new one may be given
a malloc arena that no call has filled yet, and keeps megabytes there. Knows nothing of what is called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

# A signal that comes after Python's last look at them and before the wait begins does not end the wait: such a one is seen this much later.
AWAKE_S = 0.1

_Calls = SimpleQueue[Callable[[], None]]  # what one thread is given to do

_idle: list[_Calls] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not live on there


def _idle_thread() -> _Calls:
    """Of a thread that waits for a call; interrupted here, one such thread more or less does no harm."""
    try:
        return _idle.pop()
    except IndexError:
        calls: _Calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="llama-sidecar calls", daemon=True).start()
        return calls


def _serve(calls: _Calls) -> None:
    while True:
        calls.get()()
        _idle.append(calls)


def call_whole(make: Callable[[threading.Event], Any], free: Callable[[Any], object]) -> Any:
    """Returns what `make` returns; interrupted meanwhile, it waits for that, frees it, and lets the interruption through.

    Args:
        make: called with an event that is set once nobody wants the result any more, so that it may end early.
        free: takes what came too late; not called for anything false.

    Raises:
        What `make` raises, in another thread.

    Example:
        >>> call_whole(lambda unwanted: 7, free=print)
        7
    """
    unwanted, begun, ended = threading.Event(), threading.Event(), threading.Event()
    gate = threading.Lock()  # a call that nobody wants any more does not begin
    bell = threading.Lock()  # free once the call has ended
    bell.acquire()
    made: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        with gate:
            if unwanted.is_set():
                return
            begun.set()
        try:
            made.append(make(unwanted))
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()
            bell.release()

    try:
        _idle_thread().put(run)
        while not ended.is_set():
            bell.acquire(timeout=AWAKE_S)
        if not failed:
            return made[0]
    except BaseException:
        with gate:
            unwanted.set()
        while begun.is_set() and not ended.is_set():
            try:
                bell.acquire(timeout=AWAKE_S)
            except BaseException:  # again: it is about to end
                continue
        for late in filter(None, made):
            free(late)
        raise
    raise failed.pop()  # no cycle of it and its traceback
