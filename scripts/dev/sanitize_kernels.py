"""Builds the native module with AddressSanitizer and UBSan, and runs the small-batch kernels' tests on it.

Needs GCC or Clang with their sanitizer runtimes; works in a folder of its own and leaves the installed module alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
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
@click.argument("tests", nargs=-1)
def command(folder: Path, tests: tuple[str, ...]) -> None:
    """Run TESTS (default: tests/test_smallbatch.py) under the sanitizers."""
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
    configure: list[str | Path] = [
        "cmake",
        "-S",
        ROOT / "runtime/native",
        "-B",
        folder,
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
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
    command = [pytest, "-q", "-p", "sanitized_native", *(tests or ["tests/test_smallbatch.py"])]
    sys.exit(subprocess.run(command, cwd=ROOT, env=env).returncode)


if __name__ == "__main__":
    command()
