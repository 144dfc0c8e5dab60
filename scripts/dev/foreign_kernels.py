"""Checks the kernel sets of another processor in an emulator: right against float64 and equal to the bit at every width.

Needs a cross compiler and a user-mode emulator (Debian: g++-aarch64-linux-gnu, qemu-user). Says nothing of speed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "runtime" / "native" / "smallbatch"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra")
SETS = {"neon_dotprod": "-march=armv8.2-a+dotprod", "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm"}
MAX_ROWS, N_OUT = 8, 37
sys.path.insert(0, str(ROOT / "tests"))


@click.command()
@click.option("--compiler", default="aarch64-linux-gnu-g++", show_default=True)
@click.option("--emulator", default="qemu-aarch64", show_default=True)
def command(compiler: str, emulator: str) -> None:
    """Build the kernels with COMPILER and run every set and type in EMULATOR."""
    from test_smallbatch import TYPES, exact, n_values, random_weights

    with tempfile.TemporaryDirectory() as folder:
        program = build(compiler, Path(folder))
        listed = subprocess.run([emulator, program], check=True, capture_output=True, text=True).stdout
        sets = {name: types for name, *types in map(str.split, listed.splitlines())}
        print("sets:", ", ".join(sets))
        for name, numbers in sets.items():
            for type in (type for type in TYPES if str(type.value) in numbers):
                worst = 0.0
                for n_blocks in (1, 2, 3, 5, 7, 12):
                    rng = np.random.default_rng(n_blocks)
                    n_in = n_values(type, n_blocks)
                    weights = random_weights(rng, type, N_OUT, n_in)
                    x = rng.standard_normal((MAX_ROWS, n_in)).astype(np.float32)
                    shape = [type.value, N_OUT, weights.nbytes // N_OUT, n_in, MAX_ROWS]
                    data = weights.tobytes() + x.tobytes()
                    answer: list[str | Path] = [emulator, program, name, *map(str, shape)]
                    out = np.frombuffer(
                        subprocess.run(answer, input=data, check=True, capture_output=True).stdout, np.float32
                    )
                    whole = out[-MAX_ROWS * N_OUT :].reshape(MAX_ROWS, N_OUT)
                    first = 0
                    for n in range(1, MAX_ROWS + 1):
                        rows = out[first : first + n * N_OUT].reshape(n, N_OUT)
                        assert (rows == whole[:n]).all(), (name, type.name, n_blocks, n)
                        first += n * N_OUT
                    expected, bound = exact(type, weights, x)
                    error = np.abs(whole - expected)
                    assert (error <= bound).all(), (name, type.name, n_blocks)
                    worst = max(worst, float((error / bound).max()))
                print(f"{name} {type.name}: widths equal, error at most {worst:.2f} of what may be")


def build(compiler: str, folder: Path) -> Path:
    """The driver with the portable set and those of SETS, linked statically."""
    objects, defines = [], [f"-DSMALLBATCH_{name.upper()}" for name in SETS]
    sources = [(SOURCES / f"set_{name}.cpp", [flag]) for name, flag in {"portable": "-O2", **SETS}.items()]
    for source, flags in [
        *sources,
        (SOURCES / "kernels.cpp", defines),
        (ROOT / "scripts/dev/foreign_kernels.cpp", []),
    ]:
        objects.append(folder / f"{source.stem}.o")
        build_one: list[str | Path] = [
            compiler,
            *FLAGS,
            *flags,
            "-I",
            SOURCES,
            "-c",
            source,
            "-o",
            objects[-1],
        ]
        subprocess.run(build_one, check=True)
    subprocess.run([compiler, "-static", *objects, "-o", folder / "driver"], check=True)
    return folder / "driver"


if __name__ == "__main__":
    command()
