"""Feeds the readers of files from strangers with broken ones: coverage-guided (atheris), with mutations that know the format.

One TARGET is one reader. It may return or raise our own error, whose text is one line; anything else it raises, ten seconds of
computing or a gibibyte of memory is a fault, and the input is kept. Inputs that reach new lines are kept too, in a folder of each
target, and a later run goes on from them. Without atheris inputs are mutated blindly. Knows which functions read what; no rule
of any format.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))

import click
import numpy as np

try:
    import atheris
except ImportError:
    atheris = None

from llama_sidecar.sidecars import LlamaSidecarError
from llama_sidecar.sidecars.errors import MAX_MESSAGE

ROOT = Path(__file__).resolve().parents[3]
MAX_BYTES = 4096
SECONDS, MEBIBYTES = 10, 1024  # of one input: computed, so that a machine that sleeps meanwhile is no fault
ADDRESSES = 4 << 30
INTERESTING = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    31,
    32,
    33,
    63,
    64,
    255,
    256,
    511,
    512,
    65535,
    1 << 16,
    1 << 24,
    2**31 - 1,
    2**31,
    2**32 - 1,
]
INTERESTING += [1 << 32, 1 << 48, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
NONSENSE: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, -(10**30), 1.5, -0.0, float("nan"), float("inf"), "", "x",
                       "\x00", "../../etc/passwd", "\ud800", "a" * 300, [], [[]], {}, [0], [1, 2, 3, 4, 5], ["x"], [None], {"x": 1}, {"": {}}]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """`run` reads one input, `seeds` are sound ones, `modules` those whose lines count as covered."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, random.Random], bytes]
    modules: tuple[str, ...]


def expected(action: Callable[[], object]) -> None:
    """Runs it; our own errors are what is expected of it, if they are one line of bounded length."""

    try:
        action()
    except LlamaSidecarError as error:
        text = str(error)
        if not text.isprintable() or len(text) > MAX_MESSAGE:
            raise AssertionError(f"a message of {len(text)} characters: {text[:200]!r}") from error


class TooLong(BaseException):
    """No reader catches this."""


def bounded(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """The same, raising TooLong after SECONDS of computing and MemoryError beyond ADDRESSES."""

    def stop(_number: int, _frame: object) -> None:
        raise TooLong(f"more than {SECONDS} s of computing")

    def run_bounded(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            run(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    for category in (
        RuntimeWarning,
        UserWarning,
    ):  # numpy's and torch's: they would stand beside the one line
        warnings.simplefilter("error", category)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    signal.signal(signal.SIGPROF, stop)
    return run_bounded


# GGUF: the header alone; the file goes on, empty, for as long as small tensors need.

_folder = Path(os.environ.get("FUZZ_FOLDER", tempfile.gettempdir()))  # of the input that is being read


@functools.cache
def _kept_open(name: str) -> tuple[Path, int]:
    path = _folder / name
    return path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def on_disk(data: bytes, name: str, more: int = 0) -> Path:
    """The file `name` of `data`, and `more` zeros; written over, since a new one takes longer than most readers."""
    path, file = _kept_open(name)
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
    if more:
        os.ftruncate(file, len(data) + more)
    return path


def json_object(data: bytes) -> dict[str, Any]:
    """What `run_config` reads from a file, for readers of what stands in it."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_folder))


def run_gguf(data: bytes) -> None:
    from llama_sidecar.runtime.placement import default_ctx, n_gpu_layers
    from llama_sidecar.runtime.sampling import file_defaults
    from llama_sidecar.sidecars import open_main, open_sidecar
    from llama_sidecar.sidecars.compact import open_compact
    from llama_sidecar.sidecars.errors import CompactGiven, NotAMain
    from llama_sidecar.sidecars.memory import layer_cache_bytes

    path = on_disk(data, "x.gguf", more=1 << 16)

    def use() -> None:
        try:
            main = open_main(path)
        except (NotAMain, CompactGiven) as error:
            (open_compact if isinstance(error, CompactGiven) else open_sidecar)(path)
            return
        _ = main.trunk
        values = main.header.keys
        default_ctx(values, main.arch), file_defaults(values)
        n_gpu_layers(main.header, free_bytes=1 << 30, n_ctx=512, cache_bits=16, n_slots=2, drafter_bytes=0)
        layer_cache_bytes(main.arch, values, list(main.header.tensors), n_ctx=512)

    expected(use)


def gguf_seeds() -> list[bytes]:
    import models
    import tiny_gguf
    from gguf_edit import read

    folder = _folder / "seeds"
    paths = [tiny_gguf.main(folder / "m.gguf"), tiny_gguf.main(folder / "h.gguf", head=True)]
    paths += [tiny_gguf.sidecar(folder / f"{name}.gguf", name) for name in tiny_gguf.SIDECARS]
    for recurrent in (False, True):
        pair = models.write_pair(folder / str(recurrent), recurrent=recurrent)
        paths += [pair.main, pair.sidecar]
    seeds = []
    for path in paths:
        file = read(path)
        for name in ("tokens", "token_type", "merges"):
            if key := file.keys.get(f"tokenizer.ggml.{name}"):
                key.value = key.value[:16]
        for tensor in file.tensors.values():
            tensor.shape = [min(n, 16) for n in tensor.shape]
            tensor.data = tensor.data[: 4 * int(np.prod(tensor.shape))]
        whole = file.to_bytes()
        seeds.append(whole[: len(whole) - sum(-(-len(t.data) // 32) * 32 for t in file.tensors.values())])
    return seeds


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """Changes a number where one is likely: a length, a type, a count, an offset."""
    spots = [m.start() for m in re.finditer(rb"[\x00-\xff]\x00{7}|[\x00-\x2f]\x00{3}", data)]
    return _put_number(data, rng, spots)


def _put_number(data: bytes, rng: random.Random, spots: list[int]) -> bytes:
    if not spots:
        return data
    changed = bytearray(data)
    at = rng.choice(spots)
    layout = rng.choice(["<Q", "<I", "<I", "<B"])
    size = struct.calcsize(layout)
    old = struct.unpack(layout, (bytes(changed[at : at + size]) + bytes(8))[:size])[0]
    new = rng.choice([*INTERESTING, old + 1, old - 1, old * 2, old // 2]) % (1 << 8 * size)
    changed[at : at + size] = struct.pack(layout, new)
    return bytes(changed)


# Safetensors


def run_safetensors(data: bytes) -> None:
    from llama_sidecar.converter.places import WeightFile
    from llama_sidecar.converter.shards import read_safetensors

    def read_into(offset: int, buffer: Any) -> None:
        buffer[:] = np.frombuffer(data[offset : offset + buffer.size], np.uint8)

    def use() -> None:
        for tensor in read_safetensors(WeightFile("x", "x", len(data), read_into)).values():
            if tensor.n_rows > 0 and tensor.n_cols < 1 << 16:
                tensor.raw_rows(0, 1)
            expected(tensor.check_type)

    expected(use)


def safetensors_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [32, 33]},
    }
    texts = [json.dumps(header).encode(), b"{}", json.dumps({"x": header["b"]}).encode()]
    return [struct.pack("<Q", len(text)) + text + bytes(64) for text in texts]


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Changes the tree of the header, and keeps its length right."""
    try:
        n = struct.unpack_from("<Q", data)[0]
        header, rest = json.loads(data[8 : 8 + n]), data[8 + n :]
    except (struct.error, ValueError, RecursionError):
        return _put_number(data, rng, [0])
    text = json.dumps(changed_tree(header, rng)).encode("utf-8", "replace")
    return struct.pack("<Q", len(text)) + text + rest


# PyTorch shards: zip archives with a pickle, where torch is installed


def run_bin(data: bytes) -> None:
    from llama_sidecar.converter.places import Folder
    from llama_sidecar.converter.shards import read_bin

    place, name = Folder(_folder), "pytorch_model.bin"
    on_disk(data, name)

    def use() -> None:
        with contextlib.ExitStack() as files:
            for tensor in read_bin(place.path(name), place.open(name, files)).values():
                if tensor.n_rows > 0 and tensor.n_cols < 1 << 16:
                    expected(lambda tensor=tensor: tensor.raw_rows(tensor.n_rows - 1, tensor.n_rows))

    expected(use)


def bin_seeds() -> list[bytes]:
    import torch

    whole = torch.arange(24.0).reshape(4, 6)
    states = [
        {
            "a.weight": whole,
            "b": torch.ones(3, dtype=torch.bfloat16),
            "c": torch.zeros((), dtype=torch.int64),
        },
        {"a.weight": whole.T, "b": whole[1:3, 2:], "tied": whole},
        {},
    ]
    seeds = []
    for state in states:
        for is_zip in (True, False):
            file = io.BytesIO()
            torch.save(state, file, _use_new_zipfile_serialization=is_zip)
            seeds.append(file.getvalue())
    return seeds


def mutate_bin(data: bytes, rng: random.Random) -> bytes:
    """Changes a byte or a number of the archive, or of one of its records, which is then packed anew."""
    if rng.random() < 0.4:
        return _put_number(data, rng, [rng.randrange(max(1, len(data)))])
    packed = io.BytesIO()
    try:
        with (
            zipfile.ZipFile(io.BytesIO(data)) as old,
            zipfile.ZipFile(packed, "w") as new,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # a name that occurs twice
            names = old.namelist()
            chosen = rng.choice(
                [name for name in names if name.endswith(".pkl")] if rng.random() < 0.8 else names
            )
            for name in names:
                record = old.read(name)
                for _ in range(rng.choice([1, 1, 2, 4]) if name == chosen and record else 0):
                    at = rng.randrange(len(record))
                    how = rng.randrange(4)
                    if how == 0:
                        record = record[:at] + bytes([rng.randrange(256)]) + record[at + 1 :]
                    elif how == 1:
                        record = record[:at] + record[at + rng.randrange(8) :]
                    elif how == 2:
                        record = (
                            record[:at]
                            + record[rng.randrange(len(record)) :][: rng.randrange(32)]
                            + record[at:]
                        )
                    else:
                        record = _put_number(record, rng, [at])
                new.writestr(name, record)
    except Exception:  # no archive any more, for one of the many reasons there are
        return _put_number(data, rng, [rng.randrange(max(1, len(data)))])
    return packed.getvalue()


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """Another value at a random place of a JSON tree."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        name = rng.choice(list(tree))
        how = rng.randrange(10)
        if how == 0:
            return {key: value for key, value in tree.items() if key != name}
        if how == 1:
            return tree | {rng.choice(["x", "__metadata__", name + "x", "\x00"]): tree[name]}
        return tree | {name: changed_tree(tree[name], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        i = rng.randrange(len(tree))
        how = rng.randrange(10)
        if how == 0:
            return tree[:i] + tree[i + 1 :]
        if how == 1:
            return [*tree, tree[i]] * rng.choice([1, 2, 9])
        return [*tree[:i], changed_tree(tree[i], rng), *tree[i + 1 :]]
    if type(tree) is int and rng.random() < 0.7:
        return rng.choice([tree + 1, tree - 1, tree * 2, -tree, *INTERESTING])
    if isinstance(tree, str) and rng.random() < 0.5:
        return tree + rng.choice(["x", "\x00", "\n", "\x1b[31m", "/..", "\ud800"])
    return nested(rng) if rng.random() < 0.05 else rng.choice(NONSENSE)


def nested(rng: random.Random) -> Any:
    value: Any = 0
    for _ in range(rng.choice([3, 50, 400])):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value


# Checkpoints: config.json with the family's keys and layout, and the tokenizer's files


def run_config(data: bytes) -> None:
    from llama_sidecar.converter.checkpoint import read_object
    from llama_sidecar.converter.config import Config
    from llama_sidecar.converter.families import families

    path = on_disk(data, "config.json")

    def use() -> None:
        values = read_object(path)
        for sizes in (values, values.get("text_config")):
            _fewer(sizes if isinstance(sizes, dict) else {})
        config = Config(values)
        for family in families().values():
            if config.architecture in family.CLASSES:
                for n_heads in (0, 1):
                    expected(lambda f=family, n=n_heads: f.keys(config, n))
                expected(lambda f=family: f.layout(config, ()))

    expected(use)


def _fewer(sizes: dict[str, Any]) -> None:
    """Layers and experts by the hundred take milliseconds and nothing new; what is too many to be read stays."""
    for name, n in sizes.items():
        if type(n) is int and 32 < n <= 1 << 14 and re.search("layers|experts", name):
            sizes[name] = n % 32


def config_seeds() -> list[bytes]:
    from llama_sidecar.converter.families import families

    return [json.dumps(tiny[0]).encode() for family in families().values() for tiny in family.TINY.values()]


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return json.dumps(changed_tree(tree, rng)).encode("utf-8", "replace")


def run_tokenizer(data: bytes) -> None:
    from llama_sidecar.converter.config import MOST, Config
    from llama_sidecar.converter.families import families
    from llama_sidecar.converter.tokenizer import vocabulary_keys

    def use() -> None:
        files = json_object(data)
        values = files.get("config") if isinstance(files.get("config"), dict) else {}
        size = values.get("vocab_size")
        if isinstance(size, int) and 512 < size <= MOST["vocab_size"]:
            values["vocab_size"] = size % 512  # a million tokens take a second and nothing new

        checkpoint = _TokenizerFiles(_folder, Config(values), files)
        for arch in ("qwen35", "gemma4"):
            expected(lambda a=arch: vocabulary_keys(checkpoint, families()[a].VOCABULARY))  # type: ignore[arg-type]

    expected(use)


@dataclass
class _TokenizerFiles:
    """As much of a checkpoint as its tokenizer takes."""

    folder: Path
    config: Any
    files: dict[str, Any]

    def json(self, name: str) -> dict[str, Any]:
        found = self.files.get(name)
        return found if isinstance(found, dict) else {}

    def text(self, name: str) -> str | None:
        found = self.files.get(name)
        return found if isinstance(found, str) else None


def tokenizer_seeds() -> list[bytes]:
    from checkpoints import make_checkpoint

    seeds = []
    for arch, variant in (("qwen35", "tied"), ("gemma4", "dense")):
        folder = make_checkpoint(_new_folder(), arch, variant)
        names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
        files = {name: json.loads((folder / name).read_text("utf-8")) for name in names}
        vocabulary = files["tokenizer.json"]["model"]["vocab"]
        files["tokenizer.json"]["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i < 24}
        config = {"architectures": ["X"], "vocab_size": 32, "eos_token_id": [3, 5]}
        seeds.append(json.dumps({"config": config, **files}).encode())
    return seeds


# Weights of quantised checkpoints: what the tensors' names, types and shapes and config.json say, over data of one byte


def run_weights(data: bytes) -> None:
    from llama_sidecar.converter.config import Config
    from llama_sidecar.converter.quantized import join_quantized
    from llama_sidecar.converter.shards import ITEM_BYTES, Stored

    def use() -> None:
        files = json_object(data)
        fill = files["fill"] % 256 if type(files.get("fill")) is int else 0

        def read_into(_offset: int, buffer: Any) -> None:
            buffer[:] = fill

        stored = {}
        tensors = files.get("tensors")
        for name, entry in tensors.items() if isinstance(tensors, dict) else ():
            with contextlib.suppress(
                TypeError, ValueError, KeyError
            ):  # what no safetensors header gets through with
                dtype, shape = entry
                if all(type(n) is int and n >= 0 for n in shape) and _product(shape) <= 1 << 20:
                    stored[name] = Stored(name, str(dtype), tuple(shape), "x", read_into)
                    ITEM_BYTES[stored[name].dtype]
        stored = {name: tensor for name, tensor in stored.items() if tensor.dtype in ITEM_BYTES}
        config = files.get("config")
        weights = join_quantized(stored, Config(config if isinstance(config, dict) else {}))
        for weight in weights.values():
            expected(weight.check_type)
            if weight.n_rows > 0 and weight.n_cols <= 1 << 16:
                with np.errstate(
                    over="ignore", invalid="ignore"
                ):  # as `plan` has it, which refuses such values
                    expected(lambda w=weight: w.rows(w.n_rows - 1, w.n_rows))
                expected(lambda w=weight: w.raw_rows(0, 1))

    expected(use)


def _product(shape: list[int]) -> int:
    return math.prod(shape) if len(shape) <= 8 else 1 << 30


def weights_seeds() -> list[bytes]:
    from quantized import METHODS, make_quantized

    seeds = []
    for method in METHODS:
        folder, _ = make_quantized(_new_folder(), method)
        (shard,) = folder.glob("*.safetensors")
        data = shard.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
        tensors = {
            name: [one["dtype"], one["shape"]] for name, one in header.items() if name != "__metadata__"
        }
        first = {name: one for name, one in tensors.items() if "layers.0.mlp" in name or "norm" in name}
        config = {
            "quantization_config": json.loads((folder / "config.json").read_text())["quantization_config"]
        }
        seeds.append(json.dumps({"config": config, "tensors": first, "fill": 1}).encode())
    return seeds


# Saved sessions: the checksum is made right, so that what lies behind it is reached


def run_session(data: bytes) -> None:
    import hashlib

    from llama_sidecar.runtime.session_file import Origin, read

    digest = hashlib.sha256(data).digest()
    here = Origin("m", "l", ("f16", "f16"), "auto", 64, None, None, None)
    expected(lambda: read(on_disk(data + digest, "x.session"), here))


def session_seeds() -> list[bytes]:
    from dataclasses import asdict

    from llama_sidecar.runtime.session_file import MAGIC, VERSION, Origin

    origin = Origin("m", "l", ("f16", "f16"), "auto", 64, None, None, None)
    head = json.dumps({"origin": asdict(origin), "tokens": [1, 2, 3], "bytes": [8, 4]}).encode()
    return [struct.pack("<22sIQ", MAGIC, VERSION, len(head)) + head + bytes(12)]


def mutate_session(data: bytes, rng: random.Random) -> bytes:
    try:
        magic, version, n = struct.unpack_from("<22sIQ", data)
        head, rest = json.loads(data[34 : 34 + n]), data[34 + n :]
    except (struct.error, ValueError, RecursionError, OverflowError):
        return _put_number(data, rng, [22, 26])
    text = json.dumps(changed_tree(head, rng)).encode("utf-8", "replace")
    return struct.pack("<22sIQ", magic, version, len(text)) + text + rest


# Saved conversations


def run_conversation(data: bytes) -> None:
    from llama_sidecar.runtime.conversation_file import read

    expected(lambda: read(on_disk(data, "x.json")))


def conversation_seeds() -> list[bytes]:
    from llama_sidecar.runtime.conversation_file import SavedConversation, write

    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"},
    ]
    path = _folder / "talk.json"
    seeds = []
    for messages in ([], talk, [{"role": "system", "content": "Be brief"}, *talk]):
        saved = SavedConversation("m", "0" * 64, messages, ("Yes", [1, 2]) if messages else None, path)
        write(path, saved)
        seeds.append(path.read_bytes())
    return seeds


# What a client sends to the server, and what a model then answers, with calls of functions in it

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<assistant>{% if enable_thinking %}<think>{% endif %}"
)


class _Vocabulary:
    """As much of a model's as reading a request asks for: bytes are tokens."""

    chat_template, n_tokens = TEMPLATE, 256

    def __init__(self) -> None:
        from llama_sidecar.runtime.chat_template import ChatTemplate

        self.render_chat = ChatTemplate(TEMPLATE).render

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def text_of(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def control_tokens(self, texts: Any) -> list[int]:
        return [len(text) for text in texts]


@functools.cache
def _vocabulary() -> Any:
    return _Vocabulary()


def run_request(data: bytes) -> None:
    from llama_sidecar.runtime.sampling import Sampling
    from llama_sidecar.runtime.server import app, requests

    files = json_object(data)
    body, answer = files.get("body"), files.get("answer")

    def use() -> None:
        app._check_depth(body)
        read = requests.read_text if isinstance(body, dict) and "prompt" in body else requests.read_chat
        try:
            request = read(body, _vocabulary(), client="", n_ctx=512)
            settings = {name: request.options[name] for name in requests.SAMPLING if name in request.options}
            Sampling().with_options(**settings)
        except LlamaSidecarError as error:
            told = app._as_request_error(error)
            assert told.status < 500, told
            json.dumps(told.body(), ensure_ascii=False).encode()
            raise
        if request.splitter is None or not isinstance(answer, str):
            return
        splitter, parts = request.splitter(), []
        for i in range(0, len(answer), 7):
            parts += splitter.push(answer[i : i + 7])
        parts += splitter.finish()
        whole = request.splitter()
        assert _joined(parts) == _joined([*whole.push(answer), *whole.finish()]), (
            "pieces decide what an answer is"
        )

    expected(use)


def _joined(parts: list[Any]) -> list[Any]:
    """Parts of one answer, with neighbours of the same sort in one."""
    found: list[Any] = []
    for kind, what in parts:
        if kind != "call" and found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + what)
        else:
            found.append((kind, what if isinstance(what, str) else (what.name, what.arguments)))
    return found


def request_seeds() -> list[bytes]:
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    }
    tools = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
    talk = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 1,
        "stop": ["x"],
        "logit_bias": {"7": -1},
    }
    answer = '<think>Hm</think>Yes <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    bodies = [
        {"messages": talk, **tools, "max_tokens": 9},
        {"messages": talk[:2], **tools, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": talk[1:2], "response_format": schema, **sampling, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": talk[1:2], "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": True}},
        {"prompt": "def f", "max_tokens": 3, "echo": True, "grammar": 'root ::= "a"', **sampling},
        {"prompt": [1, 2, 3], "logprobs": 1, "lens": True, "user": "x", "model": "m", "n": 1},
    ]  # fmt: skip
    answers = [answer, "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", '{"name": "f", "arguments": {}}',
               "<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call> and", "a <tool_ca", ""]  # fmt: skip
    return [
        json.dumps({"body": body, "answer": text}).encode()
        for body, text in zip(bodies, answers, strict=True)
    ]


# Small files: the index of a checkpoint's shards and its model card, prompts, results of bench, and what the cache remembers


def run_small(data: bytes) -> None:
    from llama_sidecar.converter import checkpoint, general
    from llama_sidecar.converter.places import Folder
    from llama_sidecar.runtime.costs import Costs
    from llama_sidecar.runtime.exactness import Exactness
    from llama_sidecar.runtime.kernel_choice import _trials_from_json
    from llama_sidecar.runtime.prompts import read_prompts
    from llama_sidecar.runtime.study import read_results

    folder = Folder(_folder)
    for what, value in json_object(data).items():
        text = value if isinstance(value, str) else json.dumps(value)
        if what == "index":
            on_disk(text.encode("utf-8", "replace"), checkpoint.INDEX)
            expected(
                lambda: [
                    folder.has(name) for name in checkpoint._read_index(_folder, checkpoint.INDEX).values()
                ]
            )
        elif what == "card":
            on_disk(text.encode("utf-8", "replace"), "README.md")
            expected(lambda: json.dumps(general._model_card(_folder)))
        elif what in ("prompts", "results"):
            read = read_prompts if what == "prompts" else read_results
            path = on_disk(text.encode("utf-8", "replace"), f"{what}.jsonl")
            expected(lambda read=read, path=path: read(path))
        elif what in ("costs", "exactness", "trials"):
            read = {"costs": Costs.from_json, "exactness": Exactness.from_json, "trials": _trials_from_json}[
                what
            ]
            with contextlib.suppress(ValueError):  # what there is of them is made again
                read(value)


def small_seeds() -> list[bytes]:
    from gguf import GGMLQuantizationType as Type

    from llama_sidecar.runtime import kernel_choice, kernels
    from llama_sidecar.runtime.costs import Costs
    from llama_sidecar.runtime.exactness import Exactness

    trial = kernels.Trial(Type.Q8_0, (64, 32), 4096, (1, 4), (1.0, 1.5), (2.0, 2.5))
    trials = {"schema": kernel_choice.SCHEMA, "trials": {"x": kernel_choice._trial_to_json(trial)}}
    figures = {"n_pairs": 3, "plain_tok_s": 9.5, "spec_tok_s": 12.0, "speedup": 1.3, "speedup_spread": [1.1, 1.5],
               "mean_accepted_length": 2.5, "accepted_per_position": [0.8, 0.5]}  # fmt: skip
    part = figures | {
        "tasks": {"code": figures}, "main": {"file": "m.gguf", "type": "Q8_0"}, "drafter": {"kind": "mtp", "file": "s.gguf", "type": "Q8_0"},
        "machine": {"cpu": "x"}, "llama_cpp": {"commit": "x"}, "prompts": {}, "round_s": {"draft": 1, "verify": 2, "accept": 0.1, "rest": 0.1},
        "bound": 2.0, "depth": 2, "temperature": 0.0, "c": 0.1, "row_s": 0.01, "n": 64, "threads": 2, "version": "1", "backend": "CPU",
        "warnings": ["x"], "first_divergence": {"pair": 1, "token": 2}, "predicted": 1.2,
    }  # fmt: skip
    card = "---\nlicense: mit\nlanguage: [en, de]\nbase_model:\n- a/b\ntags:\n- x\ndate: 2020-01-01\n---\n# A model\n"
    prompts = [{"prompt": "def f", "task": "code"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    files: list[dict[str, Any]] = [
        {
            "index": {
                "metadata": {"total_size": 7},
                "weight_map": {"a.weight": "model-1.safetensors", "b": "x.safetensors"},
            }
        },
        {"card": card},
        {"prompts": "\n".join(map(json.dumps, prompts))},
        {"prompts": prompts[1]},
        {
            "results": {
                "schema": 1,
                "study": 1,
                "bench": part,
                "depths": [part],
                "temperatures": [],
                "command": "x",
            }
        },
        {"results": {"schema": 1, **part}},
        {
            "costs": Costs(
                plain_s=1.0, verify_s=(1.1, 1.5), first_draft_s=0.25, draft_step_s=0.125, key="x"
            ).to_json()
        },
        {"exactness": Exactness(short=((1, 2), (3,)), long=((1,), (2, 3))).to_json()},
        {"trials": trials},
    ]
    return [json.dumps(file).encode() for file in files]


# Importance matrices, in both formats, and grammars


def run_imatrix(data: bytes) -> None:
    from llama_sidecar.converter.imatrix import read_imatrix

    expected(lambda: read_imatrix(on_disk(data, "x.dat")).warnings(["blk.0.a.weight"]))


def imatrix_seeds() -> list[bytes]:
    from gguf import GGUFValueType as V
    from gguf_edit import File, Key, Tensor

    name = b"blk.0.a.weight"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii4f", 2, 4, 1.0, 2.0, 3.0, 4.0)
    sums, counts = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0), struct.pack("<2f", 3.0, 0.0)
    newer = File(
        {
            "general.type": Key((V.STRING,), "imatrix"),
            "imatrix.datasets": Key((V.ARRAY, V.STRING), ["text"]),
            "imatrix.chunk_count": Key((V.UINT32,), 7),
        },
        {
            "blk.0.a.weight.in_sum2": Tensor([2, 2], 0, sums),
            "blk.0.a.weight.counts": Tensor([1, 2], 0, counts),
        },
    )
    return [
        newer.to_bytes(),
        struct.pack("<i", 1) + entry + struct.pack("<ii", 7, 4) + b"text",
        struct.pack("<i", 2) + entry * 2,
    ]


def mutate_imatrix(data: bytes, rng: random.Random) -> bytes:
    if data[:4] == b"GGUF":
        return mutate_gguf(data, rng)
    return _put_number(data, rng, list(range(max(1, len(data) - 3))))


def run_grammar(data: bytes) -> None:
    from llama_sidecar.runtime.grammar import check_gbnf, schema_grammar

    text = data.decode("utf-8", "surrogateescape")
    expected(lambda: check_gbnf(text))
    if len(data) < 1024:
        expected(lambda: schema_grammar(text))


def grammar_seeds() -> list[bytes]:
    schema = {
        "type": "object", "required": ["a"],
        "properties": {"a": {"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 3}, "b": {"$ref": "#/$defs/c"}},
        "$defs": {"c": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-z]{1,3}$"}]}},
    }  # fmt: skip
    return [json.dumps(schema).encode(), b'root ::= "a" [b-z]{1,3} (x | y)*\nx ::= "\\"" # c\ny ::= root?\n']


TARGETS: dict[str, Target] = {
    "gguf": Target(
        run_gguf, gguf_seeds, mutate_gguf,
        tuple(f"sidecars.{n}" for n in ("gguf_reader", "gguf_header", "model_rules", "sidecar", "shards", "compact", "memory", "kind", "kinds.mtp", "kinds.dflash", "kinds.eagle3", "kinds.dspark")),
    ),
    "safetensors": Target(run_safetensors, safetensors_seeds, mutate_safetensors, ("converter.shards",)),
    "bin": Target(run_bin, bin_seeds, mutate_bin, ("converter.shards",)),
    "config": Target(run_config, config_seeds, mutate_json, ("converter.config", "converter.families.*")),
    "tokenizer": Target(run_tokenizer, tokenizer_seeds, mutate_json, ("converter.tokenizer",)),
    "session": Target(run_session, session_seeds, mutate_session, ("runtime.session_file",)),
    "weights": Target(run_weights, weights_seeds, mutate_json, ("converter.quantized", "converter.quantized.*")),
    "conversation": Target(run_conversation, conversation_seeds, mutate_json, ("runtime.conversation_file",)),
    "request": Target(
        run_request, request_seeds, mutate_json,
        tuple(f"runtime.server.{n}" for n in ("requests", "fields", "messages", "tools", "spellings", "splitter")),
    ),
    "small": Target(
        run_small, small_seeds, mutate_json,
        ("converter.checkpoint", "converter.general", "runtime.prompts", "runtime.study", "runtime.costs", "runtime.exactness"),
    ),
    "imatrix": Target(run_imatrix, imatrix_seeds, mutate_imatrix, ("converter.imatrix",)),
    "grammar": Target(run_grammar, grammar_seeds, mutate_json, ("runtime.grammar",)),
}  # fmt: skip


# Running


def fuzz(name: str, seconds: int, n_runs: int, corpus: Path) -> None:
    """Fuzzes one target in this process, and ends it."""
    target = TARGETS[name]
    if atheris:
        for module in modules_of(target):
            for function in functions_of(importlib.import_module(module)):
                atheris.instrument_func(function)
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed{i}").write_bytes(seed)
    if atheris is None:
        _blindly(target, seconds, n_runs, corpus)
        return
    rng = random.Random()  # not anew from each seed: that takes longer than a mutation

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        found = data
        for _ in range(rng.choice([1, 1, 2, 3])):
            found = target.mutate(found, rng) if rng.random() < 0.6 else atheris.Mutate(found, max_bytes)
        return found[:max_bytes]

    options = [
        f"-max_total_time={seconds}",
        f"-runs={n_runs or -1}",
        f"-max_len={MAX_BYTES}",
        f"-timeout={1 << 30}",  # of the clock on the wall
        f"-report_slow_units={1 << 30}",
    ]
    options += [
        f"-rss_limit_mb={MEBIBYTES}",
        f"-artifact_prefix={corpus}.fault-",
        "-print_final_stats=1",
        "-len_control=0",
    ]
    atheris.Setup([name, *options, str(corpus)], bounded(target.run), custom_mutator=mutate)
    atheris.Fuzz()


def _blindly(target: Target, seconds: int, n_runs: int, corpus: Path) -> None:
    rng, n, run = random.Random(0), 0, bounded(target.run)
    inputs = [path.read_bytes() for path in sorted(corpus.iterdir())]
    end = time.monotonic() + seconds
    while time.monotonic() < end and (not n_runs or n < n_runs):
        data = rng.choice(inputs)
        for _ in range(rng.choice([1, 2, 3])):
            data = target.mutate(data, rng)
        try:
            run(data)
        except BaseException:
            Path(f"{corpus}.fault-{n}").write_bytes(data)
            raise
        n += 1
    print(f"stat::number_of_executed_units: {n}", file=sys.stderr)


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """A module's own functions and methods. (atheris instruments imports, but not those of an editable installation.)"""
    for value in list(vars(module).values()):
        for one in [value, *(vars(value).values() if isinstance(value, type) else ())]:
            function = (
                getattr(one, "fget", None) or getattr(one, "func", None) or getattr(one, "__func__", one)
            )
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def modules_of(target: Target) -> list[str]:
    """Full names; a star stands for all of a package."""
    import pkgutil

    found = []
    for name in target.modules:
        if name.endswith(".*"):
            package = importlib.import_module(f"llama_sidecar.{name[:-2]}")
            found += [f"llama_sidecar.{name[:-2]}.{m.name}" for m in pkgutil.iter_modules(package.__path__)]
        else:
            found.append(f"llama_sidecar.{name}")
    return found


def covered(target: Target, inputs: Iterator[bytes]) -> tuple[int, int]:
    """How many lines inside functions of the target's modules the inputs reach, and how many there are."""
    wanted: dict[str, set[int]] = {}
    for name in modules_of(target):
        module = importlib.import_module(name)
        assert module.__file__
        code = compile(Path(module.__file__).read_text("utf-8"), module.__file__, "exec")
        wanted[module.__file__] = set(_lines(code))
    seen: dict[str, set[int]] = {file: set() for file in wanted}

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        lines = seen.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        for data in inputs:
            with contextlib.suppress(Exception):
                target.run(data)
    finally:
        sys.settrace(None)
    return sum(len(seen[file] & wanted[file]) for file in wanted), sum(map(len, wanted.values()))


def _lines(code: CodeType, inside: bool = False) -> Iterator[int]:
    """The lines of functions; a module's and a class's own run once, at import."""
    if inside:
        yield from (line for _, _, line in code.co_lines() if line and line != code.co_firstlineno)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines(constant, inside or bool(constant.co_flags & 2))


def _in_a_child(name: str, seconds: int, n_runs: int, corpus: Path) -> bool:
    """Fuzzes a target and prints a row about it; whether there was no fault."""
    here = [sys.executable, __file__, "--corpus", str(corpus), "--inside", name]
    options = ["--seconds", str(seconds), "--runs", str(n_runs)]
    started = time.monotonic()
    done = subprocess.run([*here, *options], stderr=subprocess.PIPE, text=True, errors="replace")
    took = time.monotonic() - started
    found = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    n = int(found[1]) if found else 0
    replayed = subprocess.run([*here, "--replay"], stdout=subprocess.PIPE, text=True).stdout.split()
    reached, lines = map(int, replayed) if len(replayed) == 2 else (0, 1)
    n_kept = len(list((corpus / name).iterdir()))
    print(
        f"{name:12} {n:12,} {n / max(took, 1e-3):9,.0f} {n_kept:6}  {reached} of {lines} ({reached / lines:.0%})",
        flush=True,
    )
    if done.returncode:
        print("\n".join([line for line in done.stderr.splitlines() if line[:1] != "#"][-40:]), flush=True)
    return done.returncode == 0


@click.command()
@click.option("--seconds", type=int, default=60, show_default=True, help="For each target.")
@click.option("--runs", type=int, default=0, help="At most this many inputs for each target.")
@click.option(
    "--corpus",
    type=click.Path(path_type=Path),
    default=ROOT / ".build" / "fuzz",
    show_default=True,
    help="Where inputs are kept.",
)
@click.option("--inside", hidden=True)
@click.option("--replay", is_flag=True, hidden=True)
@click.argument("targets", nargs=-1, type=click.Choice(sorted(TARGETS)))
def command(
    seconds: int, runs: int, corpus: Path, inside: str | None, replay: bool, targets: tuple[str, ...]
) -> None:
    """Fuzz TARGETS (default: all), one after the other; exits with 1 where a fault was found."""
    if inside and replay:
        n, of = covered(TARGETS[inside], (path.read_bytes() for path in sorted((corpus / inside).iterdir())))
        print(f"{n} {of}")
        return
    if inside:
        fuzz(inside, seconds, runs, corpus / inside)
        return
    print(f"{'reader':12} {'inputs':>12} {'a second':>9} {'kept':>6}  lines reached", flush=True)
    n_faults = 0
    corpus.mkdir(parents=True, exist_ok=True)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        os.environ["FUZZ_FOLDER"] = folder
        for name in targets or TARGETS:
            if name == "bin" and importlib.util.find_spec("torch") is None:
                print(f"{name:12} needs torch, which is not installed", flush=True)
                continue
            n_faults += not _in_a_child(name, seconds, runs, corpus)
    sys.exit(1 if n_faults else 0)


if __name__ == "__main__":
    command()
