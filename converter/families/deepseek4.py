"""DeepSeek-V4: several residual streams mixed by hyper-connections, one key-value head over windows and compressed positions.

Facts: transformers' modeling_deepseek_v4.py for the model and the checkpoint's names, llama.cpp's src/models/deepseek4.cpp
for the file's. The first layers' experts are looked up by token (`tid2eid`); the output projection is of low rank, in groups
of heads. The MTP block projects embedding and hidden row apart, which the file has side by side, and hands on all streams; it
has an output mix of its own, under the names of the trunk's, so that no one file can hold both. A checkpoint whose
`mtp.*` is a DSpark drafter is told by its config.json (drafts/deepseek4_dspark.py). The variant that sees pictures is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from llama_sidecar.converter.config import Config, Key, checked_number, shared_keys
from llama_sidecar.converter.errors import BadConfig, UnsupportedModel
from llama_sidecar.converter.families import Layout, Placement, Source, Vocabulary, _parts, place
from llama_sidecar.sidecars.kind import MAX_BLOCKS

ARCH = "deepseek4"
CLASSES = ("DeepseekV4ForCausalLM",)
DROPPED = _parts.NOT_WEIGHTS
PREFIX = ""
VOCABULARY = Vocabulary("deepseek-v3")
SQRT_SOFTPLUS = 4  # llama.cpp's expert_gating_func
N_STREAMS = 4  # what llama.cpp's graph runs
SPARSE, HEAVY = 4, 128  # positions that one compressed one stands for
KINDS = {"sliding_attention": 0, "compressed_sparse_attention": SPARSE, "heavily_compressed_attention": HEAVY}
N_MORE_BLOCKS = 2  # after the trunk's, which a list of layers does not name
DSPARK = "dspark_target_layer_ids"  # in config.json: what is called mtp.* is a DSpark drafter
EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}


def canonical(name: str) -> str:
    return name


def published(config: Config) -> Config:
    """The configuration under the names of published ones, of one that transformers has written anew. Raises BadConfig.

    It calls layers and rotations by their kinds: the plain rotation, and the one of layers with compressed positions.
    """
    values = dict(config)
    kinds, mixtures = values.get("layer_types"), values.get("mlp_layer_types")
    if "compress_ratios" not in values and isinstance(kinds, list):
        ratios = [KINDS.get(kind) if isinstance(kind, str) else None for kind in kinds]
        values["compress_ratios"] = ratios + [0] * N_MORE_BLOCKS
    if "num_hash_layers" not in values and isinstance(mixtures, list):
        values["num_hash_layers"] = mixtures.count("hash_moe")
    if "qk_rope_head_dim" not in values and values.get("partial_rotary_factor") is not None:
        share = checked_number("partial_rotary_factor", values["partial_rotary_factor"], 1)
        values["qk_rope_head_dim"] = int(config.integer("head_dim") * share)
    rope = values.get("rope_parameters")
    if (
        isinstance(rope, dict)
        and isinstance(rope.get("main"), dict)
        and isinstance(rope.get("compress"), dict)
    ):
        compressed = {name: value for name, value in rope["compress"].items() if name != "attention_factor"}
        values["rope_theta"] = checked_number("rope_theta", rope["main"].get("rope_theta"))
        values["compress_rope_theta"] = compressed.pop("rope_theta", None)
        values |= {"rope_parameters": None, "rope_scaling": compressed}
    return Config(values)


def keys(config: Config, n_head_layers: int) -> dict[str, Key]:
    config = published(config)
    n_blocks = _parts.n_layers_of(config) + n_head_layers
    own = block_keys(config, n_blocks) | {
        "attention.compress_ratios": compress_ratios(config, n_blocks),
        "hash_layer_count": n_hashed(config),
        "embedding_length_out": config.integer("hidden_size") * N_STREAMS,
    }
    if n_head_layers:
        own["nextn_predict_layers"] = n_head_layers
    return shared_keys(config, ARCH, n_blocks) | {f"{ARCH}.{name}": value for name, value in own.items()}


def block_keys(config: Config, n_blocks: int) -> dict[str, Key]:
    """What the keys say of a block, without the architecture's prefix. Raises UnsupportedModel, BadConfig."""
    if config.get("scoring_func") != "sqrtsoftplus" or config.integer("hc_mult") != N_STREAMS:
        raise UnsupportedModel(
            f"config.json has scoring_func = {config.get('scoring_func')!r} and hc_mult = {config.get('hc_mult')!r}; "
            f"llama.cpp runs this architecture with 'sqrtsoftplus' and {N_STREAMS}"
        )
    n_experts = config.integer("n_routed_experts")
    limit = config.number("swiglu_limit")
    return {
        "rope.dimension_count": config.integer("qk_rope_head_dim"),
        "attention.q_lora_rank": config.integer("q_lora_rank"),
        "attention.sliding_window": config.integer("sliding_window"),
        "expert_count": n_experts,
        "expert_used_count": config.integer("num_experts_per_tok", n_experts),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts"),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": SQRT_SOFTPLUS,
        "swiglu_clamp_exp": [limit] * n_blocks,
        "swiglu_clamp_shexp": [limit] * n_blocks,
        "attention.indexer.head_count": config.integer("index_n_heads"),
        "attention.indexer.key_length": config.integer("index_head_dim"),
        "attention.indexer.top_k": config.integer("index_topk"),
        "attention.output_group_count": config.integer("o_groups"),
        "attention.output_lora_rank": config.integer("o_lora_rank"),
        "attention.compress_rope_freq_base": config.number("compress_rope_theta"),
        "hyper_connection.count": N_STREAMS,
        "hyper_connection.sinkhorn_iterations": config.integer("hc_sinkhorn_iters"),
        "hyper_connection.epsilon": config.number("hc_eps"),
    }


def compress_ratios(config: Config, n_blocks: int) -> list[int]:
    """How many positions a compressed one of each block stands for, 0 for no compression; the list may be longer. Raises BadConfig."""
    ratios = config["compress_ratios"]
    is_sound = isinstance(ratios, list) and all(ratio in (0, SPARSE, HEAVY) for ratio in ratios)
    if not is_sound or not n_blocks <= len(ratios) <= MAX_BLOCKS:
        raise BadConfig(
            f"config.json has compress_ratios = {ratios!r}; expected at least {n_blocks} times 0, {SPARSE} or {HEAVY}"
        )
    return [int(ratio) for ratio in ratios]


def n_hashed(config: Config) -> int:
    """How many of the first layers look their experts up by token."""
    value, n_layers = config["num_hash_layers"], _parts.n_layers_of(config)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= n_layers:
        raise BadConfig(f"config.json has num_hash_layers = {value!r}; expected 0 to {n_layers}")
    return value


def layout(config: Config, names: Collection[str]) -> Layout:
    config = published(config)
    hidden, vocabulary = config.integer("hidden_size"), config.integer("vocab_size")
    seeing = next((name for name in names if name.endswith(".bias_vl")), None)
    if seeing:
        raise UnsupportedModel(
            f"this checkpoint's experts have a bias for pictures ({seeing}), which llama.cpp has no place for: convert the model "
            f"that reads text alone"
        )
    n_layers, indices = _parts.n_layers_of(config), [] if DSPARK in config else head_indices(names)
    n_head_layers = _parts.one_block(max(indices, default=-1) + 1, "mtp.*")
    ratios, n_hash = compress_ratios(config, n_layers + n_head_layers), n_hashed(config)
    if n_head_layers and ratios[n_layers]:
        raise BadConfig(
            f"config.json has a compress_ratio of {ratios[n_layers]} for the head's block; expected 0"
        )
    shared = [
        place("token_embd.weight", "embed.weight", vocabulary, hidden),
        place("output_norm.weight", "norm.weight", hidden),
        place("output.weight", "head.weight", vocabulary, hidden),
    ]
    trunk = list(output_mix(config, ""))
    for i in range(n_layers):
        source, target = f"layers.{i}.", f"blk.{i}."
        trunk += block(config, source, target, is_hashed=i < n_hash)
        trunk += compressor(config, source, target, ratios[i])
    head: list[Placement] = []
    if n_head_layers:
        source, target = "mtp.0.", f"blk.{n_layers}."
        head = [
            *output_mix(config, source),
            *block(config, source, target),
            *_projection(config, source, target),
        ]
    plain = config if DSPARK not in config else Config(dict(config) | {"num_nextn_predict_layers": 0})
    said = _parts.warnings(
        plain, {*names, "lm_head.weight"}, n_head_layers, "num_nextn_predict_layers", "mtp.*"
    )
    return Layout(shared, trunk, head, n_head_layers, list(said), "mtp.*")


def head_indices(names: Collection[str]) -> list[int]:
    """The numbers of the blocks called `mtp.I.`."""
    found = {match[1] for name in names if (match := re.match(r"mtp\.(\d{1,3})\.", name))}
    return sorted(int(index) for index in found)


def output_mix(config: Config, source: str) -> Iterator[Placement]:
    """What makes one row of all streams before the output."""
    hidden = config.integer("hidden_size")
    yield place("output_hc_fn.weight", f"{source}hc_head_fn", N_STREAMS, N_STREAMS * hidden)
    yield place("output_hc_base.weight", f"{source}hc_head_base", N_STREAMS)
    yield place("output_hc_scale.weight", f"{source}hc_head_scale", 1)


def block(config: Config, source: str, target: str, *, is_hashed: bool = False) -> Iterator[Placement]:
    """A block without what compresses positions: attention, experts, and the mixing of streams around both."""
    hidden, head = config.integer("hidden_size"), config.integer("head_dim")
    n_heads = config.integer("num_attention_heads")
    rank, groups = config.integer("q_lora_rank"), config.integer("o_groups")
    if n_heads % groups:
        raise BadConfig(
            f"config.json has {n_heads} attention heads in o_groups = {groups}; expected a divisor"
        )
    low = groups * config.integer("o_lora_rank")
    n_mixed = N_STREAMS * (2 + N_STREAMS)  # to take a row out of the streams, put it back, and mix them
    for part in ("attn", "ffn"):
        yield place(f"{target}hc_{part}_fn.weight", f"{source}hc_{part}_fn", n_mixed, N_STREAMS * hidden)
        yield place(f"{target}hc_{part}_base.weight", f"{source}hc_{part}_base", n_mixed)
        yield place(f"{target}hc_{part}_scale.weight", f"{source}hc_{part}_scale", 3)
        yield place(f"{target}{part}_norm.weight", f"{source}{part}_norm.weight", hidden)
    for name, own, *shape in (
        ("attn_sinks", "attn_sink", n_heads),
        ("attn_q_a", "wq_a.weight", rank, hidden),
        ("attn_q_a_norm", "q_norm.weight", rank),
        ("attn_q_b", "wq_b.weight", n_heads * head, rank),
        ("attn_kv", "wkv.weight", head, hidden),
        ("attn_kv_a_norm", "kv_norm.weight", head),
        ("attn_output_a", "wo_a.weight", low, n_heads * head // groups),
        ("attn_output_b", "wo_b.weight", hidden, low),
    ):
        yield place(f"{target}{name}.weight", f"{source}attn.{own}", *shape)
    yield from _mixture(config, f"{source}ffn.", target, is_hashed)


def _mixture(config: Config, source: str, target: str, is_hashed: bool) -> Iterator[Placement]:
    hidden, ff = config.integer("hidden_size"), config.integer("moe_intermediate_size")
    n_experts = config.integer("n_routed_experts")
    yield place(f"{target}ffn_gate_inp.weight", f"{source}gate.weight", n_experts, hidden)
    if is_hashed:
        shape = config.integer("vocab_size"), config.integer("num_experts_per_tok", n_experts)
        table = (Source(f"{source}gate.tid2eid", shape),)
        yield Placement(f"{target}ffn_gate_tid2eid.weight", shape, table, below=n_experts)
    else:
        yield place(f"{target}exp_probs_b.bias", f"{source}gate.bias", n_experts)
    shared_ff = config.integer("n_shared_experts") * ff
    for part, name in EXPERTS.items():
        shape = (hidden, ff) if part == "down" else (ff, hidden)
        yield _parts.stacked(
            f"{target}ffn_{part}_exps.weight", f"{source}experts.{{}}.{name}.weight", n_experts, shape
        )
        shape = (hidden, shared_ff) if part == "down" else (shared_ff, hidden)
        yield place(f"{target}ffn_{part}_shexp.weight", f"{source}shared_experts.{name}.weight", *shape)


def compressor(config: Config, source: str, target: str, ratio: int) -> Iterator[Placement]:
    """What makes one key and value of `ratio` positions, and at the lower ratio picks the compressed ones to look at."""
    if not ratio:
        return
    head, index = config.integer("head_dim"), config.integer("index_head_dim")
    yield from _compressed(config, f"{source}attn.compressor.", f"{target}attn_compressor_", head, ratio)
    if ratio != SPARSE:
        return
    hidden, n_heads = config.integer("hidden_size"), config.integer("index_n_heads")
    own = f"{source}attn.indexer."
    yield from _compressed(config, f"{own}compressor.", f"{target}indexer_compressor_", index, ratio)
    yield place(f"{target}indexer.proj.weight", f"{own}weights_proj.weight", n_heads, hidden)
    yield place(
        f"{target}indexer.attn_q_b.weight",
        f"{own}wq_b.weight",
        n_heads * index,
        config.integer("q_lora_rank"),
    )


def _compressed(config: Config, source: str, target: str, head: int, ratio: int) -> Iterator[Placement]:
    hidden, width = config.integer("hidden_size"), (2 if ratio == SPARSE else 1) * head  # sparse ones overlap
    yield place(f"{target}kv.weight", f"{source}wkv.weight", width, hidden)
    yield place(f"{target}gate.weight", f"{source}wgate.weight", width, hidden)
    yield place(f"{target}ape.weight", f"{source}ape", ratio, width)
    yield place(f"{target}norm.weight", f"{source}norm.weight", head)


def _projection(config: Config, source: str, target: str) -> Iterator[Placement]:
    """Embedding and hidden row, each normed and projected, and added: one matrix over both."""
    hidden = config.integer("hidden_size")
    halves = tuple(Source(f"{source}{part}_proj.weight", (hidden, hidden)) for part in "eh")
    yield Placement(f"{target}nextn.eh_proj.weight", (hidden, 2 * hidden), halves, beside=True)
    for part in ("enorm", "hnorm"):
        yield place(f"{target}nextn.{part}.weight", f"{source}{part}.weight", hidden)
    yield place(f"{target}nextn.shared_head_norm.weight", f"{source}norm.weight", hidden)


_TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "vocab_size": 320,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,  # llama.cpp divides by zero where it is as head_dim
    "index_topk": 8,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0, 0],
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_HEAD = frozenset({"mtp.0.enorm.weight", "head.weight"})
TINY = {
    "plain": (_TINY, _HEAD),
    "yarn": (
        _TINY
        | {
            "num_hash_layers": 0,
            "swiglu_limit": 0.2,
            "rope_scaling": {
                "type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
            },
        },
        _HEAD,
    ),
}  # fmt: skip
