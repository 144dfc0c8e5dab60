"""The `general.*` keys: what a model is called, where it comes from, and how to sample from it.

What can be read out of the folder's name, config.json and README.md is read by llama.cpp's own heuristics, from the
published gguf package. Knows no tensor.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import gguf

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.converter.config import MAX_FLOAT, MAX_INTEGER
from llama_sidecar.converter.places import small_file
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
MAX_CARD_BYTES = 1 << 20  # of README.md: the longest published ones, with hundreds of results, have 0.4 MB
ANCHOR = re.compile(r"(?<!\w)&\S")
# What of a model card may be a list: of texts, or of texts and descriptions.
TEXT_LISTS = ("license", "tags", "pipeline_tag", "language", "languages")
SOURCE_LISTS = ("base_model", "base_models", "base_model_sources", "dataset", "datasets", "dataset_sources")


def add_general_keys(
    writer: gguf.GGUFWriter, checkpoint: Checkpoint, name: str | None, file_type: int
) -> None:
    """Adds the `general.*` keys to a file whose tensors the writer knows already: they decide its size label.

    `name` replaces the model's name that the checkpoint suggests.
    """
    writer.add_type(gguf.GGUFType.MODEL)
    n_total, n_shared, n_expert, n_experts = writer.get_total_parameter_count()
    origin = checkpoint.json("config.json").get("_name_or_path")
    metadata = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(),
        _model_card(checkpoint.folder),
        {"_name_or_path": _utf8(origin) if isinstance(origin, str) else None},
        Path(_utf8(checkpoint.name)),
        n_total,
    )
    metadata.name = _utf8(name or metadata.name or checkpoint.name)
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
        if kind is str and isinstance(value, str):
            found[key] = _utf8(value)
        elif kind is not str and _is_number(value, kind):
            found[key] = kind(value)
    return found


def _is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of a type that a key of 32 bits can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        return False
    return abs(value) <= (MAX_FLOAT if kind is float else MAX_INTEGER)


def _model_card(folder: Path) -> dict[str, Any]:
    """What of README.md's front matter the keys can hold; the rest of it is left out, as it only describes."""
    try:
        path = small_file(folder, "README.md")
        if path is None or path.stat().st_size > MAX_CARD_BYTES or _has_anchors(path.read_text("utf-8")):
            return {}
        card = gguf.Metadata.load_model_card(folder)
        kept = {name: _kept(name, value) for name, value in card.items()}
    except Exception:  # whatever its YAML is: a README only describes
        return {}
    return {name: value for name, value in kept.items() if value is not None}


def _has_anchors(text: str) -> bool:
    """Whether a front matter names parts to repeat them: maps merged of merged maps fill the memory (before PyYAML 6.0.4)."""
    return ANCHOR.search(text.partition("\n---\n")[0]) is not None


def _kept(name: Any, value: Any) -> Any:
    if isinstance(value, list) and name in TEXT_LISTS:
        return [text for entry in value if (text := _scalar(entry)) is not None]
    if isinstance(value, list) and name in SOURCE_LISTS:
        sources = (_described(entry) if isinstance(entry, dict) else _scalar(entry) for entry in value)
        return [source for source in sources if source is not None]
    return _scalar(value)


def _described(source: dict[Any, Any]) -> dict[str, str]:
    return {str(name): text for name, value in source.items() if (text := _scalar(value)) is not None}


def _scalar(value: Any) -> str | None:
    """A scalar (YAML's dates, numbers and booleans too) as text, which is what the keys hold; None for anything else."""
    return _utf8(str(value)) if isinstance(value, (str, int, float, date)) else None


def _utf8(text: str) -> str:
    """The text without what UTF-8 cannot hold: halves of surrogate pairs, and what stands for bytes in a file's name."""
    return text.encode("utf-8", "replace").decode()


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
