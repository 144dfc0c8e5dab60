"""Requests of all sorts at a server for a long time, some of which leave half-way: memory stays flat and no slot gets stuck.

    python scripts/dev/soak.py MAIN.gguf [--requests 1000] [--clients 6] [--slots 4] [--faults]

Starts `llama-sidecar serve` at a free port and asks it from several threads: chats and texts, streams and not, long and short,
bound by a schema, seeded, with mistakes, and every third one is left half-way. At the end every slot must be free and all of the
rest must be answered; the server's resident memory after a fifth of the requests and at the end is compared. With --faults every
third call of the server's that concerns its cache fails (tests/faults.c), and it is stopped for a moment each second, as a laptop
that sleeps. Linux alone.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from served import Served, served

TESTS = Path(__file__).resolve().parents[2] / "tests"
GROWTH = 1.05  # of memory that counts as flat: allocators keep some
SETTLE_S = 20.0
TIMEOUT_S = 120.0
NAP_S = 0.1
STILL_S = 10.0


@dataclass
class Report:
    """What happened: how requests ended, and MiB of memory over time."""

    ends: Counter[str] = field(default_factory=Counter)
    memory_mib: list[float] = field(default_factory=list)
    n_stuck: int = 0
    seconds: float = 0.0
    stood_still_s: float = (
        0.0  # this process, stopped from outside: requests then time out, which says nothing of the server
    )

    @property
    def growth(self) -> float:
        """Memory at the end by memory after a fifth of the requests."""
        early = self.memory_mib[len(self.memory_mib) // 5]
        return self.memory_mib[-1] / early

    def problems(self) -> list[str]:
        """What is wrong, nothing when all is well."""
        found = [f"{n} requests {end}" for end, n in self.ends.items() if end.startswith("failed")]
        if self.n_stuck:
            found.append(f"{self.n_stuck} slots or places in the queue are still taken")
        if self.growth > GROWTH:
            found.append(f"memory grew by {100 * (self.growth - 1):.1f} %")
        return found


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) / 1024


def request(pick: random.Random) -> tuple[str, dict[str, Any], int]:
    """A path, a body, and the status that is expected."""
    n = pick.choice((1, 4, 16, 60))
    fields: dict[str, Any] = {"max_tokens": n, "stream": pick.random() < 0.6, "user": pick.choice("abc")}
    fields |= pick.choice(
        [{}, {"temperature": 0}, {"temperature": 1.0, "seed": pick.randrange(9)}, {"lens": True}]
    )
    kind = pick.random()
    if kind < 0.1:
        return "/v1/completions", {"prompt": "x", "n": 2}, 400
    if kind < 0.5:
        return "/v1/completions", {"prompt": "def f(" * pick.choice((1, 3, 40)), **fields}, 200
    talk = [{"role": "user", "content": pick.choice(["Hello", "Write `add` in Python."])}]
    for _ in range(pick.randrange(3)):
        talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    if kind < 0.6:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if kind > 0.9:
        fields |= {"logprobs": True, "top_logprobs": 3}
    return "/v1/chat/completions", {"messages": talk, **fields}, 200


def ask(url: str, pick: random.Random, leaves: bool) -> str:
    """Sends one request; how it ended."""
    path, body, expected = request(pick)
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=TIMEOUT_S)
    try:
        if leaves:
            body |= {"max_tokens": 400, "ignore_eos": True}
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if leaves and expected == 200:
            time.sleep(pick.choice((0.0, 0.005, 0.05, 0.3)))
            return "left"
        response = connection.getresponse()
        data = response.read()
        if response.status == 429:
            time.sleep(0.05)
            return "told to wait"
        if response.status != expected:
            return f"failed with {response.status}: {data[:200]!r}"
        if body.get("stream"):
            is_whole = data.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in data
        else:  # by its keys: "error" may be a token whose probability was asked for
            is_whole = "error" not in json.loads(data)
        if expected == 200 and not is_whole:
            return f"failed: {data[-200:]!r}"
        return "answered" if expected == 200 else "refused"
    except (OSError, http.client.HTTPException) as error:
        return f"failed with {type(error).__name__}: {error}"
    finally:
        connection.close()


def with_faults(folder: Path) -> dict[str, str]:
    """What the environment of a process says whose cache, in this folder, fails every third call. Needs a C compiler."""
    library, cache, source = folder / "faults.so", folder / "cache", TESTS / "faults.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    faults = {"LD_PRELOAD": str(library), "FAULTS": f"i 3 {cache}", "FAULTS_SORTS": "owtfrlumdRO"}
    return {**faults, "LLAMA_SIDECAR_CACHE": str(cache)}


@contextlib.contextmanager
def each_second(act: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `act` is called each second, in a thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(1):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def naps(pid: int) -> contextlib.AbstractContextManager[None]:
    """Meanwhile a process is stopped for NAP_S each second, which interrupts what it waits for."""

    def stop_and_go() -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(NAP_S)
        os.kill(pid, signal.SIGCONT)

    return each_second(stop_and_go)


def watching(report: Report) -> contextlib.AbstractContextManager[None]:
    """Meanwhile it is noted how long this process stood still."""
    last = time.monotonic()

    def watch() -> None:
        nonlocal last
        gap_s, last = time.monotonic() - last, time.monotonic()
        report.stood_still_s += gap_s if gap_s > STILL_S else 0.0

    return each_second(watch)


def soak(server: Served, *, n_requests: int, n_clients: int, seed: int = 0) -> Report:
    """Asks a running server so many requests from so many threads, and waits for the slots.

    The first fifth is answered before the rest is asked, also to those who left, so that what a sort of request takes once, and keeps,
    counts as no growth.
    """
    pid = server.process.pid
    report, lock = Report(), threading.Lock()
    n_first = n_requests // 5
    began = time.monotonic()

    def asked(i: int, *, leaves: bool) -> str:
        """How the ith request ended; of the first ones, those that are told to wait ask again."""
        while True:
            end = ask(server.url, random.Random(seed * 1_000_003 + i), leaves=leaves)
            if end != "told to wait" or i >= n_first:
                return end

    def client(numbers: Iterator[int]) -> None:
        while True:
            with lock:
                i = next(numbers, None)
                if i is None:
                    return
                report.memory_mib.append(memory_mib(pid))
            end = asked(i, leaves=i % 3 == 2)
            if end == "left" and i < n_first:  # perhaps before it cost what its sort costs once
                whole = asked(i, leaves=False)
                end = whole if whole.startswith("failed") else end
            with lock:
                report.ends[end] += 1

    with watching(report):
        for part in (range(n_first), range(n_first, n_requests)):
            numbers = iter(part)
            threads = [threading.Thread(target=client, args=(numbers,)) for _ in range(n_clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    report.seconds = time.monotonic() - began
    deadline = time.monotonic() + SETTLE_S
    while (n_stuck := _n_taken(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
    report.n_stuck = n_stuck
    report.memory_mib.append(memory_mib(pid))
    return report


def _n_taken(server: Served) -> int:
    return int(server.gauge("slots_busy") + server.gauge("waiting"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Requests of all sorts at a server for a long time.")
    parser.add_argument("main", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--faults", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is not left behind
    with contextlib.ExitStack() as stack:
        if options.faults:
            os.environ.update(with_faults(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        arguments = ("--slots", str(options.slots), "--queue", "8", "--ctx", "1024")
        server = stack.enter_context(served(options.main, *arguments))
        if options.faults:
            stack.enter_context(naps(server.process.pid))
        report = soak(server, n_requests=options.requests, n_clients=options.clients)
    code = server.process.returncode
    n = len(report.memory_mib) - 1
    fifths = ", ".join(f"{report.memory_mib[n * i // 5]:.1f}" for i in range(6))
    print(f"{options.requests} requests in {report.seconds:.0f} s: {dict(report.ends)}")
    print(f"memory: {fifths} MiB before and after each fifth; exit code {code}")
    if report.stood_still_s:
        print(
            f"this process was stopped for {report.stood_still_s:.0f} s: requests may have timed out for it"
        )
    problems = report.problems() + ([f"the server ended with {code}"] if code else [])
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
