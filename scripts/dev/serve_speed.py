"""How fast the server writes against the direct API, in turns within one run, and with 1, 2 and 4 clients at once.

    python scripts/dev/serve_speed.py MAIN.gguf [-n 256] [--repeats 3] [--parts ...] [--clients 1 2 4] [--spec] [-- OPTIONS OF serve]

Both decode greedily and to the end, plainly or with `--spec`, so that they do the same work; a stream is compared with iterating, an
answer at once with `read()`. The server is a process of its own, and this one the client: seconds are those of the whole request,
the prompt included, and the clients' own work counts as the server's. `--parts` says what is timed: `stream`, `at-once` and `clients`
by default, `threads` (sessions that threads of this process iterate side by side) and `first` (how long a stream's first token
takes, alone and beside others).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from llama_sidecar.runtime import Session, load

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from served import served

PROMPT = "def main():\n    "
N_SLOTS = 4
N_WARM = 8
PARTS = ("stream", "at-once", "clients", "threads", "first")


@contextlib.contextmanager
def answer(url: str, n: int, *, prompt: str = PROMPT, **more: Any) -> Iterator[http.client.HTTPResponse]:
    """What comes for a request; one that is left before its end is cancelled."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=600)
    fields = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, **more}
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}")
        yield response
    finally:
        connection.close()


def ask(url: str, n: int, *, stream: bool) -> None:
    """One request, whose answer is read whole."""
    with answer(url, n, stream=stream) as response:
        while response.read(4096):
            pass


def first_token(url: str, i: int) -> float:
    """Seconds to the first token of a stream whose prompt has nothing in common with others'."""
    began = time.perf_counter()
    with answer(url, 2, stream=True, prompt=f"{i} {PROMPT}", lens=True) as response:
        response.readline()
        took = time.perf_counter() - began
        while response.read(4096):
            pass
    return took


@contextlib.contextmanager
def streaming(url: str, n_streams: int) -> Iterator[None]:
    """Meanwhile so many streams are read, each begun anew where it ends."""
    over = threading.Event()

    def read(_: int) -> None:
        while not over.is_set():
            with answer(url, 900, stream=True) as response:
                while not over.is_set() and response.readline():
                    pass

    threads = [threading.Thread(target=read, args=(i,)) for i in range(n_streams)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def at_once(work: Callable[[int], None], n: int) -> None:
    """So many at once, each with its number."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def direct(session: Session, n: int, *, stream: bool) -> None:
    """The same work without a server."""
    generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
    if not stream:
        generation.read()
    for _ in generation:
        pass


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(session: Session, url: str, options: argparse.Namespace, *, stream: bool) -> None:
    """The direct API and the server in turns, each warm: virtual machines may make memory slow that has rested for a second."""

    def direct_s() -> float:
        direct(session, N_WARM, stream=stream)
        return seconds(lambda: direct(session, options.n, stream=stream))

    def server_s() -> float:
        at_once(lambda _: ask(url, N_WARM, stream=stream), N_SLOTS)
        return seconds(lambda: ask(url, options.n, stream=stream))

    pairs = [(direct_s(), server_s()) for _ in range(options.repeats)]
    ours, theirs = (median(options.n / s for s in side) for side in zip(*pairs, strict=True))
    ratios = " ".join(f"{a / b:.3f}" for a, b in pairs)
    name = "stream" if stream else "at once"
    print(f"{name}: direct {ours:.1f} tok/s, server {theirs:.1f} tok/s, ratios {ratios}", flush=True)


def together(name: str, work: Callable[[int], None], options: argparse.Namespace) -> None:
    """So many at once."""
    for n in options.clients:
        speeds = [n * options.n / seconds(lambda n=n: at_once(work, n)) for _ in range(options.repeats)]  # type: ignore[misc]
        print(f"{n} {name}: {median(speeds):.1f} tok/s together", flush=True)


def first_tokens(url: str, options: argparse.Namespace) -> None:
    """Alone and beside others, twice."""
    for n_others in (0, N_SLOTS - 1) * 2:
        with streaming(url, n_others):
            times = sorted(1000 * first_token(url, i) for i in range(options.repeats))
        print(
            f"first token beside {n_others} streams: median {median(times):.1f} ms, {times[0]:.1f} to {times[-1]:.1f}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast the server writes against the direct API.")
    parser.add_argument("main", type=Path)
    parser.add_argument("-n", type=int, default=256, help="tokens of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--spec", action="store_true", help="with the file's own drafter")
    options, more = parser.parse_known_args()
    spec = [] if options.spec else ["--no-spec"]
    more = [*spec, "--slots", str(N_SLOTS), "--ctx", "1024", *[one for one in more if one != "--"]]
    spec_type = "auto" if options.spec else "none"
    with (
        served(options.main, *more) as server,
        load(options.main, spec_type=spec_type, ctx=1024) as model,
        contextlib.ExitStack() as stack,
    ):
        n_sessions = N_SLOTS if "threads" in options.parts else 1
        sessions = [stack.enter_context(model.session()) for _ in range(n_sessions)]
        for session in sessions:
            direct(session, N_WARM, stream=True)
        at_once(lambda _: ask(server.url, N_WARM, stream=True), N_SLOTS)
        works: dict[str, Callable[[], None]] = {
            "stream": lambda: compare(sessions[0], server.url, options, stream=True),
            "at-once": lambda: compare(sessions[0], server.url, options, stream=False),
            "clients": lambda: together(
                "clients", lambda _: ask(server.url, options.n, stream=True), options
            ),
            "threads": lambda: together(
                "threads that iterate", lambda i: direct(sessions[i], options.n, stream=True), options
            ),
            "first": lambda: first_tokens(server.url, options),
        }
        for part in options.parts:
            works[part]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
