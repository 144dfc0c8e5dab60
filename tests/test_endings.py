"""However a text ends, the session goes on as one that has decoded the same tokens one by one: state bytes, and what follows.

Stop strings and end-of-text tokens inside accepted blocks, max_tokens inside a block, characters cut in two, texts that were left,
and the end of the context; for attention and for hybrid targets, with rollback slots and with checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import PairOf
from native_rounds import drafts_after

from llama_sidecar.runtime import Generation, Model, Scripted, Session, load

PROMPT = list(b"hello world, this is where it starts")
MORE = list(b" and on")
DEPTH = 4
N = 40


@pytest.fixture(scope="module", params=["T", "R"])
def model(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Model]:
    """At Q8_0, whose rows llama.cpp computes alike at any number in these lengths."""
    with load(pair_of(request.param, "Q8_0").main, ctx=256, threads=1, depth=DEPTH) as loaded:
        yield loaded


def write(session: Session, prompt: list[int] = PROMPT, **options: Any) -> Generation:
    text = session.generate(prompt, **{"max_tokens": N, "temperature": 0, "ignore_eos": True, **options})
    text.read()
    return text


def plain_text(model: Model, **options: Any) -> list[int]:
    with model.session(spec_type="none") as session:
        return write(session, **options).tokens


def drafting(model: Model, script: list[int]) -> Iterator[tuple[str, Session]]:
    """Sessions whose drafts all stand, with slots and with checkpoints; whose drafts stand in part; and the model's own."""
    ways: dict[str, dict[str, Any]] = {
        "all stand": {"scripted": Scripted(script, DEPTH)},
        "all stand, checkpoints": {"scripted": Scripted(script, DEPTH), "n_slots": 0},
        "two stand": {"scripted": Scripted(script, 2)},
        "two stand, one slot": {"scripted": Scripted(script, 2), "n_slots": 1},
        "own": {},
    }
    for name, options in ways.items():
        with model.session(depth=DEPTH, **options) as session:
            yield name, session


def goes_on(model: Model, session: Session, held: list[int]) -> None:
    """`held` is the prompt and all that was chosen, the last of it not decoded: state and next text are those of a cold run."""
    with model.session(spec_type="none") as cold:
        native = cold._native
        with model.turns:
            native.feed(PROMPT, True)
            for token in held[len(PROMPT) : -1]:
                native.feed([token], True)
        assert session._history == held
        assert session._native.state() == native.state()
        cold._history = held
        following = [*held, *MORE]
        if len(following) < model.n_ctx:
            ours, theirs = write(session, following, max_tokens=12), write(cold, following, max_tokens=12)
            assert ours.tokens == theirs.tokens
            assert ours.stats.n_reused == theirs.stats.n_reused == len(held) - 1
            assert session._native.state() == native.state()


# Each ending


@pytest.mark.parametrize("n", range(1, 13))
def test_max_tokens_inside_a_block(model: Model, n: int) -> None:
    tokens = plain_text(model)
    for name, session in drafting(model, PROMPT + tokens):
        text = write(session, max_tokens=n)
        assert (text.tokens, text.finish_reason, text.stats.n_tokens) == (tokens[:n], "length", n), name
        goes_on(model, session, PROMPT + tokens[:n])


def ascii_text(model: Model) -> tuple[dict[str, Any], list[int]]:
    """Options under which the text is readable, and it: stop strings must be text, and random bytes are none."""
    options: dict[str, Any] = {"grammar": 'root ::= "a" [a-z ]*'}
    return options, plain_text(model, **options)


@pytest.mark.parametrize(("at", "n"), [(at, n) for at in range(1, 11) for n in (1, 3)])
def test_a_stop_string_inside_a_block(model: Model, at: int, n: int) -> None:
    """At every place of a block, within it and across its end."""
    options, tokens = ascii_text(model)
    whole = bytes(tokens).decode()
    stop = whole[at : at + n]
    end = whole.index(stop) + n
    for name, session in drafting(model, PROMPT + tokens):
        text = write(session, stop=stop, **options)
        assert (text.text, text.finish_reason) == (whole[: end - n], "stop"), name
        assert text.tokens == tokens[:end] and text.stats.n_tokens == end, name
        goes_on(model, session, PROMPT + tokens[:end])


@pytest.mark.parametrize("at", range(1, 9))
def test_the_end_of_text_token_inside_a_block(model: Model, at: int) -> None:
    """The grammar ends the text, so that its end is chosen at each place of a block; the scripts know it."""
    options: dict[str, Any] = {"grammar": f'root ::= "{"ab" * 8}"'.replace("ab" * 8, ("ab" * 8)[:at])}
    with model.session(spec_type="none") as plain:
        expected = write(plain, ignore_eos=False, **options)
        chosen = [*expected.tokens, 0]  # the tiny models' end of text
        assert (expected.finish_reason, expected.text) == ("stop", ("ab" * 8)[:at])
    for name, session in drafting(model, [*PROMPT, *chosen, 1, 2, 3, 4]):
        text = write(session, ignore_eos=False, **options)
        assert (text.tokens, text.finish_reason) == (expected.tokens, "stop"), name
        goes_on(model, session, [*PROMPT, *chosen])


@pytest.mark.parametrize("n", range(1, 14))
def test_characters_cut_in_two(model: Model, n: int) -> None:
    """A token is a byte: max_tokens cuts characters of three and four bytes everywhere, and blocks do so all the time."""
    whole = "é日本😀 x"
    options: dict[str, Any] = {"grammar": f'root ::= "{whole}" [a-z]*', "max_tokens": n}
    data = list(whole.encode())
    for name, session in drafting(model, [*PROMPT, *data, *b"abcdefgh"]):
        pieces = session.generate(PROMPT, temperature=0, ignore_eos=True, **options)
        shown = list(pieces)
        assert pieces.tokens[: len(data)] == data[:n], name
        assert "".join(shown) == pieces.text == bytes(pieces.tokens).decode("utf-8", "ignore"), name
        assert all("\ufffd" not in piece for piece in shown), name
        goes_on(model, session, PROMPT + pieces.tokens)


def test_a_stop_string_of_characters_of_several_tokens(model: Model) -> None:
    whole = "é日本😀 x"
    options: dict[str, Any] = {"grammar": f'root ::= "{whole}" [a-z]*'}
    data = list(whole.encode())
    for stop in ("é", "日", "日本", "本😀", "😀 "):
        n = len(whole[: whole.index(stop)].encode()) + len(stop.encode())
        for name, session in drafting(model, [*PROMPT, *data, *b"abcdefgh"]):
            text = write(session, stop=stop, **options)
            assert (text.text, text.finish_reason) == (whole[: whole.index(stop)], "stop"), (stop, name)
            assert text.tokens == data[:n]
            goes_on(model, session, PROMPT + data[:n])


@pytest.mark.parametrize("n_pieces", [1, 2, 5])
def test_a_text_that_was_left(model: Model, n_pieces: int) -> None:
    """Whether it is left, closed or cancelled: what was emitted stands, shown or not."""
    options, tokens = ascii_text(model)
    for end in ("left", "closed", "cancelled"):
        for name, session in drafting(model, PROMPT + tokens):
            text = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True, **options)
            for _ in range(n_pieces):
                next(text)
            if end == "closed":
                text.close()
            elif end == "cancelled":
                session.cancel()
                text.read()
            else:
                session._end_current()
            n = len(text.tokens)
            assert text.tokens == tokens[:n] and n >= n_pieces and text.finish_reason == "cancelled", name
            goes_on(model, session, PROMPT + tokens[:n])


@pytest.mark.parametrize("n_room", range(6))
def test_the_end_of_the_context(model: Model, n_room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n = len(PROMPT) + n_room
    with model.session(spec_type="none", ctx=n) as plain:
        tokens = write(plain).tokens
        state = plain._native.state()
    assert len(tokens) == n_room + 1
    for n_right in range(DEPTH + 1):
        scripted = Scripted([*PROMPT, *tokens, 1, 2, 3, 4], n_right)
        with model.session(depth=DEPTH, ctx=n, scripted=scripted) as session:
            text = write(session)
            assert (text.tokens, text.finish_reason) == (tokens, "length")
            assert session._history == [*PROMPT, *tokens] and session._native.state() == state
            shorter = write(session, PROMPT[:-8], max_tokens=4)
            assert len(shorter.tokens) == 4, "it begins anew"


def test_drafts_after_an_ending_are_those_of_a_cold_run(model: Model) -> None:
    """The drafter, too, has forgotten what did not stand."""
    options, tokens = ascii_text(model)
    for end in range(2, 9):
        held = PROMPT + tokens[:end]
        with model.session(depth=DEPTH) as session, model.session(depth=DEPTH) as cold:
            write(session, max_tokens=end, **options)
            write(session, [*held, *MORE], max_tokens=1)
            write(cold, [*held, *MORE], max_tokens=1)
            assert drafts_after(session, 4, DEPTH) == drafts_after(cold, 4, DEPTH)
