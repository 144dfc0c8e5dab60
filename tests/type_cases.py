"""What the tests of tensor types share with the script that stores llama-quantize's answers: checkpoints with enough layers
for every rule that goes by layer, and an importance matrix for them.

`full` has rows of whole K-quant blocks, `narrow` has not, and one of 80 values, which no block fits; `eight` has the number
of experts that llama-quantize has rules for. The bytes of `short` are compared too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from checkpoints import make_checkpoint, random_values, tiny_config, tiny_tensors

from llama_sidecar.converter.families import families
from llama_sidecar.sidecars import read_header


def _layers(n: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": n,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n)],
    }


_WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
_NARROW: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 80, "num_key_value_heads": 1}
_DENSE = _WIDE | {"intermediate_size": 256}
_EXPERTS = _WIDE | {"moe_intermediate_size": 64}
# (family, name) -> (variant of the family, what of its configuration differs)
CASES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("qwen35", "full"): ("tied", _layers(16) | _DENSE),
    ("qwen35", "narrow"): ("untied", _layers(16) | _NARROW),
    ("qwen35", "short"): ("untied", _layers(8) | _DENSE),
    ("qwen35moe", "full"): ("single", _layers(16) | _EXPERTS | {"num_key_value_heads": 1}),
    ("qwen35moe", "eight"): ("single", _layers(16) | _EXPERTS | {"num_experts": 8}),
    ("qwen35moe", "short"): ("single", _layers(8) | _EXPERTS),
}
WITH_BYTES = [case for case in CASES if case[1] == "short"]


def case_config(family: str, name: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The configuration of a case, and the optional tensors it has."""
    variant, differences = CASES[family, name]
    return tiny_config(family, variant) | differences, families()[family].TINY[variant][1]


def make_case(parent: Path, family: str, name: str) -> Path:
    """Writes the checkpoint folder of a case."""
    variant, (config, _) = CASES[family, name][0], case_config(family, name)
    tensors = tiny_tensors(family, variant, config=config)
    return make_checkpoint(parent, family, variant, tensors=tensors, config=config, name=f"{family}-{name}")


def importances(main: Path) -> Iterator[tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """For each matrix of a main file's blocks: name, sums (n_matrices, n_cols), and counts (n_matrices,); 0 for an expert."""
    for name, info in read_header(main).tensors.items():
        if (
            name.startswith("blk.")
            and name.endswith(".weight")
            and len(info.shape) > 1
            and "_norm" not in name
        ):
            n_cols, _, n_matrices = (*info.shape, 1)[:3]
            sums = random_values(f"{name} sums", (n_matrices, n_cols)) ** 2 * 1000
            counts = np.full(n_matrices, 37, np.float32)
            counts[1:2] = 0
            yield name, sums, counts


def write_imatrix(path: Path, main: Path, *, legacy: bool = False) -> Path:
    """An importance matrix for a main file in one of llama-imatrix's formats, random but the same on every machine."""
    if legacy:
        entries = [
            (n.encode(), (s / np.maximum(c, 1)[:, None] * 3).astype("<f4")) for n, s, c in importances(main)
        ]
        with path.open("wb") as file:
            file.write(np.int32(len(entries)).tobytes())
            for name, values in entries:
                file.write(np.int32(len(name)).tobytes() + name)
                file.write(np.array([3, values.size], "<i4").tobytes() + values.tobytes())
            file.write(np.array([5, 8], "<i4").tobytes() + b"text.txt")
        return path
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 5)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, sums, counts in importances(main):
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", counts.reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def types_of(path: Path) -> dict[str, str]:
    """The type of every tensor of a file that is not F32."""
    tensors = read_header(path).tensors.items()
    return {name: info.type_name for name, info in sorted(tensors) if info.type_name != "F32"}


def digest_of(path: Path) -> str:
    """A hash of the bytes of all quantised matrices in a file's blocks."""
    header, digest = read_header(path), sha256()
    for name, type_name in types_of(path).items():
        if name.startswith("blk.") and type_name not in ("F16", "BF16"):
            digest.update(f"{name} {type_name} ".encode() + header.tensor_bytes(name).tobytes())
    return digest.hexdigest()[:16]


def quantize(program: Path, source: Path, out: Path, type_name: str, imatrix: Path | None = None) -> Path:
    """Runs llama-quantize on a file. Raises CalledProcessError."""
    options = ["--imatrix", imatrix] if imatrix else []
    subprocess.run([program, *options, source, out, type_name, "1"], check=True, capture_output=True)
    return out
