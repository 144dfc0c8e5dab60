#!/usr/bin/env python3
"""Times decodes of 1 to 8 rows with ik_llama.cpp's kernels and with ours, in turns, and prints one table.

    pip install --target IK --no-deps ik-llama-cpp-python==0.1.5
    compare_ik.py MAIN.gguf IK [--rows 1,4] [--turns 4] [--threads 2]

Each turn is a process of its own, since both libraries call their functions alike; they take turns, so that the machine's drift
falls on both. All rows have logits; contents do not matter.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

FIRST_TOKEN, N_CTX = 1000, 512
REPEATS = 8  # of each number of rows in a turn; the first makes graphs and does not count

Decode = Callable[[int], None]  # decodes so many rows behind those before


def timed(decode: Decode, widths: Sequence[int]) -> dict[int, float]:
    """The median seconds of a decode, by its number of rows."""
    seconds: dict[int, float] = {}
    for n_rows in widths:
        taken = []
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            decode(n_rows)
            taken.append(time.perf_counter() - started)
        seconds[n_rows] = median(taken[1:])
    return seconds


def of_ik(package: str, main: str, n_threads: int, widths: Sequence[int]) -> dict[int, float]:
    """Seconds with the wheel that is unpacked in `package`, by its own ctypes."""
    sys.path.insert(0, package)
    import ik_llama_cpp._ctypes_api as ik  # type: ignore[import-not-found]

    library = next(Path(package).glob("ik_llama_cpp/lib/libllama.*"))
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    ctypes.CDLL(str(library)).llama_log_set(silent, None)
    params = ik.llama_model_default_params()
    params.n_gpu_layers = 0
    model = ik.llama_model_load_from_file(main.encode(), params)
    params = ik.llama_context_default_params()
    params.n_ctx, params.n_batch = N_CTX, 64
    params.n_threads = params.n_threads_batch = n_threads
    context = ik.llama_init_from_model(model, params)
    batch: Any = ik.llama_batch_init(max(widths), 0, 1)
    n_past = 0

    def decode(n_rows: int) -> None:
        nonlocal n_past
        batch.n_tokens = n_rows
        for i in range(n_rows):
            batch.token[i], batch.pos[i] = FIRST_TOKEN + i, n_past + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        if ik.llama_decode(context, batch) != 0:
            raise SystemExit(f"ik_llama.cpp cannot decode {n_rows} rows of {main}")
        n_past += n_rows

    return timed(decode, widths)


def of_ours(main: str, n_threads: int, widths: Sequence[int]) -> dict[int, float]:
    """Seconds with our kernels: one row as plain decoding decodes it, several as a verification does, with rollback slots."""
    from llama_sidecar.runtime import load
    from llama_sidecar.runtime.session import Scripted

    depth = max(1, max(widths) - 1)
    nothing = Scripted(list(range(N_CTX)), 0)
    tokens = [FIRST_TOKEN + i for i in range(max(widths))]
    seconds = {}
    with load(main, spec_type="none", kernels="ours", threads=n_threads, ctx=N_CTX) as model:
        for n in widths:
            with model.session(depth=depth, scripted=nothing, n_slots=0 if n == 1 else depth) as session:
                seconds[n] = median(session.time_rows(tokens, n, 1 + REPEATS)[1:])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("package")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=("ik", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    widths = [int(n) for n in args.rows.split(",")]
    if args.one:
        rows = of_ours if args.one == "ours" else partial(of_ik, args.package)
        print(json.dumps(rows(args.main, args.threads, widths)))
        return
    found: dict[str, list[dict[str, float]]] = {"ik": [], "ours": []}
    for _ in range(args.turns):
        for name, turns in found.items():
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--one", name], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr.strip()}")
            turns.append(json.loads(done.stdout.splitlines()[-1]))
    print("| rows | ik_llama.cpp, ms | ours, ms | theirs over ours, by turns |\n|---|---|---|---|")
    for n in map(str, widths):
        ik, ours = ([turn[n] for turn in found[name]] for name in ("ik", "ours"))
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(ik, ours, strict=True))
        print(f"| {n} | {1e3 * median(ik):.1f} | {1e3 * median(ours):.1f} | {ratios} |")


if __name__ == "__main__":
    main()
