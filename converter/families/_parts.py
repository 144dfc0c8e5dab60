"""Parts that several families' checkpoints are made of: embeddings, feed-forward parts, experts, latent attention, heads.

Each yields placements from the Hugging Face names that most families use to GGUF's. Knows configuration values and
names; which part stands where is a family's own business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache

from llama_sidecar.converter.config import Config, Key, checked_integer, checked_number
from llama_sidecar.converter.errors import BadConfig, UnsupportedModel
from llama_sidecar.converter.families import Layout, Placement, Source, Transform, place

SIGMOID = 2  # llama.cpp's expert_gating_func
NOT_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$")
GLM_ROLES = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}


def without_model(name: str) -> str:
    """The name without `model.`: `layers.0...`, `embed_tokens...`, `lm_head...`."""
    return name.removeprefix("model.")


# How many blocks there are.


def n_layers_of(config: Config) -> int:
    return config.integer("num_hidden_layers")


def n_indices(names: Collection[str], prefix: str) -> int:
    """How many blocks `PREFIXlayers.I.` the names speak of; at least one if any name has the prefix.

    An index that no model has counts for nothing: its tensors find no place.
    """
    found = {name.removeprefix(f"{prefix}layers.").split(".")[0] for name in names if name.startswith(prefix)}
    return max((int(index) + 1 if re.fullmatch("[0-9]{1,3}", index) else 1 for index in found), default=0)


def n_appended(config: Config, names: Collection[str]) -> int:
    """How many blocks follow the trunk's, `layers.N.` on: the head's."""
    n_blocks = n_indices([name for name in names if name.startswith("layers.")], "")
    return max(0, n_blocks - n_layers_of(config))


def one_block(n_head_layers: int, names: str) -> int:
    """The number of the head's blocks; raises UnsupportedModel for more than the one that llama.cpp runs."""
    if n_head_layers > 1:
        raise UnsupportedModel(
            f"the head has {n_head_layers} blocks ({names}); llama.cpp drafts with exactly one here"
        )
    return n_head_layers


def appended_names(config: Config) -> str:
    return f"model.layers.{n_layers_of(config)}.*"


# What is said.


def warnings(
    config: Config, names: Collection[str], n_head_layers: int, key: str, head_names: str
) -> Iterator[str]:
    """What a user should know where config.json, under `key` for the head, and the tensors disagree."""
    said = config.get(key)
    if said and not n_head_layers:
        yield f"config.json says {key} = {said}, but no tensor is called {head_names}: there is no head to write"
    elif said is not None and said != n_head_layers:
        yield f"config.json says {key} = {said}, the tensors hold {n_head_layers}; the tensors decide"
    if config.get("rope_parameters") and config.get("rope_scaling"):
        yield "config.json has rope_scaling beside rope_parameters: rope_parameters is used"
    has_output, tied = "lm_head.weight" in names, config.get("tie_word_embeddings")
    if tied is False and not has_output:
        yield "config.json says the output is not tied, but there is no lm_head.weight: the embeddings serve as output"
    if tied is True and has_output:
        yield "config.json says the output is tied, but there is an lm_head.weight: it is used"


# Tensors of both files.


def shared(config: Config, names: Collection[str], norm: Transform | None = None) -> list[Placement]:
    """The embeddings, the last norm, and the output unless it is tied to the embeddings."""
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    placements = [
        place("token_embd.weight", "embed_tokens.weight", vocabulary, hidden),
        place("output_norm.weight", "norm.weight", hidden, transform=norm),
    ]
    if "lm_head.weight" in names:
        placements.append(place("output.weight", "lm_head.weight", vocabulary, hidden))
    return placements


# Feed-forward parts.


def dense_ffn(config: Config, source: str, target: str, ff: int, suffix: str = "") -> Iterator[Placement]:
    """A gated feed-forward part of `ff` inner values; `suffix` is `_shexp` for the expert that all tokens share."""
    hidden = config.integer("hidden_size")
    yield place(f"{target}ffn_gate{suffix}.weight", f"{source}gate_proj.weight", ff, hidden)
    yield place(f"{target}ffn_up{suffix}.weight", f"{source}up_proj.weight", ff, hidden)
    yield place(f"{target}ffn_down{suffix}.weight", f"{source}down_proj.weight", hidden, ff)


def experts(
    config: Config, source: str, target: str, n_experts: int, names: Collection[str], ff: int | None = None
) -> Iterator[Placement]:
    """The experts, of `ff` inner values, stacked in their order; they come one by one, or fused with the gate's rows first."""
    hidden, ff = config.integer("hidden_size"), ff or config.integer("moe_intermediate_size")
    suffix = next((s for s in ("", ".weight") if f"{source}gate_up_proj{s}" in names), None)
    if suffix is None:
        for part, shape in {"gate": (ff, hidden), "up": (ff, hidden), "down": (hidden, ff)}.items():
            yield stacked(
                f"{target}ffn_{part}_exps.weight", f"{source}{{}}.{part}_proj.weight", n_experts, shape
            )
        return
    both = (n_experts, 2 * ff, hidden)
    for half, part in enumerate(("gate", "up")):
        rows = tuple(range((2 * e + half) * ff, (2 * e + half + 1) * ff) for e in range(n_experts))
        name = f"{target}ffn_{part}_exps.weight"
        yield place(
            name, f"{source}gate_up_proj{suffix}", n_experts, ff, hidden, rows=rows, source_shape=both
        )
    yield place(f"{target}ffn_down_exps.weight", f"{source}down_proj{suffix}", n_experts, hidden, ff)


def stacked(name: str, source: str, n: int, shape: tuple[int, ...]) -> Placement:
    """One tensor of `n` sources of one shape, whose names have their number for `{}`."""
    return Placement(name, (n, *shape), tuple(Source(source.format(i), shape) for i in range(n)))


def routed(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    """A router with a bias for the choice alone, and its experts."""
    hidden, n_experts = config.integer("hidden_size"), config.integer("n_routed_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}gate.weight", n_experts, hidden)
    yield place(f"{target}exp_probs_b.bias", f"{source}gate.e_score_correction_bias", n_experts)
    yield from experts(config, f"{source}experts.", target, n_experts, names)


def deepseek_moe(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    """DeepSeek's mixture: routed experts, and an expert that all tokens share."""
    yield from routed(config, source, target, names)
    ff = config.integer("n_shared_experts") * config.integer("moe_intermediate_size")
    yield from dense_ffn(config, f"{source}shared_experts.", target, ff, "_shexp")


def is_dense(config: Config, i: int) -> bool:
    """Whether block `i` comes before the mixtures begin."""
    return i < n_dense(config)


def n_dense(config: Config, usual: int = 0) -> int:
    """How many blocks come before the mixtures begin; `usual` where config.json does not say."""
    value = config.get("first_k_dense_replace", usual)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadConfig(f"config.json has first_k_dense_replace = {value!r}; expected an integer from 0 on")
    return value


def deepseek_moe_keys(config: Config) -> dict[str, Key]:
    """The keys of DeepSeek's mixture, without the architecture's prefix."""
    n_experts = config.integer("n_routed_experts")
    keys: dict[str, Key] = {
        "leading_dense_block_count": n_dense(config),
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_gating_func": SIGMOID,
    }
    if config.get("routed_scaling_factor") is not None:
        keys["expert_weights_scale"] = config.number("routed_scaling_factor")
    if config.get("norm_topk_prob"):
        keys["expert_weights_norm"] = True
    return keys | expert_group_keys(config, n_experts)


def expert_group_keys(config: Config, n_experts: int) -> dict[str, Key]:
    names = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {
        key: config.integer(name, n_experts) for name, key in names.items() if config.get(name) is not None
    }


def limits(config: Config, name: str, n_blocks: int) -> list[float]:
    """What a list of config.json clamps each block's gated values to; 0 does not clamp, nor does what the list leaves out."""
    if not isinstance(config[name], list):
        raise BadConfig(f"config.json has {name} = {config[name]!r}; expected a list of numbers")
    said = [checked_number(name, limit or 0) for limit in config[name]]
    return (said + [0.0] * n_blocks)[:n_blocks]


# Attention.


def head_dim_of(config: Config) -> int:
    if config.get("head_dim") is not None:
        return config.integer("head_dim")
    n_heads = config.integer("num_attention_heads")
    return checked_integer(
        "hidden_size / num_attention_heads = head_dim", config.integer("hidden_size") // n_heads
    )


def n_rotary(config: Config, usual: float) -> int:
    """How many of a head's values are rotated; `usual` is the share where config.json says none."""
    share = checked_number("partial_rotary_factor", config.rope.get("partial_rotary_factor", usual), 1)
    return checked_integer("head_dim * partial_rotary_factor", int(head_dim_of(config) * share))


def attention(
    config: Config, source: str, target: str, names: Collection[str], *, has_norms: bool = False
) -> Iterator[Placement]:
    """Grouped attention; biases, and norms of queries and keys unless `has_norms`, where the checkpoint has them."""
    hidden, head = config.integer("hidden_size"), head_dim_of(config)
    n_q, n_kv = config.integer("num_attention_heads") * head, config.integer("num_key_value_heads") * head
    has_bias = f"{source}q_proj.bias" in names
    for part, n_rows in {"q": n_q, "k": n_kv, "v": n_kv}.items():
        yield place(f"{target}attn_{part}.weight", f"{source}{part}_proj.weight", n_rows, hidden)
        if has_bias:
            yield place(f"{target}attn_{part}.bias", f"{source}{part}_proj.bias", n_rows)
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, n_q)
    if has_norms or f"{source}q_norm.weight" in names:
        yield place(f"{target}attn_q_norm.weight", f"{source}q_norm.weight", head)
        yield place(f"{target}attn_k_norm.weight", f"{source}k_norm.weight", head)


# Multi-head latent attention.


def latent_keys(config: Config) -> dict[str, Key]:
    """The keys of multi-head latent attention, which llama.cpp runs as one wide key-value head."""
    latent, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    keys: dict[str, Key] = {
        "vocab_size": config.integer("vocab_size"),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config.integer("qk_nope_head_dim") + rope,
        "attention.value_length_mla": config.integer("v_head_dim"),
        "rope.dimension_count": rope,
    }
    if config.get("q_lora_rank") is not None:
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank")
    scale = config.rope.get("mscale_all_dim")
    if scale is not None:  # llama.cpp divides by the 0.1 again
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * checked_number("mscale_all_dim", scale)
    return keys


def latent_attention(config: Config, source: str, target: str, output: str = "o_proj") -> Iterator[Placement]:
    """Multi-head latent attention; the projection back from the latent is split per head, the keys' half transposed."""
    hidden, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    latent, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, head_v = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    n_q = n_heads * (nope + rope)
    if config.get("q_lora_rank") is None:
        yield place(f"{target}attn_q.weight", f"{source}q_proj.weight", n_q, hidden)
    else:
        rank = config.integer("q_lora_rank")
        yield place(f"{target}attn_q_a.weight", f"{source}q_a_proj.weight", rank, hidden)
        yield place(f"{target}attn_q_a_norm.weight", f"{source}q_a_layernorm.weight", rank)
        yield place(f"{target}attn_q_b.weight", f"{source}q_b_proj.weight", n_q, rank)
    yield place(f"{target}attn_kv_a_mqa.weight", f"{source}kv_a_proj_with_mqa.weight", latent + rope, hidden)
    yield place(f"{target}attn_kv_a_norm.weight", f"{source}kv_a_layernorm.weight", latent)
    joined, per_head = f"{source}kv_b_proj.weight", nope + head_v
    stack = (n_heads * per_head, latent)
    keys = tuple(range(h * per_head, h * per_head + nope) for h in range(n_heads))
    values = tuple(range(h * per_head + nope, (h + 1) * per_head) for h in range(n_heads))
    yield place(
        f"{target}attn_k_b.weight", joined, n_heads, latent, nope,
        rows=keys, source_shape=stack, transposed=True,
    )  # fmt: skip
    yield place(f"{target}attn_v_b.weight", joined, n_heads, head_v, latent, rows=values, source_shape=stack)
    yield place(f"{target}attn_output.weight", f"{source}{output}.weight", hidden, n_heads * head_v)


# Orders of the rows of queries and keys.

Rows = tuple[range, ...]  # of a tensor, each a few of them


@lru_cache(maxsize=4)
def halved_rows(n_heads: int, head: int) -> Rows:
    """Within each head its even rows, then its odd ones: from pairs to halves."""
    return tuple(
        range(row, row + 1)
        for start in range(0, n_heads * head, head)
        for parity in (0, 1)
        for row in range(start + parity, start + head, 2)
    )


@lru_cache(maxsize=4)
def paired_rows(n_heads: int, head: int) -> Rows:
    """Within each head row i of the first half, then row i of the second, for every i: from halves to pairs."""
    return tuple(
        range(start, start + 1)
        for h in range(n_heads)
        for i in range(head // 2)
        for start in (h * head + i, h * head + head // 2 + i)
    )


# Heads.


def projection(
    config: Config, source: str, target: str, norm: Transform | None = None
) -> Iterator[Placement]:
    """What joins a token's embedding with the hidden row before it: two norms, and a matrix over both."""
    hidden = config.integer("hidden_size")
    yield place(f"{target}nextn.eh_proj.weight", f"{source}eh_proj.weight", hidden, 2 * hidden)
    yield place(f"{target}nextn.enorm.weight", f"{source}enorm.weight", hidden, transform=norm)
    yield place(f"{target}nextn.hnorm.weight", f"{source}hnorm.weight", hidden, transform=norm)


def nextn(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    """What a head has beside its block, as DeepSeek-V3 spells it; its own embeddings and output where it has them."""
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    yield from projection(config, source, target)
    yield place(f"{target}nextn.shared_head_norm.weight", f"{source}shared_head.norm.weight", hidden)
    own = {"embed_tokens.weight": "embed_tokens", "shared_head.head.weight": "shared_head_head"}
    for name, part in own.items():
        if f"{source}{name}" in names:
            yield place(f"{target}nextn.{part}.weight", f"{source}{name}", vocabulary, hidden)


Block = Callable[[int, str, str], Iterator[Placement]]  # (number, source prefix, target prefix)


def appended_layout(
    config: Config, names: Collection[str], block: Block, *, key: str = "num_nextn_predict_layers"
) -> Layout:
    """The layout of a family whose one head block follows the trunk's as `layers.N.`, with `nextn` beside it."""
    n_layers, head_names = n_layers_of(config), appended_names(config)
    n_head_layers = one_block(n_appended(config, names), head_names)
    trunk = [p for i in range(n_layers) for p in block(i, f"layers.{i}.", f"blk.{i}.")]
    head = []
    for i in range(n_layers, n_layers + n_head_layers):
        head += [*block(i, f"layers.{i}.", f"blk.{i}."), *nextn(config, f"layers.{i}.", f"blk.{i}.", names)]
    said = list(warnings(config, names, n_head_layers, key, head_names))
    return Layout(shared(config, names), trunk, head, n_head_layers, said, head_names)
