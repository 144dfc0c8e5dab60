"""Builds native.cpp with AddressSanitizer and UndefinedBehaviorSanitizer and runs it for some time; exits with 1 for a fault.

With Clang the inputs are guided by coverage (libFuzzer), with another compiler they are random. Knows compilers, and nothing
of what is parsed.
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


@click.command()
@click.option("--seconds", type=int, default=60, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=ROOT / ".build" / "fuzz", show_default=True
)
def command(seconds: int, folder: Path) -> None:
    """Fuzz the native code that parses bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    program, corpus = folder / "native-program", folder / "native"
    guided = shutil.which("clang++")
    compiler = guided or os.environ.get("CXX", "c++")
    more = ["-DLIBFUZZER", "-fsanitize=fuzzer"] if guided else []
    subprocess.run([compiler, *FLAGS, *more, *SOURCES, "-o", program], check=True)
    corpus.mkdir(exist_ok=True)
    options = [f"-max_total_time={seconds}", str(corpus)] if guided else [str(seconds)]
    done = subprocess.run([program, *options], capture_output=True, text=True, errors="replace")
    n = re.search(r"Done (\d+) runs|^(\d+)$", done.stdout + done.stderr, re.MULTILINE)
    print(f"native: {int(n[1] or n[2]) if n else 0:,} inputs, {'guided by coverage' if guided else 'random'}")
    if done.returncode:
        print(done.stderr[-4000:])
        sys.exit(1)


if __name__ == "__main__":
    command()
