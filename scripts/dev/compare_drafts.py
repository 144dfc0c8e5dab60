"""Holds our drafts against stock llama.cpp's: the same files and prompt, greedy, position by position.

    scripts/dev/compare_drafts.py MAIN SIDECAR LLAMA_SPECULATIVE_SIMPLE [--depth 3] [--tokens 64] [--prompt TEXT]

SIDECAR may also be a draft model. Random weights are enough. llama-speculative-simple drafts its first time before the first token, and shortens what it says of its
last drafts to the tokens left; drafts are compared where both start from the same position, as far as it tells. It says nothing
of DFlash2's.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click

from llama_sidecar.runtime import _native, load
from llama_sidecar.runtime.drafter_choice import MODEL, OTHERS
from llama_sidecar.sidecars import KINDS

CANDIDATE = re.compile(r"draft candidate +0, pos +\d+: +(\d+)")
ROUND = re.compile(r"called impl draft-[a-z0-9-]+, hist size = (\d+), call_count = \d+, gen = (\d+)")


@click.command()
@click.argument("main", type=click.Path(exists=True, path_type=Path))
@click.argument("sidecar", type=click.Path(exists=True, path_type=Path))
@click.argument("peer", type=click.Path(exists=True, path_type=Path))
@click.option("--depth", default=3, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--prompt", default="hello world, this is where it starts", show_default=True)
def command(main: Path, sidecar: Path, peer: Path, depth: int, tokens: int, prompt: str) -> None:
    """Prints how many drafts were compared; exits with 1 where one differs."""
    with load(
        main, sidecar, ctx=512, threads=1, depth=depth, draft_vocab="full", kernels="stock"
    ) as model:  # the same bits as llama.cpp's
        kind, depth = model.kind, model.depth
        start = model.vocab.tokenize(prompt)
        ours: dict[int, list[int]] = {}
        with model.session() as session:
            native, chooser = session._native, _native.greedy_chooser()
            native.feed(start, True)
            native.first(chooser)
            while native.n_past < len(start) + tokens:
                position = native.n_past
                ours[position] = native.step(chooser, depth, True).drafts
    spec_type = OTHERS[MODEL][0] if kind == MODEL else KINDS[str(kind)].llama_name
    call = [peer, "-m", main, "-md", sidecar, "--spec-type", spec_type, "-p", prompt, "-n", str(tokens)]
    call += ["--spec-draft-n-max", str(depth), "--spec-draft-p-min", "0", "--temp", "0", "--top-k", "1"]
    call += ["-c", "512", "-t", "1", "-lv", "5", "--ignore-eos"]
    ran = subprocess.run(call, capture_output=True, encoding="latin-1", timeout=120)
    theirs = _drafts(ran.stderr)
    both = sorted(ours.keys() & theirs.keys())
    wrong = [p for p in both if ours[p][: len(theirs[p])] != theirs[p]]
    print(f"{kind}, depth {depth}: {len(both)} rounds compared, {len(wrong)} differ")
    for position in wrong[:5]:
        print(f"  at {position}: ours {ours[position]}, llama.cpp's {theirs[position]}")
    if wrong or not both:
        raise SystemExit(1)


def _drafts(log: str) -> dict[int, list[int]]:
    """Every round's drafts by the position that they start from."""
    rounds, drafts = {}, list[int]()
    for line in log.splitlines():
        if found := CANDIDATE.search(line):
            drafts.append(int(found[1]))
        elif found := ROUND.search(line):
            rounds[int(found[1])] = drafts[: int(found[2])]
            drafts = []
    return rounds


if __name__ == "__main__":
    command()
