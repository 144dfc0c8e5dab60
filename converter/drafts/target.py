"""The main model that a stand-alone drafter is converted for: its vocabulary, its sizes and its fingerprints.

It is a checkpoint's folder or a main GGUF; no weights are read of it but the norms that the fingerprint covers. A checkpoint
of a class that no family here converts serves too, as far as its tokenizer does: then there is no fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_sidecar.converter.checkpoint import Checkpoint, open_checkpoint
from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.errors import UnsupportedModel
from llama_sidecar.converter.families import family_of
from llama_sidecar.converter.fingerprints import fingerprint_keys
from llama_sidecar.converter.plan import canonical_tensors
from llama_sidecar.converter.tokenizer import DEFAULT, vocabulary_keys
from llama_sidecar.sidecars import MainFile, StringArray, keys, open_main
from llama_sidecar.sidecars.discover import TYPE_WORD
from llama_sidecar.sidecars.shards import shard_name

SECTIONS = "{arch}.rope.dimension_sections"


@dataclass(frozen=True)
class Target:
    """What a drafter needs to know. `vocabulary` are the `tokenizer.*` keys, `fingerprints` those of FORMAT.md.

    `arch` is its GGUF architecture, where it is known.
    `has_sections`: its positions are rotated in sections (M-RoPE). `settings` is its tokenizer_config.json, where there is one.
    """

    name: str
    n_layers: int
    width: int
    n_vocab: int
    has_sections: bool
    vocabulary: Mapping[str, Key]
    fingerprints: Mapping[str, Key]
    settings: Mapping[str, Any] = field(default_factory=dict)
    arch: str | None = None


def open_target(path: str | Path) -> Target:
    """Reads a target. Raises NotACheckpoint, BadTokenizer and what `open_main` raises.

    >>> open_target("Qwen3-8B-Q8_0.gguf").width  # doctest: +SKIP
    4096
    """
    if Path(path).suffix.lower() == ".gguf":
        return _of_main(open_main(path))
    with open_checkpoint(path) as opened:
        return _of_checkpoint(opened)


def _of_main(main: MainFile) -> Target:
    shard = shard_name(main.path)
    stem = shard[0] if shard else main.path.stem
    vocabulary = {n: _value(v) for n, v in main.header.keys.items() if n.startswith("tokenizer.")}
    prints: dict[str, Key] = {keys.FORMAT: keys.FORMAT_VERSION}
    if main.trunk:
        prints[keys.FINGERPRINT_TRUNK] = main.trunk
    if main.rows:
        prints[keys.FINGERPRINT_ROWS] = main.rows
    return Target(
        name=TYPE_WORD.sub("", stem),
        n_layers=main.n_layers,
        width=main.width,
        n_vocab=len(main.tokens),
        has_sections=main.header.key(SECTIONS) in main.header.keys,
        vocabulary=vocabulary,
        fingerprints=prints,
        arch=main.arch,
    )


def _value(value: Any) -> Key:
    """A key's value as the writer takes it."""
    if isinstance(value, StringArray):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value  # type: ignore[no-any-return]


def _of_checkpoint(opened: Checkpoint) -> Target:
    config = opened.config
    try:
        family = family_of(config)
    except UnsupportedModel:
        family = None
    vocabulary = vocabulary_keys(opened, family.VOCABULARY if family else DEFAULT)
    prints: dict[str, Key] = {keys.FORMAT: keys.FORMAT_VERSION}
    if family:
        tensors = canonical_tensors(opened.tensors, family)
        layout = family.layout(config, tensors.keys())
        prints = fingerprint_keys(
            layout, tensors, config, vocabulary[keys.TOKENS], opened.place.reading.n_threads
        )
    return of_model(opened, family.ARCH if family else None, vocabulary, prints)


def of_model(
    opened: Checkpoint, arch: str | None, vocabulary: Mapping[str, Key], prints: Mapping[str, Key]
) -> Target:
    """An opened checkpoint as a target, with its keys of the vocabulary and its fingerprints."""
    config = opened.config
    return Target(
        name=opened.name,
        n_layers=config.integer("num_hidden_layers"),
        width=config.integer("hidden_size"),
        n_vocab=config.integer("vocab_size"),
        has_sections="mrope_section" in Config(config).rope,
        vocabulary=vocabulary,
        fingerprints=prints,
        settings=opened.json("tokenizer_config.json"),
        arch=arch,
    )
