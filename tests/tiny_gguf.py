"""Tiny main models and sidecars for the tests of sidecars/, made with gguf's writer; random weights, loadable by nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

WIDTH, N_VOCAB, N_LAYERS = 32, 16, 2
TOKENS = [f"t{i}" for i in range(N_VOCAB)]


def write(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, Any], type: str = "F32") -> Path:
    """Write a GGUF: ints as U32, floats as F32, lists as arrays; matrices of blocks as `type`, all else F32 (arrays of integers as they are)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_array(name, value)
    for name, value in tensors.items():
        if type != "F32" and value.ndim > 1 and name.startswith("blk."):
            writer.add_tensor(name, gguf.quantize(value, T[type]), raw_dtype=T[type])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Random F32 of a torch shape (rows first)."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def vocabulary(tokens: list[str]) -> dict[str, Any]:
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}


def head_tensors(i: int = N_LAYERS, width: int = WIDTH) -> dict[str, Any]:
    return {
        f"blk.{i}.attn_norm.weight": floats(width),
        f"blk.{i}.attn_q.weight": floats(width, width),
        f"blk.{i}.nextn.eh_proj.weight": floats(width, 2 * width),
        f"blk.{i}.nextn.enorm.weight": floats(width),
        f"blk.{i}.nextn.hnorm.weight": floats(width),
    }


def main_keys(
    head: bool = False, arch: str = "qwen35", width: int = WIDTH, tokens: list[str] = TOKENS
) -> dict[str, Any]:
    keys = {f"{arch}.block_count": N_LAYERS, f"{arch}.embedding_length": width, **vocabulary(tokens)}
    return keys | ({f"{arch}.block_count": N_LAYERS + 1, f"{arch}.nextn_predict_layers": 1} if head else {})


def main_tensors(
    head: bool = False, width: int = WIDTH, n_vocab: int = N_VOCAB, seed: int = 0
) -> dict[str, Any]:
    """`seed` makes another trunk: other norms and matrices."""
    tensors = {
        "token_embd.weight": floats(n_vocab, width, seed=seed),
        "output_norm.weight": floats(width, seed=seed),
    }
    for i in range(N_LAYERS):
        tensors[f"blk.{i}.attn_norm.weight"] = floats(width, seed=seed + 10 * i)
        tensors[f"blk.{i}.attn_q.weight"] = floats(width, width, seed=seed + 10 * i)
    return tensors | (head_tensors(width=width) if head else {})


def main(
    path: Path, *, head: bool = False, type: str = "F32", seed: int = 0, keys: Any = None, **same: Any
) -> Path:
    """A main model; `same` (arch, width, tokens) goes to its keys and tensors."""
    n_vocab, width = len(same.get("tokens", TOKENS)), same.get("width", WIDTH)
    tensors = main_tensors(head, width=width, n_vocab=n_vocab, seed=seed)
    return write(path, same.get("arch", "qwen35"), main_keys(head, **same) | (keys or {}), tensors, type)


def mtp_keys(arch: str = "qwen35", width: int = WIDTH, tokens: list[str] = TOKENS) -> dict[str, Any]:
    return main_keys(True, arch, width, tokens)


def mtp_tensors(width: int = WIDTH, n_vocab: int = N_VOCAB) -> dict[str, Any]:
    shared = {"token_embd.weight": floats(n_vocab, width), "output_norm.weight": floats(width)}
    return shared | head_tensors(width=width)


def assistant_keys() -> dict[str, Any]:
    arch = "gemma4-assistant"
    keys = {f"{arch}.block_count": 1, f"{arch}.embedding_length": 16, f"{arch}.embedding_length_out": WIDTH}
    return keys | vocabulary(TOKENS)


def assistant_tensors() -> dict[str, Any]:
    return {
        "token_embd.weight": floats(N_VOCAB, 16),
        "output_norm.weight": floats(16),
        "nextn.pre_projection.weight": floats(16, 2 * WIDTH),
        "nextn.post_projection.weight": floats(WIDTH, 16),
        "blk.0.attn_norm.weight": floats(16),
    }


def dflash_keys() -> dict[str, Any]:
    keys = {"dflash.block_count": 1, "dflash.embedding_length": WIDTH, "dflash.block_size": 8}
    return keys | {"dflash.target_layers": [1, 2], "tokenizer.ggml.mask_token_id": 3} | vocabulary(TOKENS)


def dflash_tensors() -> dict[str, Any]:
    return {
        "fc.weight": floats(WIDTH, 2 * WIDTH),
        "enc.output_norm.weight": floats(WIDTH),
        "output_norm.weight": floats(WIDTH),
        "blk.0.attn_norm.weight": floats(WIDTH),
        "blk.0.attn_q.weight": floats(WIDTH, WIDTH),
    }


def dspark_tensors() -> dict[str, Any]:
    return dflash_tensors() | {"markov_w1.weight": floats(N_VOCAB, 4), "markov_w2.weight": floats(N_VOCAB, 4)}


def eagle3_keys() -> dict[str, Any]:
    keys = {"eagle3.block_count": 1, "eagle3.embedding_length": 16, "eagle3.target_hidden_size": WIDTH}
    return keys | {"eagle3.target_layers": [0, 1, 2]} | vocabulary(TOKENS)


def eagle3_tensors() -> dict[str, Any]:
    norms = {f"blk.0.{name}.weight": floats(16) for name in ("attn_norm", "attn_norm_2", "ffn_norm")}
    own = {"token_embd.weight": floats(N_VOCAB, 16), "output.weight": floats(8, 16), "d2t": np.arange(8)}
    return {"fc.weight": floats(16, 3 * WIDTH), "output_norm.weight": floats(16)} | own | norms


SIDECARS: dict[str, tuple[str, str, Any, Any]] = {  # name: kind, architecture, keys, tensors
    "mtp": ("mtp", "qwen35", mtp_keys, mtp_tensors),
    "assistant": ("mtp", "gemma4-assistant", assistant_keys, assistant_tensors),
    "dspark": ("dspark", "dflash", dflash_keys, dspark_tensors),
    "dflash": ("dflash", "dflash", dflash_keys, dflash_tensors),
    "eagle3": ("eagle3", "eagle3", eagle3_keys, eagle3_tensors),
}


def sidecar(
    path: Path, name: str = "mtp", *, type: str = "F32", keys: Any = None, tensors: Any = None
) -> Path:
    """A sidecar by its name in SIDECARS, with keys and tensors added or (None) left out."""
    _, arch, base_keys, base_tensors = SIDECARS[name]
    changed = base_keys() | (keys or {}), base_tensors() | (tensors or {})
    kept_keys, kept_tensors = ({k: v for k, v in values.items() if v is not None} for values in changed)
    return write(path, arch, kept_keys, kept_tensors, type)
