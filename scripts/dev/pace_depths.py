#!/usr/bin/env python3
"""Prints how fast texts are written plainly, at each fixed depth and with pace, all in turns: pace should be as fast as the best.

    pace_depths.py MAIN.gguf [SIDECAR.gguf] [--prompts PROMPTS.jsonl] [--texts 16] [-n 128] [--depths 1 2 3 4] [--no-ngram]

A column's speed-up is that of all its texts together, plain seconds over its own, and in brackets the median over texts. Pace looks
prompts up, which fixed depths never do: `--no-ngram` leaves the choice of a depth alone.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from never_slower import in_turns

from llama_sidecar.runtime import Model, load
from llama_sidecar.runtime.prompts import read_prompts

HELDOUT = Path(__file__).parents[2] / "sidecars" / "demo" / "heldout.jsonl"


def seconds(model: Model, prompts: list[list[int]], n: int, depths: list[int]) -> list[list[float]]:
    """Seconds of each text plainly, at each of `depths`, and with pace; sessions are kept, so pace goes on learning."""
    found = []
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(model.session(spec_type="none", learn=False)),
            *(stack.enter_context(model.session(depth=depth, learn=False)) for depth in depths),
            stack.enter_context(model.session(learn=False)),
        ]
        for prompt in prompts:
            texts = [
                session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True) for session in sessions
            ]
            in_turns(texts, n)
            found.append([text.stats.generate_s for text in texts])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("sidecar", nargs="?")
    parser.add_argument("--prompts", type=Path, default=HELDOUT)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--no-ngram", action="store_true")
    args = parser.parse_args()
    with load(args.main, args.sidecar, ctx=1024, ngram=not args.no_ngram) as model:
        prompts = [prompt.tokens(model) for prompt in read_prompts(args.prompts)[: args.texts]]
        seconds(model, prompts[:1], args.n, args.depths)  # what is slow once
        found = seconds(model, prompts, args.n, args.depths)
    print("| " + " | ".join(["plain", *(f"depth {depth}" for depth in args.depths), "pace"]) + " |")
    print("|---" * (2 + len(args.depths)) + "|")
    whole = [sum(arm) for arm in zip(*found, strict=True)]
    cells = [
        f"{whole[0] / whole[i]:.3f} ({median(text[0] / text[i] for text in found):.3f})"
        for i in range(len(whole))
    ]
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
