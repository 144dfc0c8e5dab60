"""Times our conversion against llama.cpp's own on one checkpoint, in turns, and compares the files.

    scripts/dev/convert_timing.py CHECKPOINT PEER_CONVERT --pre qwen35 [--type Q8_0] [--turns 3]

PEER_CONVERT is as in peer_listings.py; the peer needs two runs for what one of ours writes. Prints wall and processor
seconds, peak memory (ru_maxrss of the process) and whether all tensors are the same. A machine that does other work
makes the seconds meaningless.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import listing  # noqa: E402

OURS = (
    "import sys; from llama_sidecar.converter import convert; convert(*sys.argv[1:5], name='m', force=True)"
)
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def measured(command: Sequence[str | Path]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak megabytes of a command. Raises where it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(f"{command[0]} failed with status {status}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * MAXRSS_UNIT / 1e6


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, resolve_path=True, path_type=Path))
@click.argument("peer_convert", type=click.Path(exists=True, resolve_path=True, path_type=Path))
@click.option("--pre", default="qwen35", show_default=True)
@click.option("--type", "kind", default="Q8_0", show_default=True)
@click.option("--turns", default=3, show_default=True)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for the files.  [default: a temporary one]"
)
def main(checkpoint: Path, peer_convert: Path, pre: str, kind: str, turns: int, work: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        ours, theirs = [], []
        for _ in range(turns):
            ours.append(measured([sys.executable, "-c", OURS, checkpoint, folder, kind, kind]))
            peer = [
                measured(
                    [
                        peer_convert,
                        checkpoint,
                        folder / f"{s}.gguf",
                        "--pre",
                        pre,
                        s,
                        "--outtype",
                        kind.lower(),
                    ]
                )
                for s in ("--no-mtp", "--mtp")
            ]
            theirs.append((peer[0][0] + peer[1][0], peer[0][1] + peer[1][1], max(peer[0][2], peer[1][2])))
        for who, runs in {"ours": ours, "peer": theirs}.items():
            wall, cpu, peak = (statistics.median(run[i] for run in runs) for i in range(3))
            print(f"{who}  {wall:7.1f} s wall  {cpu:7.1f} s processor  {peak:7.0f} MB peak")
        pairs = {f"m-{kind}.gguf": "--no-mtp.gguf", f"mtp-m-{kind}.gguf": "--mtp.gguf"}
        for mine, other in pairs.items():
            a, b = listing(folder / mine)["tensors"], listing(folder / other)["tensors"]
            differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
            print(f"{mine}: {len(a)} tensors, different: {', '.join(differ) or 'none'}")


if __name__ == "__main__":
    main()
