#!/usr/bin/env python3
"""Prints where a round's microseconds go: drafting, verifying, choosing, and the rest (Python), at depth 0 and at a depth.

    round_overhead.py MAIN.gguf [SIDECAR.gguf] [--depth 3] [-n 256] [--threads 2]

`a row` is choosing over the rows read: what reading a row of logits costs. Medians over rounds, and the quickest round in
brackets. The rest is mostly memory that the weights have pushed out of the caches: larger models, larger rest. The text is
written twice, and the second counts: a token that is new costs more, since its bytes come from llama.cpp and a compact head may
have to be given its row. "read": texts of 96 tokens that nobody watches, where Python is not entered at each round; medians over texts.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from llama_sidecar.runtime import Session, load

PARTS = ("draft", "verify", "choose", "a row", "rest")


def rounds(session: Session, n: int) -> list[tuple[float, ...]]:
    """Microseconds of each of `PARTS`, round by round."""
    running = session.generate("def main():\n", max_tokens=n, temperature=0, ignore_eos=True)
    next(running)
    found: list[tuple[float, ...]] = []

    def counts() -> list[float]:
        stats = running.stats
        return [stats.draft_s, stats.verify_s, stats.accept_s, stats.n_rounds, stats.n_accepted]

    before, started = counts(), time.perf_counter()
    for _ in running:
        whole, now = time.perf_counter() - started, counts()
        draft, verify, choose, n_rounds, n_accepted = (b - a for a, b in zip(before, now, strict=True))
        a_row = choose / (1 + n_accepted / n_rounds)
        parts = (draft, verify, choose, a_row, whole - draft - verify - choose)
        found.append(tuple(1e6 * part / n_rounds for part in parts))
        before, started = now, time.perf_counter()
    return found


def texts(session: Session, n: int) -> list[tuple[float, ...]]:
    """Microseconds of each of `PARTS` a round, text by text, where a text is read as a whole."""
    found = []
    for _ in range(max(2, n // 96)):
        text = session.generate("def main():\n", max_tokens=96, temperature=0, ignore_eos=True)
        text.read()
        s = text.stats
        a_row = s.accept_s / (s.n_rounds + s.n_accepted) * s.n_rounds
        found.append(
            tuple(1e6 * part / s.n_rounds for part in (s.draft_s, s.verify_s, s.accept_s, a_row, s.rest_s))
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("sidecar", nargs="?")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("-n", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| depth | rounds or texts | " + " | ".join(f"{part}, us" for part in PARTS) + " |")
    print("|---" * (2 + len(PARTS)) + "|")
    with load(args.main, args.sidecar, depth=args.depth, threads=args.threads, ctx=2048) as model:
        for depth in (0, args.depth):
            with model.session(depth=depth) as session:
                rounds(session, args.n)
                tables = {"": rounds(session, args.n), ", read": texts(session, args.n)}
            for name, found in tables.items():
                cells = [f"{median(part):.0f} ({min(part):.0f})" for part in zip(*found, strict=True)]
                print(f"| {depth}{name} | {len(found)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
