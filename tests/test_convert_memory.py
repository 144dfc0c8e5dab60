"""Converting needs little memory whatever the checkpoint's size: a cut 27B, with its real widths and vocabulary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkpoints import tiny_config, write_json, write_tokenizer
from sparse import PEAK, WIDTHS_27B, write_sparse

WIDTHS = WIDTHS_27B | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}

# Large slices are computed and then not written: a disk's room is not the point here.
PROGRAM = f"""{PEAK}
import os, sys
from llama_sidecar.converter import convert
write = os.pwrite
os.pwrite = lambda fd, data, offset: write(fd, data, offset) if len(data) < 1 << 17 else len(data)
result = convert(sys.argv[1], sys.argv[2], "BF16")
print(result.main_bytes, result.sidecar_bytes, peak_bytes())
"""


def test_peak_memory_is_under_a_gigabyte(tmp_path: Path) -> None:
    folder = tmp_path / "imitated-27b"
    folder.mkdir()
    config = tiny_config("qwen35", "tied") | WIDTHS
    write_sparse(folder, config)
    write_json(folder / "config.json", config)
    write_tokenizer(folder, n_more=247_000)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    main_bytes, sidecar_bytes, peak_bytes = map(int, run.stdout.split())
    assert main_bytes > 3e9 and sidecar_bytes > 1e9
    assert peak_bytes < 1e9, f"{peak_bytes / 1e6:.0f} MB"
    print(f"peak {peak_bytes / 1e6:.0f} MB")
