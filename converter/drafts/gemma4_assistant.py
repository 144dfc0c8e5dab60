"""Gemma 4's assistant: a few narrow Gemma 4 layers that look at the main model's keys and values, and have none of their own.

Two projections lead from the main model's width and back. To a runtime it is an MTP head, of an architecture of its own. The
embeddings serve as the output; their clusters (`masked_embedding`), which would make that cheaper, llama.cpp does not use. Facts
from transformers' modeling_gemma4_assistant.py, and llama.cpp's src/models/gemma4-assistant.cpp.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.drafts import _parts
from llama_sidecar.converter.drafts.target import Target
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.converter.families import Placement, gemma4, place
from llama_sidecar.converter.families import _parts as family_parts

KIND = "mtp"
ARCH = "gemma4-assistant"
CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
INSIDE: dict[str, tuple[str, str]] = {}
REFUSED: dict[str, str] = {}


def prepared(config: Config) -> Config:
    """All of its layers share keys and values, where config.json does not say so too."""
    values = dict(config)
    values["num_kv_shared_layers"] = values.get("num_kv_shared_layers") or values.get("num_hidden_layers")
    return Config(values)


def canonical(name: str, config: Config) -> str:
    name = name.replace("language_model.", "")
    return "" if name.startswith("masked_embedding.") or name == "lm_head.weight" else name


def d2t(config: Config) -> int | None:
    return None


def keys(config: Config, names: Collection[str], target: Target) -> dict[str, Key]:
    width = config.integer("backbone_hidden_size")
    if target.arch not in (None, gemma4.ARCH):
        raise BadConfig(
            f"the target {target.name} is {target.arch}; expected {gemma4.ARCH}: give the model that this drafter was trained for"
        )
    if width != target.width:
        raise BadConfig(
            f"config.json has backbone_hidden_size = {width}, the target {target.name} is {target.width} wide: "
            f"give the model that this drafter was trained for"
        )
    _parts.check_vocabulary(config, target)
    own = {"embedding_length_out": width, "nextn_predict_layers": family_parts.n_layers_of(config)}
    return gemma4.keys(config, 0, ARCH) | {f"{ARCH}.{name}": value for name, value in own.items()}


def layout(config: Config, names: Collection[str], target: Target) -> tuple[list[Placement], list[str]]:
    hidden, width = config.integer("hidden_size"), config.integer("backbone_hidden_size")
    windowed, ff = gemma4.is_windowed(config), config.integer("intermediate_size")
    placements = [
        place("token_embd.weight", "model.embed_tokens.weight", config.integer("vocab_size"), hidden),
        place("output_norm.weight", "model.norm.weight", hidden),
        place("nextn.pre_projection.weight", "pre_projection.weight", hidden, 2 * width),
        place("nextn.post_projection.weight", "post_projection.weight", width, hidden),
        gemma4.rotary_factors(config),
    ]
    for i, is_windowed in enumerate(windowed):
        source, to = f"model.layers.{i}.", f"blk.{i}."
        head = gemma4.head_of(config, is_windowed)
        n_q = config.integer("num_attention_heads") * head
        placements += gemma4.norms_and_scale(config, source, to)
        placements += [
            place(f"{to}attn_q.weight", f"{source}self_attn.q_proj.weight", n_q, hidden),
            place(f"{to}attn_q_norm.weight", f"{source}self_attn.q_norm.weight", head),
            place(f"{to}attn_output.weight", f"{source}self_attn.o_proj.weight", hidden, n_q),
        ]
        placements += family_parts.dense_ffn(config, f"{source}mlp.", to, ff)
    return placements, []


_TEXT: dict[str, Any] = {
    name: value for name, value in gemma4.TINY["dense"][0].items() if name != "architectures"
} | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": [gemma4.WINDOWED, gemma4.FULL],
    "final_logit_softcapping": None,
}
_PLAIN: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 64,
    "tie_word_embeddings": True,
    "text_config": _TEXT,
}
TINY = {
    "plain": (_PLAIN, frozenset[str]()),
    "unified": (
        _PLAIN
        | {"architectures": ["Gemma4UnifiedAssistantForCausalLM"], "model_type": "gemma4_unified_assistant"},
        frozenset[str](),
    ),
}
