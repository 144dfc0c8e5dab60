"""A session in a file: it goes on as if it had never been away, for drafters of every kind, and what is no such file is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafts
import models
import pytest
from checkpoints import make_checkpoint
from conftest import PairOf
from draft_checkpoints import make_draft, make_target
from gguf import GGMLQuantizationType as T
from native_rounds import drafts_after

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Model, Session, SessionError, SessionFileError, load, session_file

PROMPT = list(b"hello world, this is where it starts")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
KINDS = [
    "mtp, attention",
    "mtp, hybrid",
    "mtp, several heads",
    "eagle3, attention",
    "eagle3, hybrid",
    "dflash, attention",
    "dflash2, hybrid",
    "dspark, hybrid",
    "model, hybrid",
    "ngram, attention",
    "assistant, sliding window",
]


@pytest.fixture(scope="module", params=KINDS)
def files(
    request: pytest.FixtureRequest, pair_of: PairOf, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path | None]:
    """A main file and its sidecar, of every kind."""
    kind, target = request.param.split(", ")
    folder: Path = tmp_path_factory.mktemp("kind")
    if target == "several heads":
        result = convert(make_checkpoint(folder, "mimo2", "joined"), folder / "out", "Q8_0", "Q8_0")
        assert result.main
        return result.main, result.sidecar
    if kind == "mtp":
        pair = pair_of("T" if target == "attention" else "R", "Q8_0")
        return pair.main, pair.sidecar
    if kind == "assistant":
        checkpoint = make_target(folder, "gemma4_assistant")
        draft = make_draft(folder, "gemma4_assistant", "plain", checkpoint)
        whole = convert(checkpoint, folder / "out", "Q8_0").main
        assert whole
        return whole, convert(draft, folder / "out", None, "Q8_0", target=checkpoint).sidecar
    main = drafts.write_target(folder, "qwen35" if target == "hybrid" else "qwen3")
    if kind == "ngram":
        return main, None
    if kind == "model":
        return main, drafts.write_target(folder / "draft", "llama")
    if kind == "eagle3":
        fc = drafts.fitted_fc(main, PROMPT, (1, 2, 3), 2)
        return main, drafts.write_eagle3(folder, fc=fc, scale=0.2)
    text = drafts.greedy_text(main, PROMPT, 80)
    if kind == "dspark":
        return main, drafts.write_dflash(folder, markov=True, text=text, scale=0.2)
    return main, drafts.write_dflash(folder, selector=kind == "dflash2")


def opened(files: tuple[Path, Path | None], **options: Any) -> Model:
    if files[1] is None:
        options = {"spec_type": "ngram"} | options
    return load(*files, **{"ctx": 256, "threads": 1, "depth": 3, "draft_vocab": "full"} | options)


def written(session: Session, prompt: list[int], n: int, **options: Any) -> list[int]:
    text = session.generate(prompt, max_tokens=n, **{**GREEDY, **options})
    text.read()
    return text.tokens


# It goes on


@pytest.mark.parametrize("n", [1, 2, 20])
def test_a_restored_session_goes_on_as_the_saved_one_draft_for_draft(
    files: tuple[Path, Path | None], n: int, tmp_path: Path
) -> None:
    """Case 17: after a prompt alone (one token), and within a text; in another process's model."""
    path = tmp_path / "one.session"
    with opened(files) as model, model.session() as session:
        text = written(session, PROMPT, n)
        session.save(path)
        here = drafts_after(session, 6, 3)
        state = session._native.state()
    with opened(files) as model, model.session(restore=path) as session:
        assert session._history == [*PROMPT, *text]
        assert drafts_after(session, 6, 3) == here
        assert session._native.state() == state
    assert sum(len(drafted) for _, drafted in here) or files[1] is None  # nothing need come again


def test_saving_changes_nothing(files: tuple[Path, Path | None], tmp_path: Path) -> None:
    with opened(files) as model:
        texts = []
        for saves in (False, True):
            with model.session() as session:
                text = written(session, PROMPT, 20)
                if saves:
                    session.save(tmp_path / "one.session")
                texts.append((text, drafts_after(session, 6, 3), session._native.state()))
    assert texts[0] == texts[1]


def test_its_next_prompt_costs_only_what_is_new(files: tuple[Path, Path | None], tmp_path: Path) -> None:
    path = tmp_path / "one.session"
    with opened(files) as model:
        with model.session() as session:
            text = written(session, PROMPT, 20)
            longer = [*PROMPT, *text, *b" and on"]
            session.save(path)
            expected = written(session, longer, 20, temperature=0.9, seed=4)
        with model.session(restore=path) as session:
            again = session.generate(longer, max_tokens=20, temperature=0.9, seed=4, ignore_eos=True)
            again.read()
            assert again.tokens == expected
            assert again.stats.n_reused == len(PROMPT) + 19


@pytest.mark.parametrize(("saved_by", "restored_by"), [("none", "auto"), ("auto", "none"), ("none", "none")])
def test_plain_sessions_and_drafting_ones_read_each_others_files(
    files: tuple[Path, Path | None], saved_by: str, restored_by: str, tmp_path: Path
) -> None:
    """A drafter of which nothing was saved begins anew behind the text; what is written is the same."""
    path = tmp_path / "one.session"
    with opened(files) as model:
        with model.session(spec_type="none") as session:
            text = written(session, PROMPT, 40)
            state = session._native.state()
        with model.session(spec_type=saved_by) as session:
            assert written(session, PROMPT, 20) == text[:20]
            session.save(path)
        with model.session(spec_type=restored_by, restore=path) as session:
            assert written(session, [*PROMPT, *text[:20]], 20) == text[20:]
            assert session._native.state() == state


@pytest.mark.parametrize("saved_by", ["drafting", "plain"])
def test_models_loaded_with_a_drafter_and_without_read_each_others_files(
    files: tuple[Path, Path | None], saved_by: str, tmp_path: Path
) -> None:
    """A plain one leaves out what the drafter has seen, and has no rollback slots; a drafting one begins anew behind the text."""
    path = tmp_path / "one.session"

    def loaded(how: str) -> Model:
        return opened(files) if how == "drafting" else opened((files[0], None), spec_type="none")

    with loaded(saved_by) as model, model.session() as session:
        text = written(session, PROMPT, 20)
        session.save(path)
        rest = written(session, [*PROMPT, *text], 20)
        state = session._native.state()
    with loaded("plain" if saved_by == "drafting" else "drafting") as model:
        assert (model.kind is None) == (saved_by == "drafting")
        with model.session(restore=path) as session:
            again = session.generate([*PROMPT, *text], max_tokens=20, **GREEDY)
            again.read()
            assert again.tokens == rest and again.stats.n_reused == len(PROMPT) + 19
            assert session._native.state() == state


@pytest.mark.parametrize("spec_type", ["auto", "none"])
@pytest.mark.parametrize(("was", "other"), [("on", "off"), ("off", "on")])
def test_values_lie_in_the_cache_as_flash_attention_had_them(
    was: str, other: str, spec_type: str, pair_of: PairOf, tmp_path: Path
) -> None:
    """What is chosen by itself may be another in another load, since it follows the kernels; what was asked for is kept."""
    pair, path = pair_of("R", "Q8_0"), tmp_path / "one.session"
    files = (pair.main, pair.sidecar if spec_type == "auto" else None)
    for kernels in ("ours", "stock"):  # with which it is off, and on
        options: dict[str, Any] = {"kernels": kernels}
        with (
            opened((pair.main, pair.sidecar), flash_attn=was, **options) as model,
            model.session() as session,
        ):
            text = written(session, PROMPT, 20)
            session.save(path)
            rest = written(session, [*PROMPT, *text], 20)
        with opened(files, spec_type=spec_type, **options) as model:
            with model.session(restore=path) as session:
                assert written(session, [*PROMPT, *text], 10) == rest[:10]
                session.save(tmp_path / "later.session")
            with model.session(restore=tmp_path / "later.session") as session:
                assert written(session, [*PROMPT, *text, *rest[:10]], 10) == rest[10:]
    with opened(files, flash_attn=other, spec_type=spec_type) as model:
        why = refusal(model, path)
        assert f"flash attention {was}, this session's is {other} (--flash-attn {was})" in why


def test_another_head_and_another_depth_go_on_with_the_same_text(pair_of: PairOf, tmp_path: Path) -> None:
    one, other = pair_of("R", "Q8_0"), models.write_pair(tmp_path / "other", seed=5, type=T.Q8_0)
    head = shutil.copy(other.sidecar, tmp_path / "mtp-other.gguf")
    path = tmp_path / "one.session"
    with opened((one.main, one.sidecar)) as model, model.session() as session:
        text = written(session, PROMPT, 20)
        session.save(path)
        rest = written(session, [*PROMPT, *text], 20)
    with opened((one.main, Path(head)), force=True, depth=2) as model, model.session(restore=path) as session:
        assert written(session, [*PROMPT, *text], 20) == rest


def test_a_text_that_pace_decoded_plainly_is_saved_from_the_plain_context(
    pair_of: PairOf, tmp_path: Path
) -> None:
    pair, path = pair_of("R", "Q8_0"), tmp_path / "one.session"
    with opened((pair.main, pair.sidecar), depth="auto") as model:
        with model.session() as session:
            text = written(session, PROMPT, 20)
            session._make_plain_context(None)
            session._native.use_plain(True)
            assert session._native.is_plain
            session.save(path)
            state = session._native.state()
        with model.session(restore=path) as session:
            assert session._native.state() == state and not session._native.is_plain
            expected = written(session, [*PROMPT, *text], 20)
        with model.session(spec_type="none") as plain:
            assert written(plain, PROMPT, 40) == text + expected


def test_a_compact_head_gets_rows_for_what_the_text_has(pair_of: PairOf, tmp_path: Path) -> None:
    pair, path = pair_of("R", "Q8_0"), tmp_path / "one.session"
    with opened((pair.main, pair.sidecar), draft_vocab=128) as model, model.session() as session:
        text = written(session, PROMPT, 12)
        session.save(path)
        rest = written(session, [*PROMPT, *text], 12)
    with opened((pair.main, pair.sidecar), draft_vocab=128) as model, model.session(restore=path) as session:
        assert model.draft_vocab is not None
        assert set(text) <= set(model.draft_vocab.ids), "as far as there are spare rows"
        assert written(session, [*PROMPT, *text], 12) == rest


def test_exact_sessions_are_saved_too(pair_of: PairOf, tmp_path: Path) -> None:
    pair, path = pair_of("R", "BF16"), tmp_path / "one.session"
    with opened((pair.main, pair.sidecar), exact=True, kernels="stock", threads=2) as model:
        with model.session() as session:
            text = written(session, PROMPT, 20)
            session.save(path)
        with model.session(spec_type="none", restore=path) as session:
            rest = written(session, [*PROMPT, *text], 20)
            state = session._native.state()
        with model.session(restore=path) as session:
            assert written(session, [*PROMPT, *text], 20) == rest
            assert session._native.state() == state


def test_what_was_not_exact_is_refused_where_exact_is_promised(pair_of: PairOf, tmp_path: Path) -> None:
    pair, path = pair_of("R", "BF16"), tmp_path / "one.session"
    with opened((pair.main, pair.sidecar), kernels="stock") as model, model.session() as session:
        text = written(session, PROMPT, 4)
        session.save(path)
    with opened((pair.main, pair.sidecar), exact=True, kernels="stock") as model:
        assert "not decoded with exact" in refusal(model, path)
        with model.session() as session:
            text = written(session, PROMPT, 4)
            session.save(path)
        with model.session(restore=path) as session:
            assert written(session, [*PROMPT, *text], 4)
    with opened((pair.main, pair.sidecar), exact=True, kernels="stock", threads=2) as model:
        assert "with these settings" in refusal(model, path)
    with opened((pair.main, pair.sidecar), kernels="stock") as model, model.session(restore=path) as session:
        assert written(session, [*PROMPT, *text], 4)


# What is refused


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    pair = pair_of("R", "Q8_0")
    with opened((pair.main, pair.sidecar)) as loaded:
        yield loaded


@pytest.fixture
def saved(model: Model, tmp_path: Path) -> Path:
    with model.session() as session:
        written(session, PROMPT, 8)
        session.save(tmp_path / "one.session")
    return tmp_path / "one.session"


def refusal(model: Model, path: Path, **options: Any) -> str:
    """The one line that says why; nothing is left behind."""
    before = len(model._sessions)
    with pytest.raises(SessionFileError) as info:
        model.session(restore=path, **options)
    assert len([s for s in model._sessions if not s.closed]) <= before
    text = str(info.value)
    assert text.startswith(str(path)) and "\n" not in text
    return text


def test_a_file_cut_anywhere_is_refused(model: Model, saved: Path) -> None:
    whole = saved.read_bytes()
    cuts = [0, 1, 21, 22, 30, 34, 66, 100, len(whole) // 2, len(whole) - 32, len(whole) - 1]
    for n in cuts:
        saved.write_bytes(whole[:n])
        why = refusal(model, saved)
        assert "cut short" in why or (n < 22 and "no saved session" in why), (n, why)
    saved.write_bytes(whole + b"x")
    assert "added to" in refusal(model, saved)


def test_a_changed_byte_anywhere_is_refused(model: Model, saved: Path) -> None:
    whole = saved.read_bytes()
    for at in [0, 23, 40, len(whole) // 3, len(whole) // 2, len(whole) - 33, len(whole) - 1]:
        data = bytearray(whole)
        data[at] ^= 1
        saved.write_bytes(data)
        refusal(model, saved)
    data = bytearray(whole)
    data[len(whole) // 2] ^= 64
    saved.write_bytes(data)
    assert "checksum" in refusal(model, saved)


def test_what_is_no_file_or_a_foreign_one_is_refused(model: Model, tmp_path: Path) -> None:
    assert "No such file" in refusal(model, tmp_path / "none")
    assert "directory" in refusal(model, tmp_path)
    for content in (b"", b"GGUF" * 100, b"ggsn" + bytes(5000)):
        path = tmp_path / "foreign"
        path.write_bytes(content)
        assert "no saved session" in refusal(model, path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a file that is no regular one")
def test_folders_and_devices_are_neither_read_nor_replaced(
    model: Model, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = tmp_path / "pipe"  # as a device: reading it might never end
    os.mkfifo(pipe)
    with model.session(restore=saved) as session:
        for place in (pipe, tmp_path, Path(".")):
            with pytest.raises(SessionFileError, match="a folder or a device"):
                session.save(place)
            with pytest.raises(SessionFileError, match="but a device" if place == pipe else "Is a directory"):
                model.session(restore=place)
    assert pipe.is_fifo() and set(tmp_path.iterdir()) == {pipe, saved}


def test_another_model_or_type_is_refused(model: Model, saved: Path, pair_of: PairOf) -> None:
    for pair in (pair_of("R", "Q8_0", seed=1), pair_of("R", "Q4_0"), pair_of("T", "Q8_0")):
        with opened((pair.main, pair.sidecar)) as other:
            assert "another model" in refusal(other, saved)


def test_another_context_cache_or_library_is_refused(
    model: Model, saved: Path, pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its context has 256 tokens, this session's 128" in refusal(model, saved, ctx=128)
    pair = pair_of("R", "Q8_0")
    with opened((pair.main, pair.sidecar), cache_type_k="f32") as other:
        assert "its KV cache is f16/f16, this session's f32/f16" in refusal(other, saved)
    monkeypatch.setattr("llama_sidecar.runtime.provenance.library", lambda: {"commit": "0ther"})
    assert "this is 0ther" in refusal(model, saved)


Edit = Callable[[dict[str, Any]], None]


def rewritten(
    path: Path, edit: Edit, *, version: int = session_file.VERSION, target: bytes | None = None
) -> Path:
    """The file with another head, its checksum right: as somebody would make it on purpose."""
    data = path.read_bytes()
    _, _, n_head = session_file._FIXED.unpack_from(data)
    start = session_file._FIXED.size
    head, states = json.loads(data[start : start + n_head]), data[start + n_head : -32]
    if target is not None:
        states = target + states[head["bytes"][0] :]
        head["bytes"][0] = len(target)
    edit(head)
    text = json.dumps(head).encode()
    data = session_file._FIXED.pack(session_file.MAGIC, version, len(text)) + text + states
    path.write_bytes(data + hashlib.sha256(data).digest())
    return path


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda head: head.update(bytes=[-1, head["bytes"][0] + head["bytes"][1] + 1]), "cut short or added"),
        (lambda head: head.update(bytes=[1 << 70, 0]), "cut short or added"),
        (lambda head: head.update(bytes="many"), "its head"),
        (lambda head: head.update(tokens=[]), "0 tokens"),
        (lambda head: head.update(tokens=[1] * 5000), "5000 tokens"),
        (lambda head: head.update(tokens=[*head["tokens"], 1]), "positions"),
        (lambda head: head["tokens"].__setitem__(0, 70_000), "token id 70000"),
        (lambda head: head["tokens"].__setitem__(0, "x"), "its head"),
        (lambda head: head["tokens"].__setitem__(0, float("inf")), "its head"),
        (lambda head: head.pop("origin"), "its head"),
        (lambda head: head["origin"].pop("n_ctx"), "its head"),
        (lambda head: head["origin"].update(cache_types=5), "its head"),
        (lambda head: head["origin"].update(flash_attn="maybe"), "its head"),
        (lambda head: head["origin"].update(cache_types=[5, None]), "KV cache is 5/None"),
    ],
)
def test_heads_that_lie_are_refused(edit: Edit, said: str, model: Model, saved: Path) -> None:
    assert said in refusal(model, rewritten(saved, edit))


def test_another_version_and_states_that_are_none_are_refused(model: Model, saved: Path) -> None:
    whole = saved.read_bytes()
    newer = session_file.VERSION + 1
    assert f"format version {newer}" in refusal(model, rewritten(saved, lambda head: None, version=newer))
    head = b"[" * 100_000
    saved.write_bytes(
        session_file._FIXED.pack(session_file.MAGIC, session_file.VERSION, len(head)) + head + bytes(32)
    )
    assert "no JSON" in refusal(model, saved)
    for target in (b"", b"garbage" * 50, bytes(4000)):
        saved.write_bytes(whole)
        refusal(model, rewritten(saved, lambda head: None, target=target))
    saved.write_bytes(whole)

    def swap(head: dict[str, Any]) -> None:
        head["bytes"] = [head["bytes"][0] - 5, head["bytes"][1] + 5]

    refusal(model, rewritten(saved, swap))
    with model.session() as session:
        assert written(session, PROMPT, 4), "the model is as it was"


def test_a_drafters_state_of_another_shape_is_refused(model: Model, saved: Path) -> None:
    here = session_file.Origin.of(model, 256, "mtp")
    found = session_file.read(saved, here)
    for drafter in (found.drafter[:-1], found.drafter + b"x", found.drafter[: len(found.drafter) // 2], b"x"):
        session_file.write(saved, dataclasses.replace(found, drafter=drafter))
        refusal(model, saved)


def test_what_holds_nothing_cannot_be_saved(model: Model, tmp_path: Path) -> None:
    with model.session() as session:
        with pytest.raises(SessionError, match="nothing to save"):
            session.save(tmp_path / "none")
        session.time_rows(PROMPT, 1, 2)
        with pytest.raises(SessionError, match="nothing to save"):
            session.save(tmp_path / "none")
    with pytest.raises(SessionError, match="closed"):
        session.save(tmp_path / "none")
    assert not any(tmp_path.iterdir())


def test_saving_ends_a_text_that_is_being_written(model: Model, tmp_path: Path) -> None:
    with model.session() as session:
        text = session.generate(PROMPT, max_tokens=60, **GREEDY)
        for _ in range(3):
            next(text)
        session.save(tmp_path / "one.session")
        assert text.finish_reason == "cancelled"
    with model.session(restore=tmp_path / "one.session") as session, model.session(spec_type="none") as plain:
        n = len(text.tokens)
        assert written(session, [*PROMPT, *text.tokens], 20) == written(plain, PROMPT, n + 20)[n:]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    model: Model, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with model.session() as session:
        written(session, PROMPT, 4)
        for name in ("fsync", "replace"):
            with monkeypatch.context() as patch, pytest.raises(SessionFileError, match="No space left"):
                patch.setattr(os, name, full)
                session.save(saved)
            assert saved.read_bytes() == whole and [*saved.parent.iterdir()] == [saved]
        with pytest.raises(SessionFileError, match="cannot be written"):
            session.save(saved.parent / "no folder" / "x")
        session.save(saved)
    assert saved.read_bytes() != whole
