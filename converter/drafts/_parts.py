"""What the checkpoints of several stand-alone drafters have in common: sizes, blocks, and a vocabulary of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from llama_sidecar.converter.config import Config, Key, checked_integer, checked_number, shared_keys
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import Placement, place
from llama_sidecar.converter.families._parts import Rows, dense_ffn, head_dim_of
from llama_sidecar.sidecars.kind import MAX_BLOCKS


def flattened(config: Config, *names: str) -> Config:
    """The configuration with the objects of these names merged over it."""
    merged = dict(config)
    for name in names:
        if isinstance(config.get(name), dict):
            merged |= config[name]
    return Config(merged)


def block_keys(config: Config, arch: str, n_blocks: int) -> dict[str, Key]:
    """The keys every drafter has. Scaled rotation of Llama 3's kind is a tensor and no key."""
    plain = dict(config)
    if _is_llama3(config):
        for name in ("rope_parameters", "rope_scaling"):
            if plain.get(name):
                plain[name] = (
                    {"rope_theta": config.rope["rope_theta"]} if "rope_theta" in config.rope else None
                )
    return shared_keys(Config(plain), arch, n_blocks)


def _is_llama3(config: Config) -> bool:
    return str(config.rope.get("rope_type", "")).lower() == "llama3"


def rope_factors(config: Config) -> Iterator[Placement]:
    """What Llama 3's scaling divides each frequency by, where config.json asks for it: `rope_freqs.weight`."""
    if not _is_llama3(config):
        return
    rope, dim = config.rope, head_dim_of(config)

    def number(name: str, usual: float) -> float:
        return checked_number(name, rope.get(name, usual))

    base, factor = number("rope_theta", 10000.0), number("factor", 8.0)
    low, high = number("low_freq_factor", 1.0), number("high_freq_factor", 4.0)
    length = checked_integer(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings", 8192)
    )
    if not (base and factor and low and high > low):
        raise BadConfig(
            f"config.json has rope scaling {dict(rope)!r}; expected factors above 0 and a higher high_freq_factor"
        )
    one, turn = np.float32(1), np.float32(2 * math.pi)
    frequencies = one / (np.float32(base) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)))
    factors = []
    for wavelength in one / frequencies * turn:  # in F32 and in this order, as the peer computes them
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (one / wavelength * np.float32(length) - np.float32(low)) / np.float32(high - low)
            factors.append(float(one / ((one - smooth) / np.float32(factor) + smooth)))
    yield Placement("rope_freqs.weight", (len(factors),), values=tuple(factors))


def block(
    config: Config, source: str, target: str, *, n_in: int, rows_of: Callable[[int, int], Rows] | None = None
) -> Iterator[Placement]:
    """Attention over rows of `n_in` values, and a gated feed-forward part.

    `rows_of(n_heads, head)` is the order in which llama.cpp wants the rows of queries and keys, where it is another.
    """
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head, n_kv = head_dim_of(config), config.integer("num_key_value_heads")
    for part, n in (("q", n_heads), ("k", n_kv), ("v", n_kv)):
        rows = rows_of(n, head) if rows_of and part != "v" else None
        yield place(
            f"{target}attn_{part}.weight", f"{source}self_attn.{part}_proj.weight", n * head, n_in, rows=rows
        )
    yield place(f"{target}attn_output.weight", f"{source}self_attn.o_proj.weight", hidden, n_heads * head)
    yield from dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))


def own_vocabulary(
    config: Config, names: Collection[str], n_drafted: int | None, embeddings: str = "embed_tokens.weight"
) -> Iterator[Placement]:
    """Embeddings and output where the checkpoint has them."""
    hidden, n_vocab = config.integer("hidden_size"), config.integer("vocab_size")
    if embeddings in names:
        yield place("token_embd.weight", embeddings, n_vocab, hidden)
    if "lm_head.weight" in names:
        yield place("output.weight", "lm_head.weight", n_drafted or n_vocab, hidden)


def n_drafted(config: Config) -> int | None:
    """`draft_vocab_size`, where it is less than the vocabulary."""
    n_vocab = config.integer("vocab_size")
    if config.get("draft_vocab_size") is None:
        return None
    n = config.integer("draft_vocab_size", n_vocab)
    return n if n < n_vocab else None


def layer_numbers(name: str, value: Any) -> list[int]:
    """A list of layers out of config.json. Raises BadConfig."""
    is_sound = isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_BLOCKS for n in value)
    if not is_sound or not value:
        raise BadConfig(f"config.json has {name} = {value!r}; expected numbers of layers")
    return [int(n) for n in value]


def layers_after(name: str, said: Any, target: Target) -> list[int]:
    """The layers whose inputs are read, of a list that says whose outputs. Raises BadConfig."""
    layers = [layer + 1 for layer in layer_numbers(name, said)]
    if max(layers) > target.n_layers:
        raise BadConfig(
            f"config.json has {name} = {said}; expected layers below the {target.n_layers} of {target.name}"
        )
    return layers


def mask_key(name: str, value: Any, target: Target) -> dict[str, Key]:
    """The token that stands for what is to be drafted. Raises BadConfig."""
    if type(value) is not int or not 0 <= value < target.n_vocab:
        raise BadConfig(f"config.json has {name} = {value!r}; expected a token id below {target.n_vocab}")
    return {"tokenizer.ggml.mask_token_id": value}


def check_vocabulary(config: Config, target: Target) -> None:
    """Raises BadConfig where the drafter's vocabulary is not as large as the target's."""
    n_vocab = config.integer("vocab_size")
    if n_vocab != target.n_vocab:
        raise BadConfig(
            f"config.json has vocab_size = {n_vocab}, the target {target.name} has {target.n_vocab} tokens: "
            f"give the model that this drafter was trained for"
        )
