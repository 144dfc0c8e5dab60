"""How many bytes a model takes while it runs: weights, keys and values, recurrent states, and what decodes compute in.

Caches are llama.cpp's to the byte; compute buffers are estimated from the widths of a layer's matrices, too high rather than too
low. Facts: llama.cpp's llama-kv-cache*.cpp, llama-memory-recurrent.cpp and llama-hparams.cpp. DeepSeek-V4 keeps a window of every
layer, and beside it compressed positions with the state of what is being compressed. Which sort of layer a block is, is told
from the tensors it has. Knows GGUF keys and tensor names; no file, no model, and no llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from llama_sidecar.sidecars import compact
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.keys import block_of

WINDOW_PADDING = (
    256  # cells, to which the cache of a sliding window is rounded up, and that of compressed positions
)
SPARSE = 4  # positions that one stands for where an indexer chooses among them; these overlap
STATE_BYTES = 4  # of a recurrent state's values: F32
EXPERTS = "_exps."
VOCABULARY = ("token_embd.weight", "output.weight")
OF_VOCABULARY = (
    *VOCABULARY,
    ".nextn.embed_tokens.weight",
    ".nextn.shared_head_head.weight",
)  # a head's own, too
DEFAULT_CHECKPOINTS = 4  # states of recurrent layers that a session keeps (runtime/checkpoints.py)
AUTO_DEPTH = (
    4  # the deepest that pace may choose: each rollback slot costs memory, and drafts beyond rarely stand
)
N_HEAD_BATCH = 128  # rows that an MTP head catches up with at once; a draft step itself is one row
N_MODEL_BATCH = 64  # the same of EAGLE3, DFlash and DSpark: their graphs have logits for every row
TOKEN_BYTES = (
    400  # of a vocabulary, for each token: its text and what finds it (93 MB for the 248,320 of Qwen3.5)
)
LOADED_BYTES = 24 << 20  # whatever the model: graphs, threads, what the allocator keeps


class Cache(NamedTuple):
    """Bytes of one block's cache: `kv` grows with the context, `states` (of recurrent layers, and what is being compressed) do not."""

    kv: int
    states: int


class Size(NamedTuple):
    """A tensor's: `n_out` values come of a product with it for each row, of an expert's for each expert chosen."""

    n_out: int
    n_bytes: int


@dataclass(frozen=True)
class Contents:
    """What an estimate sees of a GGUF file, one that is there or one that is planned."""

    arch: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, Size]

    @classmethod
    def of(cls, header: GGUFHeader) -> Contents:
        """Of a file's header."""
        sizes = {
            name: Size(info.shape[1] if len(info.shape) > 1 else 0, info.n_bytes)
            for name, info in header.tensors.items()
        }
        return cls(header.arch, header.keys, sizes)

    @property
    def n_bytes(self) -> int:
        """Of all weights."""
        return sum(size.n_bytes for size in self.tensors.values())

    @property
    def n_vocab(self) -> int:
        """Rows of the output; 0 where the file has none."""
        return max((self.tensors[name].n_out for name in VOCABULARY if name in self.tensors), default=0)

    def with_rows(self, n_rows: int) -> Contents:
        """With so many rows of its vocabulary alone, as a compact head has them."""

        def cut(name: str, size: Size) -> Size:
            if not name.endswith(OF_VOCABULARY) or size.n_out <= n_rows:
                return size
            return Size(n_rows, size.n_bytes * n_rows // size.n_out)

        return replace(self, tensors={name: cut(name, size) for name, size in self.tensors.items()})

    @property
    def n_trunk(self) -> int:
        """The layers before a head's blocks."""
        return _Layers(self.arch, self.keys).n_trunk

    @property
    def trained_ctx(self) -> int:
        """The model's own context length; 0 where the file does not say."""
        return _Layers(self.arch, self.keys).value("context_length", 0)

    @property
    def n_blocks(self) -> int:
        """All of them."""
        return _Layers(self.arch, self.keys).value("block_count", 0)

    @property
    def is_recurrent(self) -> bool:
        """Whether a state cannot be taken back row by row but from rollback slots."""
        return any(".ssm_" in name for name in self.tensors)


@dataclass(frozen=True)
class Context:
    """How a llama.cpp context is made: `n_ctx` cells, decodes of `n_batch` rows at most, `n_outputs` of them with logits.

    `cache_bits` are those of a key or value (16 for F16), `n_slots` the rollback slots of recurrent states.
    """

    n_ctx: int
    n_batch: int = 512
    n_outputs: int = 1
    n_slots: int = 0
    cache_bits: float = 16
    flash_attn: bool = True


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

    `keys` and tensor `names` are a GGUF's; the others are `Context`'s: a sliding window's cache holds `n_batch` rows beside the window.

    >>> layer_cache_bytes("x", {"x.block_count": 1, "x.attention.head_count_kv": 2, "x.attention.key_length": 64,
    ...                         "x.attention.value_length": 64}, ["blk.0.attn_k.weight"], n_ctx=1024)
    [524288]
    """
    context = Context(n_ctx, n_batch, n_slots=n_slots, cache_bits=cache_bits)
    return [sum(cache) for cache in layer_caches(arch, keys, names, context)]


def layer_caches(arch: str, keys: Mapping[str, Any], names: Collection[str], context: Context) -> list[Cache]:
    """The same, keys and values apart from states."""
    parts: dict[int, set[str]] = {}
    for name in names:
        if found_in := block_of(name):
            parts.setdefault(found_in[0], set()).add(found_in[1])
    layer = _Layers(arch, keys)
    n_ctx, bits, n_states = context.n_ctx, context.cache_bits, 1 + context.n_slots
    found = []
    for i in range(layer.value("block_count", 0)):
        tensors = parts.get(i, set())
        if any(part.startswith("ssm_") for part in tensors):
            found.append(Cache(0, layer.state_values() * STATE_BYTES * n_states))
        elif any(part.startswith("attn_") and part != "attn_norm.weight" for part in tensors):
            has_indexer = i < layer.n_trunk and any(part.startswith("indexer.") for part in tensors)
            values = layer.n_cells(i, n_ctx, context.n_batch) * layer.row_values(i, has_indexer)
            compressed, states = layer.compressed_values(i, n_ctx)
            found.append(
                Cache(int(values * bits / 8) + int(compressed * bits / 8), states * STATE_BYTES * n_states)
            )
        else:
            found.append(Cache(0, 0))
    return found


def compute_bytes(contents: Contents, context: Context, blocks: range | None = None) -> int:
    """About the bytes that a context's decodes compute in, with the outputs it keeps: what a layer of them gives at once.

    `blocks` are those of the file that the context runs (default: the trunk's); the bytes are those of one decode of `n_batch` rows.
    """
    layer = _Layers(contents.arch, contents.keys)
    blocks = range(layer.n_trunk) if blocks is None else blocks
    n_embd = layer.value("embedding_length", 0)
    widths, heads, is_indexed = dict.fromkeys(blocks, 0), 0, False
    for name, size in contents.tensors.items():
        i, part = block_of(name) or (-1, "")
        if i not in widths or "conv" in part:
            continue
        n_used = layer.value("expert_used_count", 1) if EXPERTS in part else 1
        widths[i] += size.n_out * n_used
        is_indexed |= part.startswith("indexer.") and i < layer.n_trunk
    caches = layer_caches(contents.arch, contents.keys, contents.tensors, context)
    attending = [i for i in blocks if i < len(caches) and caches[i].kv]
    n_cells = {
        layer.n_cells(i, context.n_ctx, context.n_batch) + layer.n_compressed(i, context.n_ctx)
        for i in attending
    }
    masks = sum(n_cells) * (2 if context.flash_attn else 4)
    if not context.flash_attn:
        heads = max((layer.value("attention.head_count", 1, i) for i in attending), default=0)
    scores = 4 * heads * max(n_cells, default=0)
    if is_indexed:
        n_scored = context.n_ctx // SPARSE if layer.is_compressed else context.n_ctx
        scores += (
            4 * (2 if context.flash_attn else 3) * n_scored
        )  # one value for a position, whatever its heads
    states = max((caches[i].states for i in blocks if i < len(caches)), default=0)
    activations = 4 * (max(widths.values(), default=0) + 2 * n_embd)
    outputs = 2 * 4 * context.n_outputs * (contents.n_vocab + 2 * n_embd)  # computed, and kept
    latent = 0
    if not context.flash_attn and layer.value("attention.key_length_mla", 0):
        latent = 4 * max(n_cells, default=0) * layer.value("attention.key_length", 0)  # their values, turned
    return context.n_batch * (masks + scores + activations) + outputs + states + latent


@dataclass(frozen=True)
class Drafter:
    """What drafts: the `blocks` of a file that its `context` runs; `own_weights` where they are not in the main file,
    `own_cache` where it does not look at the target's."""

    contents: Contents
    context: Context
    blocks: range
    own_weights: bool = True
    own_cache: bool = True


@dataclass(frozen=True)
class Memory:
    """Bytes that a model takes while it runs at a context of `n_ctx` tokens; 0 for what is not there.

    `main_cache` are keys and values of the target, `states` those of its recurrent layers with their rollback slots, `buffers` what
    decodes compute in, `other` vocabularies and bookkeeping.

    >>> Memory(n_ctx=512, main=800, main_cache=100, states=20, head=90, head_cache=10, buffers=40, other=5).total
    1065
    """

    n_ctx: int
    main: int
    main_cache: int
    states: int
    head: int
    head_cache: int
    buffers: int
    other: int

    @property
    def total(self) -> int:
        return sum(int(getattr(self, field.name)) for field in fields(self)) - self.n_ctx

    @property
    def session(self) -> int:
        """Of these, what each further session takes."""
        return self.main_cache + self.states + self.head_cache + self.buffers

    def to_json(self) -> dict[str, int]:
        """Ready for `json.dumps`."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "total": self.total}


def memory(
    main: Contents | None,
    context: Context,
    drafter: Drafter | None = None,
    *,
    two_contexts: bool = False,
    n_checkpoints: int = 0,
) -> Memory:
    """What a main model, its session and what drafts for it take.

    Args:
        main: the main file; None for a drafter alone.
        context: the target's.
        two_contexts: of a recurrent target, another context beside it, of one row and without rollback slots: plain rounds
            are cheaper there.
        n_checkpoints: copies of the states that are kept.

    >>> block = {"x.block_count": 1, "x.attention.head_count_kv": 2, "x.attention.key_length": 64,
    ...          "x.attention.value_length": 64}
    >>> found = memory(Contents("x", block, {"blk.0.attn_k.weight": Size(128, 4096)}), Context(n_ctx=1024))
    >>> found.main, found.main_cache
    (4096, 524288)
    """
    kv = states = main_bytes = buffers = head = head_cache = other = 0
    if main is not None:
        plain = Context(context.n_ctx, 1, 1, 0, context.cache_bits, context.flash_attn)
        contexts = [context, plain] if two_contexts and main.is_recurrent else [context]
        caches = [_of_blocks(main, range(main.n_trunk), one) for one in contexts]
        kv = sum(cache.kv for cache in caches)
        states = sum(cache.states for cache in caches)
        if n_checkpoints:
            states += n_checkpoints * _of_blocks(main, range(main.n_trunk), plain).states
        unused = 0 if drafter and not drafter.own_weights else _head_bytes(main)
        main_bytes = main.n_bytes - unused
        buffers = sum(compute_bytes(main, one) for one in contexts)
        other = LOADED_BYTES + TOKEN_BYTES * main.n_vocab
    if drafter is not None:
        if drafter.own_weights:
            head, other = drafter.contents.n_bytes, other + TOKEN_BYTES * drafter.contents.n_vocab
        if drafter.own_cache:
            cache = _of_blocks(drafter.contents, drafter.blocks, drafter.context)
            head_cache = cache.kv + cache.states * (1 + n_checkpoints)
        buffers += compute_bytes(drafter.contents, drafter.context, drafter.blocks)
    return Memory(context.n_ctx, main_bytes, kv, states, head, head_cache, buffers, other)


def pair_memory(
    main: Contents | None, head: Contents | None, n_ctx: int, *, is_head: bool = True, embedded: bool = False
) -> Memory:
    """What a pair of files takes with the runtime's defaults: caches in F16, and as many drafts a round as it tries at most.

    `is_head`: what drafts is an MTP head, `embedded` in the main file or in one of its own, of which the runtime then cuts the vocabulary.
    """
    target = Context(n_ctx, n_outputs=AUTO_DEPTH + 1, n_slots=AUTO_DEPTH if head else 0)
    drafter = None
    if head:
        n_rows = compact.default_n_rows(head.n_vocab) if is_head and head.n_vocab else None
        head = head.with_rows(n_rows) if n_rows and not embedded else head
        context = Context(n_ctx, n_batch=N_HEAD_BATCH if is_head else N_MODEL_BATCH)
        blocks = range(head.n_trunk if is_head else 0, head.n_blocks)
        drafter = Drafter(head, context, blocks, own_weights=not embedded)
    return memory(main, target, drafter, two_contexts=drafter is not None, n_checkpoints=DEFAULT_CHECKPOINTS)


def _of_blocks(contents: Contents, blocks: range, context: Context) -> Cache:
    found = layer_caches(contents.arch, contents.keys, contents.tensors, context)
    chosen = [found[i] for i in blocks if i < len(found)]
    return Cache(sum(cache.kv for cache in chosen), sum(cache.states for cache in chosen))


def _head_bytes(main: Contents) -> int:
    """Of the blocks behind the trunk, which nothing reads that does not draft with them."""
    numbered = ((block_of(name), size) for name, size in main.tensors.items())
    return sum(size.n_bytes for block, size in numbered if block and block[0] >= main.n_trunk)


def _padded(n_cells: int) -> int:
    return -(-n_cells // WINDOW_PADDING) * WINDOW_PADDING


class _Layers:
    """What the keys say of each layer."""

    def __init__(self, arch: str, keys: Mapping[str, Any]):
        self._arch, self._keys = arch, keys

    def value(self, name: str, default: int, i: int = 0) -> int:
        """A key's value; of a list that has one for each layer, layer `i`'s."""
        found = self._keys.get(f"{self._arch}.{name}", default)
        if isinstance(found, np.ndarray):
            found = found[i] if i < len(found) else default
        is_number = isinstance(found, (int, float, np.number, np.bool_)) and math.isfinite(found)
        return int(found) if is_number else default  # llama.cpp says what else it is

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

    def compressed_values(self, i: int, n_ctx: int) -> tuple[int, int]:
        """Values that a layer keeps of compressed positions, its indexer's with them, and of those that are not yet compressed."""
        ratio = self.value("attention.compress_ratios", 0, i)
        if not ratio:
            return 0, 0
        n_cells = self.n_compressed(i, n_ctx)
        widths = [self.value("attention.key_length", 0)]
        if ratio == SPARSE:
            widths.append(self.value("attention.indexer.key_length", 0))
        overlap = 2 if ratio == SPARSE else 1
        return n_cells * sum(widths), 2 * (overlap * ratio) * (overlap * sum(widths))

    def n_compressed(self, i: int, n_ctx: int) -> int:
        """Cells of a layer's compressed positions."""
        ratio = self.value("attention.compress_ratios", 0, i)
        return _padded(-(-n_ctx // ratio)) if ratio else 0

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
