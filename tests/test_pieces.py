"""Where each token of a text came from, and that the tokens' texts are the text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import PairOf

from llama_sidecar.runtime import Model, Piece, Scripted, load

PROMPT = list(b"def f(x):\n")
N = 24


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of("R").main, ctx=256, depth=3) as model:
        yield model


def pieces(model: Model, n_right: int, n: int = N, **options: object) -> list[Piece]:
    """Those of a text of which a scripted drafter knows `n_right` tokens of each draft of 3."""
    with model.session(spec_type="none") as session:
        text = session.generate(PROMPT, max_tokens=n + 8, ignore_eos=True, temperature=0)
        text.read()
    script = Scripted([*PROMPT, *text.tokens], n_right)
    with model.session(scripted=script, depth=3) as session:
        generation = session.generate(
            PROMPT,
            max_tokens=n,
            ignore_eos=True,
            temperature=0,
            **options,  # type: ignore[arg-type]
        )
        found = list(generation.pieces())
        assert "".join(piece.text for piece in found) == generation.text
        assert [piece.token for piece in found] == generation.tokens
        return found


def test_without_a_drafter_all_is_plain(model: Model) -> None:
    with model.session(spec_type="none") as session:
        found = list(session.generate(PROMPT, max_tokens=N, ignore_eos=True, temperature=0).pieces())
    assert [piece.origin for piece in found] == ["plain"] * N


@pytest.mark.parametrize(
    "n_right, round_",
    [
        (3, ["drafted", "drafted", "drafted", "plain"]),
        (2, ["drafted", "drafted", "corrected"]),
        (1, ["drafted", "corrected"]),
        (0, ["corrected"]),
    ],
)
def test_a_round_is_what_stood_and_then_the_targets_own(
    model: Model, n_right: int, round_: list[str]
) -> None:
    origins = [piece.origin for piece in pieces(model, n_right)]
    assert origins[0] == "plain"  # the prompt's
    whole = (N - 1 - 3) // len(round_)  # the last rounds may draft less: the text ends
    assert origins[1 : 1 + whole * len(round_)] == round_ * whole


def test_what_the_look_up_found_has_a_name_of_its_own(model: Model, pair_of: PairOf) -> None:
    with load(pair_of("R").main, ctx=512, spec_type="ngram") as plain, plain.session() as session:
        found = session.generate(list(b"one two three. ") * 12, max_tokens=64, temperature=0, ignore_eos=True)
        origins = [piece.origin for piece in found.pieces()]
    assert origins.count("ngram") == found.stats.n_ngram_accepted
    assert "drafted" not in origins


def test_what_a_stop_string_cuts_has_no_text(model: Model) -> None:
    everything = "".join(piece.text for piece in pieces(model, 3))
    stop = everything[5:8]
    found = pieces(model, 3, stop=stop)
    assert stop not in "".join(piece.text for piece in found) and found[-1].text == ""


def test_characters_belong_to_the_token_that_completes_them(model: Model) -> None:
    """The random model writes bytes, most of which are no whole character."""
    for piece in pieces(model, 2, 200):
        assert len(piece.text) <= 2  # a broken character's replacement, and its own


def test_nothing_is_held_longer_than_its_text(model: Model) -> None:
    with model.session(depth=3) as session:
        generation = session.generate(PROMPT, max_tokens=N, ignore_eos=True, temperature=0)
        shown = ""
        for piece in generation.pieces():
            shown += piece.text
            assert generation.text.startswith(shown)
        assert shown == generation.text
