"""A checkpoint's config.json: the text model's values, and the GGUF keys that every family shares.

Knows how Hugging Face nests and names configuration values. Does not know any family's own values, nor any tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.sidecars.kind import MAX_BLOCKS
from llama_sidecar.sidecars.model_rules import MAX_EXPERTS, MAX_WIDTH

Key = int | float | bool | str | list[int] | list[bool] | list[str] | list[float]

MAX_INTEGER = 2**31 - 1
MAX_FLOAT = 3.4028234e38  # of a GGUF's F32 keys
# The most that a size may be, by how its name ends: lists as long as these are made, and a damaged file's would fill the memory.
MOST = {
    "_layers": MAX_BLOCKS,
    "_heads": 1024,
    "_groups": 1024,
    "_experts": MAX_EXPERTS,
    "head_dim": 2048,
    "hidden_size": MAX_WIDTH,
    "vocab_size": 1 << 20,
}


class Config(Mapping[str, Any]):
    """config.json with `text_config` merged over the root, as the text model sees it.

    >>> Config({"architectures": ["X"], "text_config": {"hidden_size": 64}}).integer("hidden_size")
    64
    """

    def __init__(self, root: Mapping[str, Any]):
        text = root.get("text_config")
        said = (
            {name: value for name, value in text.items() if value is not None}
            if isinstance(text, dict)
            else {}
        )
        self._values: dict[str, Any] = {**root, **said}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise BadConfig(f"config.json has no {name!r}, which this architecture needs")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, name: str, at_most: int | None = None) -> int:
        """The value of a required positive integer, no larger than its name allows or `at_most`."""
        return checked_integer(name, self[name], at_most)

    def number(self, name: str) -> float:
        """The value of a required number, 0 or more."""
        return checked_number(name, self[name])

    @property
    def architecture(self) -> str:
        """The first of `architectures`, that of `text_config` before the root's."""
        names = self.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise BadConfig(
                "config.json names no architecture: expected a list of strings under 'architectures'"
            )
        return names[0]

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary values: `rope_parameters`, else `rope_scaling`, filled up from the root."""
        value = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(value, dict):
            raise BadConfig(f"config.json has rope parameters {value!r}; expected an object")
        rope = {name: entry for name, entry in value.items() if entry is not None}
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if name not in rope and self.get(name) is not None:
                rope[name] = self[name]
        if "rope_type" not in rope and "type" in rope:
            rope["rope_type"] = rope["type"]
        return rope


def checked_integer(name: str, value: Any, at_most: int | None = None) -> int:
    """The value, if it is a positive integer no larger than its name allows (MOST) or `at_most`; else raises BadConfig."""
    if at_most is None:
        at_most = next((most for ending, most in MOST.items() if name.endswith(ending)), MAX_INTEGER)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= at_most:
        limit = f" of at most {at_most}" if isinstance(value, int) and value > at_most else ""
        raise BadConfig(f"config.json has {name} = {value!r}; expected a positive integer{limit}")
    return value


def checked_number(name: str, value: Any, at_most: float = MAX_FLOAT) -> float:
    """The value, if it is a number from 0 on that a 32-bit float can hold; else raises BadConfig."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= at_most:
        raise BadConfig(f"config.json has {name} = {value!r}; expected a number from 0 to {at_most:.3g}")
    return float(value)


def shared_keys(
    config: Config, arch: str, n_blocks: int, *, epsilon: str | None = "rms_norm_eps"
) -> dict[str, Key]:
    """The GGUF keys that every family writes the same way (facts: llama.cpp's loader and its published files).

    `arch` prefixes the keys and `n_blocks` is the number of blocks the file declares, head included. `epsilon` is what
    config.json calls the norms' constant, None for a file that does without.
    """
    n_heads, n_kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if n_heads % n_kv_heads:
        raise BadConfig(
            f"config.json has {n_heads} attention heads for {n_kv_heads} key-value heads; expected a multiple"
        )
    keys: dict[str, Key] = {
        "block_count": n_blocks,
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": config.integer("hidden_size"),
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
    }
    if epsilon:
        keys["attention.layer_norm_rms_epsilon"] = config.number(epsilon)
    if config.get("intermediate_size") is not None:
        keys["feed_forward_length"] = config.integer("intermediate_size")
    if config.get("head_dim") is not None:
        keys["attention.key_length"] = keys["attention.value_length"] = config.integer("head_dim")
    keys |= _rope_keys(config)
    return {f"{arch}.{name}": value for name, value in keys.items()}


def _rope_keys(config: Config) -> dict[str, Key]:
    rope = config.rope
    keys: dict[str, Key] = (
        {"rope.freq_base": checked_number("rope_theta", rope["rope_theta"])} if "rope_theta" in rope else {}
    )
    if "mrope_section" in rope:
        sections = rope["mrope_section"]
        if not (isinstance(sections, list) and len(sections) <= 4 and all(_is_size(s) for s in sections)):
            raise BadConfig(f"config.json has mrope_section = {sections!r}; expected at most four integers")
        keys["rope.dimension_sections"] = sections + [0] * (4 - len(sections))
    scaling = rope.get("rope_type")
    if scaling in (None, "default"):
        return keys
    if scaling not in ("linear", "yarn") or "factor" not in rope:
        raise BadConfig(
            f"config.json has rope scaling {scaling!r}; expected 'default', or 'linear' or 'yarn' with a 'factor'"
        )
    keys["rope.scaling.type"] = scaling
    keys["rope.scaling.factor"] = checked_number("factor", rope["factor"])
    if scaling == "yarn":
        if "original_max_position_embeddings" not in rope:
            raise BadConfig("config.json has yarn rope scaling without 'original_max_position_embeddings'")
        keys["rope.scaling.original_context_length"] = checked_integer(
            "original_max_position_embeddings", rope["original_max_position_embeddings"]
        )
        for key, names in {
            "yarn_ext_factor": ("extrapolation_factor",),
            "yarn_attn_factor": ("attention_factor", "attn_factor"),
            "yarn_beta_fast": ("beta_fast",),
            "yarn_beta_slow": ("beta_slow",),
        }.items():
            value = next((rope[n] for n in names if n in rope), None)
            if value is not None:
                keys[f"rope.scaling.{key}"] = checked_number(names[0], value)
    return keys


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER
