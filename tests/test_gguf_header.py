"""The header reader returns what the writer wrote, and answers every damaged file with the error that names the rule."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
from gguf import GGUFValueType as V

from llama_sidecar.sidecars import LlamaSidecarError, errors, open_main, open_sidecar, read_header, read_model
from llama_sidecar.sidecars.gguf_reader import MAX_ENTRIES

# Literal files: a name, a key, a tensor's entry, and the whole.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def array(item: int, n: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", item, n) + raw


def entry(
    name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0, n_dims: int | None = None
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape) if n_dims is None else n_dims, *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    data: int = 256,
    order: str = "<",
) -> bytes:
    counts = struct.pack(f"{order}IQQ", version, len(tensors), len(keys))
    head = b"GGUF" + counts + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


ARCH = key("general.architecture", V.STRING, text("qwen35"))
NORM = entry("a.weight", (8,))
TOO_DEEP = array(V.ARRAY, 1, array(V.ARRAY, 1, array(V.ARRAY, 1, array(V.ARRAY, 1, array(V.UINT8, 0, b"")))))

BROKEN: dict[str, tuple[bytes, type[LlamaSidecarError]]] = {
    "empty": (b"", errors.NotGGUF),
    "another format": (b"PK\3\4" + bytes(100), errors.NotGGUF),
    "magic alone": (b"GGUF", errors.TruncatedFile),
    "version 1": (file([ARCH], [NORM], version=1), errors.UnsupportedVersion),
    "version 4": (file([ARCH], [NORM], version=4), errors.UnsupportedVersion),
    "big-endian": (file(version=3, order=">"), errors.UnsupportedVersion),
    "2^63 keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), errors.HeaderTooLarge),
    "2^63 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), errors.HeaderTooLarge),
    "more keys than there are": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + ARCH, errors.TruncatedFile),
    "empty key": (file([key("", V.UINT8, b"\1")]), errors.BadName),
    "key not UTF-8": (file([key(b"\xff\xfe", V.UINT8, b"\1")]), errors.BadName),
    "long key": (file([key("k" * 70000, V.UINT8, b"\1")]), errors.BadName),
    "duplicate key": (file([ARCH, ARCH]), errors.DuplicateName),
    "value type 13": (file([key("k", 13, bytes(8))]), errors.BadValueType),
    "item type 99": (file([key("k", V.ARRAY, array(99, 1, bytes(8)))]), errors.BadValueType),
    "long string": (file([key("k", V.STRING, struct.pack("<Q", 1 << 62))]), errors.TruncatedFile),
    "long array": (file([key("k", V.ARRAY, array(V.INT32, 1 << 61, b""))]), errors.TruncatedFile),
    "long array of strings": (file([key("k", V.ARRAY, array(V.STRING, 1 << 61, b""))]), errors.TruncatedFile),
    "long string in an array": (
        file([key("k", V.ARRAY, array(V.STRING, 2, text("a") + struct.pack("<Q", (1 << 64) - 1)))]),
        errors.TruncatedFile,
    ),
    "deep arrays": (file([key("k", V.ARRAY, TOO_DEEP)]), errors.HeaderTooLarge),
    "many arrays": (file([key("k", V.ARRAY, array(V.ARRAY, MAX_ENTRIES + 1, b""))]), errors.HeaderTooLarge),
    "alignment 0": (file([key("general.alignment", V.UINT32, bytes(4))], [NORM]), errors.BadAlignment),
    "alignment 48": (
        file([key("general.alignment", V.UINT32, struct.pack("<I", 48))], [NORM]),
        errors.BadAlignment,
    ),
    "alignment U64": (
        file([key("general.alignment", V.UINT64, struct.pack("<Q", 32))], [NORM]),
        errors.BadAlignment,
    ),
    "empty tensor name": (file([ARCH], [entry("", (8,))]), errors.BadName),
    "long tensor name": (file([ARCH], [entry("n" * 64, (8,))]), errors.BadName),
    "duplicate tensor": (file([ARCH], [NORM, entry("a.weight", (8,), offset=32)]), errors.DuplicateName),
    "no dimensions": (file([ARCH], [entry("a", ())]), errors.BadShape),
    "2^32-1 dimensions": (file([ARCH], [entry("a", (8,), n_dims=0xFFFFFFFF)]), errors.BadShape),
    "dimension 0": (file([ARCH], [entry("a", (8, 0))]), errors.BadShape),
    "overflowing shape": (file([ARCH], [entry("a", (1 << 40, 1 << 40))]), errors.BadShape),
    "row not of whole blocks": (file([ARCH], [entry("a", (40, 2), kind=8)]), errors.BadShape),
    "tensor type 4": (file([ARCH], [entry("a", (8,), kind=4)]), errors.BadTensorType),
    "tensor type 2^32-1": (file([ARCH], [entry("a", (8,), kind=0xFFFFFFFF)]), errors.BadTensorType),
    "offset not aligned": (file([ARCH], [NORM, entry("b", (8,), offset=40)]), errors.BadOffset),
    "overlap": (file([ARCH], [NORM, entry("b", (8,), offset=0)]), errors.BadOffset),
    "gap": (file([ARCH], [NORM, entry("b", (8,), offset=64)]), errors.BadOffset),
    "offset 2^64-32": (file([ARCH], [entry("a", (8,), offset=(1 << 64) - 32)]), errors.BadOffset),
    "data cut off": (file([ARCH], [entry("a", (65,))]), errors.TruncatedFile),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_has_its_error(name: str, tmp_path: Path) -> None:
    raw, expected = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    with pytest.raises(expected) as caught:
        read_header(path)
    assert type(caught.value) is expected
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_every_container_error_is_tested() -> None:
    named = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.GGUFError)}
    assert named - {errors.GGUFError} - {expected for _, expected in BROKEN.values()} == {errors.BadShards}


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "absent.gguf", tmp_path / "pipe.gguf", tmp_path / "nul\0.gguf"):
        with pytest.raises(errors.UnreadableFile):
            read_header(path)


def test_control_characters_in_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\nb.gguf"
    path.write_bytes(file([key("k\x1b[2J\n", V.UINT8, b"\1")] * 2))
    with pytest.raises(errors.DuplicateName) as caught:
        read_header(path)
    assert str(caught.value).isprintable()


def test_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    values: dict[str, Any] = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -300,
        "uint32": 1 << 31,
        "int32": -70000,
    }
    values |= {"uint64": 1 << 63, "int64": -(1 << 40), "float32": 0.5, "float64": 1e-300, "bool": True}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    writer.add_string("k.string", "für alle ▁ 🙂")
    writer.add_array("k.strings", ["", "a", "Ġthe", "🙂"])
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, 0.25])
    writer.add_array("k.bools", [True, False, True])
    writer.add_array("k.nested", [[1, 2], [3]])
    matrix = np.arange(64 * 3, dtype=np.float32).reshape(3, 64)
    writer.add_tensor("f32.weight", matrix)
    q8 = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8.weight", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)
    assert (header.version, header.arch, header.file_bytes) == (3, "qwen35", path.stat().st_size)
    for kind, value in values.items():
        assert header.keys[f"k.{kind}"] == value and type(header.keys[f"k.{kind}"]) is type(value)
        assert header.key_types[f"k.{kind}"] == (V[kind.upper()],)
    assert header.keys["k.string"] == "für alle ▁ 🙂"
    strings = header.keys["k.strings"]
    assert (
        list(strings) == ["", "a", "Ġthe", "🙂"] == strings[:]
        and strings[-1] == "🙂"
        and strings.raw(2) == "Ġthe".encode()
    )
    assert header.key_types["k.ints"] == (V.ARRAY, V.INT32) and header.keys["k.ints"].tolist() == [1, -2, 3]
    assert header.keys["k.floats"].tolist() == [0.5, 0.25] and header.keys["k.bools"].tolist() == [
        True,
        False,
        True,
    ]
    assert [inner.tolist() for inner in header.keys["k.nested"]] == [[1, 2], [3]]
    f32, q = header.tensors["f32.weight"], header.tensors["q8.weight"]
    assert f32.shape == q.shape == (64, 3) and (f32.n_bytes, q.n_bytes) == (768, 3 * 2 * 34)
    assert q.type == gguf.GGMLQuantizationType.Q8_0 and q.type_name == "Q8_0"
    assert np.array_equal(header.tensor_bytes("f32.weight").view("<f4").reshape(3, 64), matrix)
    assert np.array_equal(header.tensor_bytes("q8.weight"), q8.reshape(-1))
    with pytest.raises(errors.MissingTensors):
        header.tensor_bytes("absent.weight")


def test_version_2_alignment_64_and_types_newer_than_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    aligned = key("general.alignment", V.UINT32, struct.pack("<I", 64))
    path.write_bytes(
        file([ARCH, aligned], [entry("a", (64, 2), kind=42), entry("b", (8,), offset=64)], version=2)
    )
    header = read_header(path)
    assert header.version == 2
    assert (header.tensors["a"].type_name, header.tensors["a"].n_bytes) == ("Q2_0", 36)
    assert (
        header.tensors["a"].offset % 64 == 0 and header.tensors["b"].offset == header.tensors["a"].offset + 64
    )


def test_tokens_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    path.write_bytes(file([key("k", V.ARRAY, array(V.STRING, 2, text(b"\xff") + text("b")))]))
    strings = read_header(path).keys["k"]
    assert strings.raw(0) == b"\xff" and list(strings) == ["\ufffd", "b"]


def test_a_large_vocabulary_is_read_in_well_under_a_second(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    n = 248_320
    tokens = array(V.STRING, n, b"".join(text(f"token{i}") for i in range(n)))
    merges = array(V.STRING, n, b"".join(text(f"to{i} ken{i}") for i in range(n)))
    path.write_bytes(file([ARCH, key("tokens", V.ARRAY, tokens), key("merges", V.ARRAY, merges)]))
    began = time.process_time()
    header = read_header(path)
    assert time.process_time() - began < 1.0  # about 0.1 s
    assert header.keys["tokens"][n - 1] == f"token{n - 1}" and len(header.keys["merges"]) == n


def test_lengths_that_a_sparse_file_makes_plausible_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    claims = [
        key("k", V.STRING, struct.pack("<Q", 1 << 39)),
        key("k", V.ARRAY, array(V.FLOAT64, 1 << 36, b"")),
        key("k", V.ARRAY, array(V.STRING, 1 << 36, b"")),
        key("k", V.ARRAY, array(V.STRING, 1, struct.pack("<Q", 1 << 39))),
    ]
    for claim in claims:
        path.write_bytes(file([claim]))
        os.truncate(path, 1 << 40)
        tracemalloc.start()
        with pytest.raises(errors.HeaderTooLarge):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize("make", [tiny_gguf.main, tiny_gguf.sidecar])
def test_a_file_cut_anywhere_is_called_truncated(make: object, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole.gguf").read_bytes()  # type: ignore[operator]
    path = tmp_path / "cut.gguf"
    for cut in sorted({*range(4, 64), *(len(whole) * i // 64 for i in range(1, 64))}):
        path.write_bytes(whole[:cut])
        with pytest.raises(errors.TruncatedFile):
            read_header(path)


@pytest.mark.parametrize("name", ["main", *tiny_gguf.SIDECARS])
def test_no_mutation_raises_anything_but_our_errors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mutant.gguf"
    whole = (tiny_gguf.main(path) if name == "main" else tiny_gguf.sidecar(path, name)).read_bytes()
    header_bytes = min(info.offset for info in read_header(path).tensors.values())
    rng = random.Random(name)
    hostile = [
        b"\xff" * 8,
        b"\xff" * 4,
        bytes(8),
        struct.pack("<Q", 1 << 40),
        struct.pack("<I", 1 << 31),
        b"\x09\0\0\0",
    ]
    n_refused = 0
    for _ in range(200):
        mutant = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            piece = rng.choice((*hostile, rng.randbytes(1), rng.randbytes(8)))
            start = rng.randrange(4, header_bytes - len(piece))
            mutant[start : start + len(piece)] = piece
        path.write_bytes(mutant)
        for open_file in (read_model, open_main, open_sidecar):
            try:
                open_file(path)
            except LlamaSidecarError as error:
                n_refused += 1
                assert str(error).isprintable() and len(str(error)) < 10_000
    assert n_refused > 200
