"""The round: what is generated never depends on what is drafted, and nothing of a rejected draft stays behind.

Cases 13-16, 18-20, 25 and 26 of the project's list of what broke other tools, and the library's silent traps.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import models
import numpy as np
import pytest
from conftest import PairOf
from native_rounds import drafts_at_depths, moved_rounds, native_run

from llama_sidecar.runtime import (
    Generation,
    Model,
    PromptError,
    Scripted,
    Session,
    SessionError,
    _native,
    load,
    reference,
)
from llama_sidecar.runtime import session as session_module

PROMPT = list(b"hello world, this is where it starts")
N = 64


@pytest.fixture(scope="module", params=["T", "R"])
def model(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Model]:
    """T and R at Q8_0: llama.cpp's rows are then equal to the bit at every width, and so are ids and states."""
    with load(pair_of(request.param, "Q8_0").main, ctx=256, threads=1, depth=3) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=["T", "R"])
def f32_model(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Model]:
    """T and R at F32, with an F32 cache and no flash attention: F16 in either rounds the widths apart by up to 1e-3."""
    path = pair_of(request.param).main
    with load(
        path, ctx=256, threads=1, depth=3, cache_type_k="f32", cache_type_v="f32", flash_attn="off"
    ) as loaded:
        yield loaded


def ids(session: Session, prompt: list[int] = PROMPT, n: int = N, **options: object) -> list[int]:
    generation = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True, **options)  # type: ignore[arg-type]
    generation.read()
    return generation.tokens


def plain_ids(model: Model, prompt: list[int] = PROMPT, n: int = N) -> list[int]:
    with model.session(spec_type="none") as session:
        return ids(session, prompt, n)


def assert_same_text(model: Model, found: list[int], expected: list[int]) -> None:
    """Equal ids, or first apart where the target's two best logits are within 2e-2: F32 bits depend on the width."""
    apart = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)
    if apart is None:
        return
    prompt = PROMPT + expected[:apart]
    with model.session(spec_type="none") as session:
        session._native.feed(prompt, True)
        second, best = np.sort(session._native.logits(len(prompt) - 1))[-2:]
    assert best - second < 2e-2, f"ids differ at {apart}, where the margin is {best - second}"


# What is generated


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_native_loop_reference_loop_and_plain_agree_in_tokens_and_in_every_draft(
    model: Model, depth: int
) -> None:
    expected, expected_drafts = reference.generate(model, PROMPT, N, depth)
    found, drafts, _ = native_run(model, PROMPT, N, depth)
    assert found == expected == plain_ids(model)
    assert drafts == expected_drafts


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_f32_text_is_plain_text_up_to_near_ties(f32_model: Model, depth: int) -> None:
    assert_same_text(f32_model, native_run(f32_model, PROMPT, N, depth)[0], plain_ids(f32_model))


@pytest.mark.parametrize("n_right", range(5))
def test_rewind_sweep_is_equal_to_the_bit(model: Model, n_right: int) -> None:
    """Case 13: ids and the state's bytes are those of a run that never speculated."""
    expected = plain_ids(model)
    with model.session(spec_type="none") as plain:
        ids(plain)
        state = plain._native.state()
    with model.session(depth=4, scripted=Scripted(PROMPT + expected, n_right)) as session:
        generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
        assert generation.tokens == expected
        assert generation.stats.accepted_per_position == [1.0] * n_right + [0.0] * (4 - n_right)
        assert session._native.state() == state


def test_the_head_leaves_nothing_behind_either(model: Model) -> None:
    with model.session(spec_type="none") as plain, model.session(depth=4) as speculative:
        assert ids(plain) == ids(speculative)
        assert plain._native.state() == speculative._native.state()


@pytest.mark.parametrize("n_right", range(5))
def test_rewind_sweep_f32(f32_model: Model, n_right: int) -> None:
    """Case 13 at F32, where bits depend on the width: the next logits agree to 1e-3 with those of a fresh run."""
    script = PROMPT + plain_ids(f32_model)
    with (
        f32_model.session(depth=4, scripted=Scripted(script, n_right)) as speculative,
        f32_model.session(spec_type="none") as plain,
    ):
        found = ids(speculative)
        assert_same_text(f32_model, found, script[len(PROMPT) :])
        speculative._native.feed([found[-1]], True)
        plain._native.feed(PROMPT, False)
        for token in found:
            plain._native.feed([token], True)
        ours, theirs = np.array(speculative._native.logits(0)), np.array(plain._native.logits(0))
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_the_liar_has_acceptance_exactly_zero(model: Model) -> None:
    with model.session(depth=3, scripted=Scripted(PROMPT + plain_ids(model), 0)) as session:
        generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
    assert generation.stats.n_accepted == 0
    assert generation.stats.n_drafted > 0
    assert generation.stats.mean_accepted_length == 1.0


@pytest.mark.parametrize("n_slots", [0, 1, 2])
def test_fewer_rollback_slots_than_the_depth_take_a_checkpoint(pair_of: PairOf, n_slots: int) -> None:
    """Case 14: the state is right all the same."""
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        expected = plain_ids(model)
        for n_right in range(5):
            with model.session(
                depth=4, n_slots=n_slots, scripted=Scripted(PROMPT + expected, n_right)
            ) as session:
                assert ids(session) == expected
                if n_right + n_slots < 4:
                    assert session.n_restores > 0


def test_a_stop_string_inside_an_accepted_block_leaves_a_state_that_goes_on_rightly(pair_of: PairOf) -> None:
    """The rewind is deferred: the block is shortened after it was accepted, and the text then continued."""
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        expected = plain_ids(model)
        with model.session(depth=4, scripted=Scripted(PROMPT + expected, 4)) as session:
            native, chooser = session._native, _native.greedy_chooser()
            for n_kept in (1, 2, 3, 4, 5):
                native.clear()
                native.feed(PROMPT, True)
                native.first(chooser)
                assert native.step(chooser, 4, True).tokens == expected[1:6]
                native.keep(n_kept)
                assert native.last == expected[n_kept]
                rest = native.step(chooser, 0, True).tokens + native.step(chooser, 0, True).tokens
                assert rest == expected[n_kept + 1 : n_kept + 3]


def test_keep_refuses_what_was_not_emitted(model: Model) -> None:
    with model.session() as session:
        session._native.feed(PROMPT, True)
        session._native.first(_native.greedy_chooser())
        with pytest.raises(RuntimeError, match="keep"):
            session._native.keep(1)


# Pairing of token and hidden row


def zero_block(tensors: dict[str, np.ndarray]) -> None:
    """Makes the head's block do nothing: what enters it leaves it."""
    tensors["blk.4.attn_output.weight"][:] = 0
    tensors["blk.4.ffn_down.weight"][:] = 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_head_that_copies_its_token_drafts_the_last_token(tmp_path: Path, depth: int) -> None:
    """Case 16: after "a b c" the draft comes from the cell (h_b, c), so it is c."""

    def copy_token(tensors: dict[str, np.ndarray]) -> None:
        zero_block(tensors)
        tensors["blk.4.nextn.eh_proj.weight"][:] = np.eye(models.N_EMBD, 2 * models.N_EMBD)

    for drafts, last in drafts_of(models.write_pair(tmp_path, edit=copy_token), depth):
        assert drafts == [last] * depth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_head_that_copies_its_hidden_row_drafts_what_the_target_chose_there(
    tmp_path: Path, depth: int
) -> None:
    """Case 16, the other half: h_b led the target to c, so a copy of h_b drafts c; h_c or h_a would draft another."""

    def copy_hidden(tensors: dict[str, np.ndarray]) -> None:
        zero_block(tensors)
        tensors["blk.4.nextn.eh_proj.weight"][:] = np.eye(models.N_EMBD, 2 * models.N_EMBD, models.N_EMBD)

    for drafts, last in drafts_of(models.write_pair(tmp_path, edit=copy_hidden), depth):
        assert drafts == [last] * depth


def drafts_of(pair: models.Pair, depth: int) -> Iterator[tuple[list[int], int]]:
    """Every round's drafts, with the token they were drafted after."""
    with load(pair.main, ctx=256, threads=1, depth=depth) as model, model.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(PROMPT, True)
        native.first(chooser)
        for _ in range(24):
            last = native.last
            yield native.step(chooser, depth, True).drafts, last


def test_prompt_pieces_do_not_change_the_drafts(pair_of: PairOf) -> None:
    """Case 15: a prompt of 2 x 8 + 1 tokens in batches of 8 gives the drafts of one batch."""
    seen = []
    for batch in (8, 64):
        with (
            load(pair_of("R").main, ctx=256, threads=1, depth=3, batch=batch) as model,
            model.session() as session,
        ):
            native, chooser = session._native, _native.greedy_chooser()
            for start in range(0, 17, batch):
                native.feed(PROMPT[:17][start : start + batch], start + batch >= 17)
            native.first(chooser)
            drafts: list[int] = []
            while len(drafts) < 8:
                drafts += native.step(chooser, 2, True).drafts
            seen.append(drafts[:8])
    assert seen[0] == seen[1]


# One session after another


def test_a_short_prompt_after_a_long_one(model: Model) -> None:
    """Case 18."""
    with model.session() as session:
        ids(session, PROMPT + PROMPT[:4])
        assert ids(session, PROMPT[:5]) == plain_ids(model, PROMPT[:5])


def test_leaving_a_generation_early_leaves_a_usable_session(model: Model) -> None:
    with model.session() as session:
        for n_pieces in (1, 3):
            generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
            for _ in range(n_pieces):
                next(generation)
            assert ids(session) == plain_ids(model)
            assert generation.finish_reason == "cancelled"
            assert list(generation) == []


def test_a_prompt_that_continues_the_session_is_not_fed_again(pair_of: PairOf) -> None:
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        with model.session() as session:
            first = ids(session, n=20)
            longer = PROMPT + first + list(b" and on")
            generation = session.generate(longer, max_tokens=20, temperature=0, ignore_eos=True)
            generation.read()
        assert generation.stats.n_reused == len(PROMPT) + 19
        assert generation.tokens == plain_ids(model, longer, 20)


class Interrupted(_native.Pacing):
    """Drafts two tokens a round; Ctrl-C comes in the third round."""

    n_rounds = 0

    def drafting(self) -> bool:
        return True

    def depth(self) -> int:
        return 2

    def plain_in_place(self) -> None:
        pass

    def switched(self, seconds: float) -> None:
        pass

    def observe(self, *_: object) -> None:
        self.n_rounds += 1
        if self.n_rounds == 3:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_round_leaves_a_usable_session(ctrl_c: None, model: Model) -> None:
    with model.session() as session:
        session.pace = Interrupted()
        generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt):
            generation.read()
        assert generation.finish_reason == "cancelled"
        session.pace = None
        assert ids(session) == plain_ids(model)


def test_ctrl_c_ends_a_text_that_is_read_long_before_its_end(
    ctrl_c: None, pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "READ_S", 600.0)  # of rounds in one native call
    n = 30_000
    with load(pair_of("T", "Q8_0").main, ctx=n + 100, threads=1, depth=3) as loaded:
        generation = loaded.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
        next(generation)

        def strike() -> None:
            while len(generation.tokens) < 100:
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=strike)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            generation.read()
        thread.join()
        assert generation.finish_reason == "cancelled"
        assert 100 <= len(generation.tokens) < n / 2
        session = generation._session
        again = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        again.read()
        assert again.tokens == plain_ids(loaded)


def test_a_text_has_ended_when_its_last_piece_is_there(model: Model) -> None:
    with model.session() as session:
        for n in (1, 9):
            generation = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
            reasons = [generation.finish_reason for _ in generation]
            assert reasons[-1] == generation.finish_reason == "length"
            assert reasons[:-1] == [None] * (len(reasons) - 1)


def test_cancel_from_another_thread(model: Model) -> None:
    with model.session() as session:
        generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        next(generation)
        thread = threading.Thread(target=session.cancel)
        thread.start()
        thread.join()
        generation.read()
        assert generation.finish_reason == "cancelled"
        assert ids(session) == plain_ids(model)


def test_two_threads_on_one_session_is_an_error_and_on_two_sessions_works(model: Model) -> None:
    expected = plain_ids(model)
    with model.session() as one, model.session() as two:
        running = one.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        next(running)
        seen: list[object] = []

        def intrude() -> None:
            try:
                one.generate(PROMPT)
            except SessionError as error:
                seen.append(str(error))
            seen.append(ids(two))

        thread = threading.Thread(target=intrude)
        thread.start()
        running.read()
        thread.join()
        assert running.tokens == expected
        assert "another thread" in str(seen[0])
        assert seen[1] == expected


def test_a_text_that_is_read_does_not_come_back_to_python_each_round(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "READ_S", 60.0)
    with model.session(learn=False) as session:
        watched = list(session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True))
        text = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        calls: list[str] = []

        def counted(generation: Generation) -> str:
            calls.append(next(generation._pieces))
            return calls[-1]

        monkeypatch.setattr(Generation, "__next__", counted)
        assert text.read() == "".join(watched) == "".join(calls)
    assert len(calls) <= 3 < 10 < len(watched)  # the opening, the rounds, what was held back
    assert text.stats.n_rounds > 10


def test_closed_things_raise_and_closing_twice_is_fine(pair_of: PairOf) -> None:
    model = load(pair_of("T").main, ctx=256, threads=1, depth=3)
    session = model.session()
    session.close()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.generate(PROMPT)
    left_open = model.session()
    model.close()
    model.close()
    assert left_open.closed
    with pytest.raises(SessionError, match="closed"):
        model.session()


def test_what_nobody_closed_is_freed_with_its_last_reference(pair_of: PairOf) -> None:
    model = load(pair_of("R").main, ctx=256, threads=1, depth=3)
    model.generate(PROMPT, max_tokens=4, temperature=0).read()
    session = model.session()
    freed = [session._free, model.weights._free, model.head_weights._free]
    del session
    assert [f.alive for f in freed] == [False, True, True]
    del model
    gc.collect()  # the model and its own session refer to each other
    assert not any(f.alive for f in freed)


# Limits


def test_the_end_of_the_context_ends_the_text(pair_of: PairOf) -> None:
    """Case 19: n_ctx 64, prompt 56, depth 16."""
    prompt = (PROMPT * 2)[:56]
    with (
        load(pair_of("R").main, ctx=64, threads=1, depth=16) as model,
        model.session() as session,
        model.session(spec_type="none") as plain,
    ):
        generation = session.generate(prompt, temperature=0, ignore_eos=True)
        generation.read()
        assert generation.finish_reason == "length"
        # llama.cpp pads a context to 256 cells; ours ends where it was told to
        assert len(generation.tokens) == 64 - 56 + 1
        assert generation.tokens == ids(plain, prompt, 64 - 56 + 1)
        with pytest.raises(PromptError, match="65 tokens, the context holds 64"):
            session.generate((PROMPT * 2)[:65])


@pytest.mark.parametrize("letter", ["T", "R"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_small_batches_clamp_the_draft(pair_of: PairOf, letter: str, batch: int) -> None:
    """Case 20: n_batch 1, and n_batch = depth; no slots fit a batch of 1 or 2, so checkpoints stand in."""
    with load(pair_of(letter, "Q8_0").main, ctx=256, threads=1, depth=4, batch=batch) as model:
        expected = plain_ids(model)
        with model.session() as session:
            assert ids(session) == expected
        with model.session(scripted=Scripted(PROMPT + expected, 2)) as session:
            assert ids(session) == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_max_tokens_is_never_exceeded(model: Model, max_tokens: int) -> None:
    expected = plain_ids(model)
    with model.session(depth=4, scripted=Scripted(PROMPT + expected, 4)) as session:
        assert ids(session, n=max_tokens) == expected[:max_tokens]


def test_bad_prompts_and_options(model: Model) -> None:
    with model.session() as session:
        for prompt, options, words in (
            ("", {}, "empty"),
            ([], {}, "empty"),
            ([256], {}, "outside the vocabulary"),
            ([-1], {}, "outside the vocabulary"),
            ("x", {"temperature": -1.0}, "temperature"),
            ("x", {"temperature": float("nan")}, "temperature"),
            ("x", {"top_p": 0.0}, "top_p"),
            ("x", {"top_k": -3}, "top_k"),
            ("x", {"seed": -1}, "seed"),
            ("x", {"max_tokens": 0}, "max_tokens"),
            ("x", {"depth": -1}, "depth"),
        ):
            with pytest.raises(PromptError, match=words):
                session.generate(prompt, **options)  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="no chat template"):
            session.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("n_prompt", [100, 127, 128, 129, 200])
def test_a_head_that_catches_up_late_drafts_as_one_that_caught_up_at_once(
    model: Model, n_prompt: int
) -> None:
    """Plain rounds pile up rows for the head; the next draft decodes them in pieces of the head's batch of 128."""
    prompt, depths = (PROMPT * 6)[:n_prompt], (0, 0, 0, 3, 0, 2, 3)
    late, at_once = (drafts_at_depths(model, prompt, depths, catches_up=c) for c in (False, True))
    assert late == at_once


def test_moving_to_the_plain_context_and_back_changes_nothing(model: Model) -> None:
    """The text, the drafts and the state are those of a session that never moved."""
    depths = (3, 3, 0, 0, 3, 0, 0, 0, 3)
    stays, moves = (moved_rounds(model, PROMPT, depths, moves=m) for m in (False, True))
    assert [len(drafts) for drafts in stays[1]] == [*depths]
    assert stays == moves


# Sampling


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8}, {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.0}]
)
def test_a_seed_gives_the_same_text_plain_and_speculative(pair_of: PairOf, options: dict[str, float]) -> None:
    """Case 25, across plain and speculative: one emitted token is one draw."""
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        texts = []
        for spec_type in ("none", None, None):
            with model.session(spec_type=spec_type) as session:
                generation = session.generate(PROMPT, max_tokens=N, seed=7, ignore_eos=True, **options)  # type: ignore[arg-type]
                generation.read()
                texts.append(generation.tokens)
        assert texts[0] == texts[1] == texts[2]
        with model.session() as session:
            other = session.generate(PROMPT, max_tokens=N, seed=8, ignore_eos=True, **options)  # type: ignore[arg-type]
            other.read()
        assert other.tokens != texts[0]


def test_argmax_takes_the_first_of_equals_and_never_nan() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 15, 16, 17, 4095, 4096, 4097, 9000):
        values = rng.standard_normal(n).astype(np.float32)
        assert _native.argmax(values.tolist()) == int(np.argmax(values))
        values[[0, n // 2, n - 1]] = 9.0
        assert _native.argmax(values.tolist()) == 0
    assert _native.argmax([float("nan"), 1.0, float("nan")]) == 1
    assert _native.argmax([float("-inf")] * 3) == 0
    assert _native.argmax([float("nan")] * 3) == 0
    with pytest.raises(ValueError, match="nothing"):
        _native.argmax([])


# The target is left alone


def test_a_draft_context_does_not_change_plain_logits(pair_of: PairOf) -> None:
    """Case 26."""
    rows = []
    with load(pair_of("R").main, ctx=256, threads=1, depth=3) as model:
        for depth in (0, 4, 0):
            with model.session(depth=depth) as session:
                session._native.feed(PROMPT, True)
                rows.append(session._native.logits(len(PROMPT) - 1))
    assert rows[0] == rows[1] == rows[2]


def test_llama_cpp_itself_returns_true_for_a_rollback_it_cannot_do(pair_of: PairOf) -> None:
    """The trap behind Target's own count: after 1-row decodes two rows cannot be taken back, and ours refuses to try.

    If llama.cpp ever answers False here, the count can go.
    """
    with load(pair_of("R").main, ctx=256, threads=1, depth=3) as model, model.session(depth=8) as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(PROMPT, True)
        native.first(chooser)
        for _ in range(3):
            native.step(chooser, 0, True)
        assert native.n_slots == 8
        with pytest.raises(RuntimeError, match="cannot rewind"):
            native.rewind(native.n_past - 2)


def test_ids_outside_the_target_vocabulary_are_never_proposed(tmp_path: Path) -> None:
    """Case 12: a sidecar padded to 264 rows, whose padding has the largest logits, drafts for a target of 256."""
    pair = models.write_pair(tmp_path, sidecar_padding=8)
    with load(pair.main, ctx=256, threads=1, depth=3) as model:
        expected = plain_ids(model)
        with model.session(depth=3) as session:
            assert ids(session) == expected
            step = session._native.step(_native.greedy_chooser(), 3, True)
        assert all(token < models.N_VOCAB for token in step.drafts)
