"""Compact sidecars: llama.cpp computes from one exactly the chosen rows of the full head's logits; bad files are named errors."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import gguf
import models
import numpy as np
import pytest
import tiny_gguf
from conftest import PairOf
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.runtime.reference import Context
from llama_sidecar.runtime.weights import Settings, Weights, make_draft_context
from llama_sidecar.sidecars import (
    MainFile,
    Sidecar,
    compact,
    errors,
    gguf_header,
    identify,
    open_main,
    open_sidecar,
    read_header,
    tensor_rows,
)
from llama_sidecar.sidecars.discover import survey

N_ROWS = 128


def some_rows(n_vocab: int = models.N_VOCAB, n_rows: int = N_ROWS) -> np.ndarray:
    return np.sort(np.random.default_rng(1).choice(n_vocab, n_rows, replace=False)).astype(np.int32)


def cut(source: Sidecar | MainFile, folder: Path, rows: np.ndarray) -> compact.Compact:
    path = folder / compact.file_name(source.path, len(rows))
    compact.write_compact(source, rows, path)
    return compact.open_compact(path)


def draft(path: Path, tokens: list[int], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden rows of an MTP context over a file, one row at a time."""
    with closing(Weights(path, with_head=True, n_gpu_layers=0, device=None)) as weights:
        settings = Settings(threads=1)
        context = Context(make_draft_context(weights, settings, n_ctx=64), masked=True)
        with closing(context):
            logits, rows = [], []
            for i, (token, row) in enumerate(zip(tokens, hidden, strict=True)):
                context.decode([token], i, [0], [row])
                logits.append(context.logits(0))
                rows.append(context.hidden(0))
    return np.array(logits), np.array(rows)


def assert_same_drafts(source: Path, small: compact.Compact) -> None:
    drafted = [0, len(small.target_ids) - 1, 17, 64]
    hidden = np.random.default_rng(2).standard_normal((len(drafted), models.N_EMBD)).astype(np.float32)
    full = draft(source, [int(small.target_ids[i]) for i in drafted], hidden)
    ours = draft(small.path, drafted, hidden)
    assert np.array_equal(ours[0], full[0][:, small.target_ids])
    assert np.array_equal(ours[1], full[1])
    assert np.ptp(full[0]) > 0.1


@pytest.mark.parametrize("letter", ["T", "R"])
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_its_logits_are_the_chosen_ones_of_the_full_head(
    pair_of: PairOf, letter: str, type: str, tmp_path: Path
) -> None:
    sidecar = open_sidecar(pair_of(letter, type).sidecar)
    assert_same_drafts(sidecar.path, cut(sidecar, tmp_path, some_rows()))


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_head_inside_the_main_file_and_one_with_an_output_of_its_own(
    tmp_path: Path, recurrent: bool
) -> None:
    rng = np.random.default_rng(3)

    def own_matrices(tensors: dict[str, np.ndarray]) -> None:
        for name in ("embed_tokens", "shared_head_head"):
            shape = tensors["token_embd.weight"].shape
            tensors[f"blk.4.nextn.{name}.weight"] = rng.standard_normal(shape).astype(np.float32)

    pair = models.write_pair(
        tmp_path / "pair", recurrent=recurrent, n_vocab=1024, embedded=True, edit=own_matrices
    )
    sidecar, main = open_sidecar(pair.sidecar), open_main(pair.main)
    from_sidecar = cut(sidecar, tmp_path, some_rows(1024, 192))
    from_main = cut(main, tmp_path / "pair", some_rows(1024, 192))
    assert_same_drafts(sidecar.path, from_sidecar)
    assert from_main.header.tensors.keys() == from_sidecar.header.tensors.keys()
    for name in from_main.header.tensors:
        assert np.array_equal(from_main.header.tensor_bytes(name), from_sidecar.header.tensor_bytes(name))
    assert from_main.source == from_sidecar.source == compact.content_hash(main)
    assert from_main.header.keys["sidecar.fingerprint.trunk"] == main.trunk


def test_everything_of_the_head_is_in_it_and_nothing_else(pair_of: PairOf, tmp_path: Path) -> None:
    sidecar = open_sidecar(pair_of("R", "Q4_0").sidecar)
    rows = some_rows()
    small = cut(sidecar, tmp_path, rows)
    assert small.target_ids.dtype == np.int32 and np.array_equal(small.target_ids, rows)
    assert (small.n_vocab, small.source) == (models.N_VOCAB, compact.content_hash(sidecar))
    full, header = sidecar.header, small.header
    assert list(header.tensors) == list(full.tensors)
    for name in full.tensors:
        theirs = full.tensor_bytes(name)
        if name == "token_embd.weight":
            theirs = theirs.reshape(models.N_VOCAB, -1)[rows].reshape(-1)
        assert np.array_equal(header.tensor_bytes(name), theirs)
    kept = {name for name in full.keys if not name.startswith("tokenizer.")}
    assert all(np.array_equal(header.keys[name], full.keys[name]) for name in kept)
    assert all(header.key_types[name] == full.key_types[name] for name in kept)
    added = {name for name in header.keys if name not in kept}
    assert added == {
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "qwen35.vocab_size",
        "sidecar.format",
        "sidecar.compact.target_ids",
        "sidecar.compact.n_vocab",
        "sidecar.compact.source",
    }
    assert list(header.strings("tokenizer.ggml.tokens")) == [sidecar.tokens[i] for i in rows]
    assert small.path.stat().st_size % gguf.GGUF_DEFAULT_ALIGNMENT == 0


@pytest.mark.parametrize("letter", ["T", "R"])
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_a_narrow_head_holds_no_matrix_wider_than_four_bits(
    pair_of: PairOf, letter: str, type: str, tmp_path: Path
) -> None:
    sidecar = open_sidecar(pair_of(letter, type).sidecar)
    full, rows = sidecar.header, some_rows()
    path = tmp_path / "compact-x.gguf"
    compact.write_compact(sidecar, rows, path, narrow=True)
    small = compact.open_compact(path)
    assert small.types == compact.narrow_types(sidecar)
    for name, info in full.tensors.items():
        found = small.header.tensors[name]
        is_vocab = name == "token_embd.weight"
        is_narrowed = len(info.shape) > 1 and "gate_inp" not in name
        assert found.type_name == ("Q4_0" if is_narrowed else info.type_name), name
        theirs = full.tensor_bytes(name).reshape(info.n_elements // info.shape[0], -1)
        theirs = theirs[rows] if is_vocab else theirs
        if found.type != info.type:
            values = gguf.dequantize(theirs, GGMLType(info.type))
            theirs = gguf.quantize(values, GGMLType(found.type))
        assert np.array_equal(small.header.tensor_bytes(name), theirs.reshape(-1).view(np.uint8)), name
    hidden = np.ones((1, models.N_EMBD), np.float32)
    assert np.ptp(draft(path, [3], hidden)[0]) > 0.1


@pytest.mark.parametrize(
    ("name", "shape", "type", "narrowed"),
    [
        ("blk.4.ffn_up.weight", (48, 4), GGMLType.F32, GGMLType.F16),  # a row is not whole blocks
        ("blk.4.ffn_up.weight", (48, 4), GGMLType.BF16, GGMLType.BF16),
        ("blk.4.ffn_up.weight", (128, 4), 41, 41),  # gguf cannot read it
        ("blk.4.ffn_up_exps.weight", (64, 4, 2), GGMLType.F32, GGMLType.Q4_0),
        ("blk.4.ffn_gate_inp.weight", (64, 2), GGMLType.F32, GGMLType.F32),  # a router
        ("blk.4.nextn.enorm.weight", (64,), GGMLType.F16, GGMLType.F16),
        ("blk.4.rope_freqs", (64, 2), GGMLType.F32, GGMLType.F32),
        ("blk.4.ffn_up.weight", (256, 4), GGMLType.Q4_K, GGMLType.Q4_K),
        ("blk.4.ffn_up.weight", (64, 4), GGMLType.Q4_1, GGMLType.Q4_0),
    ],
)
def test_what_a_narrow_head_leaves_as_it_is(
    name: str, shape: tuple[int, ...], type: int, narrowed: int
) -> None:
    assert tensor_rows.narrowed_type(gguf_header.TensorInfo(name, shape, type, 0, 0, Path("x"))) == narrowed


def test_a_vocabulary_s_size_that_the_source_declares_is_replaced(tmp_path: Path) -> None:
    keys = {
        "qwen35.vocab_size": tiny_gguf.N_VOCAB,
        "general.tags": ["a", "b"],
        "sidecar.fingerprint.trunk": "ab" * 32,
    }
    sidecar = open_sidecar(tiny_gguf.sidecar(tmp_path / "mtp-x.gguf", keys=keys))
    small = cut(sidecar, tmp_path, np.array([3, 5]))
    assert small.header.keys["qwen35.vocab_size"] == 2
    assert list(small.header.keys["general.tags"]) == ["a", "b"]
    assert small.header.keys["sidecar.fingerprint.trunk"] == "ab" * 32


def test_the_hash_follows_what_can_get_into_a_cut(pair_of: PairOf, tmp_path: Path) -> None:
    original = pair_of("R").sidecar
    path = tmp_path / "mtp-copy.gguf"
    path.write_bytes(original.read_bytes())
    same = compact.content_hash(open_sidecar(path))
    assert same == compact.content_hash(open_sidecar(original))
    header = read_header(path)
    for name in ("token_embd.weight", "blk.4.nextn.eh_proj.weight"):
        data = bytearray(original.read_bytes())
        data[header.tensors[name].offset + 1] ^= 1
        path.write_bytes(data)
        assert compact.content_hash(open_sidecar(path)) != same


# Which rows.


def test_special_and_byte_tokens_come_first_then_what_was_seen_then_merge_order() -> None:
    letters = models.byte_tokens()
    tokens = [*letters, *(f"word{i}" for i in range(1000)), "<end>", "[PAD]", "[PAD]"]
    types = [1] * 1256 + [3, 5, 5]
    first = compact.choose_rows(tokens, types, 300)
    assert first.dtype == np.int32
    assert first.tolist() == [*range(299), 1256]
    counts = np.zeros(1259, np.uint32)
    counts[[700, 800, 900]] = [5, 1, 9]
    assert compact.choose_rows(tokens, types, 259, counts).tolist() == [*range(256), 700, 900, 1256]
    assert compact.choose_rows(tokens, types, 261, counts).tolist() == [*range(257), 700, 800, 900, 1256]
    assert compact.choose_rows(tokens, types, 5000).tolist() == list(range(1259))
    assert compact.choose_rows(tokens, None, 1257)[-1] == 1256  # nothing says that the last two are unused
    with_seen_padding = np.bincount([1258], minlength=1259)
    assert compact.choose_rows(tokens, types, 258, with_seen_padding).tolist() == [*range(256), 1256, 1258]


def test_bytes_are_known_by_their_type_or_their_spelling(tmp_path: Path) -> None:
    spelled = compact.choose_rows(["word", "more", "Ġ", "a", "é"], [1] * 5, 3)
    assert spelled.tolist() == [2, 3, 4]
    assert compact.choose_rows(["word", "more", "<0x0A>"], [1, 1, 6], 1).tolist() == [2]
    sidecar = open_sidecar(
        tiny_gguf.sidecar(
            tmp_path / "mtp-x.gguf", keys={"tokenizer.ggml.tokens": [*(f"a{i}" for i in range(15)), "Ċ"]}
        )
    )
    assert compact.choose_rows(sidecar.tokens, None, 1).tolist() == [15]


def test_coverage_is_the_share_of_tokens_inside() -> None:
    assert compact.coverage([0, 2], [6, 2, 2]) == 0.8
    assert compact.coverage([0, 2, 9], [6, 2, 2]) == 0.8
    assert compact.coverage([0], [0, 0]) == 1.0


def test_small_vocabularies_are_left_whole() -> None:
    assert [compact.default_n_rows(n) for n in (4096, 65_536, 65_537, 248_320)] == [
        None,
        None,
        32_768,
        32_768,
    ]


def test_tokens_are_in_order_of_worth() -> None:
    tokens, types = ["a1", "a2", "a3", "a4", "<end>"], [1, 1, 5, 1, 3]
    assert compact.ranked(tokens, types).tolist() == [4, 0, 1, 3, 2]
    assert compact.ranked(tokens, types, [0, 0, 3, 7]).tolist() == [4, 3, 2, 0, 1]
    with pytest.raises(errors.BadRows, match="types of 5 tokens; 2"):
        compact.ranked(tokens[:2], types)


# Names and mistakes.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("mtp-NAME-Q8_0.gguf", "compact-NAME-Q8_0-64.gguf"),
        ("NAME-MTP-BF16.gguf", "compact-NAME-BF16-64.gguf"),
        ("NAME-mtp.gguf", "compact-NAME-64.gguf"),
        ("mtmtp-p-x.gguf", "compact-x-64.gguf"),
        ("mtp-.gguf", "compact-head-64.gguf"),
        ("NAME-Q8_0-00001-of-00003.gguf", "compact-NAME-Q8_0-64.gguf"),
        ("dspark-dflash-eagle3-NAME.gguf", "compact-NAME-64.gguf"),
    ],
)
def test_no_name_is_one_of_llama_cpp_s_sidecars(source: str, name: str) -> None:
    assert compact.file_name(Path(source), 64) == name


def test_it_is_neither_a_standard_sidecar_nor_a_main_file(tmp_path: Path) -> None:
    pair = models.write_pair(tmp_path)
    small = cut(open_sidecar(pair.sidecar), tmp_path, some_rows())
    for opens in (open_sidecar, open_main, lambda path: identify(read_header(path))):
        with pytest.raises(errors.CompactGiven, match="cut from"):
            opens(small.path)
    assert [c.path for c in survey(open_main(pair.main))] == [pair.sidecar]
    for other in (pair.main, pair.sidecar):
        with pytest.raises(errors.NotCompact):
            compact.open_compact(other)


def test_what_cannot_be_cut_is_said(pair_of: PairOf, tmp_path: Path) -> None:
    for name in ("assistant", "dflash", "dspark", "eagle3"):
        sidecar = open_sidecar(tiny_gguf.sidecar(tmp_path / f"{name}.gguf", name))
        with pytest.raises(errors.CannotCut, match="whole vocabulary"):
            compact.write_compact(sidecar, [0, 1], tmp_path / "out.gguf")
    with pytest.raises(errors.CannotCut, match="no head"):
        compact.content_hash(open_main(pair_of("R").main))
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("rows", [[], [1, 1], [2, 1], [-1, 3], [5, 256], [0.5, 1.5], [[1, 2]], ["a"]])
def test_bad_rows_are_refused(pair_of: PairOf, tmp_path: Path, rows: list[object]) -> None:
    with pytest.raises(errors.BadRows):
        compact.write_compact(open_sidecar(pair_of("R").sidecar), rows, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(pair_of: PairOf, tmp_path: Path) -> None:
    sidecar = open_sidecar(pair_of("R").sidecar)
    with pytest.raises(errors.UnwritableFile, match="cannot be written"):
        compact.write_compact(sidecar, some_rows(), tmp_path / "absent" / "out.gguf")

    def stop(done: int, total: int, name: str) -> None:
        assert 0 < done <= total and name in sidecar.header.tensors
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact.write_compact(sidecar, some_rows(), tmp_path / "out.gguf", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_file_gets_its_name_when_the_block_ends_well(pair_of: PairOf, tmp_path: Path) -> None:
    sidecar, path = open_sidecar(pair_of("R").sidecar), tmp_path / "out.gguf"
    with (
        pytest.raises(ZeroDivisionError),
        compact.writing_compact(sidecar, some_rows(), path) as part,
    ):
        assert len(compact.open_compact(part).target_ids) == N_ROWS
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    left = tmp_path / ".out.gguf.0123abcd.part"
    left.write_text("of a killed writer")
    with compact.writing_compact(sidecar, some_rows(), path) as part:
        assert not left.exists()
        compact.write_compact(sidecar, some_rows(), path)  # another one, meanwhile
        assert part.exists() and path.exists()
    assert list(tmp_path.iterdir()) == [path]


def with_keys(changes: dict[str, object]) -> Callable[[Path, Path], None]:
    """Writes a compact sidecar of two rows with some keys otherwise, or (None) left out."""

    def write(source: Path, path: Path) -> None:
        keys = {
            **tiny_gguf.mtp_keys(tokens=["a", "b"]),
            "tokenizer.ggml.model": "none",
            "qwen35.vocab_size": 2,
            "sidecar.compact.target_ids": [3, 7],
            "sidecar.compact.n_vocab": 16,
            "sidecar.compact.source": hashlib.sha256().hexdigest(),
        }
        kept = {name: value for name, value in (keys | changes).items() if value is not None}
        tiny_gguf.write(path, "qwen35", kept, tiny_gguf.mtp_tensors(n_vocab=2))

    return write


def cut_short(source: Path, path: Path) -> None:
    cut(open_sidecar(source), path.parent, some_rows()).path.rename(path)
    path.write_bytes(path.read_bytes()[:-1000])


def one_row_more(source: Path, path: Path) -> None:
    cut(open_sidecar(source), path.parent, some_rows()).path.rename(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 8
    assert struct.unpack_from("<Q", data, at) == (N_ROWS,)
    struct.pack_into("<Q", data, at, N_ROWS + 64)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (with_keys({"sidecar.compact.target_ids": None}), errors.NotCompact),
        (with_keys({"sidecar.compact.target_ids": [7, 3]}), errors.BadRows),
        (with_keys({"sidecar.compact.target_ids": [3]}), errors.BadRows),
        (with_keys({"sidecar.compact.target_ids": [3, 16]}), errors.BadRows),
        (with_keys({"sidecar.compact.target_ids": [-1, 16]}), errors.BadRows),
        (with_keys({"sidecar.compact.target_ids": ["a", "b"]}), errors.BadRows),
        (with_keys({"sidecar.compact.target_ids": 3}), errors.BadRows),
        (with_keys({"sidecar.compact.n_vocab": None}), errors.MissingKey),
        (with_keys({"sidecar.compact.n_vocab": "many"}), errors.WrongKey),
        (with_keys({"sidecar.compact.source": None}), errors.MissingKey),
        (with_keys({"sidecar.compact.source": "me"}), errors.BadFingerprint),
        (with_keys({"qwen35.vocab_size": 3}), errors.WrongKey),
        (with_keys({"tokenizer.ggml.tokens": ["a", "b", "c"]}), errors.WrongTensorShape),
        (with_keys({"qwen35.block_count": None}), errors.NotCompact),
        (with_keys({"qwen35.nextn_predict_layers": None}), errors.MissingKey),
        (with_keys({"sidecar.format": 2}), errors.UnsupportedFormat),
        (with_keys({"qwen35.attention.layer_norm_rms_epsilon": -1.0}), errors.WrongKey),
        (cut_short, errors.TruncatedFile),
        (one_row_more, errors.GGUFError),
    ],
)
def test_hostile_files_are_named_errors(
    pair_of: PairOf, tmp_path: Path, damage: Callable[[Path, Path], None], error: type[Exception]
) -> None:
    path = tmp_path / "compact-x.gguf"
    damage(pair_of("R").sidecar, path)
    with pytest.raises(error) as raised:
        compact.open_compact(path)
    assert "\n" not in str(raised.value) and "compact-x.gguf" in str(raised.value)


def test_the_whole_file_of_these_tests_is_sound_without_damage(pair_of: PairOf, tmp_path: Path) -> None:
    with_keys({})(pair_of("R").sidecar, tmp_path / "compact-x.gguf")
    assert compact.open_compact(tmp_path / "compact-x.gguf").target_ids.tolist() == [3, 7]
