#!/usr/bin/env python3
"""Prints how fast pace writes a text against plain decoding, both in turns of a few tokens: never slower is the promise.

    never_slower.py MAIN.gguf [SIDECAR.gguf] [--texts wrong hot korean] [-n 512]

On a model of random weights the head is always wrong. `hot` samples at a temperature of 1.5; `korean` has a prompt whose tokens
the first draft vocabulary lacks. Turns of 16 tokens: a machine that drifts drifts for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from llama_sidecar.runtime import Generation, Model, load

TURN = 16
ENGLISH = "The history of the city begins with a river and"
KOREAN = "한국의 수도는 서울이다. 서울은 한강을 끼고 있으며 인구가 많은 도시로, 오랜 역사를 가지고 있다."
TEXTS = {"wrong": (ENGLISH, 0.0), "hot": (ENGLISH, 1.5), "korean": (KOREAN, 0.0)}


def in_turns(texts: Sequence[Generation], n: int) -> None:
    """Writes texts of `n` tokens, each some tokens at a time, now in this order and now in the other."""
    for goal in range(TURN, n + TURN, TURN):
        for text in texts if goal // TURN % 2 else reversed(texts):
            while len(text.tokens) < min(goal, n) and not text.finished:
                next(text, None)
    for text in texts:
        text.read()


def compare(model: Model, name: str, n: int) -> list[str]:
    """A row of the table: `n` tokens by a plain and by a paced session."""
    prompt, temperature = TEXTS[name]
    options = {"max_tokens": n, "temperature": temperature, "seed": 1, "ignore_eos": True}
    with model.session(spec_type="none", learn=False) as plain, model.session(learn=False) as paced:
        texts = [session.generate(prompt, **options) for session in (plain, paced)]
        in_turns(texts, n)
    plain_s, paced_s = (text.stats.generate_s for text in texts)
    speeds = [f"{text.stats.tok_s:.1f}" for text in texts]
    equal = "equal" if texts[0].tokens == texts[1].tokens else "differ"
    rounds = " ".join(map(str, texts[1].stats.rounds_per_depth))
    return [name, *speeds, f"{plain_s / paced_s:.3f}", rounds, "-" if temperature else equal]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("sidecar", nargs="?")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("-n", type=int, default=512)
    args = parser.parse_args()
    print(
        "| text | plain tok/s | paced tok/s | ratio | rounds at depth 0, 1, .. | ids |\n" + "|---" * 6 + "|"
    )
    with load(args.main, args.sidecar, ctx=len(KOREAN) * 3 + args.n) as model:
        for name in args.texts:
            print("| " + " | ".join(compare(model, name, args.n)) + " |", flush=True)


if __name__ == "__main__":
    main()
