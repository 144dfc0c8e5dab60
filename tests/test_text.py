"""Text in and out: never half a character, never a part of a stop string, templates that fail are the prompt's fault."""

from __future__ import annotations

import codecs
import random
from pathlib import Path

import pytest
from conftest import PairOf

from llama_sidecar.runtime import load
from llama_sidecar.runtime._native import TextStream


def shown(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(stop)
    texts = []
    for piece in pieces:
        texts.append(stream.push(piece))
        if stream.stopped:
            break
    texts.append(stream.finish())
    return [t for t in texts if t], stream.stopped


@pytest.mark.parametrize("text", ["héllo wörld", "日本語のテキスト", "a😀b👩‍👩‍👧c", "\n\t\x00"])
def test_bytes_one_by_one_give_whole_characters(text: str) -> None:
    texts, _ = shown([bytes([b]) for b in text.encode()], [])
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


def test_broken_utf8_is_replaced_and_not_held_for_ever() -> None:
    assert shown([b"a\xff", b"b\xe6\x97"], [])[0] == ["a\ufffd", "b", "\ufffd"]


WHOLE = [chr(c).encode() for c in (*range(0x80, 0xD800, 0x40), *range(0xE000, 0x110000, 0x40))]
BEGUN = {character[:n] for character in WHOLE for n in range(1, len(character))}


def n_begun(data: bytes) -> int:
    """Length of the character that the end of `data` has cut, by the definition."""
    return next((n for n in (3, 2, 1) if len(data) >= n and data[-n:] in BEGUN), 0)


def test_any_bytes_in_any_pieces_are_shown_as_python_replaces_them_and_as_soon_as_they_can_be() -> None:
    rng = random.Random(0)
    some = [
        *"aé日😀\n".encode(),
        0xC0,
        0xC1,
        0xC2,
        0xDF,
        0xE0,
        0xED,
        0xF0,
        0xF4,
        0xF5,
        0xFF,
        0x80,
        0x8F,
        0x90,
        0x9F,
        0xA0,
    ]
    for _ in range(300):
        data, start, shown_text = bytes(rng.choices(some, k=rng.randrange(24))), 0, ""
        stream = TextStream()
        while start < len(data):
            end = start + rng.randrange(1, 4)
            shown_text += stream.push(data[start:end])
            start = min(end, len(data))
            assert shown_text == data[: start - n_begun(data[:start])].decode("utf-8", "replace")
        assert shown_text + stream.finish(cut=False) == data.decode("utf-8", "replace")


def test_a_text_that_is_cut_ends_before_the_character_that_the_end_cuts() -> None:
    stream = TextStream(["STOP"])
    assert stream.push("a日ST".encode()) == "a日"
    assert stream.push("本".encode()[:2]) + stream.finish(cut=True) == "ST"
    stream = TextStream(["STOP"])
    assert stream.push(b"a ST") + stream.finish(cut=True) == "a ST"


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        ([b"one EN", b"D two"], ["END"], "one ", True),
        ([b"one EN", b"X two"], ["END"], "one ENX two", False),
        ([b"aab"], ["aab", "ab"], "", True),
        ([b"a", b"a", b"b"], ["ab"], "a", True),
        ([b"xx\n", b"\nyy"], ["\n\n"], "xx", True),
        ([b"\xe6\x97", b"\xa5\xe6\x9c\xac"], ["日本"], "", True),
        ([b"abc"], ["", "zz"], "abc", False),
    ],
)
def test_stop_strings(pieces: list[bytes], stop: list[str], text: str, stopped: bool) -> None:
    texts, did_stop = shown(pieces, stop)
    assert ("".join(texts), did_stop) == (text, stopped)


def test_a_stop_string_ends_a_generation_and_is_not_in_its_text(pair_of: PairOf) -> None:
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        whole = model.generate("hello", max_tokens=40, temperature=0, ignore_eos=True)
        whole.read()
        stop = model.vocab.text_of(whole.tokens[20:22])
        for depth in (0, 3):
            with model.session(depth=depth) as session:
                stopped = session.generate("hello", max_tokens=40, temperature=0, ignore_eos=True, stop=stop)
                pieces = list(stopped)
            assert stopped.finish_reason == "stop"
            assert stop not in stopped.text
            assert "".join(pieces) == stopped.text
            assert whole.text.startswith(stopped.text)


def test_the_end_of_text_token_ends_a_generation(pair_of: PairOf) -> None:
    """The tiny models' end of text is token 0: the text stops there, also inside an accepted block."""
    with load(pair_of("T", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        prompt = list(b"hello world, this is a test")
        free = model.generate(prompt, max_tokens=100, temperature=1.0, seed=5, ignore_eos=True)
        free.read()
        assert 0 in free.tokens, "choose another seed"
        for depth in (0, 3):
            with model.session(depth=depth) as session:
                ended = session.generate(prompt, max_tokens=100, temperature=1.0, seed=5)
                ended.read()
                assert ended.finish_reason == "stop"
                assert ended.tokens == free.tokens[: free.tokens.index(0)]
                assert session._history is not None and session._history[-1] == 0


def test_special_tokens_in_a_prompt_and_round_trip(pair_of: PairOf) -> None:
    with load(pair_of("R").main, ctx=256, threads=1, depth=3) as model:
        for text in ("plain", "zwölf Boxkämpfer", " leading and trailing ", "日本"):
            assert model.vocab.text_of(model.vocab.tokenize(text)) == text


def test_the_paths_of_files_may_hold_any_character(tmp_path: Path, pair_of: PairOf) -> None:
    pair = pair_of("R")
    folder = tmp_path / "mödels with space"
    folder.mkdir()
    (folder / "main.gguf").write_bytes(pair.main.read_bytes())
    (folder / "mtp-main.gguf").write_bytes(pair.sidecar.read_bytes())
    with load(folder / "main.gguf", ctx=256, threads=1, depth=3) as model:
        assert model.kind == "mtp"


def test_max_tokens_inside_a_character_leaves_no_replacement_character(pair_of: PairOf) -> None:
    """The tiny vocabulary is bytes: most random text is broken UTF-8, and its last character is often cut."""
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1) as model:
        n_cut = 0
        for n in range(1, 40):
            whole = model.generate("hello", max_tokens=n, temperature=0, ignore_eos=True)
            whole.read()
            ids = bytes(model.vocab.piece(token)[0] for token in whole.tokens)
            shown = codecs.getincrementaldecoder("utf-8")("replace").decode(ids)
            assert whole.text == shown
            n_cut += whole.text != ids.decode("utf-8", "replace")
    assert n_cut, "choose another prompt"
