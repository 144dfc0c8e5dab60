"""The edits meet files of any size and of any make: little memory, one line for what cannot be, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_gguf
from gguf import GGMLQuantizationType
from gguf import GGUFValueType as V
from sparse import PEAK

from llama_sidecar.converter.edit import graft, merge, requant, split
from llama_sidecar.converter.edit.header import Header, Keys, keys_of
from llama_sidecar.converter.edit.stored import Stored
from llama_sidecar.sidecars import LlamaSidecarError, StringArray, TensorInfo, read_header

VALUES: list[tuple[tuple[V, ...], Any]] = [
    ((V.INT32,), -7),
    ((V.FLOAT32,), float("nan")),
    ((V.STRING,), "x"),
    ((V.ARRAY, V.STRING), StringArray.of(["a", "b"])),
    ((V.ARRAY, V.FLOAT32), np.array([1, np.inf, 3], "<f4")),
]
KEYS = {
    "general.name": "x", "general.size_label": "2K", "general.file_type": 1, "qwen35.expert_count": 8, "qwen35.expert_used_count": 2,
    "qwen35.attention.head_count": 4, "qwen35.attention.head_count_kv": [4, 2, 1], "qwen35.vocab_size": 16,
    "sidecar.format": 1, "sidecar.fingerprint.rows": "b" * 64, "sidecar.requant.from": ["a"], "sidecar.graft.trunk": "",
}  # fmt: skip


def write(path: Path, keys: Keys, tensors: list[Stored]) -> Path:
    """A file of these keys and tensors, the data of all of them last."""
    header = Header(keys, tensors)
    path.unlink(missing_ok=True)
    header.write_header_to_file(path)
    header.write_kv_data_to_file()
    header.write_ti_data_to_file()
    with path.open("ab") as out:
        for tensor in tensors:
            out.write(bytes(-out.tell() % header.data_alignment))
            out.write(tensor.rows(0, tensor.n_rows).tobytes())
        out.write(bytes(-out.tell() % header.data_alignment))
    return path


def test_a_key_of_any_type_is_one_line_or_harmless(tmp_path: Path) -> None:
    merged = {"sidecar.merged.trunk": "a" * 64, "sidecar.merged.rows": ""}
    of_main = KEYS | {"qwen35.attention.head_count_kv": [4, 2]}
    main = tiny_gguf.main(tmp_path / "main.gguf", keys=of_main)
    whole = tiny_gguf.main(tmp_path / "whole.gguf", head=True, keys=KEYS | merged)
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-main.gguf", keys=KEYS)
    quantised = requant(sidecar, tmp_path / "q", "Q8_0", "Q8_0").sidecar
    assert quantised
    out, changed = tmp_path / "out", tmp_path / "mtp-changed.gguf"
    edits: dict[Path, list[Callable[[Path], Any]]] = {
        whole: [lambda path: split(path, out)],
        main: [lambda path: merge(path, sidecar, out / "m.gguf"), lambda path: graft(sidecar, path, out)],
        sidecar: [lambda path: merge(main, path, out / "m.gguf"), lambda path: graft(path, main, out)],
        quantised: [lambda path: requant(path, out, "F16", "Q4_0")],
    }
    n_ok = n_refused = 0
    for source, of_source in edits.items():
        header = read_header(source)
        tensors = [Stored(info) for info in header.tensors.values()]
        for name in header.keys:
            for value in VALUES:
                write(changed, keys_of(header) | {name: value}, tensors)
                for edit in of_source:
                    try:
                        edit(changed)
                        n_ok += 1
                    except LlamaSidecarError as error:
                        assert "\n" not in str(error) and ".part" not in str(error)
                        n_refused += 1
                        assert not out.exists()
                    for file in out.iterdir() if out.exists() else ():
                        file.unlink()
                    if out.exists():
                        out.rmdir()
    assert n_ok > 100 and n_refused > 100


# Large slices are read and then not written: a disk's room is not the point here.
PROGRAM = f"""{PEAK}
import os, sys
from llama_sidecar.converter.edit import split
from llama_sidecar.sidecars import open_main
write = os.pwrite
os.pwrite = lambda fd, data, offset: write(fd, data, offset) if len(data) < 1 << 17 else len(data)
open_main(sys.argv[1])
before = peak_bytes()
result = split(sys.argv[1], sys.argv[2])
print(result.main_bytes + result.sidecar_bytes, before, peak_bytes())
"""


def test_gigabytes_pass_through_megabytes(tmp_path: Path) -> None:
    """Nearly two gigabytes are written for a vocabulary of 150,000 tokens; the data are holes in a sparse file."""
    width, n_vocab, n_ff = 4096, 150_000, 16_384
    shapes = {"token_embd.weight": (width, n_vocab), "output_norm.weight": (width,)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_norm.weight": (width,)}
        shapes |= {f"blk.{i}.ffn_{part}.weight": (width, n_ff) for part in ("gate", "up", "down")}
    shapes |= {"blk.2.nextn.eh_proj.weight": (2 * width, width)}
    shapes |= {f"blk.2.nextn.{name}.weight": (width,) for name in ("enorm", "hnorm")}
    tensors = []
    for name, shape in shapes.items():
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.Q8_0
        n_values = int(np.prod(shape))
        n_bytes = 4 * n_values if len(shape) == 1 else n_values // 32 * 34
        tensors.append(Stored(TensorInfo(name, shape, kind, 0, n_bytes, tmp_path)))
    tokens = StringArray.of(f"token {i}" for i in range(n_vocab))
    keys: Keys = {
        "general.architecture": ((V.STRING,), "qwen35"),
        "qwen35.block_count": ((V.UINT32,), 3),
        "qwen35.nextn_predict_layers": ((V.UINT32,), 1),
        "qwen35.embedding_length": ((V.UINT32,), width),
        "tokenizer.ggml.tokens": ((V.ARRAY, V.STRING), tokens),
    }
    path = tmp_path / "whole.gguf"
    header = Header(keys, tensors)
    for step in (
        lambda: header.write_header_to_file(path),
        header.write_kv_data_to_file,
        header.write_ti_data_to_file,
    ):
        step()
    with path.open("ab") as file:
        file.truncate(file.tell() + sum(tensor.n_bytes + 32 for tensor in tensors))
    command = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    written, before, peak = map(int, run.stdout.split())
    assert written > 1.7e9
    assert peak - before < 50e6, f"{(peak - before) / 1e6:.0f} MB"
    print(f"{written / 1e9:.1f} GB with {(peak - before) / 1e6:.0f} MB beside the headers")
