"""Converting needs little memory whatever the checkpoint's size: a cut 27B, with its real widths and vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

from checkpoints import tiny_config, write_json, write_tokenizer

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.families import families

WIDTHS = {
    "hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320, "head_dim": 256,
    "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 1, "layer_types": ["linear_attention"],
}  # fmt: skip

# Large slices are computed and then not written: a disk's room is not the point here.
PROGRAM = """
import os, resource, sys
from llama_sidecar.converter import convert
write = os.pwrite
os.pwrite = lambda fd, data, offset: write(fd, data, offset) if len(data) < 1 << 17 else len(data)
result = convert(sys.argv[1], sys.argv[2], "BF16")
unit = 1 if sys.platform == "darwin" else 1024
print(result.main_bytes, result.sidecar_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


def sparse_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """The tensors of a configuration as one BF16 file of holes, which read as zeros and take no room."""
    layout = families()["qwen35"].layout(Config(config), frozenset({"mtp.fc.weight"}))
    header, end = {}, 0
    for source in {s.name: s for p in layout.shared + layout.trunk + layout.head for s in p.sources}.values():
        n_bytes = 2 * prod(source.shape)
        header[source.name] = {"dtype": "BF16", "shape": source.shape, "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_peak_memory_is_under_a_gigabyte(tmp_path: Path) -> None:
    folder = tmp_path / "imitated-27b"
    folder.mkdir()
    config = tiny_config("qwen35", "tied") | WIDTHS
    sparse_checkpoint(folder, config)
    write_json(folder / "config.json", config)
    write_tokenizer(folder, n_more=247_000)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    main_bytes, sidecar_bytes, peak_bytes = map(int, run.stdout.split())
    assert main_bytes > 3e9 and sidecar_bytes > 1e9
    assert peak_bytes < 1e9, f"{peak_bytes / 1e6:.0f} MB"
    print(f"peak {peak_bytes / 1e6:.0f} MB")
