"""How fast the server writes against the direct API, in turns within one run, and with 1, 2 and 4 clients at once.

    python scripts/dev/serve_speed.py MAIN.gguf [-n 256] [--repeats 3] [--clients 1 2 4] [-- OPTIONS OF serve]

Both decode plainly (`--no-spec` and `spec_type="none"`), greedily and to the end, so that they do the same work; a stream is
compared with iterating, an answer at once with `read()`. The server is a process of its own, and this one the client: seconds are
those of the whole request, the prompt included, and the clients' own work counts as the server's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from llama_sidecar.runtime import Session, load

PROMPT = "def main():\n    "
N_SLOTS = 4


def ask(url: str, n: int, *, stream: bool) -> None:
    """One request, whose answer is read whole."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=600)
    fields = {"prompt": PROMPT, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while response.read(4096):
        pass
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}")
    connection.close()


def at_once(url: str, n: int, n_clients: int) -> None:
    """So many streams at once."""
    threads = [threading.Thread(target=ask, args=(url, n), kwargs={"stream": True}) for _ in range(n_clients)]
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


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast the server writes against the direct API.")
    parser.add_argument("main", type=Path)
    parser.add_argument("-n", type=int, default=256, help="tokens of a text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 2, 4])
    options, more = parser.parse_known_args()
    command = [sys.executable, "-m", "llama_sidecar.scripts", "serve", str(options.main), "--port", "0"]
    command += ["--no-spec", "--slots", str(N_SLOTS), "--ctx", "1024", *[one for one in more if one != "--"]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("serving "):
            return 1  # it has said why
        url = line.split(" at ")[1].split()[0]
        with load(options.main, spec_type="none", ctx=1024) as model, model.session() as session:
            for stream in (True, False):  # warm-up
                direct(session, 8, stream=stream)
            at_once(url, 8, N_SLOTS)
            for stream in (True, False):
                pairs = [
                    (
                        seconds(lambda s=stream: direct(session, options.n, stream=s)),  # type: ignore[misc]
                        seconds(lambda s=stream: ask(url, options.n, stream=s)),  # type: ignore[misc]
                    )
                    for _ in range(options.repeats)
                ]
                ours, server = (median(options.n / s for s in side) for side in zip(*pairs, strict=True))
                ratios = " ".join(f"{a / b:.3f}" for a, b in pairs)
                name = "stream" if stream else "at once"
                print(
                    f"{name}: direct {ours:.1f} tok/s, server {server:.1f} tok/s, ratios {ratios}", flush=True
                )
        for n_clients in options.clients:
            speeds = [
                n_clients * options.n / seconds(lambda c=n_clients: at_once(url, options.n, c))  # type: ignore[misc]
                for _ in range(options.repeats)
            ]
            print(f"{n_clients} clients: {median(speeds):.1f} tok/s together", flush=True)
    finally:
        process.terminate()
        process.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
