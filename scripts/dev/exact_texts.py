#!/usr/bin/env python3
"""Writes many texts plainly and with drafts under `--exact`, and says how many part: none may, and no byte of a state may differ.

    exact_texts.py MAIN.gguf [SIDECAR.gguf] [--texts 200] [-n 256] [--depth 3] [--kernels stock] [--any-width]

Prompts are the beginnings of this Python's own modules, in the order of their names, then of its packages'. `--any-width`
leaves exact decoding out: how many texts part without it. Exits with 1 where a text does.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from llama_sidecar.runtime import Session, load

N_CHARACTERS = 300


def prompts() -> Iterator[str]:
    """What modules of the standard library begin with; the same on every machine with this Python."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    packages = (path for path in sorted(stdlib.glob("*/*.py")) if path.parent.name != "site-packages")
    for path in (*sorted(stdlib.glob("*.py")), *packages):
        text = path.read_text(encoding="utf-8", errors="replace")[:N_CHARACTERS]
        if len(text) == N_CHARACTERS:
            yield text


def written(session: Session, prompt: str, n: int) -> tuple[list[int], bytes, int]:
    """Greedy ids, the state behind them, and how many drafts stood."""
    text = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    text.read()
    return text.tokens, session._native.state(), text.stats.n_accepted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("sidecar", nargs="?")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("-n", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--kernels", default="stock")
    parser.add_argument("--any-width", action="store_true")
    args = parser.parse_args()
    n_texts = n_tokens = n_stood = n_apart = n_states = 0
    options = {"ctx": N_CHARACTERS + args.n, "depth": args.depth, "kernels": args.kernels}
    with (
        load(args.main, args.sidecar, exact=not args.any_width, **options) as model,
        model.session(spec_type="none") as plain,
        model.session() as session,
    ):
        for _, prompt in zip(range(args.texts), prompts(), strict=False):
            expected, found = (written(one, prompt, args.n) for one in (plain, session))
            n_texts, n_tokens, n_stood = n_texts + 1, n_tokens + len(found[0]), n_stood + found[2]
            n_apart += found[0] != expected[0]
            n_states += found[0] == expected[0] and found[1] != expected[1]
        rows = ", ".join(map(str, session.widths)) or "any"
        print(
            f"{model.main.path.name}, {model.kind} depth {model.depth}, {model.kernels}, rows {rows}: {n_texts} texts, {n_tokens} tokens, "
            f"{n_stood} drafts stood; {n_apart} texts apart, {n_states} states of equal texts differ"
        )
    raise SystemExit(bool(n_apart or n_states))


if __name__ == "__main__":
    main()
