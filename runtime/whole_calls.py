"""Calls of llama.cpp that make something and take long: interrupted, they leave nothing behind.

Python tells a thread of Ctrl-C only when it is back from a call, and what that has made is then lost, gigabytes maybe. So such calls
run in a thread of their own, and the caller's waits where it can be interrupted. Knows nothing of what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


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
    unwanted = threading.Event()
    made: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make(unwanted))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="llama-sidecar call")
    try:
        thread.start()
        thread.join()
        if not failed:
            return made[0]
    except BaseException:
        unwanted.set()
        while thread.is_alive():
            try:
                thread.join()
            except BaseException:  # again: it is about to end
                continue
        for late in filter(None, made):
            free(late)
        raise
    raise failed.pop()  # no cycle of it and its traceback
