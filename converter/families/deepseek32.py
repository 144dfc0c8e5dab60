"""DeepSeek-V3.2: DeepSeek-V3 with an indexer beside each attention that picks the positions it looks at.

Facts: transformers' modeling_deepseek_v32.py for the checkpoint's names, llama.cpp's src/models/deepseek32.cpp for the
file's. The head's block has an indexer too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.families import Layout, Placement, Vocabulary, _parts, deepseek2, place

ARCH = "deepseek32"
CLASSES = ("DeepseekV32ForCausalLM",)
DROPPED = deepseek2.DROPPED
PREFIX = deepseek2.PREFIX
VOCABULARY = Vocabulary("deepseek-v3")
canonical = deepseek2.canonical


def keys(config: Config, n_head_layers: int, arch: str = ARCH) -> dict[str, Key]:
    own = {
        "head_count": config.integer("index_n_heads"),
        "key_length": config.integer("index_head_dim"),
        "top_k": config.integer("index_topk"),
    }
    indexer = {f"{arch}.attention.indexer.{name}": value for name, value in own.items()}
    return deepseek2.keys(config, n_head_layers, arch) | indexer


def indexer(config: Config, source: str, target: str) -> Iterator[Placement]:
    """What scores the positions: queries from the latent, one key, and a weight for each of its heads."""
    hidden, head = config.integer("hidden_size"), config.integer("index_head_dim")
    n_heads = config.integer("index_n_heads")
    yield place(f"{target}indexer.k_norm.weight", f"{source}k_norm.weight", head)
    yield place(f"{target}indexer.k_norm.bias", f"{source}k_norm.bias", head)
    yield place(f"{target}indexer.proj.weight", f"{source}weights_proj.weight", n_heads, hidden)
    yield place(f"{target}indexer.attn_k.weight", f"{source}wk.weight", head, hidden)
    rank = config.integer("q_lora_rank")
    yield place(f"{target}indexer.attn_q_b.weight", f"{source}wq_b.weight", n_heads * head, rank)


def layout(config: Config, names: Collection[str]) -> Layout:
    def block(i: int, source: str, target: str) -> Iterator[Placement]:
        yield from deepseek2.block(config, names, i, source, target)
        yield from indexer(config, f"{source}self_attn.indexer.", target)

    return _parts.appended_layout(config, names, block)


_YARN, _optional = deepseek2.TINY["yarn"]
_TINY = _YARN | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 4,
}
TINY = {"sparse": (_TINY, _optional), "all": (_TINY | {"index_topk": 64, "rope_scaling": None}, _optional)}
