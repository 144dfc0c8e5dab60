"""Tiny random Hugging Face checkpoints, the same bytes on every machine, for the converter's tests.

Every variant of every family's `TINY` becomes a folder of a few hundred kilobytes. Values come from the raw bits of
PCG64, which numpy promises to keep, so that stored listings stay valid.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from hashlib import sha256
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from llama_sidecar.converter.config import Config
from llama_sidecar.converter.families import Source, families
from llama_sidecar.converter.tokenizer import GEMMA4, PRE_TOKENIZERS
from llama_sidecar.sidecars import read_header

Array = npt.NDArray[Any]
DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "I64": np.dtype(np.int64),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu), "I32": np.dtype(np.int32), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
VARIANTS = [(arch, variant) for arch, family in families().items() for variant in family.TINY]


def has_head(arch: str, variant: str) -> bool:
    """Whether the variant's checkpoint holds a draft head; a family's drafter may be a checkpoint of its own (drafts/)."""
    config, optional = families()[arch].TINY[variant]
    return bool(families()[arch].layout(Config(config), optional).head)


# How the names of tensors end that published checkpoints have in F32.
KEPT_F32 = (
    "A_log", "linear_attn.norm.weight",
    "_fn", "_base", "hc_attn_scale", "hc_ffn_scale", "hc_head_scale", ".ape", ".attn_sink", "ffn.gate.bias",
)  # fmt: skip
# A tensor of what sees pictures, which the text model leaves out, where a family calls it otherwise.
VISION = {"gemma4": "model.vision_embedder.patch_ln1.weight"}
WITH_HEAD = [variant for variant in VARIANTS if has_head(*variant)]
LOGITS_PROMPT, DRAFT_TOKEN = list(range(20, 28)), 40
END, START, STOP, CALL = 260, 261, 262, 263  # ids of the added tokens


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes a safetensors file with the tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def random_values(name: str, shape: tuple[int, ...], scale: float = 0.5) -> npt.NDArray[np.float32]:
    """Uniform multiples of 2**-24 times scale around 0, decided by the name alone."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return ((bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)).reshape(
        shape
    ) * np.float32(scale)


def different_integers(name: str, shape: tuple[int, int], below: int) -> npt.NDArray[np.int64]:
    """Rows of integers below a number, no two in a row the same."""
    start = np.random.PCG64(zlib.crc32(name.encode())).random_raw(shape[0]) % np.uint64(below)
    return (start.astype(np.int64)[:, None] + np.arange(shape[1])) % below


def tiny_tensors(
    arch: str, variant: str, dtype: str = "BF16", config: Mapping[str, Any] | None = None
) -> dict[str, Array]:
    """The variant's tensors under the names that its class gives them; those of `KEPT_F32` stay F32, and tables of numbers I64."""
    family = families()[arch]
    root, optional = family.TINY[variant]
    config = Config(config or root)
    layout = family.layout(config, optional)
    prefix = family.PREFIX
    if config.architecture.endswith("ForConditionalGeneration"):
        prefix += "language_model."
    tensors: dict[str, Array] = {}
    placements = layout.shared + layout.trunk + layout.head
    below = {source.name: p.below for p in placements for source in p.sources if p.below}
    for source in _sources(placements):
        name = source.name if source.name.startswith(("lm_head.", "mtp.", prefix)) else prefix + source.name
        if source.name in below:
            tensors[name] = different_integers(source.name, source.shape, below[source.name])
            continue
        kept = source.name.endswith(KEPT_F32)
        tensors[name] = random_values(source.name, source.shape).astype(DTYPES["F32" if kept else dtype])
    if "language_model" in prefix:
        of_pictures = VISION.get(arch, "model.visual.merger.norm.weight")
        tensors[of_pictures] = random_values("visual", (8,)).astype(DTYPES[dtype])
    return tensors


def _sources(placements: list[Any]) -> list[Source]:
    return list(dict.fromkeys(source for placement in placements for source in placement.sources))


def tiny_config(arch: str, variant: str) -> dict[str, Any]:
    return json.loads(json.dumps(families()[arch].TINY[variant][0]))


def make_checkpoint(
    parent: Path,
    arch: str = "qwen35",
    variant: str = "tied",
    *,
    tensors: Mapping[str, Array] | None = None,
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Path:
    """Writes a variant's folder, `tiny-ARCH-VARIANT` unless named, with other tensors or another config if given."""
    folder = parent / (name or f"tiny-{arch}-{variant}")
    folder.mkdir(parents=True)
    write_safetensors(
        folder / "model.safetensors", tiny_tensors(arch, variant) if tensors is None else tensors
    )
    write_json(folder / "config.json", tiny_config(arch, variant) if config is None else config)
    write_tokenizer(folder, arch)
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [STOP, END]}
        | {"suppress_tokens": [7, 9]},
    )
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def write_tokenizer(folder: Path, arch: str = "qwen35", n_more: int = 0) -> None:
    """A byte-level BPE of 256 bytes, four merges and four added tokens, split as the architecture's are.

    `n_more` tokens of two and three bytes follow the added ones, each with its merge, for a vocabulary of real size.
    """
    if families()[arch].VOCABULARY.pre == GEMMA4:
        _write_gemma4_tokenizer(folder)
        return
    letters = _byte_letters()
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["\u0120", "t"]]
    vocabulary = {text: i for i, text in enumerate([*letters, *map("".join, merges)])}
    pairs = ([a, b] for a in chain(letters, map("".join, product(letters, repeat=2))) for b in letters)
    more = list(islice((pair for pair in pairs if "".join(pair) not in vocabulary), n_more))
    vocabulary |= {"".join(pair): CALL + 1 + i for i, pair in enumerate(more)}
    family = families()[arch].VOCABULARY
    patterns = next(patterns for patterns, names in PRE_TOKENIZERS.items() if family.pre in names)
    added = {END: "<|endoftext|>", START: "<|im_start|>", STOP: "<|im_end|>", CALL: "<tool_call>"}
    roles = [text for text in family.special.values() if text not in added.values()]
    added |= {CALL + 1 + n_more + i: text for i, text in enumerate(roles)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": i, "content": t, "special": i != CALL, **flags} for i, t in added.items()],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    *(
                        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
                        for regex in patterns
                    ),
                    byte_level,
                ],
            },
            "post_processor": byte_level, "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": vocabulary, "merges": merges + more,
            },
        },
    )  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
            "eos_token": added[STOP], "pad_token": added[END], "unk_token": None, "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(i): {"content": t, "special": i != CALL, **flags} for i, t in added.items()},
            "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        },
    )  # fmt: skip


def _write_gemma4_tokenizer(folder: Path, size: int = 320) -> None:
    """A BPE over characters with spaces as U+2581, which falls back to 256 byte tokens; the special tokens are in it."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_call>"]
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["\u2581", "t"]]
    texts = [*special, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    texts += map("".join, merges)
    texts += [f"filler{i}" for i in range(size - len(texts))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(special)],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            "pre_tokenizer": {
                "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
            },
            "post_processor": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "model": {
                "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                "vocab": {text: i for i, text in enumerate(texts)}, "merges": merges,
            },
        },
    )  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
            "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        },
    )  # fmt: skip


def listing(path: Path) -> dict[str, dict[str, str]]:
    """A GGUF file in words: of each tensor type, shape and hash (of `ssm_a` the values), of each key type and value."""
    header = read_header(path)
    tensors = {}
    for name, info in sorted(header.tensors.items()):
        data = header.tensor_bytes(name).tobytes()
        digest = sha256(data).hexdigest()[:16]
        if name.endswith("ssm_a"):
            digest = " ".join(str(float(value)) for value in np.frombuffer(data, np.float32))
        tensors[name] = f"{info.type_name} {'x'.join(map(str, info.shape))} {digest}"
    keys = {}
    for name, value in sorted(header.keys.items()):
        kinds = " of ".join(kind.name for kind in header.key_types[name])
        keys[name] = f"{kinds} {_words(value)}"
    return {"tensors": tensors, "keys": keys}


def _words(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value)
    text = json.dumps([v if isinstance(v, str) else v.item() for v in value])
    return text if len(text) < 100 else f"{len(value)} values {sha256(text.encode()).hexdigest()[:16]}"


def _byte_letters() -> list[str]:
    """The 256 letters by which byte-level BPE writes bytes, in the order of GPT-2's vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(256 - len(shown))]
