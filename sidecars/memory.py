"""How many bytes llama.cpp's caches take: keys and values of attention layers, states of recurrent ones.

Facts: llama.cpp's llama-kv-cache*.cpp, llama-memory-recurrent.cpp and llama-hparams.cpp. DeepSeek-V4 keeps a window of every
layer, and beside it compressed positions with the state of what is being compressed. Which sort of layer a block is, is told
from the tensors it has. Knows GGUF keys and tensor names; no file, no model, and no llama.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

WINDOW_PADDING = (
    256  # cells, to which the cache of a sliding window is rounded up, and that of compressed positions
)
SPARSE = 4  # positions that one stands for where an indexer chooses among them; these overlap
STATE_BYTES = 4  # of a recurrent state's values: F32


def layer_cache_bytes(
    arch: str,
    keys: Mapping[str, Any],
    names: Collection[str],
    *,
    n_ctx: int,
    cache_bits: float = 16,
    n_slots: int = 0,
    n_batch: int = 512,
) -> list[int]:
    """Bytes that each block's cache takes, `block_count` of them; 0 for a block that is not in the file.

    `keys` and tensor `names` are a GGUF's; `cache_bits` are those of a key or value (16 for F16), `n_slots` the rollback slots of
    recurrent states, `n_batch` the rows of one decode, which a sliding window's cache holds beside the window.

    >>> layer_cache_bytes("x", {"x.block_count": 1, "x.attention.head_count_kv": 2, "x.attention.key_length": 64,
    ...                         "x.attention.value_length": 64}, ["blk.0.attn_k.weight"], n_ctx=1024)
    [524288]
    """
    parts: dict[int, set[str]] = {}
    for name in names:
        if name.startswith("blk."):
            _, number, part = name.split(".", 2)
            parts.setdefault(int(number), set()).add(part)
    layer = _Layers(arch, keys)
    n_blocks = layer.value("block_count", 0)
    found = []
    for i in range(n_blocks):
        tensors = parts.get(i, set())
        if any(part.startswith("ssm_") for part in tensors):
            found.append(layer.state_values() * STATE_BYTES * (1 + n_slots))
        elif any(part.startswith("attn_") and part != "attn_norm.weight" for part in tensors):
            has_indexer = i < layer.n_trunk and any(part.startswith("indexer.") for part in tensors)
            found.append(
                int(layer.n_cells(i, n_ctx, n_batch) * layer.row_values(i, has_indexer) * cache_bits / 8)
                + layer.compressed_bytes(i, n_ctx, cache_bits, n_slots)
            )
        else:
            found.append(0)
    return found


def _padded(n_cells: int) -> int:
    return -(-n_cells // WINDOW_PADDING) * WINDOW_PADDING


class _Layers:
    """What the keys say of each layer."""

    def __init__(self, arch: str, keys: Mapping[str, Any]):
        self._arch, self._keys = arch, keys

    def value(self, name: str, default: int, i: int = 0) -> int:
        """A key's value; of a list that has one for each layer, layer `i`'s."""
        found = self._keys.get(f"{self._arch}.{name}", default)
        if hasattr(found, "__len__"):
            return int(found[i]) if i < len(found) else default
        return int(found)

    def n_cells(self, i: int, n_ctx: int, n_batch: int) -> int:
        if not self.is_windowed(i):
            return n_ctx
        return _padded(min(n_ctx, self.value("attention.sliding_window", 0) + n_batch))

    def is_windowed(self, i: int) -> bool:
        return self.is_compressed or bool(self.value("attention.sliding_window_pattern", 0, i))

    @property
    def n_trunk(self) -> int:
        """The layers before a head's block, which attends to all positions, without an indexer."""
        return self.value("block_count", 0) - self.value("nextn_predict_layers", 0)

    @property
    def is_compressed(self) -> bool:
        """Whether beside its window a layer may keep compressed positions: DeepSeek-V4."""
        return f"{self._arch}.attention.compress_ratios" in self._keys

    def compressed_bytes(self, i: int, n_ctx: int, cache_bits: float, n_slots: int) -> int:
        """What a layer keeps of compressed positions, its indexer's with them, and of those that are not yet compressed."""
        ratio = self.value("attention.compress_ratios", 0, i)
        if not ratio:
            return 0
        widths = [self.value("attention.key_length", 0)]
        if ratio == SPARSE:
            widths.append(self.value("attention.indexer.key_length", 0))
        n_cells = _padded(-(-n_ctx // ratio))
        overlap = 2 if ratio == SPARSE else 1
        state = 2 * (overlap * ratio) * (overlap * sum(widths)) * STATE_BYTES * (1 + n_slots)
        return int(n_cells * sum(widths) * cache_bits / 8) + state

    def row_values(self, i: int, has_indexer: bool) -> int:
        """Values that one token's keys and values have. Of latent attention only the keys are kept: the values are a part of them."""
        n_heads = self.value("attention.head_count", 1, i)
        width = self.value("embedding_length", 0) // max(1, n_heads)
        swa = "_swa" if self.is_windowed(i) else ""
        key, value = (
            self.value(f"attention.{part}_length{swa}", self.value(f"attention.{part}_length", width))
            for part in ("key", "value")
        )
        serve_as_values = self.value("attention.key_length_mla", 0) > 0 or (
            self.is_compressed and i < self.n_trunk
        )
        row = self.value("attention.head_count_kv", n_heads, i) * (key if serve_as_values else key + value)
        if self.is_compressed or not has_indexer:  # which then looks at compressed positions alone
            return row
        return row + self.value("attention.indexer.key_length", 0)

    def state_values(self) -> int:
        """Values of one sequence's state: the last inputs of the convolution, and the state itself."""
        kernel = self.value("ssm.conv_kernel", 1) - 1
        if head := self.value("kda.head_dim", 0):
            inner = self.value("attention.head_count", 1) * head
            return 3 * kernel * inner + inner * head
        inner, state = self.value("ssm.inner_size", 0), self.value("ssm.state_size", 0)
        return kernel * (inner + 2 * self.value("ssm.group_count", 0) * state) + state * inner
