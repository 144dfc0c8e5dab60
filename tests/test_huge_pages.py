"""Larger buffers of llama.cpp's ask for huge pages before they are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PairOf

FLAGS = """
import sys
from llama_sidecar.runtime import load
def asking():
    with open("/proc/self/smaps") as maps:
        return sum("hg" in line.split() for line in maps if line.startswith("VmFlags:"))
before = asking()
with load(sys.argv[1], ctx=64, threads=1) as small, small.session():
    print(asking() - before)
with load(sys.argv[1], ctx=1 << 17, threads=1) as large, large.session():
    print(asking() - before)
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no huge pages to ask for",
)
def test_a_large_kv_cache_asks_for_huge_pages(pair_of: PairOf) -> None:
    main = pair_of("T", "Q8_0").main
    done = subprocess.run(
        [sys.executable, "-c", FLAGS, str(main)], capture_output=True, text=True, timeout=120, check=True
    )
    small, large = map(int, done.stdout.split())
    assert small == 0
    assert large >= 1
