"""Holds our drafts against stock llama-server's: the same files and prompt, position by position.

    scripts/dev/compare_drafts.py LLAMA_SERVER MAIN SIDECAR [--depth 1 --depth 3] [--tokens 64] [--prompt TEXT]
    scripts/dev/compare_drafts.py LLAMA_SERVER [--only eagle3]

SIDECAR may also be a draft model. Without files, the tests' tiny pairs: every kind on each of its targets, and the head of every
family. Each depth is run as the target judges, and with drafts of which the first 1, 2, ... stand whatever the target
says (llama-server's --spec-synth-rates): what stands is in the text then, after rewinds of every length. The other drafts are read from
the server's log, which has nothing of DFlash2's drafts. Ours follows the server's text, so that both always draft behind the same tokens.
llama-server never keeps a drafted end of text: the rest of such a draft is not compared. These differ:
- "model on qwen35" after a draft of which a part stands: llama-server drafts on with a recurrent draft model whose state still has the
  rejected tokens; ours are the model's own text (tests/test_draft_model.py).
- the heads of qwen3next, which has no rollback slots, after rejected drafts: llama-server goes back to a checkpoint and drafts otherwise
  than its head does when it reads the text anew, which is what ours does.
- DeepSeek-V4, at near ties: it computes rows together otherwise than one by one, and ours reads fewer at a time.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Model, _native, load
from llama_sidecar.runtime.drafter_choice import MODEL, OTHERS
from llama_sidecar.sidecars import KINDS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import kind_models
from checkpoints import WITH_HEAD, make_checkpoint

TOKEN = re.compile(r"n_remaining = -?\d+, next token: +(\d+)")
CANDIDATE = re.compile(r"draft candidate +0, pos +\d+: +(\d+)")
ROUND = re.compile(r"called impl draft-[a-z0-9-]+, hist size = (\d+), call_count = \d+, gen = (\d+)")
N_CTX = 512
DEEPEST = 8  # is compared where a kind has no bound of its own


@click.command()
@click.argument("server", type=click.Path(exists=True, path_type=Path))
@click.argument("main", type=click.Path(exists=True, path_type=Path), required=False)
@click.argument("sidecar", type=click.Path(exists=True, path_type=Path), required=False)
@click.option(
    "--depth", "depths", multiple=True, type=int, help="1, 2, 3 and the kind's maximum if not given."
)
@click.option("--tokens", default=64, show_default=True)
@click.option("--prompt", default="hello world, this is where it starts", show_default=True)
@click.option("--only", default="", help="Tiny pairs that have this in their name.")
def command(
    server: Path,
    main: Path | None,
    sidecar: Path | None,
    depths: tuple[int, ...],
    tokens: int,
    prompt: str,
    only: str,
) -> None:
    """Prints how many drafted tokens were compared; exits with 1 where one differs."""
    with tempfile.TemporaryDirectory() as folder:
        named = [("", main, {"sidecar": sidecar})] if main else tiny_pairs(Path(folder), only)
        is_equal = [compare(server, *pair, depths, tokens, prompt) for pair in named]
    if not (is_equal and all(is_equal)):
        raise SystemExit(1)


def tiny_pairs(folder: Path, only: str) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """The name of each, its main file, and what `load` is told of its drafter."""
    for kind, target in kind_models.ON_TARGETS:
        name = f"{kind} on {target}"
        if only in name and kind not in ("ngram", "mtp, compact"):  # those are ours
            yield name, *kind_models.write_kind(kind, folder / name, target)
    for arch, variant in WITH_HEAD:
        name = f"mtp of {arch}-{variant}"
        if only in name:
            made = convert(make_checkpoint(folder / name, arch, variant), folder / name, "Q8_0", "Q8_0")
            assert made.main and made.sidecar
            yield name, made.main, {"sidecar": made.sidecar}


def compare(
    server: Path,
    name: str,
    main: Path,
    options: dict[str, Any],
    depths: tuple[int, ...],
    n_tokens: int,
    prompt: str,
) -> bool:
    """Whether every draft is the same; prints a line."""
    # Stock kernels: the same bits as llama-server's.
    how = {"ctx": N_CTX, "threads": 1, "draft_vocab": "full", "kernels": "stock"}
    with load(main, **{**options, **how}, depth=DEEPEST) as model:
        start = model.vocab.tokenize(prompt)
        depths = tuple(sorted({min(depth, model.depth) for depth in depths or (1, 2, 3, DEEPEST)}))
        n_compared, wrong = 0, list[str]()
        for depth in depths:
            for n_right in range(depth + 1):
                text, logged = ask(server, model, depth, n_right, start, n_tokens)
                for position, ours, theirs in both(model, start, text, logged, depth, n_right):
                    n_compared += len(theirs)
                    if ours[: len(theirs)] != theirs:  # behind it both draft after other tokens
                        wrong.append(
                            f"depth {depth}, {n_right or 'what'} stands, at {position}: {ours}, {theirs}"
                        )
                        break
        kind = f"{name or model.drafter}, depths {', '.join(map(str, depths))}"
    print(f"{kind}: {n_compared:,} drafted tokens compared, {len(wrong)} texts differ", flush=True)
    for line in wrong[:5]:
        print(f"  {line} is llama-server's")
    return n_compared > 0 and not wrong


def both(
    model: Model, start: list[int], text: list[int], logged: dict[int, list[int]], depth: int, n_right: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    """The position of every draft, our drafted tokens, and those of llama-server's that are known."""
    with model.session(depth=depth) as session:
        native = session._native
        native.feed(start, True)
        native.first(_native.forced_chooser(text))
        while (at := native.n_past - len(start) + 1) + depth < len(text):  # the last drafts are shortened
            position = native.n_past
            step = native.step(_native.forced_chooser(text[at:]), depth, True)
            yield position, step.drafts, logged.get(position, [])
            if n_right:
                stands = text[at : at + n_right]
                ends = [i for i, token in enumerate(step.drafts[:n_right]) if model.vocab.is_eog(token)]
                yield position, step.drafts[: (ends or [n_right])[0]], stands[: (ends or [n_right])[0]]
                native.keep(min(n_right + 1, len(step.tokens)))


def ask(
    server: Path, model: Model, depth: int, n_right: int, start: list[int], n: int
) -> tuple[list[int], dict[int, list[int]]]:
    """What llama-server writes when the first `n_right` drafts always stand (0: those that do), and the drafts in its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kind, sidecar = model.kind, model.speculation.path
    spec_type = OTHERS[MODEL][0] if kind == MODEL else KINDS[str(kind)].llama_name
    call = [
        server,
        "-m",
        model.main.path,
        "-md",
        sidecar,
        "--spec-type",
        spec_type,
        "--spec-draft-n-max",
        depth,
    ]
    call += ["--spec-draft-p-min", 0, "-c", N_CTX, "-t", 1, "-np", 1, "--port", port, "--no-webui", "-lv", 5]
    call += ["--ctx-checkpoints", 0]  # else a recurrent target's prompt is decoded in pieces, with other bits
    if n_right:
        call += ["--spec-synth-rates", ",".join(str(int(i < n_right)) for i in range(depth))]
    request = {"prompt": start, "n_predict": n, "temperature": 0, "top_k": 1, "ignore_eos": True}
    body = json.dumps(request | {"cache_prompt": False}).encode()
    with tempfile.TemporaryFile("w+", encoding="latin-1") as log:
        process = subprocess.Popen(list(map(str, call)), stdout=log, stderr=log)
        try:
            wait_for(port, process)
            with contextlib.suppress(
                urllib.error.HTTPError
            ):  # tiny models write bytes that are no text; the log has them
                urllib.request.urlopen(f"http://127.0.0.1:{port}/completion", body, timeout=600).read()
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        lines = log.read()
    return [int(token) for token in TOKEN.findall(lines)], logged_drafts(lines)


def wait_for(port: int, process: subprocess.Popen[bytes], timeout_s: float = 600) -> None:
    """Until the server answers; exits where it has ended."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"llama-server does not answer, or ended with {process.returncode}")


def logged_drafts(log: str) -> dict[int, list[int]]:
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
