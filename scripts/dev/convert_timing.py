"""Times our conversion against llama.cpp's own on one checkpoint, in turns, and compares the files.

    scripts/dev/convert_timing.py CHECKPOINT PEER_CONVERT --pre qwen35 [--type Q8_0] [--sidecar-type Q8_0] [--turns 3]
        [--llama-quantize PROGRAM] [--only ours|peer]

PEER_CONVERT is as in peer_listings.py; the peer needs two runs for what one of ours writes, and two of llama-quantize
more for types that its converter does not write. Prints wall and processor seconds, peak memory (ru_maxrss of the process;
of the peer's the largest) and, where both ran, whether all tensors are the same. A machine that does other work makes the
seconds meaningless.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import listing  # noqa: E402

OURS = (
    "import sys; from llama_sidecar.converter import convert; convert(*sys.argv[1:5], name='m', force=True)"
)
CONVERTER_TYPES = ("F32", "F16", "BF16", "Q8_0")  # that convert_hf_to_gguf.py writes
Measured = tuple[float, float, float]  # wall seconds, processor seconds, peak megabytes
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def measured(command: Sequence[str | Path]) -> Measured:
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
@click.option("--sidecar-type", "sidecar_kind", help="[default: that of --type]")
@click.option("--llama-quantize", type=click.Path(exists=True, resolve_path=True, path_type=Path))
@click.option("--turns", default=3, show_default=True)
@click.option("--only", type=click.Choice(["ours", "peer"]), help="Run one side.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for the files.  [default: a temporary one]"
)
def main(
    checkpoint: Path,
    peer_convert: Path,
    pre: str,
    kind: str,
    sidecar_kind: str | None,
    llama_quantize: Path | None,
    turns: int,
    only: str | None,
    work: Path | None,
) -> None:
    kinds = {"--no-mtp": kind, "--mtp": sidecar_kind or kind}
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        sides = {
            "ours": lambda: [measured([sys.executable, "-c", OURS, checkpoint, folder, *kinds.values()])],
            "peer": lambda: list(
                peer_steps(checkpoint, folder, [peer_convert, "--pre", pre], llama_quantize, kinds)
            ),
        }
        sides = {who: run for who, run in sides.items() if only in (None, who)}
        runs: dict[str, list[list[Measured]]] = {who: [] for who in sides}
        for _ in range(turns):
            for who, run in sides.items():
                runs[who].append(run())
        for who, found in runs.items():
            wall, cpu = (
                statistics.median(sum(step[i] for step in steps) for steps in found) for i in range(2)
            )
            peak = statistics.median(max(step[2] for step in steps) for steps in found)
            print(f"{who}  {wall:7.1f} s wall  {cpu:7.1f} s processor  {peak:7.0f} MB peak", end="")
            print("  steps:", ", ".join(f"{step[0]:.1f} s" for step in found[-1]))
        if only is None:
            compare(folder, kinds)


def peer_steps(
    checkpoint: Path,
    folder: Path,
    convert: Sequence[str | Path],
    llama_quantize: Path | None,
    kinds: Mapping[str, str],
) -> Iterator[Measured]:
    """Main file, then sidecar; by way of BF16 where llama-quantize is given and the type is none of the converter's."""
    for switch, kind in kinds.items():
        program, *options = convert
        two_steps = llama_quantize and kind not in CONVERTER_TYPES
        outtype = "bf16" if two_steps else kind.lower()
        first = folder / (f"{switch}-first.gguf" if two_steps else f"{switch}.gguf")
        yield measured([program, checkpoint, first, *options, switch, "--outtype", outtype])
        if llama_quantize and two_steps:
            yield measured([llama_quantize, first, folder / f"{switch}.gguf", kind])


def compare(folder: Path, kinds: Mapping[str, str]) -> None:
    for switch, prefix in {"--no-mtp": "", "--mtp": "mtp-"}.items():
        mine = f"{prefix}m-{kinds[switch]}.gguf"
        a, b = listing(folder / mine)["tensors"], listing(folder / f"{switch}.gguf")["tensors"]
        differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        print(f"{mine}: {len(a)} tensors, different: {', '.join(differ) or 'none'}")


if __name__ == "__main__":
    main()
