"""Prints what the small-batch kernels reach: GB/s of weights and the share of the memory roofline, by type and rows.

The roofline is measured in the same run: memory read by as many threads and nothing else. Weights are made up and larger than the
caches; every figure is the fastest of several passes. Beside ours stands llama.cpp's CPU backend with its repacked weights.
"""

from __future__ import annotations

import time

import click
import numpy as np
from gguf import GGMLQuantizationType as Type

from llama_sidecar.runtime import _native, kernels, placement
from llama_sidecar.runtime.library import set_verbose
from llama_sidecar.runtime.weights import repacks

ORDER = ("Q8_0", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q5_K", "Q5_0", "IQ4_NL", "IQ4_XS", "F16", "F32")

SHAPE = (1024, 16384)  # large, so that all else a pass takes does not show


def roofline(n_bytes: int, threads: int, repeats: int) -> float:
    """Bytes a second that `threads` can read, passing over and over `n_bytes`."""
    data = np.ones(n_bytes, np.uint8)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        _native.smallbatch_read(data, threads)
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)


@click.command()
@click.option("--type", "names", multiple=True, default=ORDER, help="A weight type; may be repeated.")
@click.option("--rows", default="1,2,3,4,5,8", show_default=True, help="Numbers of rows.")
@click.option("--threads", type=int, default=None, help="CPU threads (default: the physical cores).")
@click.option("--repeats", default=7, show_default=True, help="Passes, of which the fastest counts.")
@click.option(
    "--megabytes", default=256, show_default=True, help="Weights per pass: more than the caches hold."
)
@click.option("--set", "kernel_set", default="", help="A kernel set, by default the fastest that runs here.")
def command(
    names: tuple[str, ...], rows: str, threads: int | None, repeats: int, megabytes: int, kernel_set: str
) -> None:
    """Measure the small-batch kernels against memory and against the CPU backend."""
    set_verbose(False)
    if kernels.problem() is not None:
        raise click.ClickException(str(kernels.problem()))
    n_threads = threads or placement.default_threads()
    n_rows = tuple(int(n) for n in rows.split(","))
    _native.smallbatch_use_set(kernel_set)
    n_bytes = megabytes << 20
    top = roofline(n_bytes, n_threads, repeats)
    print(f"{n_threads} threads, memory {top / 1e9:.1f} GB/s; per type and rows: GB/s (share of memory) v(n)")
    for name in names:
        trial = kernels.try_out(
            Type[name],
            n_rows=n_rows,
            threads=n_threads,
            shape=SHAPE,
            repeats=repeats,
            n_bytes=n_bytes,
            repacked=repacks(),
        )
        top = max(top, roofline(n_bytes, n_threads, repeats))
        print(f"{name}, {kernels.kernel_set(Type[name])}: {trial.ours_gains:.2f} times the stock speed")
        for label, seconds in (("ours", trial.ours_s), ("stock", trial.stock_s)):
            cells = [
                f"{n}: {n_bytes / s / 1e9:5.1f} ({n_bytes / s / top:4.0%}) {s / seconds[0]:4.2f}"
                for n, s in zip(n_rows, seconds, strict=True)
            ]
            print(f"  {label:5} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    command()
