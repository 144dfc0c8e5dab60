"""Drafters with a cut output: the rows are the source's, drafts are the whole drafter's among them, and the text is plain's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafts
import gguf
import numpy as np
import pytest
from native_rounds import native_run

from llama_sidecar.runtime import LoadError, Model, _native, heads, load, reference
from llama_sidecar.runtime.errors import HeadsUnavailable
from llama_sidecar.sidecars import KINDS, keys, open_main, open_sidecar, read_header
from llama_sidecar.sidecars.cut_output import content_hash, narrow_types, open_cut, write_cut
from llama_sidecar.sidecars.errors import BadRows, CannotCut, NotCompact

PROMPT = list(b"hello world, this is where it starts")
N, DEPTH = 40, 4
ROWS = np.arange(1, drafts.N_VOCAB, 2)  # half of them
Q4 = drafts.T.Q4_0
FORMS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3 with a vocabulary of its own": {"own": True},
    "eagle3 with embeddings of its own": {"own": "embeddings"},
    "dflash": {},
    "dflash with embeddings of its own": {"own": "embeddings"},
    "dflash with a vocabulary of its own": {"own": True},
    "dflash2": {"selector": True},
    "dspark": {"markov": True},
    "dspark with confidence": {"markov": True, "confidence": True},
}


def write_form(form: str, folder: Path, **more: Any) -> Path:
    """The sidecar; the types of what is cut are those of the cut, so that rows stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    write = drafts.write_eagle3 if form.startswith("eagle3") else drafts.write_dflash
    return write(folder, type=Q4, **FORMS[form], **more)


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafts.write_target(tmp_path_factory.mktemp("main"), "qwen3", Q4)


def tensor(path: Path, name: str) -> np.ndarray:
    return next(t.data for t in gguf.GGUFReader(path).tensors if t.name == name)


def lender(form: str, main: Path, sidecar: Path) -> tuple[Path, str]:
    """The file and the tensor that stand in for an output: DFlash's own embeddings do, EAGLE3's do not."""
    if form == "dflash with embeddings of its own":
        return sidecar, keys.TOKEN_EMBD
    return main, keys.OUTPUT


@pytest.mark.parametrize("form", FORMS)
def test_its_rows_are_those_of_its_source_and_all_else_is_as_it_was(
    form: str, main: Path, tmp_path: Path
) -> None:
    sidecar = open_sidecar(write_form(form, tmp_path))
    write_cut(sidecar, open_main(main), ROWS, tmp_path / "cut.gguf")
    cut = open_cut(tmp_path / "cut.gguf")
    assert cut.target_ids.tolist() == ROWS.tolist()
    assert cut.source == content_hash(sidecar, open_main(main))
    assert cut.types == narrow_types(sidecar, open_main(main))
    of_rows = KINDS[sidecar.kind].output_tensors(sidecar.header)
    for name in cut.header.tensors:
        source, given = sidecar.path, name
        if name == keys.OUTPUT and name not in sidecar.header.tensors:
            source, given = lender(form, main, sidecar.path)
        if name != keys.D2T:
            expected = tensor(source, given)
            found = tensor(cut.path, name)
            assert np.array_equal(found, expected[ROWS] if name in of_rows else expected), name
    assert cut.header.keys.keys() - sidecar.header.keys.keys() == {keys.COMPACT_SOURCE}
    for name, value in sidecar.header.keys.items():
        assert np.array_equal(cut.header.keys[name], value), name
    with pytest.raises(CannotCut, match="cannot be cut"):
        write_cut(open_sidecar(cut.path), open_main(main), range(3), tmp_path / "again.gguf")


@pytest.mark.parametrize("form", FORMS)
def test_native_loop_reference_and_plain_agree_and_first_drafts_are_the_whole_drafters(
    form: str, main: Path, tmp_path: Path
) -> None:
    sidecar = write_form(form, tmp_path)
    with load(main, sidecar, ctx=256, threads=1, depth=DEPTH, draft_vocab="full") as whole:
        assert whole.n_draft_vocab is None
        expected, per_round = reference.generate(whole, PROMPT, N, DEPTH)
        firsts = first_drafts(whole, expected)
    with load(main, sidecar, ctx=256, threads=1, depth=DEPTH, draft_vocab=128, learn=False) as cut:
        assert cut.n_draft_vocab == 128 and cut.head_weights.path != sidecar
        rows = set(open_cut(cut.head_weights.path).target_ids.tolist())
        text, found, _ = native_run(cut, PROMPT, N, DEPTH)
        assert (text, found) == reference.generate(cut, PROMPT, N, DEPTH)
        assert text == expected and {token for round_ in found for token in round_} <= rows
        assert not {token for round_ in per_round for token in round_} <= rows
        both = list(zip(firsts, first_drafts(cut, expected), strict=True))
    assert all(cut == whole for whole, cut in both if whole in rows)
    assert {whole in rows for whole, _ in both} == {True, False}


def first_drafts(model: Model, text: list[int]) -> list[int]:
    """After each token of a text, whatever stands."""
    found = []
    with model.session(depth=1) as session:
        native = session._native
        native.feed(PROMPT, True)
        native.first(_native.forced_chooser(text))
        for i in range(1, len(text)):
            found.append(native.step(_native.forced_chooser([text[i]]), 1, True).drafts[0])
            native.keep(1)
    return found


def test_a_large_vocabulary_is_cut_by_itself_and_made_once(
    main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("llama_sidecar.sidecars.compact.SMALL_VOCAB", 255)
    monkeypatch.setattr("llama_sidecar.sidecars.compact.N_ROWS", 64)
    sidecar = write_form("dflash", tmp_path)
    for _ in range(2):
        with load(main, sidecar, ctx=64, threads=1, learn=True) as model:
            assert model.n_draft_vocab == 64 and model.learns
    (made,) = (tmp_path / "cache" / "heads").iterdir()
    assert made == model.head_weights.path and model.speculation.path == sidecar
    before = made.read_bytes()
    made.write_bytes(before[:-100])
    paths = [heads.cut_drafter(open_sidecar(sidecar), open_main(main)) for _ in range(2)]
    assert paths == [made, made] and made.read_bytes() == before
    counted = np.zeros(drafts.N_VOCAB, np.uint32)
    counted[250] = 5_000
    learned = heads.cut_drafter(open_sidecar(sidecar), open_main(main), counts=counted)
    assert learned.name.endswith("-learned.gguf") and 250 in open_cut(learned).target_ids
    other = drafts.write_target(tmp_path / "other", "qwen3", Q4, seed=1)  # whose output is another
    assert heads.cut_drafter(open_sidecar(sidecar), open_main(other)) != made


@pytest.mark.parametrize("markov", [False, True])
def test_rows_alone_become_narrower(markov: bool, main: Path, tmp_path: Path) -> None:
    sidecar = open_sidecar(drafts.write_dflash(tmp_path, markov=markov, own=True, type=drafts.T.Q8_0))
    types = {name: drafts.T(kind).name for name, kind in narrow_types(sidecar, open_main(main)).items()}
    cut = {keys.OUTPUT, *(["markov_w2.weight"] if markov else [])}
    assert {name for name, kind in types.items() if kind == "Q4_0"} == cut
    assert types[keys.FC] == types[keys.TOKEN_EMBD] == "Q8_0" and types[keys.D2T] == "I64"


def test_what_cannot_be_cut(main: Path, tmp_path: Path) -> None:
    narrow = drafts.write_dflash(tmp_path, own=True, n_rows=100)
    with pytest.raises(LoadError, match="of kind dflash and has no output of all tokens"):
        load(main, narrow, draft_vocab=64)
    with load(main, narrow, ctx=64, threads=1, draft_vocab="auto") as model:
        assert model.n_draft_vocab is None and "nothing of this drafter" in model.draft_vocab_why
    whole = open_sidecar(write_form("dspark", tmp_path / "whole"))
    with pytest.raises(HeadsUnavailable, match="drafted whole"):
        heads.cut_drafter(whole, open_main(main))
    for rows in ([], [3, 3], [5, 4], [-1], [drafts.N_VOCAB]):
        with pytest.raises(BadRows):
            write_cut(whole, open_main(main), rows, tmp_path / "cut.gguf")
    with pytest.raises(NotCompact, match="was not cut here"):
        open_cut(whole.path)
    short = open_main(drafts.write_target(tmp_path / "main", "qwen3", Q4))
    short.header.tensors[keys.OUTPUT] = short.header.tensors["blk.0.attn_q.weight"]
    with pytest.raises(CannotCut, match="have not the 256 rows"):
        write_cut(whole, short, range(3), tmp_path / "cut.gguf")
    assert not (tmp_path / "cut.gguf").exists()


def test_a_tied_output_is_the_embeddings(tmp_path: Path) -> None:
    from checkpoints import make_checkpoint
    from draft_checkpoints import make_draft

    from llama_sidecar.converter import convert

    checkpoint = make_checkpoint(tmp_path, "qwen35", "tied")
    main = convert(checkpoint, tmp_path / "out", "Q8_0").main
    draft = make_draft(tmp_path, "dflash", "zlab", checkpoint)
    sidecar = convert(draft, tmp_path / "out", None, "Q8_0", target=checkpoint).sidecar
    assert main and sidecar and keys.OUTPUT not in read_header(main).tensors
    with load(main, sidecar, ctx=128, threads=1, depth=3, draft_vocab=128) as model:
        text, found, _ = native_run(model, PROMPT, 12, 3)
        assert (text, found) == reference.generate(model, PROMPT, 12, 3)
        rows = set(open_cut(model.head_weights.path).target_ids.tolist())
        assert {token for round_ in found for token in round_} <= rows
