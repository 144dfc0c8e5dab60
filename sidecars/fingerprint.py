"""Which trunk a file belongs to, as two hashes.

`trunk` covers what every conversion of one trunk keeps to the bit, whatever its types: the tokens and the 1-D norms.
It can be recomputed from any main file at the cost of kilobytes. `rows` covers sampled rows of the checkpoint's own
matrices; only a conversion can compute it, and it tells a fine-tune from its base where the norms were frozen.
Pure functions over tokens, arrays and bytes: knows no pair and no kind. The hashed bytes are fixed by FORMAT.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from llama_sidecar.sidecars import keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray

N_SAMPLED_TENSORS = 64
N_SAMPLED_ROWS = 4
MAX_NORM_BYTES = 256 << 20  # more is no model's norms

_U64 = struct.Struct("<Q")


def trunk_fingerprint(tokens: Sequence[str | bytes], norms: Mapping[str, NDArray[np.float32]]) -> str:
    """Hash a trunk's tokens and norms to 64 hexadecimal digits.

    `tokens` is the whole vocabulary in id order (trailing `[PADi]` entries do not count, so that padding does not change
    the hash); `norms` are F32 arrays `(n,)` by GGUF name, those for which `is_trunk_norm` is true.
    Raises ValueError where `norms` is empty or an array is not 1-D F32.

    >>> trunk_fingerprint(["a", "b"], {"output_norm.weight": np.ones(2, np.float32)})[:8]
    'd49b6796'
    """
    if not norms:
        raise ValueError("no norms to hash")
    digest = hashlib.sha256(b"llama-sidecar trunk 1\n")
    texts = _unpadded(tokens)
    digest.update(_U64.pack(len(texts)))
    for text in texts:
        digest.update(_U64.pack(len(text)) + text)
    for name in sorted(norms):
        norm = norms[name]
        if norm.dtype != np.float32 or norm.ndim != 1:
            raise ValueError(f"{name} is {norm.ndim}-D {norm.dtype}; 1-D float32 is expected")
        digest.update(_U64.pack(len(name)) + name.encode() + _U64.pack(norm.size))
        digest.update(norm.astype("<f4").tobytes())
    return digest.hexdigest()


def _unpadded(tokens: Sequence[str | bytes]) -> list[bytes]:
    if isinstance(tokens, StringArray):
        texts = list(tokens.iter_raw())
    else:
        texts = [text.encode("utf-8") if isinstance(text, str) else text for text in tokens]
    while texts and texts[-1] == b"[PAD%d]" % (len(texts) - 1):
        texts.pop()
    return texts


def is_trunk_norm(name: str, n_dims: int, n_layers: int) -> bool:
    """Whether the trunk's fingerprint covers a tensor of a main file with `n_layers` trunk layers.

    >>> is_trunk_norm("blk.3.attn_norm.weight", 1, 4), is_trunk_norm("blk.4.nextn.hnorm.weight", 1, 4)
    (True, False)
    """
    if n_dims != 1 or not name.endswith("norm.weight"):
        return False
    parts = name.split(".")
    return parts[0] != "blk" or (parts[1].isdecimal() and int(parts[1]) < n_layers)


def main_trunk_fingerprint(header: GGUFHeader, n_layers: int) -> str | None:
    """Recompute the trunk's fingerprint from a main file; None where it has no such norms or not as F32, F16 or BF16."""
    infos = [info for info in header.tensors.values() if is_trunk_norm(info.name, len(info.shape), n_layers)]
    readable = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
    if not infos or any(info.type not in readable for info in infos):
        return None
    if sum(info.n_bytes for info in infos) > MAX_NORM_BYTES:
        return None
    norms = {info.name: _as_f32(header.tensor_bytes(info.name), info.type) for info in infos}
    return trunk_fingerprint(header.strings(keys.TOKENS), norms)


def _as_f32(raw: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    if kind == GGMLQuantizationType.F32:
        return raw.view("<f4")
    if kind == GGMLQuantizationType.F16:
        return raw.view("<f2").astype(np.float32)
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def sample_tensors(names: Iterable[str]) -> list[str]:
    """Choose which of the checkpoint's trunk matrices the rows' fingerprint covers, by their Hugging Face names.

    Give it every tensor of two or more dimensions outside the head: it returns the `N_SAMPLED_TENSORS` whose names have the
    smallest SHA-256, in that order, so that the choice is spread over the layers and the same in every run.

    >>> sample_tensors(["model.embed_tokens.weight"])
    ['model.embed_tokens.weight']
    """
    return sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())[:N_SAMPLED_TENSORS]


def sample_rows(name: str, n_rows: int) -> list[int]:
    """Choose the rows of one tensor (all its dimensions but the last are rows) that the rows' fingerprint covers, ascending.

    >>> sample_rows("model.embed_tokens.weight", 1)
    [0]
    """
    draws = (hashlib.sha256(f"{name}\0{i}".encode()).digest() for i in range(N_SAMPLED_ROWS))
    return sorted({int.from_bytes(draw[:8], "little") % n_rows for draw in draws})


def rows_fingerprint(rows: Iterable[tuple[str, int, bytes]]) -> str:
    """Hash sampled rows to 64 hexadecimal digits; their order does not matter.

    Each is (Hugging Face tensor name, row, the row's bytes as the checkpoint stores them). Raises ValueError without any.

    >>> rows_fingerprint([("model.embed_tokens.weight", 0, b"abcd")])[:8]
    'cbeaadf1'
    """
    digest = hashlib.sha256(b"llama-sidecar rows 1\n")
    n = 0
    for name, row, raw in sorted(rows):
        digest.update(
            _U64.pack(len(name.encode())) + name.encode() + _U64.pack(row) + _U64.pack(len(raw)) + raw
        )
        n += 1
    if not n:
        raise ValueError("no rows to hash")
    return digest.hexdigest()
