#!/usr/bin/env python3
"""Prints how fast texts are written beside other programs' busy loops, over the speed without them, plainly and speculatively.

    busy_machine.py MAIN.gguf [SIDECAR.gguf] [--loops 1 2] [--synthetic-length 3] [--seconds 5] [--turns 3]

Texts of a fixed depth and of coins that fall right at `--synthetic-length` (0: what really stands), in turns of some seconds:
idle, beside one loop, beside two. A loop is a process that computes and never waits. The promise is a quarter of the idle speed
at least, and speculative at least 0.9 of plain.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

from llama_sidecar.runtime import Session, load
from llama_sidecar.runtime.bench import p_accept
from llama_sidecar.runtime.prompts import Prompt

PIECE = 48  # tokens a text
SETTLE_S = 1.0  # what runs beside is noticed a few times a second


@contextlib.contextmanager
def busy_loops(n: int) -> Iterator[None]:
    """`n` processes that compute meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def speed(session: Session, prompt: list[int], seconds: float, coin: float | None) -> float:
    """Tokens a second over texts that take so long together; the first, in which the machine is looked at, does not count."""
    n, taken, seed = 0, 0.0, 0
    started = time.perf_counter()
    while time.perf_counter() - started < SETTLE_S + seconds or not n:
        if coin is None:
            text = session.generate(prompt, max_tokens=PIECE, temperature=0, ignore_eos=True)
        else:
            text = session.generate_synthetic(prompt, p_accept=coin, max_tokens=PIECE, seed=seed)
        settled = time.perf_counter() - started > SETTLE_S
        text.read()
        seed += 1
        if settled:
            n += len(text.tokens)
            taken += text.stats.generate_s
    return n / taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("sidecar", nargs="?")
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--synthetic-length", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    coin = p_accept(args.synthetic_length, args.depth) if args.synthetic_length else None
    arms = [0, *args.loops]
    plain_s: dict[int, list[float]] = {loops: [] for loops in arms}
    spec_s: dict[int, list[float]] = {loops: [] for loops in arms}
    with (
        load(args.main, args.sidecar, depth=args.depth, ctx=1024, ngram=False) as model,
        model.session(spec_type="none", learn=False) as plain,
        model.session(learn=False) as spec,
    ):
        prompt = Prompt("def main():\n", "code").tokens(model)
        for _ in range(args.turns):
            for loops in arms:
                with busy_loops(loops):
                    plain_s[loops].append(speed(plain, prompt, args.seconds, None))
                    spec_s[loops].append(speed(spec, prompt, args.seconds, coin))
    print(
        "| loops | plain tok/s | speculative tok/s | plain over idle | speculative over idle | over plain |"
    )
    print("|---" * 6 + "|")
    for loops in arms:
        p, s = median(plain_s[loops]), median(spec_s[loops])
        idle = [f"{p / median(plain_s[0]):.2f}", f"{s / median(spec_s[0]):.2f}"]
        print("| " + " | ".join([str(loops), f"{p:.1f}", f"{s:.1f}", *idle, f"{s / p:.2f}"]) + " |")


if __name__ == "__main__":
    main()
