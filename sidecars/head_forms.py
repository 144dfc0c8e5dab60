"""Which architectures compute attention and delta layers of which form, where llama.cpp asserts it at the first token.

Names of architectures, and how often their layers have a window (facts: the assertions in llama.cpp's src/models/*.cpp). An architecture that is new or in
no list is not checked for that form.
"""

from __future__ import annotations

from collections.abc import Mapping

# Keys and values of a head have one length.
EQUAL_LENGTHS = frozenset({
    "afmoe", "apertus", "arcee", "arctic", "baichuan", "bailingmoe2", "bert", "bitnet", "bloom",
    "chameleon", "chatglm", "codeshell", "cogvlm", "cohere2", "cohere2moe", "command-r", "dbrx", "deci",
    "deepseek", "deepseek4", "dflash", "dots1", "dream", "eagle3", "ernie4_5", "ernie4_5-moe", "eurobert", "exaone",
    "falcon", "gemma4", "glm4", "glm4moe", "gpt2", "gptneox", "granite", "granite_swa", "granitehybrid",
    "graniteswitch", "grok", "grovemoe", "hunyuan-moe", "hunyuan_vl", "hy_v3", "internlm2", "jais", "jais2",
    "laguna", "llada", "llada-moe", "llama", "llama4", "maincoder", "mellum", "minimax-01", "minimax-m2",
    "minimax-m3", "mistral3", "modern-bert", "mpt", "muse-glimmer", "nanbeige", "nemotron", "nemotron_h",
    "nemotron_h_moe", "neo-bert", "olmo", "olmo2", "olmoe", "openelm", "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "plamo", "pockettts", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3",
    "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe", "qwen4exp", "refact", "rnd1",
    "seed_oss", "smallthinker", "smollm3", "spark2_5", "stablelm", "starcoder", "starcoder2", "t5", "xverse",
})  # fmt: skip

# All of a head is rotated, so that the dimensions of the rotary positions are the head's length.
ROTATED_WHOLE = frozenset({
    "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "cohere2moe", "dbrx",
    "deci", "deepseek", "dots1", "dream", "ernie4_5", "ernie4_5-moe", "exaone", "exaone-moe", "exaone4",
    "falcon", "granite", "granite_swa", "graniteswitch", "grok", "grovemoe", "hunyuan-moe", "hunyuan_vl",
    "hy_v3", "internlm2", "jais2", "llada", "llada-moe", "llama", "llama4", "maincoder", "mellum", "mistral3", "olmo", "olmo2", "olmoe", "orion", "paddleocr",
    "pangu-embedded", "plamo", "pockettts", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl",
    "qwen3vlmoe", "rnd1", "seed_oss", "smallthinker", "smollm3", "starcoder2", "talkie", "xverse",
})  # fmt: skip

GATED_DELTA = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})

# What the graph of a head asserts that its block has (llama.cpp's src/models, graph_mtp).
HEAD_PARTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("cohere2moe", "deepseek32", "glm-dsa", "glm4moe"), ("ffn_gate_inp",)),
    "nemotron_h_moe": ("nextn.shared_head_norm",),
    "mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down"),
}
# ... that its attention is compressed, and ... that it is not scaled by the position.
LATENT_HEADS = frozenset({"deepseek2", "deepseek32", "glm-dsa"})
UNSCALED_HEADS = frozenset({"deepseek2"})

# All heads share one row of keys and values, which no key of compression says.
ONE_KV_HEAD = frozenset({"deepseek4"})

# The decay of Kimi's delta layers has a lower bound, and no layers without one are computed.
BOUNDED_DECAY = frozenset({"bailingmoe3"})

# No position is rotated; elsewhere ggml's rotation of no dimensions never ends.
UNROTATED = frozenset({
    "arwkv7", "bloom", "gpt2", "gptj", "jais", "jamba", "jina-bert-v2", "kimi-k3", "kimi-linear", "glm5-next", "mamba", "mamba2", "mpt",
    "nemotron_h", "nemotron_h_moe", "refact", "rwkv6", "rwkv6qwen2", "rwkv7", "t5", "t5encoder", "wavtokenizer-dec",
})  # fmt: skip

# Rotary positions always have sections.
SECTIONED = frozenset({"qwen2vl", "paddleocr", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp"})

# Some layers attend to a window alone: all but every so many, where no key says which; 0: a key must. Where the first of so many
# is the one without, two layers are the least.
WINDOW_PERIODS: Mapping[str, int] = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": 4, "dflash": 0, "dots3note": 0, "exaone-moe": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5,
    "gemma4": 0, "gemma4-assistant": 0, "gemma-embedding": 6, "gpt-oss": 2, "granite_swa": 0, "laguna": 4, "maple": 0, "mellum": 4,
    "mimo2": 0, "modern-bert": 3, "muse-glimmer": 4, "olmo2": 4, "plamo3": 8, "smallthinker": 4, "spark2_5": 0, "step35": 0,
}  # fmt: skip
WINDOW_IF_SAID = frozenset(
    {"afmoe", "dflash", "gemma3", "laguna", "mellum", "modern-bert", "olmo2", "plamo3", "smallthinker"}
)
FIRST_WITHOUT_WINDOW = frozenset({"cohere2moe", "laguna", "modern-bert", "smallthinker"})
