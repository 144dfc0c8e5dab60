"""GLM-4.7-Flash: DeepSeek-V3's architecture with GLM's vocabulary, and one MTP block after the trunk's.

Facts: transformers' modeling_glm4_moe_lite.py for the checkpoint's names, llama.cpp's src/models/deepseek2.cpp for the
file's. Its mixture is gated by a sigmoid, which config.json does not say: llama.cpp's converter writes no gating function,
and its loader then guesses by the number of layers.
"""

from __future__ import annotations

from llama_sidecar.converter.families import Vocabulary, _parts, deepseek2

ARCH = deepseek2.ARCH
CLASSES = ("Glm4MoeLiteForCausalLM",)
DROPPED = deepseek2.DROPPED
PREFIX = deepseek2.PREFIX
VOCABULARY = Vocabulary("glm4", _parts.GLM_ROLES)
canonical = deepseek2.canonical
keys = deepseek2.keys
layout = deepseek2.layout

_TINY, _optional = deepseek2.TINY["plain"]
TINY = {
    "flash": (
        {name: value for name, value in _TINY.items() if name != "scoring_func"}
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "rope_theta": 1000000,
            "partial_rotary_factor": 1.0,
        },
        _optional,
    ),
}
