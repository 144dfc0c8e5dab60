"""Checks the kernel sets of another processor in an emulator: right against float64 and equal to the bit at every width, on
random and on extreme blocks.

Needs a cross compiler and a user-mode emulator (Debian: g++-aarch64-linux-gnu, qemu-user). Says nothing of speed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "runtime" / "native" / "smallbatch"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra")
SETS = {"neon_dotprod": "-march=armv8.2-a+dotprod", "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm"}
MAX_ROWS = 8
sys.path.insert(0, str(ROOT / "tests"))
from blocks import (  # noqa: E402
    TYPES,
    T,
    exact,
    extreme_rows,
    extreme_weights,
    n_values,
    random_weights,
)


@click.command()
@click.option("--compiler", default="aarch64-linux-gnu-g++", show_default=True)
@click.option("--emulator", default="qemu-aarch64", show_default=True)
def command(compiler: str, emulator: str) -> None:
    """Build the kernels with COMPILER and run every set and type in EMULATOR."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(emulator, build(compiler, Path(folder)))
        sets = {name: rest for name, *rest in map(str.split, driver.run("sets").decode().splitlines())}
        print("sets:", ", ".join(sets))
        for name, numbers in sets.items():
            for type in (type for type in TYPES if str(type.value) in numbers):
                worst = max(check_products(driver, name, type))
                print(
                    f"{name} {type.name}: widths equal, error at most {worst:.2f} of what may be", flush=True
                )


class Driver:
    """The program of foreign_kernels.cpp in the emulator."""

    def __init__(self, emulator: str, program: Path) -> None:
        self.command = [emulator, str(program)]

    def run(self, *arguments: object, data: bytes = b"") -> bytes:
        command = [*self.command, *map(str, arguments)]
        return subprocess.run(command, input=data, check=True, capture_output=True).stdout

    def multiply(self, name: str, type: T, weights: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
        """The products of the first 1, 2 .. len(x) rows."""
        (n_out, n_bytes), (n_rows, n_in) = weights.shape, x.shape
        shape = (type.value, n_out, n_bytes, n_in, n_rows)
        out = np.frombuffer(
            self.run("multiply", name, *shape, data=weights.tobytes() + x.tobytes()), np.float32
        )
        ends = np.cumsum(np.arange(1, n_rows + 1)) * n_out
        return [part.reshape(-1, n_out) for part in np.split(out, ends[:-1])]


def check_products(driver: Driver, name: str, type: T) -> Iterator[float]:
    """Yields how large the largest error is, as a part of the largest that may be."""
    rng = np.random.default_rng(0)
    cases = []
    for n_blocks in (1, 2, 3, 5, 7, 12):
        n_in = n_values(type, n_blocks)
        cases.append((random_weights(rng, type, 37, n_in), np.float32(rng.standard_normal((MAX_ROWS, n_in)))))
    for n_blocks in (1, 4):
        n_in = n_values(type, n_blocks)
        cases.append((extreme_weights(rng, type, n_in), extreme_rows(rng, n_in)))
    for weights, x in cases:
        *fewer, whole = driver.multiply(name, type, weights, x)
        for rows in fewer:
            assert (rows == whole[: len(rows)]).all(), (name, type.name, x.shape, len(rows))
        expected, bound = exact(type, weights, x)
        error = np.abs(whole - expected)
        assert (error <= bound).all(), (name, type.name, x.shape)
        yield float((error / bound).max())
    for n_out in (1, 2, 3, 6):
        for rows in driver.multiply(name, type, weights[:n_out], x):
            assert (rows == whole[: len(rows), :n_out]).all(), (name, type.name, n_out, len(rows))


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
