"""Checkpoints from strangers: headers and configurations made to break their reader are one line, in bounded time and memory.

Nothing of a checkpoint is run: pickles go through torch's weights-only loader, templates are copied. Links and names of shards
that lead out of the folder test_checkpoint.py has.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import pickle
import resource
import struct
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VARIANTS, make_checkpoint, tiny_config, write_json
from gguf_edit import File, Tensor

from llama_sidecar.converter import convert, dry_run, general
from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import (
    BadImatrix,
    BadShard,
    ConversionError,
    NotACheckpoint,
    UnsafePath,
    UnsupportedModel,
)
from llama_sidecar.converter.families import families
from llama_sidecar.converter.imatrix import read_imatrix
from llama_sidecar.converter.places import MAX_SMALL_BYTES, Folder
from llama_sidecar.converter.shards import _data_start, _mapped_at, _records, read_bin

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refused(folder: Path, kind: type[ConversionError] = ConversionError) -> str:
    with pytest.raises(kind) as error:
        dry_run(folder, folder.parent)
    text = str(error.value)
    assert text.isprintable() and len(text) <= 8000
    return text


def shard(header: bytes, data: int = 8, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(data)


def with_entry(**changes: Any) -> bytes:
    return shard(json.dumps({"x": ENTRY | changes}).encode())


SHARDS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated or no safetensors"),
    "a length alone": (struct.pack("<Q", 2), "truncated or no safetensors"),
    "a length of 2^63": (shard(b"{}", length=1 << 63), "declares a header of 9223372036854775808 bytes"),
    "no JSON": (shard(b"{{"), "broken safetensors header"),
    "no object": (shard(b"[1, 2]"), "broken safetensors header"),
    "no UTF-8": (shard(b'{"\xff": 1}'), "broken safetensors header"),
    "deep": (shard(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "broken safetensors header"),
    "a long integer": (shard(b'{"x": ' + b"9" * 5000 + b"}"), "broken safetensors header"),
    "an entry that is none": (shard(b'{"x": 7}'), "broken safetensors header"),
    "a name twice": (shard(b'{"x": 1, "x": 1}'), "a name occurs twice"),
    "a type that is a list": (with_entry(dtype=["F32"]), "unknown data type"),
    "an unknown type": (with_entry(dtype="F3"), "unknown data type 'F3'"),
    "a negative size": (with_entry(shape=[-2]), "sizes"),
    "a size that is true": (with_entry(shape=[True, 2]), "sizes"),
    "a size that is no integer": (with_entry(shape=[2.0]), "sizes"),
    "a size of 2^63": (with_entry(shape=[2**63]), "sizes"),
    "sizes whose product is 2^64": (with_entry(shape=[2**32, 2**32]), "8 bytes for F32"),
    "a million dimensions": (with_entry(shape=[2**62] * 1_000_000), "1000000 dimensions; at most 8"),
    "offsets the wrong way": (with_entry(data_offsets=[8, 0]), "-8 bytes for F32"),
    "three offsets": (with_entry(data_offsets=[0, 4, 8]), "broken safetensors header"),
    "a gap": (with_entry(data_offsets=[4, 12]), "overlap or leave a gap"),
    "more than the file": (shard(json.dumps({"x": ENTRY}).encode(), data=7), "is truncated"),
    "an overlap": (shard(json.dumps({"x": ENTRY, "y": ENTRY}).encode()), "overlap or leave a gap"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_broken_header_is_one_line(name: str, tmp_path: Path) -> None:
    data, match = SHARDS[name]
    write_json(tmp_path / "config.json", tiny_config("qwen35", "tied"))
    (tmp_path / "model.safetensors").write_bytes(data)
    started = time.monotonic()
    assert match in refused(tmp_path, BadShard)
    assert time.monotonic() - started < 10


def test_a_header_of_a_hundred_megabytes_is_not_read(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", tiny_config("qwen35", "tied"))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000))
        file.truncate(200_000_000)
    tracemalloc.start()
    assert "declares a header of 100,000,000 bytes; at most 33,554,432" in refused(tmp_path, BadShard)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


NONSENSE: dict[str, Any] = {
    "null": None, "negative": -1, "zero": 0, "huge": 2**63, "a googol": 10**100, "a fraction": 0.5, "not a number": float("nan"),
    "infinity": float("inf"), "a text": "64", "a list": [64], "an object": {"x": 64}, "true": True,
}  # fmt: skip
SHAPING = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
SIZES = (*SHAPING, "vocab_size",
         "head_dim", "rms_norm_eps", "max_position_embeddings", "linear_num_value_heads", "full_attention_interval")  # fmt: skip


@pytest.mark.parametrize("value", NONSENSE)
def test_a_configuration_of_nonsense_is_one_line(value: str, tmp_path: Path) -> None:
    """What cannot be told from the configuration alone shows in the tensors' shapes, or is left to a default of the class."""
    folder = make_checkpoint(tmp_path)
    sound = tiny_config("qwen35", "tied")
    for name in SIZES:
        if name in sound:
            write_json(folder / "config.json", sound | {name: NONSENSE[value]})
            try:
                report = dry_run(folder, tmp_path)
            except ConversionError as error:
                assert str(error).isprintable()
            else:
                assert report.mismatch or name not in SHAPING or value == "null", name


class _Asked(Config):
    """Notes which names are asked for."""

    def __init__(self, root: dict[str, Any]):
        super().__init__(root)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON tree; of a list's, of the first two."""
    for step in (
        tree if isinstance(tree, dict) else range(min(len(tree), 2)) if isinstance(tree, list) else ()
    ):
        yield (*above, step)
        yield from _places(tree[step], (*above, step))


def _changed(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = tree.copy()
    copy[place[0]] = _changed(tree[place[0]], place[1:], value) if len(place) > 1 else value
    return copy


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_no_value_of_a_familys_configuration_is_read_unchecked(family: str, variant: str) -> None:
    """Each that is there or asked for, in its own place. Found by scripts/dev/fuzz/readers.py."""
    reader, sound = families()[family], tiny_config(family, variant)

    def read(config: Config) -> None:
        for use in (lambda c: reader.keys(c, 0), lambda c: reader.keys(c, 1), lambda c: reader.layout(c, ())):
            try:
                use(config)
            except ConversionError as error:
                assert str(error).isprintable() and len(str(error)) <= 8000

    asked = _Asked(sound)
    read(asked)
    assert "hidden_size" in asked.names
    room = ("text_config",) if "text_config" in sound else ()
    for place in {*_places(sound), *((*room, name) for name in asked.names)}:
        for value in (*NONSENSE.values(), False, 1, 2**31, "", [], [[], {}], [None], ["x"], {}):
            read(Config(_changed(sound, place, value)))


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_no_size_in_a_configuration_fills_the_memory(family: str, variant: str) -> None:
    """Lists are made of some: of heads, layers, experts, rows. Found by scripts/dev/fuzz/readers.py."""
    reader, config = families()[family], tiny_config(family, variant)
    sizes = config.get("text_config", config)
    tracemalloc.start()
    for name in [name for name, value in sizes.items() if type(value) is int or value is None]:
        changed = Config(sizes | {"architectures": config["architectures"], name: 1 << 24})
        for read in (lambda c: reader.keys(c, 1), lambda c: reader.layout(c, ())):
            with contextlib.suppress(ConversionError):
                read(changed)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20, name
    tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", '"x"', "{", '{"a": ' + "[" * 200_000, "\x00", "{}", '{"architectures": []}', '{"architectures": {"x": 1}}',
     '{"architectures": [["x"]]}', '{"architectures": ["X"], "text_config": {"architectures": [7]}}', '{"a": ' + "9" * 5000 + "}"],
    ids=range(13),
)  # fmt: skip
def test_a_configuration_that_is_none_is_one_line(text: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "config.json").write_text(text)
    refused(folder)


def test_small_files_are_small(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    with (folder / "config.json").open("r+b") as file:
        file.truncate(MAX_SMALL_BYTES + 1)
    assert "at most 67,108,864 are read" in refused(folder, NotACheckpoint)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "has no config.json" in refused(folder, NotACheckpoint)


LINKED = (
    *(
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ),
    *("chat_template.jinja", "additional_chat_templates", "additional_chat_templates/x.jinja"),
)


@pytest.mark.parametrize("name", LINKED)
def test_no_file_of_the_reader_gets_into_a_model(name: str, tmp_path: Path) -> None:
    """A checkpoint that was unpacked from an archive may have links to anything that whoever converts it can read."""
    folder, elsewhere = make_checkpoint(tmp_path / "c"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.jinja").write_text("secret")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    target = folder / name
    if name == "additional_chat_templates":
        target.symlink_to(elsewhere)
    else:
        target.parent.mkdir(exist_ok=True)
        moved = elsewhere / "moved"
        if target.exists():
            target.rename(moved)
        else:
            moved.write_text('{"weight_map": {}}' if name.endswith(".json") else "secret")
        target.symlink_to(moved)
    with pytest.raises(UnsafePath, match=r"is a link to .* outside the folder"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pipe_among_templates_is_not_waited_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {k: v for k, v in settings.items() if k != "chat_template"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "x.jinja")
    assert "x.jinja cannot be read: a folder, a pipe" in refused(folder)


@pytest.mark.parametrize("what", ["bomb", "long", "link", "pipe"])
def test_a_model_card_that_is_none_is_left_out(what: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    card, sound = folder / "README.md", "---\nlicense: mit\n---\n"
    lines = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    if what == "bomb":
        card.write_text("\n".join(["---", "license: mit", "a0: &a0 {x: 1}", *lines, "---", ""]))
    elif what == "long":
        card.write_text(sound + " " * general.MAX_CARD_BYTES)
    elif what == "link":
        (tmp_path / "card").write_text(sound)
        card.symlink_to(tmp_path / "card")
    else:
        os.mkfifo(card)
    assert general._model_card(folder) == {}
    card.unlink()
    card.write_text(sound + "text with *stars* & anchors &x")
    assert general._model_card(folder) == {"license": "mit"}


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_json(tmp_path / "config.json", tiny_config("qwen35", "tied"))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": _Bomb(tmp_path / "ran")}))
    assert "cannot be read by torch" in refused(tmp_path, BadShard)
    assert not (tmp_path / "ran").exists()


def test_an_archive_broken_anywhere_is_one_line(tmp_path: Path) -> None:
    """What torch has read its own way, zipfile may not. Found by scripts/dev/fuzz/readers.py."""
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data/0", bytes(8))
    sound = path.read_bytes()
    for at in range(len(sound)):
        for byte in (0, 1, 64, 127, 255):
            path.write_bytes(sound[:at] + bytes([byte]) + sound[at + 1 :])
            with pytest.raises(BadShard, match=r"broken archive|packed in a way|truncated") as error:
                _mapped_at(path, _records(path), {1: 8})
            assert str(error.value).isprintable()


def repack(
    old: io.BytesIO,
    path: Path,
    end: str,
    change: Callable[[bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Writes an archive anew, with the records changed whose name ends so."""
    with zipfile.ZipFile(old) as archive, zipfile.ZipFile(path, "w", compression) as new:
        for record in archive.namelist():
            data = archive.read(record)
            new.writestr(record, change(data) if record.endswith(end) else data)


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "version"])
def test_a_record_that_says_it_holds_gigabytes_costs_no_memory(tmp_path: Path, name: str) -> None:
    """torch asks for as much as the archive's directory says. Found by scripts/dev/fuzz/readers.py."""
    torch = pytest.importorskip("torch")
    place, file_name, packed = Folder(tmp_path), "pytorch_model.bin", io.BytesIO()
    torch.save({"a": torch.arange(24.0)}, packed)
    data = bytearray(packed.getvalue())
    entry = data.rindex(f"/{name}".encode())  # in the directory, where the name follows on 46 bytes
    begin = data.rindex(b"PK\x01\x02", 0, entry)
    data[begin + 20 : begin + 28] = struct.pack("<II", 3 << 30, 3 << 30)
    (tmp_path / file_name).write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.ExitStack() as files, pytest.raises(BadShard, match="is truncated: it declares a record"):
        read_bin(place.path(file_name), place.open(file_name, files))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 18)


@pytest.mark.parametrize(
    ("compression", "n_values", "said"),
    [
        (zipfile.ZIP_STORED, 24, None),
        (zipfile.ZIP_STORED, 25, "says that more bytes of a tensor are stored"),
        (
            zipfile.ZIP_STORED,
            215,
            "says that more bytes of a tensor are stored",
        ),  # to the end of the file, no whole number of values
        (zipfile.ZIP_DEFLATED, 24, "packed in a way"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_shard_whose_tensor_is_longer_than_its_record(
    tmp_path: Path, turned: bool, compression: int, n_values: int, said: str | None
) -> None:
    """Of which torch maps what stands behind the record, too. Found by scripts/dev/fuzz/readers.py."""
    torch = pytest.importorskip("torch")
    place, name = Folder(tmp_path), "pytorch_model.bin"
    whole, packed = torch.arange(24.0).reshape(4, 6), io.BytesIO()
    torch.save({"a": whole.T if turned else whole}, packed)

    def lengthened(data: bytes) -> bytes:
        assert data.count(b"K\x18t") == 1
        return data.replace(b"K\x18t", b"K" + bytes([n_values]) + b"t")

    repack(packed, tmp_path / name, ".pkl", lengthened, compression)
    with contextlib.ExitStack() as files:
        file = place.open(name, files)
        if said is None:
            rows = read_bin(place.path(name), file)["a"].raw_rows(0, 2)
            assert rows.tobytes() == (whole.T if turned else whole)[:2].numpy().tobytes()
        else:
            with pytest.raises(BadShard, match=said):
                read_bin(place.path(name), file)


def test_a_shard_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    """torch turns the values in its own mapping, which nothing is read through."""
    torch = pytest.importorskip("torch")
    place, name, packed = Folder(tmp_path), "pytorch_model.bin", io.BytesIO()
    torch.save({"a": torch.arange(24.0)}, packed)
    repack(packed, tmp_path / name, "/byteorder", lambda data: b"big")
    with contextlib.ExitStack() as files, pytest.raises(UnsupportedModel, match="big-endian"):
        read_bin(place.path(name), place.open(name, files))


def test_a_shard_whose_pickle_begins_pages_before_its_only_storage_is_read(tmp_path: Path) -> None:
    """Where a record begins modulo a page does not say which one it is."""
    torch = pytest.importorskip("torch")
    place, name, values = Folder(tmp_path), "pytorch_model.bin", torch.arange(48.0).reshape(4, 12)
    n_alike = 0
    for length in range(3000, 7200, 60):
        torch.save({"x" * length: values}, tmp_path / name)
        with contextlib.ExitStack() as files:
            (tensor,) = read_bin(place.path(name), place.open(name, files)).values()
            assert tensor.raw_rows(0, 4).tobytes() == values.numpy().tobytes()
        with zipfile.ZipFile(tmp_path / name) as archive, (tmp_path / name).open("rb") as file:
            starts = {record.filename: _data_start(file, record) for record in archive.infolist()}
        (pickled,) = (start for n, start in starts.items() if n.endswith("data.pkl"))
        (stored,) = (start for n, start in starts.items() if n.endswith("data/0"))
        n_alike += (stored - pickled) % mmap.PAGESIZE == 0
    assert n_alike > 0


def test_torch_says_nothing_beside_our_line(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    place, name, packed = Folder(tmp_path), "pytorch_model.bin", io.BytesIO()
    torch.save({"a": torch.zeros(4)}, packed)
    repack(packed, tmp_path / name, ".pkl", lambda data: b"\x80\x11" + data[2:])
    with contextlib.ExitStack() as files, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read_bin(place.path(name), place.open(name, files))
    assert not said


def test_a_template_is_copied_and_not_run(tmp_path: Path) -> None:
    """convert() looks for no more than that it is text."""
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    started = time.monotonic()
    assert convert(folder, tmp_path / "out", "Q8_0").main
    assert time.monotonic() - started < 60


FORMS = {  # found by scripts/dev/fuzz/readers.py
    "step35-plain": {"swiglu_limits_shared": -0.0, "rope_theta": []},
    "cohere2moe-rms": {"mlp_layer_types": 7},
    "gemma4-layered": {"layer_types": [["x"]] * 4, "hidden_size_per_layer_input": "16"},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FORMS.items() for key in keys])
def test_a_value_of_another_form_is_one_line(name: str, key: str, tmp_path: Path) -> None:
    arch, variant = name.split("-")
    folder = make_checkpoint(tmp_path, arch, variant)
    write_json(folder / "config.json", tiny_config(arch, variant) | {key: FORMS[name][key]})
    assert key in refused(folder)


@pytest.mark.parametrize(
    "name",
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta"],
)
def test_a_rotation_of_nonsense_is_one_line(name: str) -> None:
    """Scaled as Llama 3's is: nothing is divided by what is no number, or zero. Found by scripts/dev/fuzz/readers.py."""
    sound = tiny_config("step35", "plain")
    rope = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
    for value in (None, "", "x", [], 0, float("nan"), 10**400, "9" * 5000):
        at_root = name == "rope_theta"
        changed = {"rope_scaling": rope if at_root else rope | {name: value}} | (
            {name: value} if at_root else {}
        )
        with contextlib.suppress(ConversionError):
            families()["step35"].layout(Config(sound | changed), ())
        with contextlib.suppress(ConversionError):
            families()["step35"].keys(Config(sound | changed | {"moe_layers_enum": value}), 0)


def test_an_importance_matrix_that_ends_within_a_number_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    name = b"blk.0.a.weight"
    path.write_bytes(struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 1, 2) + bytes(7))
    with pytest.raises(BadImatrix, match="ends within entry 1 of 1"):
        read_imatrix(path)


@pytest.mark.parametrize("format", ["dat", "gguf"])
@pytest.mark.parametrize(
    "word", [0x7F800001, 0x7FC00000, 0x7F800000], ids=["signalling", "no number", "infinite"]
)
def test_an_importance_matrix_of_no_numbers_is_one_line_without_warnings(
    word: int, format: str, tmp_path: Path
) -> None:
    path = tmp_path / f"imatrix.{format}"
    if format == "dat":
        name = b"blk.0.a.weight"
        path.write_bytes(struct.pack("<ii", 1, len(name)) + name + struct.pack("<iiI", 2, 1, word))
    else:
        sums, counts = (Tensor([1, 1], 0, struct.pack("<I", n)) for n in (word, 0x3F800000))
        File({}, {"a.in_sum2": sums, "a.counts": counts, "b.in_sum2": sums, "b.counts": sums}).write(path)
    with warnings.catch_warnings(), pytest.raises(BadImatrix, match="values that are not finite"):
        warnings.simplefilter("error")
        read_imatrix(path)
