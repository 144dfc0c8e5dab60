"""The `general.*` keys: what a model is called, where it comes from, and how to sample from it.

What can be read out of the folder's name, config.json and README.md is read by llama.cpp's own heuristics, from the
published gguf package. Knows no tensor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.sidecars.kinds import KINDS

# generation_config.json -> general.sampling.*, with its type there. "repetition_penalty" is Hugging Face's own name.
SAMPLING: dict[str, tuple[str, type]] = {
    "sequence": ("sequence", str),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temperature": ("temp", float),
    "penalty_last_n": ("penalty_last_n", int),
    "repetition_penalty": ("penalty_repeat", float),
    "penalty_repeat": ("penalty_repeat", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}


def add_general_keys(
    writer: gguf.GGUFWriter, checkpoint: Checkpoint, name: str | None, file_type: int
) -> None:
    """Adds the `general.*` keys to a file whose tensors the writer knows already: they decide its size label.

    `name` replaces the model's name that the checkpoint suggests.
    """
    writer.add_type(gguf.GGUFType.MODEL)
    n_total, n_shared, n_expert, n_experts = writer.get_total_parameter_count()
    metadata = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(),
        _model_card(checkpoint.folder),
        checkpoint.json("config.json"),
        Path(checkpoint.name),
        n_total,
    )
    metadata.name = name or metadata.name or checkpoint.name
    metadata.size_label = metadata.size_label or gguf.size_label(n_total, n_shared, n_expert, n_experts)
    for key, value in _sampling(checkpoint).items():
        setattr(metadata, f"sampling_{key}", value)
    metadata.set_gguf_meta_model(writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """The values of generation_config.json that llama.cpp has a key for; one of another type says nothing."""
    settings = checkpoint.json("generation_config.json")
    found = {}
    for name, (key, kind) in SAMPLING.items():
        value = settings.get(name)
        if isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool):
            found[key] = kind(value)
    return found


def _model_card(folder: Path) -> dict[str, Any]:
    """The front matter of README.md; {} where there is none that can be used, as it only describes."""
    try:
        card = gguf.Metadata.load_model_card(folder)
    except Exception:  # whatever its YAML is: a README only describes
        return {}
    return {name: _text(value) for name, value in card.items() if value is not None}


def _text(value: Any) -> Any:
    """The value with every scalar in it (YAML's dates, numbers, booleans) as text, which is what the keys hold."""
    if isinstance(value, list):
        return [_text(v) for v in value if v is not None]
    if isinstance(value, dict):
        return {str(name): _text(v) for name, v in value.items() if v is not None}
    return str(value)


def file_name(name: str, type_name: str, prefix: str = "") -> str:
    """The name of a file: `PREFIXNAME-TYPE.gguf`, where NAME cannot be mistaken for a sidecar's prefix.

    >>> file_name("Qwen3.5 0.8B", "Q8_0", "mtp-")
    'mtp-Qwen3.5-0.8B-Q8_0.gguf'
    """
    stem = re.sub(r"[^\w.+-]+", "-", f"{name}-{type_name}")
    for kind in KINDS.values():
        marker = kind.prefix.removesuffix("-")
        stem = re.sub(f"(?i){marker}-", f"{marker}_", stem)
    return f"{prefix}{stem.lstrip('-.')}.gguf"
