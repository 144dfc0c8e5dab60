"""Turns are cheap: a prompt costs what it does not share with the one before, and all is as if it had been the first.

For drafters of every kind, on attention-only and on hybrid targets: ids, target state and further drafts are those of a session
that has seen no other prompt, however the two prompts differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafts
import models
import pytest
from kind_models import KINDS, open_kind, write_kind, write_near
from native_rounds import drafts_after
from test_states import TARGETS, write_mamba

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Generation, LoadError, Model, Session, load
from llama_sidecar.runtime.checkpoints import LEAST_KEPT, OPENING, checkpoint_places
from llama_sidecar.sidecars.memory import DEFAULT_CHECKPOINTS, Context, layer_caches

from checkpoints import make_checkpoint  # isort: skip  (the tests' own, of Hugging Face's)

END = 0  # the tiny models' end of text, and of a turn
SYSTEM = [*b"You are a tiny model and answer with whatever comes to your mind, in bytes.", END]
ASKED = [*b"What follows after this question, which is long enough to be worth it?", END]
OPENS = list(b"<a><think>")
N = 12  # with all prompts here below 256 cells, from where on one row is not computed as several are
HYBRIDS = (
    "eagle3, hybrid",
    "dspark, hybrid",
    "model, hybrid",
    "hybrid model, hybrid",
    "hybrid model, attention",
)


def write_any(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Those of kind_models.py, and of some the hybrid sister."""
    if kind in KINDS:
        return write_kind(kind, folder)
    drafter, target = kind.split(", ")
    if "model" in drafter:
        main = models.write_pair(folder, recurrent=target == "hybrid", type=drafts.T.Q8_0).main
        return main, {"sidecar": write_near(folder / "draft", recurrent="hybrid" in drafter)}
    main = drafts.write_target(folder, "qwen35")
    if drafter == "eagle3":
        drafts.write_eagle3(folder, fc=drafts.fitted_fc(main, SYSTEM, (1, 2, 3), 2), scale=0.2)
    else:
        drafts.write_dflash(folder, markov=True, text=drafts.greedy_text(main, SYSTEM, 80), scale=0.2)
    return main, {}


@pytest.fixture(scope="module", params=[*KINDS, *HYBRIDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """In pieces of 32 tokens: from 64 rows on llama.cpp's attention rounds otherwise than for fewer."""
    main, options = write_any(request.param, tmp_path_factory.mktemp("kind"))
    with open_kind(main, options, ctx=512, batch=32) as opened:
        yield opened


def write(session: Session, prompt: list[int], n: int = N, **options: Any) -> Generation:
    text = session.generate(prompt, max_tokens=n, **{"temperature": 0, "ignore_eos": True, **options})
    text.read()
    return text


def is_cold(model: Model, session: Session, prompt: list[int], text: Generation, depth: int = 3) -> None:
    """Text, state and the next drafts are those of a session that has seen nothing before this prompt."""
    with model.session() as cold:
        alone = write(cold, prompt, len(text.tokens))
        assert alone.stats.n_reused == 0
        assert text.tokens == alone.tokens
        assert is_compact(model) or text.stats.n_accepted == alone.stats.n_accepted
        assert session._native.state() == cold._native.state()
        after = drafts_after(session, 6, depth), drafts_after(cold, 6, depth)
        assert is_compact(model) or after[0] == after[1]
        assert session._native.state() == cold._native.state()
    session._history = None  # those rounds are in no text


def is_compact(model: Model) -> bool:
    """Whether a text changes the rows of those that follow, and so their drafts."""
    return model.draft_vocab is not None


def kept_of(model: Model, held: list[int], prompt: list[int], checkpoints: list[int]) -> int:
    """How much a session must keep: all, up to before the last token that is the same, or up to a checkpoint."""
    n_same = next(
        (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
    )
    if n_same >= len(held) - 1 and len(prompt) >= len(held):
        return len(held) - 1
    if n_same <= LEAST_KEPT:
        return 0
    with model.session(spec_type="none") as plain:
        if not plain._native.recurrent:
            return n_same - 1
    return max([0, *(c for c in checkpoints if c < n_same)])


# How the next prompt differs


def following(first: list[int], answer: list[int]) -> dict[str, list[int]]:
    """Prompts after one and its answer."""
    return {
        "goes on": [*first, *answer, *ASKED, *OPENS],
        "the answer without its last token": [*first, *answer[:-1]],
        "goes on otherwise than the last token": [*first, *answer[:-1], answer[-1] ^ 1, *ASKED],
        "the answer cut short": [*first, *answer[:7], *ASKED, *OPENS],
        "the answer without its reasoning": [*first[:-7], *answer[6:], END, *ASKED, *OPENS],
        "again": list(first),
        "another question": [
            *SYSTEM,
            *b"Something else entirely, then: what would you have said to this?",
            END,
            *OPENS,
        ],
        "the system prompt cut short": [*SYSTEM[:40], *ASKED],
        "a part of it": first[: len(SYSTEM) + 3],
        "one token of it": first[:1],
        "nothing in common": [*b"Nothing of this was ever said."],
    }


@pytest.mark.parametrize("way", following([1] * 200, [1] * N))
def test_a_turn_is_as_if_it_were_the_first(model: Model, way: str) -> None:
    first = [*SYSTEM, *ASKED, *OPENS]
    with model.session() as session:
        answer = write(session, first).tokens
        checkpoints = [pos for pos, _ in session.checkpoints]
        prompt = following(first, answer)[way]
        kept = kept_of(model, [*first, *answer], prompt, checkpoints)
        text = write(session, prompt)
        assert text.stats.n_reused == kept and text.stats.n_prompt_decoded == len(prompt) - kept
        is_cold(model, session, prompt, text)


def test_turn_upon_turn_with_and_without_drafts(model: Model) -> None:
    """Ten turns whose answers lose their beginning, as a template drops reasoning; some are not drafted for, and pace's plain context
    is entered and left."""
    talk = [*SYSTEM, *ASKED]
    with model.session() as session:
        decoded = []
        for turn in range(10):
            prompt = [*talk, *OPENS]
            text = write(session, prompt, 9 + turn % 3, depth=0 if turn % 3 == 1 else None)
            decoded.append(text.stats.n_prompt_decoded)
            talk += [*OPENS[:3], *text.tokens[4:], END, *b"And what comes then?!", END]
        news = 3 + len(text.tokens) - 4 + 1 + 22 + len(OPENS)
        assert all(n <= news + 2 * OPENING for n in decoded[1:]), decoded
        is_cold(model, session, prompt, text)


def test_a_second_session_in_between_changes_nothing(model: Model) -> None:
    first = [*SYSTEM, *ASKED, *OPENS]
    with model.session() as session, model.session() as other:
        answer = write(session, first).tokens
        write(other, SYSTEM)
        prompt = [*first[:-7], *answer[6:], END, *ASKED, *OPENS]
        is_cold(model, session, prompt, write(session, prompt))


# Checkpoints


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    main = models.write_pair(tmp_path_factory.mktemp("R"), recurrent=True, type=drafts.T.Q8_0).main
    with load(main, ctx=1024, threads=1, depth=3, draft_vocab="full", batch=32) as opened:
        yield opened


def test_checkpoints_lie_where_messages_end(hybrid: Model) -> None:
    with hybrid.session() as session:
        write(session, [*SYSTEM, *ASKED, *OPENS])
        assert [pos for pos, _ in session.checkpoints] == [len(SYSTEM), len(SYSTEM) + len(ASKED)]
        [n_bytes] = {n for _, n in session.checkpoints}
    header, plan = hybrid.main.header, hybrid.memory_plan
    caches = layer_caches(header.arch, header.keys, header.tensors, Context(1024))
    states = sum(cache.states for cache in caches)
    assert states <= n_bytes < states + 1024  # and a few words on positions
    none = replace(plan, n_checkpoints=0)
    assert plan.at(1024).states - none.at(1024).states == DEFAULT_CHECKPOINTS * states


def test_as_many_are_kept_as_were_asked_for_and_they_spread(hybrid: Model, tmp_path: Path) -> None:
    for n in (0, 1, 3, DEFAULT_CHECKPOINTS):
        with (
            load(hybrid.main.path, ctx=1024, threads=1, depth=3, checkpoints=n) as model,
            model.session() as session,
        ):
            talk = list(SYSTEM)
            for _ in range(7):
                talk += [*ASKED, *OPENS]
                talk += write(session, talk, 4).tokens
            kept = [pos for pos, _ in session.checkpoints]
            assert len(kept) == n and kept == sorted(kept)
            if n > 1:
                assert kept[-1] > len(talk) - 20 and kept[0] < len(talk) / 2
    with pytest.raises(LoadError, match=r"checkpoints -1: a whole number is wanted"):
        load(hybrid.main.path, checkpoints=-1)


def test_without_checkpoints_a_rewritten_turn_is_decoded_whole_and_is_right(hybrid: Model) -> None:
    with (
        load(hybrid.main.path, ctx=512, threads=1, depth=3, checkpoints=0, draft_vocab="full") as model,
        model.session() as session,
    ):
        first = [*SYSTEM, *ASKED, *OPENS]
        answer = write(session, first).tokens
        prompt = [*first[:-3], *answer]
        text = write(session, prompt)
        assert text.stats.n_reused == 0
        is_cold(model, session, prompt, text)


def test_attention_alone_makes_none(tmp_path: Path) -> None:
    main = models.write_pair(tmp_path, recurrent=False, type=drafts.T.Q8_0).main
    with load(main, ctx=512, threads=1, depth=3) as model, model.session() as session:
        write(session, [*SYSTEM, *ASKED, *OPENS])
        assert session.checkpoints == []


def test_a_conversation_of_short_messages_is_checkpointed_once_it_was_rewritten(hybrid: Model) -> None:
    """A checkpoint costs a decode, which a short message that nobody rewrites is not worth."""
    first = [*b"Hi there, you!", END, *OPENS]
    with hybrid.session() as session:
        answer = write(session, first).tokens
        assert session.checkpoints == []
        second = [*first[:-7], *answer[6:], END, *b"And then, what?", END, *OPENS]
        write(session, second)
        assert session.checkpoints[-1][0] == len(second) - len(OPENS)


@pytest.mark.parametrize(
    ("tokens", "n_held", "expected", "rewritten"),
    [
        ([1] * 100 + [0], 0, [100], [100]),  # a token must follow
        ([1] * 100 + [0] + [1] * OPENING, 0, [101], [101]),
        ([1] * 100 + [0] + [1] * 100, 0, [101, 193], [101, 193]),  # no message ends near the end
        ([1] * 99 + [0] + [1] * 99 + [0, 1], 0, [100, 200], [100, 200]),
        ([1] * 99 + [0] + [1] * 99 + [0, 1], 100, [200], [200]),
        ([1] * 99 + [0] + [1] * 99 + [0, 1], 150, [], [200]),
        ([1] * 99 + [0] + [1] * 99 + [0, 1], 190, [], []),
        ([1] * 99 + [0] + [1] * 9 + [0, 1], 0, [100], [110]),  # too close to each other for both
        ([1] * 9 + [0] + [1] * 99 + [0, 1], 0, [110], [110]),
        ([1], 0, [], []),
    ],
)
def test_places(tokens: list[int], n_held: int, expected: list[int], rewritten: list[int]) -> None:
    assert checkpoint_places(tokens, n_held, lambda token: token == 0) == expected
    assert checkpoint_places(tokens, n_held, lambda token: token == 0, rewritten=True) == rewritten


# Every sort of memory


@functools.cache
def memory_of(sort: str, make: Callable[[str], Path]) -> Path:
    folder = make("memory")
    if sort == "recurrent":
        return write_mamba(folder)
    arch, variant = TARGETS[sort].split("-")
    main = convert(make_checkpoint(folder, arch, variant), folder / "out", "Q8_0", "Q8_0").main
    assert main
    return main


@pytest.mark.parametrize("sort", TARGETS)
def test_every_sort_of_memory_goes_back(sort: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once, twice and three times; further than the tiny windows reach."""
    main = memory_of(sort, tmp_path_factory.mktemp)
    with (
        load(main, ctx=1024, threads=1, depth=3, kernels="stock", draft_vocab="full", batch=32) as model,
        model.session() as session,
    ):
        end = next(token for token in range(model.vocab.n_tokens) if model.vocab.is_eog(token))
        system, asked = [*SYSTEM[:-1], end], [*ASKED[:-1], end]
        first = [*system, *asked, *OPENS]
        answer = write(session, first).tokens
        for prompt in (
            [*first[:-7], *answer[6:], end, *asked, *OPENS],
            [*system, *asked, *b"No!"],
            [*system, *b"Well?"],
        ):
            text = write(session, prompt)
            assert text.stats.n_reused >= len(system)
            with model.session() as cold:
                alone = write(cold, prompt)
                assert text.tokens == alone.tokens
                assert session._native.state() == cold._native.state()


# Interrupted


def test_a_prompt_that_was_cancelled_is_kept_as_far_as_it_came(hybrid: Model) -> None:
    prompt = [*SYSTEM, *ASKED, *ASKED, *ASKED, *OPENS]
    with hybrid.session() as session:
        real = session._native

        class Cancels:
            """Cancels the session while its second piece is decoded."""

            n_pieces = 0

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def feed(self, *arguments: Any) -> None:
                self.n_pieces += 1
                if self.n_pieces == 2:
                    session.cancel()
                real.feed(*arguments)

        session._natives[0] = Cancels()
        text = write(session, prompt)
        session._natives[0] = real
        assert (text.finish_reason, text.tokens) == ("cancelled", [])
        n_past = real.n_past
        assert 0 < n_past < len(prompt)
        with pytest.raises(Exception, match="nothing to save"):
            session.save("never.session")
        again = write(session, prompt)
        assert again.stats.n_reused == n_past
        is_cold(hybrid, session, prompt, again)


def test_after_a_failed_decode_nothing_is_kept(hybrid: Model) -> None:
    prompt = [*SYSTEM, *ASKED, *OPENS]
    with hybrid.session() as session:
        write(session, prompt)
        session._history = None  # as a failure leaves it
        again = write(session, prompt)
        assert again.stats.n_reused == 0
        is_cold(hybrid, session, prompt, again)


def test_go_back_refuses_what_is_ahead(hybrid: Model) -> None:
    with hybrid.session() as session:
        write(session, SYSTEM)
        with pytest.raises(Exception, match="go back from"):
            session._native.go_back(500)


def test_saving_and_restoring_after_a_turn_went_back(model: Model, tmp_path: Path) -> None:
    first = [*SYSTEM, *ASKED, *OPENS]
    path = tmp_path / "one.session"
    with model.session() as session:
        answer = write(session, first).tokens
        prompt = [*first[:-7], *answer[6:], END, *ASKED, *OPENS]
        text = write(session, prompt)
        session.save(path)
        here = drafts_after(session, 6, 3)
        state = session._native.state()
    with model.session(restore=path) as session:
        assert session._history == [*prompt, *text.tokens]
        assert is_compact(model) or drafts_after(session, 6, 3) == here
        assert is_compact(model) or session._native.state() == state
        session._history = None
    with model.session(restore=path) as session:  # and goes back from there
        again = write(session, first)
        is_cold(model, session, first, again)


def test_time_to_the_first_token_is_the_turns_own(hybrid: Model) -> None:
    with hybrid.session() as session:
        talk = [*SYSTEM, *ASKED * 6]
        first = write(session, [*talk, *OPENS], 2)
        second = write(session, [*talk, *b"No.", END, *OPENS], 2)
        assert second.stats.n_prompt_decoded < first.stats.n_prompt_decoded / 5
        assert 0 < second.stats.first_s < first.stats.first_s
        assert second.stats.to_json()["n_prompt_decoded"] == second.stats.n_prompt - second.stats.n_reused
