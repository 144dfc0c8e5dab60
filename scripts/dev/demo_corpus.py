"""The text behind the demo model: the Python standard library, its docstrings as prose, both again as chat.

Files are taken from the running interpreter, without tests, vendored wheels and generated tables. A file is
held out when the hash of its path says so (`is_held_out`), so that the split is the same on every machine and
in every Python version; nothing of a held-out file is in the training text. Also the tokenizer (a byte-level
BPE with Qwen3.5's split pattern) and the held-out prompts. It knows nothing of models; the text is under the
PSF licence.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "encodings",
    "__pycache__",
}
HOLD_OUT = "llama-sidecar 4"  # salt of the hold-out rule
CHAT_SHARE = 4  # one function in so many becomes a chat


@dataclass(frozen=True)
class Document:
    text: str
    path: str
    kind: str  # code | prose | chat


@dataclass(frozen=True)
class Definition:
    """A function or class with a docstring; lines are numbered from 0, `end` is one past the last."""

    name: str
    start: int
    doc_end: int
    end: int
    doc: str


def number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def is_held_out(path: str) -> bool:
    return number(f"{HOLD_OUT} {path}") % 24 == 0


def library_files() -> list[tuple[str, str]]:
    """(path inside the library, text) of every source file used, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        skipped = SKIPPED_FOLDERS.intersection(path.parts) or path.parts[0].startswith(
            ("config-", "_sysconfigdata")
        )
        if skipped:
            continue
        try:
            files.append((path.as_posix(), file.read_text("utf-8")))
        except UnicodeDecodeError:
            continue
    return files


def definitions(text: str) -> list[Definition]:
    """Functions and classes with docstrings, in order of appearance."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        doc = ast.get_docstring(node)
        if doc and doc.strip():
            doc_end = node.body[0].end_lineno or node.lineno
            end = node.end_lineno or doc_end
            found.append(Definition(node.name, node.lineno - 1, doc_end, end, doc.strip()))
    return sorted(found, key=lambda d: d.start)


def dedent(lines: list[str]) -> str:
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines)


def render_chat(question: str, answer: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def chats(path: str, text: str) -> Iterator[str]:
    """Questions about some of a file's functions, answered by its docstring or its code."""
    module, lines = path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), text.split("\n")
    for d in definitions(text):
        choice = number(f"{path}:{d.name}:{d.start}")
        if choice % CHAT_SHARE or d.end - d.start > 40:
            continue
        summary = " ".join(d.doc.split("\n\n")[0].split())
        code = f"```python\n{dedent(lines[d.start : d.end])}\n```"
        match choice // CHAT_SHARE % 4:
            case 0:
                yield render_chat(f"What does `{d.name}` in the module `{module}` do?", d.doc)
            case 1:
                yield render_chat(f"Write `{d.name}` in Python. {summary}", code)
            case 2:
                yield render_chat(f"Show me the code of `{d.name}` from `{module}`.", code)
            case _:
                yield render_chat(f"Write Python code for this: {summary}", code)


def prose(path: str, text: str) -> str:
    """The docstrings of a file as running text."""
    if path == "pydoc_data/topics.py":
        topics = ast.parse(text).body[0]
        assert isinstance(topics, ast.Assign), "topics.py is one dictionary"
        return "\n\n".join(ast.literal_eval(topics.value).values())
    parts = [f"{d.name}\n\n{d.doc}" for d in definitions(text)]
    return "\n\n".join(parts) if sum(map(len, parts)) > 1000 else ""


def documents(held_out: bool) -> list[Document]:
    """Training documents, or those of the held-out files."""
    found = []
    for path, text in library_files():
        if is_held_out(path) != held_out:
            continue
        if path != "pydoc_data/topics.py":
            found.append(Document(text, path, "code"))
        if words := prose(path, text):
            found.append(Document(words, path, "prose"))
        found += (Document(chat, path, "chat") for chat in chats(path, text))
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` tokens, the special ones last, as Qwen's own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}: too little text"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, docs: list[Document]) -> list[np.ndarray]:
    """Token ids of each document, <|endoftext|> after each."""
    end = tokenizer.token_to_id("<|endoftext|>")
    encodings = tokenizer.encode_batch([d.text for d in docs])
    return [np.array([*e.ids, end], dtype=np.int64) for e in encodings]


def windows(docs: list[np.ndarray], length: int, seed: int) -> np.ndarray:
    """The documents in an order drawn from `seed`, joined and cut into shuffled rows (n_windows, length + 1).

    Rows that follow each other in the text overlap by one token, so that every token is predicted once.
    """
    rng = np.random.default_rng(seed)
    text = np.concatenate([docs[i] for i in rng.permutation(len(docs))])
    n = len(text) // length - 1
    start = int(rng.integers(length))
    rows = np.lib.stride_tricks.sliding_window_view(text, length + 1)[start : start + n * length : length]
    return rows[rng.permutation(len(rows))]


def held_out_prompts(tokenizer: Tokenizer, n_code: int = 24, n_prose: int = 6) -> list[dict[str, str]]:
    """Prompts of 60 to 110 tokens, cut at line ends.

    Code prompts begin with a definition and reach at least to the end of its docstring, prose prompts are the
    beginning of a docstring. Each has at least as much text after it in its source.
    """

    def fits(text: str) -> bool:
        return 60 <= len(tokenizer.encode(text).ids) <= 110

    code, words = [], []
    for path, text in library_files():
        if not is_held_out(path):
            continue
        lines, here = text.split("\n"), 0
        for d in definitions(text):
            for cut in range(d.doc_end, d.end - 6):
                prompt = "\n".join(lines[d.start : cut]) + "\n"
                if here < 3 and fits(prompt):
                    code.append({"kind": "code", "source": f"{path}:{d.name}", "prompt": prompt})
                    here += 1
                    break
            for n in range(3, 1 + d.doc.count("\n")):
                prompt = "\n".join(d.doc.split("\n")[:n]) + "\n"
                if len(d.doc) > 2 * len(prompt) and fits(prompt):
                    words.append({"kind": "prose", "source": f"{path}:{d.name}", "prompt": prompt})
                    break
    code.sort(key=lambda p: number(p["source"]))
    words.sort(key=lambda p: number(p["source"]))
    return code[:n_code] + words[:n_prose]
