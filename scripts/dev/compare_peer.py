#!/usr/bin/env python3
"""Times ours and llama-server on the same files in turns, and prints one table and one JSON line.

    compare_peer.py MAIN.gguf SIDECAR.gguf --server PATH/llama-server [--depth 3] [--synthetic-length 3] [-n 96] [--pairs 5]

Both servers (plain and with `--spec-type`) and our model stay loaded; each pair asks all four for the same
prompt, one after the other, so that the machine's drift falls on all. `--synthetic-length L` replaces verification on both
sides by coin tosses of mean accepted length L; 0 verifies for real, and then the acceptances can be compared. In a short run
the coins of one side may fall better: `..._speedup_at_length` is what the same rounds would have gained at exactly L.
llama-server comes from the sources of the llama-cpp-python release that ours runs on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from llama_sidecar.runtime import load
from llama_sidecar.runtime.bench import p_accept
from llama_sidecar.runtime.prompts import read_prompts
from llama_sidecar.sidecars import KINDS, open_sidecar

BETWEEN_S = 0.05  # OpenMP's threads spin for 16 ms after a run, on the next one's processors
CODE = Path(__file__).parents[1] / "prompts" / "code.jsonl"


@contextlib.contextmanager
def serving(args: argparse.Namespace, *, speculative: bool) -> Iterator[int]:
    """A running llama-server; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        args.server,
        "-m",
        args.main,
        "-c",
        args.ctx,
        "-t",
        args.threads,
        "-np",
        1,
        "--port",
        port,
        "--no-webui",
    ]
    if speculative:
        spec_type = KINDS[open_sidecar(args.sidecar).kind].llama_name
        command += ["-md", args.sidecar, "--spec-type", spec_type, "--spec-draft-n-max", args.depth]
        if args.synthetic_length:
            command += ["--spec-synth-len", args.synthetic_length]
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(240):
            time.sleep(0.5)
            if process.poll() is not None:
                sys.exit(f"llama-server ended with {process.returncode}: {' '.join(map(str, command))}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
                break
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, tokens: list[int], args: argparse.Namespace) -> tuple[float, int, int, list[int]]:
    """Tokens a second, drafted, accepted, and the ids that llama-server generated after `tokens`."""
    request = {
        "prompt": tokens,
        "n_predict": args.n,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    body = json.dumps(request).encode()
    url = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(url, timeout=900))
    timings = answer["timings"]
    drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return timings["predicted_per_second"], drafted, accepted, answer.get("tokens", [])


def compare(args: argparse.Namespace) -> dict[str, Any]:
    prompts = read_prompts(args.prompts)
    coin = p_accept(args.synthetic_length, args.depth) if args.synthetic_length else None
    speeds: dict[str, list[float]] = {
        name: [] for name in ("peer plain", "our plain", "peer spec", "our spec")
    }
    counts = {"peer": [0, 0], "our": [0, 0]}
    n_equal = 0
    with (
        serving(args, speculative=False) as plain_port,
        serving(args, speculative=True) as spec_port,
        load(
            args.main,
            args.sidecar,
            depth=args.depth,
            ctx=args.ctx,
            threads=args.threads,
            kernels=args.kernels,
        ) as model,
        model.session(spec_type="none") as plain,
        model.session() as spec,
    ):
        for pair in range(-1, args.pairs):  # the first is warm-up
            tokens = prompts[max(pair, 0) % len(prompts)].tokens(model)
            time.sleep(BETWEEN_S)
            peer_plain = ask(plain_port, tokens, args)
            time.sleep(BETWEEN_S)
            ours_plain = plain.generate(tokens, max_tokens=args.n, temperature=0, ignore_eos=True)
            ours_plain.read()
            time.sleep(BETWEEN_S)
            peer_spec = ask(spec_port, tokens, args)
            time.sleep(BETWEEN_S)
            if coin is None:
                ours_spec = spec.generate(tokens, max_tokens=args.n, temperature=0, ignore_eos=True)
            else:
                ours_spec = spec.generate_synthetic(tokens, p_accept=coin, max_tokens=args.n, seed=pair + 1)
            ours_spec.read()
            if pair < 0:
                continue
            found = (peer_plain[0], ours_plain.stats.tok_s, peer_spec[0], ours_spec.stats.tok_s)
            for sink, speed in zip(speeds.values(), found, strict=True):
                sink.append(speed)
            for name, drafted, accepted in (
                ("peer", *peer_spec[1:3]),
                ("our", ours_spec.stats.n_drafted, ours_spec.stats.n_accepted),
            ):
                counts[name][0] += drafted
                counts[name][1] += accepted
            n_equal += peer_plain[3] == ours_plain.tokens
            print(
                f"pair {pair + 1}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in speeds.items()),
                file=sys.stderr,
            )
    ratio = {
        name: median(s / p for s, p in zip(speeds[f"{name} spec"], speeds[f"{name} plain"], strict=True))
        for name in ("peer", "our")
    }
    acceptance = {name: accepted / max(1, drafted) for name, (drafted, accepted) in counts.items()}
    length = {name: 1 + args.depth * share for name, share in acceptance.items()}
    # A round costs the same whatever stands.
    at_length = {n: ratio[n] * (args.synthetic_length or length[n]) / length[n] for n in counts}
    return {
        "schema": 1,
        "main": Path(args.main).name,
        "sidecar": Path(args.sidecar).name,
        "depth": args.depth,
        "synthetic_length": args.synthetic_length,
        "n": args.n,
        "pairs": args.pairs,
        "threads": args.threads,
        "kernels": args.kernels,
        **{name.replace(" ", "_") + "_tok_s": median(values) for name, values in speeds.items()},
        "peer_speedup": ratio["peer"],
        "our_speedup": ratio["our"],
        "speedup_ratio": ratio["our"] / ratio["peer"],
        "plain_ratio": median(o / p for o, p in zip(speeds["our plain"], speeds["peer plain"], strict=True)),
        "peer_acceptance": acceptance["peer"],
        "our_acceptance": acceptance["our"],
        "peer_speedup_at_length": at_length["peer"],
        "our_speedup_at_length": at_length["our"],
        "speedup_ratio_at_length": at_length["our"] / at_length["peer"],
        "plain_texts_equal": n_equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("main")
    parser.add_argument("sidecar")
    parser.add_argument("--server", required=True, help="the llama-server to compare with")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--synthetic-length", type=float, default=0.0)
    parser.add_argument(
        "--prompts", type=Path, default=CODE, help="text or JSONL (default: the bench's code prompts)"
    )
    parser.add_argument("-n", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--kernels", default="stock", help="ours: stock or ours")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    result = compare(args)
    print(
        f"| {result['main']}, depth {result['depth']} | plain tok/s | speculative tok/s | speed-up | acceptance |"
    )
    print("|---|---|---|---|---|")
    for name, title in (("peer", "llama-server"), ("our", "llama-sidecar")):
        figures = [result[f"{name}_{key}"] for key in ("plain_tok_s", "spec_tok_s", "speedup", "acceptance")]
        print(f"| {title} | {figures[0]:.1f} | {figures[1]:.1f} | {figures[2]:.2f} | {figures[3]:.3f} |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
