"""Prints what a decode of 1 to 8 rows of a model takes: llama.cpp's kernels against ours, or settings of attention, in turns.

The target's context alone, no drafter; all rows have logits. Contents do not matter, so the prompt is made up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import click

from llama_sidecar.runtime import Model, load
from llama_sidecar.runtime.library import set_verbose
from llama_sidecar.runtime.session import Scripted, Session

FIRST_TOKEN = 1000


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kernels", default="stock,ours", show_default=True, help="Kernels to compare.")
@click.option(
    "--flash-attn", default="auto", show_default=True, help="Settings of flash attention to compare."
)
@click.option("--cache-type", default="f16", show_default=True, help="Types of the KV cache to compare.")
@click.option("--rows", default="1,2,4,8", show_default=True, help="Numbers of rows.")
@click.option("--cells", default=0, show_default=True, help="Cells in use before the decode.")
@click.option("--slots", default=7, show_default=True, help="Rollback slots.")
@click.option("--repeats", default=4, show_default=True, help="Turns, of several decodes each.")
@click.option("--threads", type=int, default=None, help="CPU threads (default: the physical cores).")
def command(
    file: Path,
    kernels: str,
    flash_attn: str,
    cache_type: str,
    rows: str,
    cells: int,
    slots: int,
    repeats: int,
    threads: int | None,
) -> None:
    """Time decodes of FILE by number of rows."""
    set_verbose(False)
    widths = [int(n) for n in rows.split(",")]
    sessions: dict[str, Session] = {}
    for k in kernels.split(","):
        for fa in flash_attn.split(","):
            for cache in cache_type.split(","):
                model = load(
                    file,
                    spec_type="none",
                    kernels=k,
                    flash_attn=fa,
                    cache_type_k=cache,
                    cache_type_v=cache,
                    threads=threads,
                    ctx=cells + 256,
                )
                sessions[f"{k}, flash {fa}, {cache}"] = open_session(model, slots, cells)
    seconds: dict[tuple[str, int], list[float]] = {}
    tokens = list(range(FIRST_TOKEN, FIRST_TOKEN + max(widths)))
    for _ in range(repeats):
        for name, session in sessions.items():
            for n in widths:
                seconds.setdefault((name, n), []).extend(session.time_rows(tokens, n, 3)[1:])
    for name in sessions:
        print(f"{name:24} " + "  ".join(cells_of(seconds, name, widths)))


def open_session(model: Model, slots: int, cells: int) -> Session:
    """With `cells` cells in use, and a drafter that does nothing, so that there are slots."""
    script = Scripted(list(range(cells + 64)), 0)
    session = model.session(depth=slots, scripted=script, n_slots=slots)
    if cells:
        session.generate([FIRST_TOKEN + i % 500 for i in range(cells)], max_tokens=1, temperature=0).read()
    return session


def cells_of(seconds: dict[tuple[str, int], list[float]], name: str, widths: Sequence[int]) -> list[str]:
    """For each number of rows: "4:  40.1 ms v 1.45" medians."""
    one = statistics.median(seconds[name, widths[0]])
    medians = [statistics.median(seconds[name, n]) for n in widths]
    return [f"{n}: {1e3 * s:6.1f} ms v {s / one:4.2f}" for n, s in zip(widths, medians, strict=True)]


if __name__ == "__main__":
    command()
