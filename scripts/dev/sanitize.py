"""Builds the native module with AddressSanitizer and UndefinedBehaviorSanitizer, and runs the native code's tests on it.

Needs GCC or Clang with their sanitizer runtimes; works in a folder of its own and leaves the installed module alone. Looks at
our own native code: llama.cpp is not built anew. Leaks are not looked for: Python's own would hide them (tests/test_overhead.py
counts what 1,000 sessions leave behind).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
NAMES = "smallbatch smallbatch_graph smallbatch_device huge_pages kernel_choice text pace round"
TESTS = [f"tests/test_{name}.py" for name in NAMES.split()]  # what runs native code in this process
PLUGIN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("llama_sidecar.runtime._native", {module!r})
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
"""


@click.command()
@click.option(
    "--folder", type=click.Path(path_type=Path), default=ROOT / ".build" / "sanitized", show_default=True
)
@click.option(
    "--minutes", type=click.IntRange(1), default=30, show_default=True, help="The tests fail after that."
)
@click.argument("tests", nargs=-1)
def command(folder: Path, minutes: int, tests: tuple[str, ...]) -> None:
    """Run TESTS (default: those of the kernels and their device, the text stream, pace and the round) under the sanitizers."""
    # At -O1, which compiles the kernels four times as fast as -O2, with the standard library's own checks and with assertions.
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1 -D_GLIBCXX_ASSERTIONS"
    configure: list[str | Path] = [
        "cmake",
        "-S",
        ROOT / "runtime/native",
        "-B",
        folder,
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
        "-DSMALLBATCH_OPTIMIZATION=-O1",
    ]
    subprocess.run(
        [*configure, f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={flags}"], check=True
    )
    # The type stubs would import the module without the sanitizer's runtime, so only the module is built.
    subprocess.run(["cmake", "--build", folder, "--target", "_native"], check=True)
    (module,) = folder.glob("_native.*.so")
    (folder / "sanitized_native.py").write_text(PLUGIN.format(module=str(module)))
    compiler = os.environ.get("CXX", "c++")
    preload = [  # libstdc++ too: the sanitizer looks for its exceptions when it starts
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    env = os.environ | {
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(folder),
        "PYTHONMALLOC": "malloc",
    }
    pytest = Path(sys.executable).with_name("pytest")
    command = [pytest, "-q", "-p", "sanitized_native", *(tests or TESTS)]
    try:
        sys.exit(subprocess.run(command, cwd=ROOT, env=env, timeout=60 * minutes).returncode)
    except subprocess.TimeoutExpired:
        sys.exit(f"error: the tests did not end within {minutes} minutes: name fewer, or raise --minutes")


if __name__ == "__main__":
    command()
