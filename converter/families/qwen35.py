"""Qwen3.5, 3.6 and 3.8, dense: gated-delta layers with full attention every few, and one MTP block.

Facts: transformers' modeling_qwen3_5.py for the checkpoint's names, llama.cpp's src/models/qwen35.cpp for the file's.
Norm weights are stored zero-centred and written plus one, all but the gated-delta norm. Value heads are stored grouped
by key head and written tiled, the order in which ggml repeats. The line's other families build on these functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np

from llama_sidecar.converter.config import Config, Key, shared_keys
from llama_sidecar.converter.errors import BadConfig, TensorMismatch
from llama_sidecar.converter.families import F32, Layout, Placement, Vocabulary, _parts, place

ARCH = "qwen35"
CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
DROPPED = re.compile(r"^(model\.)?visual\.|\.rotary_emb\.inv_freq$")
PREFIX = "model."
VOCABULARY = Vocabulary("qwen35")

BlockPart = Callable[
    [Config, str, str, Collection[str]], Iterator[Placement]
]  # (config, source, target, names)


def canonical(name: str) -> str:
    """The name without `model.` and `language_model.`: `layers.0...`, `mtp...`, `embed_tokens...`, `lm_head...`."""
    return name.replace("language_model.", "").removeprefix("model.")


# Keys.


def keys(config: Config, n_head_layers: int, arch: str = ARCH) -> dict[str, Key]:
    """The keys of a file with `n_head_layers` MTP blocks; llama.cpp demands the rope sections, so they have a default."""
    return {f"{arch}.rope.dimension_sections": [11, 11, 10, 0]} | line_keys(config, n_head_layers, arch)


def line_keys(config: Config, n_head_layers: int, arch: str) -> dict[str, Key]:
    """The keys that this whole line of families shares."""
    n_layers = config.integer("num_hidden_layers")
    result: dict[str, Key] = {
        "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
        "ssm.state_size": config.integer("linear_key_head_dim"),
        "ssm.group_count": config.integer("linear_num_key_heads"),
        "ssm.time_step_rank": config.integer("linear_num_value_heads"),
        "ssm.inner_size": config.integer("linear_value_head_dim") * config.integer("linear_num_value_heads"),
        "full_attention_interval": _interval(config),
        "rope.dimension_count": _parts.n_rotary(config, 0.25),
    }
    recurrent = recurrent_layers(config)
    if recurrent != [(i + 1) % _interval(config) != 0 for i in range(n_layers)]:
        result["attention.recurrent_layers"] = recurrent + [False] * n_head_layers
    if n_head_layers:
        result["nextn_predict_layers"] = n_head_layers
    return shared_keys(config, arch, n_layers + n_head_layers) | {
        f"{arch}.{name}": value for name, value in result.items()
    }


def recurrent_layers(config: Config) -> list[bool]:
    """Which trunk layers are gated-delta layers: `layer_types`, or all but every `full_attention_interval`-th."""
    n_layers = config.integer("num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        return [(i + 1) % _interval(config) != 0 for i in range(n_layers)]
    if (
        not isinstance(types, list)
        or len(types) != n_layers
        or not all(kind in ("linear_attention", "full_attention") for kind in types)
    ):
        raise BadConfig(
            f"config.json has layer_types = {types!r}; expected {n_layers} times 'linear_attention' or 'full_attention'"
        )
    return [kind == "linear_attention" for kind in types]


def _interval(config: Config) -> int:
    return 4 if config.get("full_attention_interval") is None else config.integer("full_attention_interval")


def delta_heads(config: Config) -> tuple[int, int]:
    """The numbers of key heads and value heads of the gated-delta layers."""
    n_k, n_v = (config.integer(f"linear_num_{part}_heads") for part in ("key", "value"))
    if n_v % n_k:
        raise BadConfig(f"config.json has {n_v} linear value heads for {n_k} key heads; expected a multiple")
    return n_k, n_v


# Values.


def plus_one(rows: F32) -> F32:
    one_more: F32 = rows + np.float32(1)
    return one_more


def minus_exp(rows: F32) -> F32:
    return -np.exp(rows)


def value_heads(config: Config) -> list[int]:
    """The stored index of each value head in the order it is written: [key head][r] becomes [r][key head]."""
    n_k, n_v = delta_heads(config)
    return [k * (n_v // n_k) + r for r in range(n_v // n_k) for k in range(n_k)]


def value_rows(config: Config, unit: int, offset: int = 0) -> tuple[range, ...] | None:
    """Rows of `unit` per value head, in the order they are written, after `offset` other rows; None if nothing moves."""
    if value_heads(config) == sorted(value_heads(config)):
        return None
    before = (range(offset),) if offset else ()
    return before + tuple(
        range(offset + head * unit, offset + (head + 1) * unit) for head in value_heads(config)
    )


def tile_columns(rows: F32, n_k: int, n_v: int) -> F32:
    """(n, n_k * r * head) with value heads grouped by key head -> the same tiled."""
    tiled: F32 = rows.reshape(len(rows), n_k, n_v // n_k, -1).swapaxes(1, 2).reshape(rows.shape)
    return tiled


# Tensors.


def delta_net(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    """A gated-delta mixer."""
    hidden, kernel = config.integer("hidden_size"), config.integer("linear_conv_kernel_dim")
    n_k, n_v = delta_heads(config)
    head_v = config.integer("linear_value_head_dim")
    n_qk, n_value = 2 * n_k * config.integer("linear_key_head_dim"), n_v * head_v
    channels = n_qk + n_value
    rows = partial(value_rows, config)
    tile = partial(tile_columns, n_k=n_k, n_v=n_v) if rows(1) else None
    source += "linear_attn."
    yield place(
        f"{target}attn_qkv.weight", f"{source}in_proj_qkv.weight", channels, hidden, rows=rows(head_v, n_qk)
    )
    yield place(f"{target}attn_gate.weight", f"{source}in_proj_z.weight", n_value, hidden, rows=rows(head_v))
    yield place(f"{target}ssm_alpha.weight", f"{source}in_proj_a.weight", n_v, hidden, rows=rows(1))
    yield place(f"{target}ssm_beta.weight", f"{source}in_proj_b.weight", n_v, hidden, rows=rows(1))
    yield place(
        f"{target}ssm_conv1d.weight", f"{source}conv1d.weight", channels, kernel,
        source_shape=(channels, 1, kernel), rows=rows(head_v, n_qk),
    )  # fmt: skip
    yield place(f"{target}ssm_a", f"{source}A_log", n_v, rows=rows(1), transform=minus_exp)
    yield place(f"{target}ssm_dt.bias", f"{source}dt_bias", n_v, rows=rows(1))
    yield place(f"{target}ssm_norm.weight", f"{source}norm.weight", head_v)
    yield place(f"{target}ssm_out.weight", f"{source}out_proj.weight", hidden, n_value, transform=tile)


def attention(config: Config, source: str, target: str) -> Iterator[Placement]:
    """A full-attention mixer; each head's query rows are followed by its gate rows, in both spellings."""
    hidden, head = config.integer("hidden_size"), _parts.head_dim_of(config)
    n_q, n_kv = config.integer("num_attention_heads") * head, config.integer("num_key_value_heads") * head
    source += "self_attn."
    yield place(f"{target}attn_q.weight", f"{source}q_proj.weight", 2 * n_q, hidden)
    yield place(f"{target}attn_k.weight", f"{source}k_proj.weight", n_kv, hidden)
    yield place(f"{target}attn_v.weight", f"{source}v_proj.weight", n_kv, hidden)
    yield place(f"{target}attn_output.weight", f"{source}o_proj.weight", hidden, n_q)
    yield place(f"{target}attn_q_norm.weight", f"{source}q_norm.weight", head, transform=plus_one)
    yield place(f"{target}attn_k_norm.weight", f"{source}k_norm.weight", head, transform=plus_one)


def dense_ffn(config: Config, source: str, target: str, names: Collection[str]) -> Iterator[Placement]:
    return _parts.dense_ffn(config, f"{source}mlp.", target, config.integer("intermediate_size"))


def layout(
    config: Config, names: Collection[str], mixer: BlockPart = delta_net, ffn: BlockPart = dense_ffn
) -> Layout:
    """Where the tensors go, with another family's gated-delta mixer or feed-forward part in place of the dense one's."""
    hidden, recurrent = config.integer("hidden_size"), recurrent_layers(config)
    _check_layers(names, recurrent)
    n_layers = len(recurrent)
    n_head_layers = _parts.one_block(_parts.n_indices(names, "mtp."), "mtp.layers.*")

    def block(source: str, target: str, is_recurrent: bool) -> Iterator[Placement]:
        yield place(
            f"{target}attn_norm.weight", f"{source}input_layernorm.weight", hidden, transform=plus_one
        )
        yield from mixer(config, source, target, names) if is_recurrent else attention(config, source, target)
        yield place(
            f"{target}post_attention_norm.weight",
            f"{source}post_attention_layernorm.weight",
            hidden,
            transform=plus_one,
        )
        yield from ffn(config, source, target, names)

    trunk = [p for i in range(n_layers) for p in block(f"layers.{i}.", f"blk.{i}.", recurrent[i])]
    head = [p for j in range(n_head_layers) for p in block(f"mtp.layers.{j}.", f"blk.{n_layers + j}.", False)]
    if head:
        nextn = f"blk.{n_layers}.nextn."
        head += [
            place(f"{nextn}eh_proj.weight", "mtp.fc.weight", hidden, 2 * hidden),
            place(f"{nextn}enorm.weight", "mtp.pre_fc_norm_embedding.weight", hidden, transform=plus_one),
            place(f"{nextn}hnorm.weight", "mtp.pre_fc_norm_hidden.weight", hidden, transform=plus_one),
            place(f"{nextn}shared_head_norm.weight", "mtp.norm.weight", hidden, transform=plus_one),
        ]
    shared = _parts.shared(config, names, plus_one)
    said = _parts.warnings(config, names, n_head_layers, "mtp_num_hidden_layers", "mtp.*")
    return Layout(shared, trunk, head, n_head_layers, list(said))


def _check_layers(names: Collection[str], recurrent: list[bool]) -> None:
    found = _parts.n_indices([name for name in names if name.startswith("layers.")], "")
    if found and found != len(recurrent):
        raise TensorMismatch(
            f"the tensors hold {found} layers, config.json has num_hidden_layers = {len(recurrent)}"
        )
    mixers = {tuple(name.split(".")[1:3]) for name in names if name.startswith("layers.")}
    wrong = [i for i, r in enumerate(recurrent) if (str(i), "self_attn" if r else "linear_attn") in mixers]
    if wrong:
        raise TensorMismatch(
            f"layers {', '.join(map(str, wrong))} hold tensors of the other kind of attention than config.json's layer_types say"
        )


# Random checkpoints for tests.

_TINY: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 320,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
_HEAD = frozenset({"mtp.fc.weight"})
TINY = {
    "tied": (_TINY, _HEAD),
    "untied": (
        _TINY | {"tie_word_embeddings": False, "linear_num_key_heads": 4},
        _HEAD | {"lm_head.weight"},
    ),
    "irregular": (
        _TINY | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        _HEAD,
    ),
    "conditional": (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "text_config": {name: value for name, value in _TINY.items() if name != "architectures"},
        },
        _HEAD,
    ),
}
