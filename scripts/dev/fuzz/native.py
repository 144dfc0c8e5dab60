"""Builds native.cpp with AddressSanitizer and UndefinedBehaviorSanitizer and runs it for some time; exits with 1 for a fault.

Coverage guides the inputs: Clang's libFuzzer, or GCC's edges and the loop in native.cpp; with another compiler they are random.
Those that reach something new are kept, and the next run goes on from them. Knows compilers, and nothing of what is parsed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = [HERE / "native.cpp", ROOT / "runtime/native/text.cpp"]
FLAGS = ["-std=c++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
CXX = os.environ.get("CXX", "c++")
GUIDES = {  # the best first: a compiler, and its flags
    "libFuzzer": ("clang++", ["-DLIBFUZZER", "-fsanitize=fuzzer"]),
    "edges": (CXX, ["-fsanitize-coverage=trace-pc"]),
    "none": (CXX, []),
}


def build(program: Path) -> str:
    """Compiles with the best guide that the compilers here have; its name."""
    for guide, (compiler, flags) in GUIDES.items():
        command = [compiler, *FLAGS, *flags, *map(str, SOURCES), "-o", str(program)]
        if shutil.which(compiler) and subprocess.run(command, capture_output=guide != "none").returncode == 0:
            return guide
    raise click.ClickException(
        f"{CXX} compiles no sanitized program: install GCC or Clang, with its sanitizers"
    )


@click.command()
@click.option("--seconds", type=int, default=60, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=ROOT / ".build" / "fuzz", show_default=True
)
def command(seconds: int, folder: Path) -> None:
    """Fuzz the native code that parses bytes."""
    program, corpus = folder / "native-program", folder / "native"
    corpus.mkdir(parents=True, exist_ok=True)
    guide = build(program)
    options = (
        [f"-max_total_time={seconds}", str(corpus)] if guide == "libFuzzer" else [str(seconds), str(corpus)]
    )
    done = subprocess.run([program, *options], capture_output=True, text=True, errors="replace")
    n = re.search(r"Done (\d+) runs|^(\d+) inputs", done.stdout + done.stderr, re.MULTILINE)
    edges = re.search(r"cov: (\d+)(?!.*cov: )|(\d+) edges", done.stdout + done.stderr, re.DOTALL)
    reached = f", {edges[1] or edges[2]} edges" if edges else ""
    print(f"native: {int(n[1] or n[2]) if n else 0:,} inputs, guide: {guide}{reached}")
    if done.returncode:
        print(done.stderr[-4000:])
        sys.exit(1)


if __name__ == "__main__":
    command()
