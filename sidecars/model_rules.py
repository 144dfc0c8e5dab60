"""What a model's keys and tensors must say for llama.cpp to come back from loading it: the rules that it asserts, or forgets.

llama.cpp answers many broken files with an error of its own. Of others it ends the process (an assertion, a division by zero, a
null pointer), and those are refused here, before it sees them: sizes and counts, rotary positions, experts, the forms of
blocks, tensor types, and what the vocabulary's byte tokens and special ids are. Facts: llama.cpp's src/llama-model.cpp,
llama-vocab.cpp and models/*.cpp, ggml's CPU operations, and scripts/dev/fuzz/models.py, which found most of them. Knows rules
for every architecture; of a single one only what head_forms.py says. Whether a tensor has the shape that its keys call
for llama.cpp says itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from llama_sidecar.sidecars import errors, keys
from llama_sidecar.sidecars.gguf_header import GGUFHeader, StringArray
from llama_sidecar.sidecars.head_forms import (
    BOUNDED_DECAY,
    EQUAL_LENGTHS,
    FIRST_WITHOUT_WINDOW,
    GATED_DELTA,
    HEAD_PARTS,
    LATENT_HEADS,
    ONE_KV_HEAD,
    ROTATED_WHOLE,
    SECTIONED,
    UNROTATED,
    UNSCALED_HEADS,
    WINDOW_IF_SAID,
    WINDOW_PERIODS,
)
from llama_sidecar.sidecars.kind import MAX_BLOCKS

MAX_EXPERTS = 1024  # llama.cpp's limit
MAX_WIDTH = 1 << 20  # of anything that is a row: the widest published model has 16,384
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
N_GATINGS = 5  # ways that an expert's score is computed
BYTE, BYTE_TEXT = 6, re.compile(rb"<0x[0-9A-Fa-f]{2}>")
TOKENIZERS = ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace")

# {arch}.NAME: the least and the most of it, one for all layers or one for each.
RANGES: Mapping[str, tuple[int, int]] = {
    "block_count": (1, MAX_BLOCKS),
    "nextn_predict_layers": (0, MAX_BLOCKS),
    "context_length": (1, 2**31 - 1),
    "embedding_length": (1, MAX_WIDTH),
    "embedding_length_out": (1, MAX_WIDTH),
    "feed_forward_length": (0, 1 << 24),
    "expert_feed_forward_length": (0, 1 << 24),
    "expert_shared_feed_forward_length": (0, 1 << 24),
    "expert_count": (0, MAX_EXPERTS),
    "expert_used_count": (0, MAX_EXPERTS),
    "expert_group_count": (0, MAX_EXPERTS),
    "expert_group_used_count": (0, MAX_EXPERTS),
    "expert_gating_func": (0, N_GATINGS - 1),
    "attention.head_count": (0, 1 << 16),
    "attention.head_count_kv": (0, 1 << 16),
    "attention.key_length": (1, 1 << 16),
    "attention.value_length": (1, 1 << 16),
    "attention.key_length_swa": (1, 1 << 16),
    "attention.value_length_swa": (1, 1 << 16),
    "attention.key_length_mla": (0, 1 << 16),
    "attention.value_length_mla": (0, 1 << 16),
    "attention.kv_lora_rank": (0, MAX_WIDTH),
    "attention.q_lora_rank": (0, MAX_WIDTH),
    "attention.sliding_window": (0, 2**31 - 1 - (1 << 20)),
    "rope.dimension_count": (0, 1 << 16),
    "rope.dimension_count_swa": (0, 1 << 16),
    "full_attention_interval": (1, 2**31 - 1),
    "interleave_moe_layer_step": (1, 2**31 - 1),
    "ssm.conv_kernel": (1, 1 << 10),
    "ssm.inner_size": (0, MAX_WIDTH),
    "ssm.state_size": (0, MAX_WIDTH),
    "ssm.group_count": (0, 1 << 16),
    "ssm.time_step_rank": (0, 1 << 16),
}


def check_model(header: GGUFHeader) -> None:
    """Check the keys and tensors of a main file or a sidecar against the rules that llama.cpp does not come back from.

    A key that is absent breaks no rule: llama.cpp has a default for it, or says which one it misses. Raises WrongKey,
    BadTensorType or MissingTensors.

    >>> check_model(read_model("NAME-Q8_0.gguf"))  # doctest: +SKIP
    """
    sizes = _Sizes(header)
    for check in (
        _check_ranges,
        _check_heads,
        _check_shared,
        _check_latent,
        _check_rope,
        _check_recurrent,
        _check_windows,
        _check_experts,
    ):
        check(sizes)
    _check_numbers(header)
    _check_decay(header)
    _check_tensor_types(header)
    _check_blocks(header)


def check_vocabulary(header: GGUFHeader) -> None:
    """Check what every text goes through: the tokenizer's name, byte tokens, and the ids that texts begin and end with.

    Raises WrongKey.
    """
    model = header.keys.get(keys.TOKENIZER_MODEL)
    if model is None or keys.TOKENS not in header.keys:
        return
    if not isinstance(model, str) or model not in TOKENIZERS:
        raise _wrong(header, keys.TOKENIZER_MODEL, _said(model), f"one of {', '.join(TOKENIZERS)}")
    tokens = header.strings(keys.TOKENS)
    _check_bytes(header, model, tokens)
    _check_ends(header, model, len(tokens))


def _wrong(header: GGUFHeader, name: str, found: object, expected: str) -> errors.WrongKey:
    return errors.WrongKey(f"{header.path}: {name} is {found}; {expected} is expected")


# Sizes


class _Sizes:
    """The whole numbers among a model's keys, one for all layers or one for each; absent ones are None."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header, self.arch = header, header.arch
        self.n_layers = header.uint(keys.BLOCK_COUNT, default=0)

    def name(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def all(self, key: str) -> list[int] | None:
        """Every value of a key. Raises WrongKey where it is no whole number or array of such."""
        value = self.header.keys.get(self.name(key))
        if value is None:
            return None
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            return [int(one) for one in value]
        if isinstance(value, int) and not isinstance(value, bool):
            return [value]
        raise _wrong(self.header, self.name(key), _said(value), "a whole number")

    def at(self, key: str, layer: int = 0, default: int | None = None) -> int | None:
        """A layer's value; the default where the key is absent or its array too short, which llama.cpp refuses itself."""
        found = self.all(key)
        if found is None:
            return default
        return found[0] if len(found) == 1 else found[layer] if layer < len(found) else default

    def fail(self, key: str, found: object, expected: str) -> errors.WrongKey:
        return _wrong(self.header, self.name(key), found, expected)


def _said(value: object) -> str:
    text = f"an array of {len(value)}" if isinstance(value, (np.ndarray, StringArray, list)) else repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _check_ranges(sizes: _Sizes) -> None:
    for key, (least, most) in RANGES.items():
        for value in sizes.all(key) or ():
            if not least <= value <= most:
                raise sizes.fail(key, value, f"{least:,} to {most:,}")


def _check_heads(sizes: _Sizes) -> None:
    """Each key-value head serves the same number of query heads."""
    for i in range(sizes.n_layers):
        n_heads = sizes.at("attention.head_count", i)
        n_kv = sizes.at("attention.head_count_kv", i, n_heads)
        if n_heads and n_kv and n_heads % n_kv:
            raise sizes.fail(
                "attention.head_count_kv", n_kv, f"a divisor of the {n_heads} heads of layer {i}"
            )
        if n_kv and n_heads == 0:
            raise sizes.fail(
                "attention.head_count", n_heads, f"at least the {n_kv} key-value heads of layer {i}"
            )


def _check_shared(sizes: _Sizes) -> None:
    """Layers that share earlier layers' keys and values leave two that have their own."""
    shared = sizes.at("attention.shared_kv_layers", default=0) or 0
    if shared and shared > sizes.n_layers - 2:
        raise sizes.fail("attention.shared_kv_layers", shared, f"at most {max(0, sizes.n_layers - 2)}")


def _head_length(sizes: _Sizes, part: str, swa: str = "") -> int:
    """The length of a head's keys or values; 0 where there are no heads."""
    n_heads = sizes.at("attention.head_count") or 0
    width = sizes.at("embedding_length", default=0) or 0
    full = sizes.at(f"attention.{part}_length", default=width // n_heads if n_heads else 0)
    return (sizes.at(f"attention.{part}_length{swa}", default=full) if swa else full) or 0


def _check_latent(sizes: _Sizes) -> None:
    """Latent attention keeps one compressed row and the rotated part of a key, of which every head makes keys of its own."""
    for_heads, rank = sizes.at("attention.key_length_mla"), sizes.at("attention.kv_lora_rank")
    is_latent = bool(for_heads and rank)
    n_kv = max(sizes.all("attention.head_count_kv") or sizes.all("attention.head_count") or [1])
    if n_kv != 1 and (is_latent or sizes.arch in ONE_KV_HEAD):
        raise sizes.fail("attention.head_count_kv", n_kv, "1 (attention is latent)")
    if not for_heads or not rank:
        return
    rotated = sizes.at("rope.dimension_count", default=0) or 0
    if rotated >= for_heads:
        raise sizes.fail("rope.dimension_count", rotated, f"less than the {for_heads} of a key")
    key_length = _head_length(sizes, "key")
    if key_length != rank + rotated:
        raise sizes.fail(
            "attention.key_length", key_length, f"{rank + rotated} (kv_lora_rank {rank}, {rotated} rotated)"
        )


def _check_rope(sizes: _Sizes) -> None:
    for swa in ("", "_swa"):
        key_length, value_length = _head_length(sizes, "key", swa), _head_length(sizes, "value", swa)
        full = sizes.at("rope.dimension_count", default=key_length)
        rotated = sizes.at(f"rope.dimension_count{swa}", default=full) if swa else full
        if not key_length or rotated is None:
            continue
        name = f"rope.dimension_count{swa if sizes.at(f'rope.dimension_count{swa}') is not None else ''}"
        if rotated % 2 or (not rotated and sizes.arch not in UNROTATED):
            raise sizes.fail(name, rotated, "an even number above 0")
        if rotated > key_length:
            raise sizes.fail(name, rotated, f"at most the {key_length} of a key")
        if not swa and sizes.arch in ROTATED_WHOLE and rotated != value_length:
            raise sizes.fail(name, rotated, f"{value_length} (this architecture rotates whole heads)")
        if sizes.arch in EQUAL_LENGTHS and key_length != value_length:
            raise sizes.fail(
                f"attention.key_length{swa}", key_length, f"{value_length}, the length of a value"
            )
    indexed = sizes.at("attention.indexer.key_length")
    rotated = sizes.at("rope.dimension_count")
    if indexed and rotated and rotated > indexed:
        raise sizes.fail("attention.indexer.key_length", indexed, f"at least the {rotated} that are rotated")
    sections = sizes.all("rope.dimension_sections")
    if sections is not None:
        least, most = int(sizes.arch in SECTIONED), _head_length(sizes, "key") or MAX_WIDTH
        if min(sections) < 0 or not least <= sum(sections) <= most:
            raise sizes.fail("rope.dimension_sections", sections, f"sizes whose sum is {least} to {most}")
    scaling = sizes.header.keys.get(sizes.name("rope.scaling.type"))
    if scaling is not None and not (isinstance(scaling, str) and scaling in ROPE_SCALINGS):
        raise sizes.fail("rope.scaling.type", _said(scaling), f"one of {', '.join(ROPE_SCALINGS)}")


def _check_windows(sizes: _Sizes) -> None:
    """Where layers may attend to a window alone, one at least does."""
    period = WINDOW_PERIODS.get(sizes.arch)
    if period is None or (
        sizes.arch in WINDOW_IF_SAID and not sizes.at("attention.sliding_window", default=0)
    ):
        return
    said = sizes.header.keys.get(sizes.name("attention.sliding_window_pattern"), period)
    if isinstance(said, np.ndarray):
        n_windowed = int(np.count_nonzero(said[: sizes.n_layers])) if said.dtype.kind in "biu" else 1
    elif period and isinstance(said, int):
        n_trunk = sizes.n_layers - (sizes.at("nextn_predict_layers", default=0) or 0)
        n_windowed = n_trunk - (sizes.arch in FIRST_WITHOUT_WINDOW and said > 0) if said != 1 else 0
    else:
        return  # llama.cpp says itself that it wants an array
    if n_windowed < 1:
        raise sizes.fail("attention.sliding_window_pattern", _said(said), "at least one layer with a window")


def _check_recurrent(sizes: _Sizes) -> None:
    """Gated-delta layers: the inner size is that of the heads, and each group of keys serves as many of them."""
    if sizes.arch not in GATED_DELTA:
        return
    inner, state = sizes.at("ssm.inner_size"), sizes.at("ssm.state_size")
    n_heads, n_groups = sizes.at("ssm.time_step_rank"), sizes.at("ssm.group_count")
    if inner is None or state is None or n_heads is None or n_groups is None:
        return
    if inner != state * n_heads or not inner:
        raise sizes.fail(
            "ssm.inner_size", inner, f"{state * n_heads:,} (state_size {state}, time_step_rank {n_heads})"
        )
    if not n_groups or n_heads % n_groups:
        raise sizes.fail("ssm.group_count", n_groups, f"a divisor of time_step_rank, {n_heads},")


def _check_experts(sizes: _Sizes) -> None:
    n_experts = sizes.at("expert_count", default=0) or 0
    used = sizes.all("expert_used_count") or [0]
    if sizes.arch in ("hunyuan-dense", "hunyuan_vl") and n_experts <= 1:
        return  # which then reads neither
    if n_experts and not 1 <= max(used) <= n_experts:
        raise sizes.fail("expert_used_count", max(used), f"1 to the {n_experts} experts there are")
    if not n_experts and max(used):
        raise sizes.fail("expert_used_count", max(used), "0, since the model declares no experts,")
    n_groups = sizes.at("expert_group_count", default=0) or 0
    if not n_experts and n_groups:
        raise sizes.fail("expert_group_count", n_groups, "0, since the model declares no experts,")
    if n_groups and (n_groups >= n_experts or n_experts % n_groups):
        raise sizes.fail("expert_group_count", n_groups, f"a divisor of the {n_experts} experts")
    n_used = sizes.at("expert_group_used_count", default=0) or 0
    if n_groups > 1 and not 0 < n_used < n_groups:
        raise sizes.fail("expert_group_used_count", n_used, f"1 to {n_groups - 1}")


def _check_numbers(header: GGUFHeader) -> None:
    """Fractions that are none, and the constants of norms."""
    for name in map(header.key, keys.EPSILONS):
        value = header.keys.get(name, 0.0)
        if not (isinstance(value, float) and value >= 0):
            raise _wrong(header, name, _said(value), "a number of at least 0")
    prefix = f"{header.arch}."
    for name, value in header.keys.items():
        if name.startswith(prefix) and isinstance(value, float) and not math.isfinite(value):
            raise _wrong(header, name, value, "a number")


def _check_decay(header: GGUFHeader) -> None:
    """Kimi's delta layers: that their decay is bounded, and by a number below 0."""
    if header.arch not in BOUNDED_DECAY:
        return
    bound = header.key("{arch}.kda.gate_lower_bound")
    if not header.flag("{arch}.kda.safe_gate", default=True):
        raise _wrong(
            header, header.key("{arch}.kda.safe_gate"), False, f"true, as {header.arch} has no other,"
        )
    if isinstance(value := header.keys.get(bound), float) and value >= 0:
        raise _wrong(header, bound, value, "a number below 0")


# Tensors

_INTEGERS = ("I8", "I16", "I32", "I64")
_NO_WEIGHTS = (*_INTEGERS, "F64", "Q8_1", "Q8_K")  # no product takes them
_TABLES = re.compile(r"tid2eid|d2t|t2d|ordering")  # of numbers, which are no weights


def _check_tensor_types(header: GGUFHeader) -> None:
    """Weights are of types that products take; what is added or multiplied value by value is F32."""
    for name, info in header.tensors.items():
        if _TABLES.search(name):
            continue
        if info.type_name in _NO_WEIGHTS:
            raise errors.BadTensorType(
                f"{header.path}: {name} is {info.type_name}; a type of weights (F32, F16, BF16, Q8_0, ...) is expected"
            )
        is_vector = len(info.shape) == 1 or name.endswith(
            (".bias", "_norm.weight", "ssm_a", "ssm_conv1d.weight")
        )
        if is_vector and info.type_name != "F32":
            raise errors.BadTensorType(
                f"{header.path}: {name} is {info.type_name}; what is added or multiplied value by value is expected in F32"
            )


_Parts = frozenset[str]


def _check_blocks(header: GGUFHeader) -> None:
    """Blocks of one sort have the same parts: llama.cpp takes many for optional and then uses them all the same."""
    blocks: dict[int, set[str]] = {}
    for name in header.tensors:
        if found := keys.block_of(name):
            blocks.setdefault(found[0], set()).add(found[1])
    n_trunk = header.uint(keys.BLOCK_COUNT, default=0) - header.uint(keys.NEXTN_PREDICT_LAYERS, default=0)
    for members in (
        {i: b for i, b in blocks.items() if i < n_trunk},
        {i: b for i, b in blocks.items() if i >= n_trunk},
    ):
        for group, form in _GROUPS.items():
            _check_group(header, group, members, form)
    has_indexer = _indexer_types(header, n_trunk)
    if has_indexer and not has_indexer[0]:
        name = header.key("{arch}.attention.indexer.types")
        raise _wrong(header, name, "0 for layer 0", "1, as no layer before has an indexer to share,")
    for i, has_own in enumerate(has_indexer):
        if has_own and i in blocks and "indexer.proj.weight" not in blocks[i]:
            raise errors.MissingTensors(
                f"{header.path}: blk.{i} has no indexer, and attention.indexer.types says that it has one of its own"
            )
    is_latent = bool(header.uint("{arch}.moe_latent_size", default=0))
    for i, parts in blocks.items():
        for what, missing in _needs(header.arch, parts, is_latent=is_latent):
            raise errors.MissingTensors(
                f"{header.path}: blk.{i} has {what} and lacks {missing}: its conversion lost it"
            )
        if any(part.startswith("nextn.") for part in parts):
            _check_head(header, i, parts)


def _indexer_types(header: GGUFHeader, n_trunk: int) -> list[bool]:
    """Which layers have an indexer of their own, as llama.cpp takes it from the keys; empty where that is not theirs to say."""
    types = header.keys.get(header.key("{arch}.attention.indexer.types"))
    if isinstance(types, np.ndarray):
        return [bool(own) for own in types[:n_trunk]]
    if isinstance(types, int):
        return [bool(types)] * n_trunk
    if header.arch != "glm-dsa":
        return []
    if header.uint("{arch}.context_length", default=0) < 1 << 20:  # GLM-5 and 5.1
        return [True] * n_trunk
    return [i < 3 or (i - 2) % 4 == 0 for i in range(n_trunk)]


def _check_head(header: GGUFHeader, i: int, parts: set[str]) -> None:
    """What the graph of a head asserts of its block and of the keys."""
    names = {part.rsplit(".", 1)[0] for part in parts}
    for name in HEAD_PARTS.get(header.arch, ()):
        if name not in names:
            raise errors.MissingTensors(
                f"{header.path}: blk.{i} is a head and lacks {name}: its conversion lost it"
            )
    if header.arch in LATENT_HEADS:
        for name in ("key_length_mla", "value_length_mla"):
            if not header.uint(f"{{arch}}.attention.{name}", default=0):
                raise _wrong(
                    header,
                    header.key(f"{{arch}}.attention.{name}"),
                    "absent or 0",
                    "a length, as the head has one,",
                )
    scale = header.key("{arch}.attention.temperature_scale")
    if header.arch in UNSCALED_HEADS and header.keys.get(scale, 0):
        raise _wrong(header, scale, _said(header.keys[scale]), "none, since there is a head,")


def _group(pattern: str) -> Callable[[set[str]], _Parts]:
    found = re.compile(pattern)
    return lambda parts: frozenset(part for part in parts if found.match(part) and not part.endswith("scale"))


def _recurrent(parts: set[str]) -> _Parts:
    if not any(part.startswith("ssm_") for part in parts):
        return frozenset()
    return frozenset(
        part for part in parts if part.startswith(("ssm_", "attn_")) and not part.endswith("scale")
    )


_GROUPS: dict[str, Callable[[set[str]], _Parts]] = {
    "experts": _group(r"ffn_(gate|up|down|gate_up)_exps\."),
    "shared experts": _group(r"ffn_(gate|up|down)_shexp\."),
    "latent experts": _group(r"ffn_latent_"),
    "an indexer": _group(r"indexer\."),
    "recurrent state": _recurrent,
    "a short convolution": _group(r"shortconv\."),
}


def _check_group(
    header: GGUFHeader, group: str, blocks: Mapping[int, set[str]], form: Callable[[set[str]], _Parts]
) -> None:
    forms = {i: found for i, parts in blocks.items() if (found := form(parts))}
    whole = frozenset[str]().union(*forms.values())
    for i, found in forms.items():
        if missing := whole - found:
            raise errors.MissingTensors(
                f"{header.path}: blk.{i} has {group} and lacks {', '.join(sorted(missing))}, which other blocks have"
            )


def _needs(arch: str, parts: set[str], *, is_latent: bool) -> Iterator[tuple[str, str]]:
    """What a block has, and what that does not work without."""
    names = {part.rsplit(".", 1)[0] for part in parts}
    if names & {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"}:
        if "ffn_down_exps" not in names:
            yield "experts", "ffn_down_exps"
        if not names & {"ffn_up_exps", "ffn_gate_up_exps"}:
            yield "experts", "ffn_up_exps"
        if "ffn_gate_inp" not in names:
            yield "experts", "ffn_gate_inp"
        if is_latent and arch == "nemotron_h_moe" and "ffn_latent_down" not in names:
            yield "experts", "ffn_latent_down"
    if names & {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"}:
        for name in ("ffn_up_shexp", "ffn_down_shexp"):
            if name not in names:
                yield "a shared expert", name
    if names & {"ffn_gate", "ffn_up", "ffn_down"}:
        for name in ("ffn_up", "ffn_down"):
            if name not in names:
                yield "a feed-forward network", name
    for name, other in (("ffn_latent_down", "ffn_latent_up"), ("ffn_latent_up", "ffn_latent_down")):
        if name in names and other not in names:
            yield name, other
    if (
        "ssm_out" in names
        and arch in GATED_DELTA
        and not {"attn_qkv", "attn_gate"} <= names
        and "ssm_in" not in names
    ):
        yield "recurrent state", "attn_qkv or attn_gate"


# Vocabulary


def _check_bytes(header: GGUFHeader, model: str, tokens: StringArray) -> None:
    types = header.keys.get(keys.TOKEN_TYPES)
    if types is not None and not (
        isinstance(types, np.ndarray) and types.dtype == np.int32 and types.size >= len(tokens)
    ):
        raise _wrong(header, keys.TOKEN_TYPES, _said(types), f"an I32 for each of the {len(tokens)} tokens")
    for i in () if types is None else np.flatnonzero(types[: len(tokens)] == BYTE):
        if not BYTE_TEXT.fullmatch(tokens.raw(int(i))) or model == "bert":
            raise _wrong(
                header,
                keys.TOKENS,
                f"{tokens[int(i)][:40]!r} for token {i}, a byte,",
                "a text such as <0x0A>",
            )
    if model == "llama":
        known = set(tokens.iter_raw())
        for byte in range(256):
            if b"<0x%02X>" % byte not in known and bytes([byte]) not in known:
                raise _wrong(
                    header, keys.TOKENS, f"without a token for the byte 0x{byte:02X}", "one for each byte"
                )


# Ids that a tokenizer has where the file names none.
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2},
    "bert": {"bos": 101, "seperator": 102},
    "t5": {"eos": 1},
    "plamo2": {"bos": 1, "eos": 2},
    "gemma4": {},
    "rwkv": {},
}
_BPE_IDS = {"bos": 11, "eos": 11}

# What a text begins and ends with where no key says: by tokenizer, or by how it splits a text.
_ENDS = {"llama": {"bos"}, "bert": {"bos", "seperator"}, "t5": {"eos"}}
_BEGUN = frozenset(
    {
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "tekken",
        "chameleon",
    }
)
_ALWAYS_BEGUN = frozenset({"gemma4", "granite-embed-multi-311m"})  # whatever a key says
_NO_DEFAULT_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})


def _check_ends(header: GGUFHeader, model: str, n_tokens: int) -> None:
    """A token that every text begins or ends with is one of the vocabulary."""
    is_bpe = model not in ("llama", "bert", "t5", "rwkv", "plamo2")
    pre = header.keys.get("tokenizer.ggml.pre")
    split = "gemma4" if model == "gemma4" else pre if is_bpe and isinstance(pre, str) else ""
    usual = _ENDS.get(model, set()) | ({"bos"} if split in _BEGUN else set())
    always = _ENDS["bert"] if model == "bert" else {"bos"} if split in _ALWAYS_BEGUN else set()
    for end, flag in (("bos", "add_bos_token"), ("eos", "add_eos_token"), ("seperator", "add_sep_token")):
        said = header.keys.get(f"tokenizer.ggml.{flag}")
        if not (end in always or said is True or (said is None and end in usual)):
            continue
        default = _DEFAULT_IDS.get(model, _BPE_IDS).get(end)
        if end == "bos" and split in _NO_DEFAULT_BOS:
            default = None
        name = f"tokenizer.ggml.{end}_token_id"
        value: Any = header.keys.get(name, default)
        if isinstance(value, int) and not 0 <= value < n_tokens:
            value = default if name in header.keys else value
        if not isinstance(value, int) or not 0 <= value < n_tokens:
            found = "absent" if header.keys.get(name) is None else repr(header.keys[name])
            why = (
                f"tokenizer.ggml.{flag} is set"
                if said is True
                else f"{split or model} puts it into every text"
            )
            raise _wrong(header, name, found, f"an id below {n_tokens}, since {why},")
