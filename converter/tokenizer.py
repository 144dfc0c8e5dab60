"""A checkpoint's tokenizer files as GGUF vocabulary keys: byte-level BPE, and Gemma 4's BPE over characters.

Knows tokenizer.json, tokenizer_config.json and the chat-template files (format: huggingface/tokenizers), and which
pre-tokenizers llama.cpp has a name for. A pre-tokenizer is recognised by its split pattern, so that trimmed and
self-trained vocabularies convert too. Does not know any model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.converter.config import Key
from llama_sidecar.converter.errors import BadTokenizer
from llama_sidecar.converter.families import Vocabulary

# The split patterns of tokenizer.json -> llama.cpp's names for them (src/llama-vocab.cpp keeps the patterns as comments).
# Where several names stand for one way of splitting, the family says which it is; they differ in what else they switch on.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
PRE_TOKENIZERS: dict[tuple[str, ...], tuple[str, ...]] = {
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _SPACES,): ("qwen2",),
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _SPACES,): (
        "qwen35",
    ),
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + _SPACES,): (
        "llama-bpe",
        "glm4",
        "pixtral",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): ("tekken",),
    (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): ("tiny_aya", "cohere2moe"),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ): ("bailingmoe", "bailingmoe2"),
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        _MARKS + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+" + _SPACES,
    ): ("deepseek-v3", "hunyuan-dense"),
}

# What src/llama-vocab.cpp of the tested llama.cpp compares `tokenizer.ggml.pre` with; a file with any other name does not load.
PRE_TOKENIZER_NAMES = [
    "a.x-4.0",
    "afmoe",
    "bailingmoe",
    "bailingmoe2",
    "bloom",
    "chameleon",
    "chatglm-bpe",
    "codeshell",
    "cohere2moe",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "exaone",
    "exaone-moe",
    "exaone4",
    "f2llmv2",
    "falcon",
    "falcon-h1",
    "falcon3",
    "gigachat",
    "glm4",
    "glm5",
    "gpt-2",
    "gpt-4o",
    "gpt3-finnish",
    "granite-docling",
    "granite-embed-multi-311m",
    "granite-embed-multi-97m",
    "grok-2",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "jais",
    "jais-2",
    "jina-v1-en",
    "jina-v2-code",
    "jina-v2-de",
    "jina-v2-es",
    "jina-v5-nano",
    "joyai-llm",
    "kanana2",
    "kimi-k2",
    "kormo",
    "laguna",
    "lfm2",
    "llada-moe",
    "llama-bpe",
    "llama4",
    "megrez",
    "mellum",
    "mellum2",
    "midm-2.0",
    "minerva-7b",
    "minicpm5",
    "minimax-m2",
    "modern-bert",
    "mpt",
    "olmo",
    "phi-2",
    "pixtral",
    "poro-chat",
    "qwen2",
    "qwen35",
    "refact",
    "roberta-bpe",
    "sarvam-moe",
    "seed-coder",
    "smaug-bpe",
    "smollm",
    "solar-open",
    "spark2_5",
    "stablelm2",
    "starcoder",
    "superbpe",
    "talkie",
    "tekken",
    "tiny_aya",
    "trillion",
    "ufakzeka",
    "viking",
    "whitespace",
    "youtu",
]

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # llama_token_type
GEMMA4 = "gemma4"
GEMMA4_SHOWN = (  # flagged as special, and yet what a chat's reader looks for
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
)  # fmt: skip

# What a special token is called in tokenizer_config.json and config.json -> in GGUF ("seperator" is published that way).
SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
    "eot": "eot",
    "eom": "eom",
}
DEFAULT = Vocabulary("qwen2")
COMPANIONS = "additional_chat_templates"  # the folder of those that have a name


def check_pre_tokenizer(name: str) -> None:
    """Raises BadTokenizer for a name that no llama.cpp tested here knows."""
    if name not in PRE_TOKENIZER_NAMES:
        raise BadTokenizer(
            f"{name!r} is no pre-tokenizer of llama.cpp's; expected one of {', '.join(PRE_TOKENIZER_NAMES)}"
        )


def vocabulary_keys(
    checkpoint: Checkpoint, family: Vocabulary = DEFAULT, pre_tokenizer: str | None = None
) -> dict[str, Key]:
    """The `tokenizer.*` keys of a checkpoint, padded to the configuration's `vocab_size`.

    `family` is what the checkpoint's family says of its vocabulary, `pre_tokenizer` llama.cpp's name of the way it splits text
    where the user gives one. Raises BadTokenizer when tokenizer.json is missing, is
    not byte-level BPE, splits in a way that is not known here and has been given no name, or lacks a token that the family gives a role to.
    """
    tokenizer = checkpoint.json("tokenizer.json")
    if not tokenizer:
        raise BadTokenizer(
            f"{checkpoint.folder} has no tokenizer.json; expected a byte-level BPE tokenizer in that form"
        )
    settings = checkpoint.json("tokenizer_config.json")
    try:
        keys = _keys(checkpoint, tokenizer, settings, family, pre_tokenizer)
        _check_text(keys)
        return keys
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadTokenizer(
            f"{checkpoint.folder}: the tokenizer's files are not in the form expected: {error!r}"
        ) from error
    except OSError as error:
        raise BadTokenizer(f"{error.filename} cannot be read: {error.strerror}") from error


def _suppressed(checkpoint: Checkpoint, family: Vocabulary, n_vocab: int) -> dict[str, Key]:
    """The tokens that are never to be written, where the checkpoint's class says so. Raises ValueError for what is no token."""
    ids = checkpoint.json("generation_config.json").get("suppress_tokens")
    if checkpoint.config.architecture not in family.suppressing or not ids:
        return {}
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < n_vocab for i in ids):
        raise ValueError(f"suppress_tokens are {ids!r}; expected token ids below {n_vocab}")
    return {"tokenizer.ggml.suppress_tokens": ids}


def _check_text(keys: Mapping[str, Key]) -> None:
    """Raises ValueError for text that UTF-8 cannot hold: JSON can spell half of a surrogate pair."""
    for value in keys.values():
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, list) and value and isinstance(value[0], str):
            "".join(map(str, value)).encode()


def _keys(
    checkpoint: Checkpoint,
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    family: Vocabulary,
    given: str | None,
) -> dict[str, Key]:
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise BadTokenizer(f"tokenizer.json holds a {model.get('type')} model; expected byte-level BPE")
    added = _added_tokens(tokenizer, settings)
    tokens, types = _tokens(model["vocab"], added, checkpoint.config.integer("vocab_size"))
    if family.pre == GEMMA4:
        if given is not None:
            raise BadTokenizer("Gemma 4's vocabulary is split in one way alone: leave --pre-tokenizer out")
        _check_split_at_spaces(tokenizer.get("pre_tokenizer"))
        own = _gemma4_keys(model, tokens, types) | _special_ids(added, settings, checkpoint)
        own |= {"tokenizer.ggml.add_bos_token": True} | _suppressed(checkpoint, family, len(tokens))
        return own | _chat_templates(checkpoint, settings)
    keys: dict[str, Key] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(tokenizer, family, given, checkpoint.warnings),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _merges(model.get("merges")),
    }
    keys |= _special_ids(added, settings, checkpoint) | _roles(added, family)
    keys |= _added_at_the_ends(tokenizer, settings)
    return keys | _chat_templates(checkpoint, settings)


def _check_split_at_spaces(stage: Mapping[str, Any] | None) -> None:
    """Raises BadTokenizer where text is split at more than spaces, of which Gemma 4's has none left by then."""
    if stage and (stage.get("type"), stage.get("pattern")) != ("Split", {"String": " "}):
        raise BadTokenizer(
            f"tokenizer.json splits by {stage.get('pattern') or stage.get('type')}; expected Gemma 4's, which splits at spaces alone: "
            f"the text would be cut at other places than in training"
        )


def _gemma4_keys(model: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Key]:
    """Spaces are written as U+2581, and what is no token falls apart into bytes `<0x00>`; there are no scores."""
    if not model.get("byte_fallback"):
        raise BadTokenizer("tokenizer.json does not fall back to bytes; expected Gemma 4's BPE, which does")
    for index, text in enumerate(tokens):
        if text.startswith("<0x") and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            types[index] = BYTE
        elif text in GEMMA4_SHOWN:
            types[index] = USER_DEFINED
    return {
        "tokenizer.ggml.model": GEMMA4,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": _merges(model.get("merges")),
        "tokenizer.ggml.add_space_prefix": False,
    }


def _pre_tokenizer(
    tokenizer: Mapping[str, Any], family: Vocabulary, given: str | None, warnings: list[str]
) -> str:
    stage = tokenizer.get("pre_tokenizer") or {}
    stages = stage.get("pretokenizers", [stage])
    patterns = tuple(
        _text(s["pattern"].get("Regex", "")).replace("\r", r"\r").replace("\n", r"\n")
        for s in stages
        if s.get("type") == "Split" and isinstance(s.get("pattern"), dict)
    )
    if given is not None:
        if given not in PRE_TOKENIZERS.get(patterns, (given,)):
            warnings.append(
                f"tokenizer.json splits text as llama.cpp's {' or '.join(PRE_TOKENIZERS[patterns])} does; "
                f"{given} is written, as asked for"
            )
        return given
    if patterns not in PRE_TOKENIZERS:
        known = ", ".join(name for names in PRE_TOKENIZERS.values() for name in names)
        raise BadTokenizer(
            f"tokenizer.json splits by {list(patterns) or stage.get('type')}, which is none of the patterns known here "
            f"({known}): the text would be cut at other places than in training; if llama.cpp has a name for it, give that with "
            f"--pre-tokenizer"
        )
    names = PRE_TOKENIZERS[patterns]
    return family.pre if family.pre in names else names[0]


def _roles(added: Mapping[int, tuple[str, bool]], family: Vocabulary) -> dict[str, Key]:
    """The ids of the tokens that the family itself gives a role to."""
    by_text = {text: index for index, (text, _) in added.items()}
    missing = [text for text in family.special.values() if text not in by_text]
    if missing:
        raise BadTokenizer(
            f"tokenizer.json has no added token {', '.join(map(repr, missing))}; expected this family's vocabulary"
        )
    return {
        f"tokenizer.ggml.{SPECIAL[role]}_token_id": by_text[text] for role, text in family.special.items()
    }


def _added_tokens(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (text, is special) of the added tokens, tokenizer.json's and those that only tokenizer_config.json has."""
    listed = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        listed.setdefault(int(index), token)
    return {index: (_text(token["content"]), bool(token.get("special"))) for index, token in listed.items()}


def _tokens(
    vocabulary: Mapping[str, int], added: Mapping[int, tuple[str, bool]], size: int
) -> tuple[list[str], list[int]]:
    """The text and the type of every id. llama.cpp's own loader ends the process where two have one text."""
    wrong = next(
        (i for i in chain(vocabulary.values(), added) if type(i) is not int or not 0 <= i < size), None
    )
    if wrong is not None:
        raise BadTokenizer(
            f"tokenizer.json has a token {wrong!r}; expected ids below config.json's vocab_size = {size}"
        )
    if len(set(vocabulary.values())) < len(vocabulary):
        raise BadTokenizer("tokenizer.json gives several texts one id; expected an id for each")
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, NORMAL
    for index, (text, special) in added.items():
        if special or _looks_special(text):
            tokens[index], types[index] = text, CONTROL
        else:
            tokens[index], types[index] = text.replace("\u2581", " "), USER_DEFINED
    if len(set(tokens)) < size:
        twice = [text[:99] for text, n in Counter(tokens).items() if n > 1]
        raise BadTokenizer(
            f"tokenizer.json gives several ids one text ({', '.join(map(repr, twice[:5]))}); expected a text for each"
        )
    return tokens, types


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _looks_special(text: str) -> bool:
    """Some checkpoints leave the flag out for tokens that must never be printed."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _merges(merges: Any) -> list[str]:
    """Merges as "left right"; a space inside a part is written as byte-level BPE writes it."""
    if not isinstance(merges, list) or not merges:
        raise BadTokenizer("tokenizer.json has no list of merges; expected byte-level BPE")
    space = chr(ord(" ") + 256)
    pairs = (
        m.split(" ") if isinstance(m, str) else [_text(part).replace(" ", space) for part in m]
        for m in merges
    )
    return [f"{left} {right}" for left, right in pairs]


def _special_ids(
    added: Mapping[int, tuple[str, bool]], settings: Mapping[str, Any], checkpoint: Checkpoint
) -> dict[str, Key]:
    """Special tokens by tokenizer_config.json's texts, else by config.json's ids."""
    by_text = {text: index for index, (text, _) in sorted(added.items(), reverse=True)}
    root = checkpoint.json("config.json")
    keys: dict[str, Key] = {}
    for name, gguf_name in SPECIAL.items():
        entry = settings.get(f"{name}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        index = by_text.get(text) if isinstance(text, str) else None
        if index is None:
            index = root.get(f"{name}_token_id")
        if index is None:
            index = checkpoint.config.get(f"{name}_token_id")
        if isinstance(index, int) and 0 <= index < checkpoint.config.integer("vocab_size"):
            keys[f"tokenizer.ggml.{gguf_name}_token_id"] = index
    return keys


def _added_at_the_ends(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Key]:
    """Whether encoding adds a token in front or behind: the post-processor decides, before tokenizer_config.json."""
    flags = {name: v for name in ("bos", "eos") if isinstance(v := settings.get(f"add_{name}_token"), bool)}
    stage = tokenizer.get("post_processor") or {}
    for processor in stage.get("processors", [stage]):
        if processor.get("type") == "ByteLevel":
            flags |= {"bos": False, "eos": False}
        elif processor.get("type") == "TemplateProcessing":
            ends = [part.get("SpecialToken", {}).get("id") for part in processor.get("single", [])]
            if len(ends) > 1:
                flags |= {
                    name: True for name, end in (("bos", ends[0]), ("eos", ends[-1])) if end is not None
                }
    return {f"tokenizer.ggml.add_{name}_token": value for name, value in flags.items()}


def _companion(checkpoint: Checkpoint, path: Path) -> str:
    text = checkpoint.text(f"{COMPANIONS}/{path.name}")
    if text is None:
        raise BadTokenizer(
            f"{path} cannot be read: a folder, a pipe or a broken link; expected a file of text"
        )
    return text


def _chat_templates(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Key]:
    """tokenizer_config.json's template, else chat_template.jinja (and its named companions), else chat_template.json."""
    template = settings.get("chat_template")
    file = checkpoint.text("chat_template.jinja")
    if template is None and file is not None:
        template = file
        companions = sorted((checkpoint.folder / COMPANIONS).glob("*.jinja"))
        if companions:
            named = [{"name": path.stem, "template": _companion(checkpoint, path)} for path in companions]
            template = [{"name": "default", "template": template}, *named]
    elif template is None:
        template = checkpoint.json("chat_template.json").get("chat_template")
    elif isinstance(template, str) and file is not None and file.strip() != template.strip():
        checkpoint.warnings.append(
            "chat_template.jinja is not the chat template in tokenizer_config.json: the latter is used"
        )
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    if not isinstance(template, list):
        return {}
    keys: dict[str, Key] = {}
    for entry in template:
        name = _text(entry["name"])
        keys["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = _text(entry["template"])
    named_only = [entry["name"] for entry in template if entry["name"] != "default"]
    return keys | ({"tokenizer.chat_templates": named_only} if named_only else {})
