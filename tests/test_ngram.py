"""Prompt look-up: it finds what followed before, is asked where it pays and not where it does not, and never changes the text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import PairOf

from llama_sidecar.runtime import LoadError, Model, Session, _native, costs, load
from llama_sidecar.runtime.bench import measure
from llama_sidecar.runtime.costs import Costs
from llama_sidecar.runtime.pace import Pace
from llama_sidecar.runtime.prompts import Prompt
from llama_sidecar.scripts.run import command

REPEATED = list(b"one two three four five six. one two three four five six. one two thr")
N = 48
# A decode that is read from memory: rows cost little. A draft of the head costs a fifth of it.
COSTS = Costs(plain_s=1.0, verify_s=(1.0, 1.05, 1.1, 1.15, 1.2), first_draft_s=0.2, draft_step_s=0.2)


# What is found


def found_in(text: list[int], n: int, model: Model) -> tuple[list[int], int]:
    """What the look-up finds after `text`, by the text alone: the model's own next token is none of it."""
    with model.session(depth=4) as session:
        native = _native.Session(_context(session), looks_up=True)
        chooser = _native.forced_chooser([text[-1]])
        native.feed(text[:-1], True)
        native.first(chooser)
        return native.look_up(n)  # type: ignore[no-any-return]


def _context(session: Session) -> int:
    from llama_sidecar.runtime.sampling import address

    return address(session._contexts[0])


def slow_find(text: list[int], n: int) -> tuple[list[int], int]:
    """The same by comparing everything with everything."""
    best, best_pos = 0, 0
    for pos in range(len(text) - 2, 0, -1):
        length = 0
        while length < 8 and pos - length >= 0 and text[pos - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= 2 and length > best:
            best, best_pos = length, pos
    found: list[int] = []
    while best and len(found) < n:
        found.append([*text, *found][best_pos + 1 + len(found)])
    return found, best


@pytest.fixture(scope="module")
def plain(pair_of: PairOf) -> Model:
    with load(pair_of("T").main, ctx=256, threads=1, spec_type="ngram", depth=4) as model:
        yield model  # type: ignore[misc]


@pytest.mark.parametrize("n_words", [1, 2, 3, 6])
def test_it_finds_the_longest_and_latest_match(n_words: int, plain: Model) -> None:
    draw = random.Random(n_words)
    for _ in range(12):
        text = [draw.randrange(n_words) + 65 for _ in range(draw.randrange(2, 40))]
        assert found_in(text, 4, plain) == slow_find(text, 4), text
    assert found_in(list(b"abcdabc"), 3, plain) == (list(b"dab"), 3)
    assert found_in(list(b"xyxy"), 5, plain) == (list(b"xyxyx"), 2)  # goes on beyond its end
    assert found_in(list(b"abcdefg"), 3, plain) == ([], 0)


# The text


@pytest.mark.parametrize("arch", ["T", "R", *drafts.TARGETS[:2]])
@pytest.mark.parametrize("depth", ["auto", 1, 3])
def test_the_text_is_plain_decodings(arch: str, depth: int | str, pair_of: PairOf, tmp_path: Path) -> None:
    """Of models without a head, with and without pace, greedy and drawn."""
    main = pair_of(arch).main if len(arch) == 1 else drafts.write_target(tmp_path, arch)
    with load(main, spec_type="ngram", ctx=512, threads=1, depth=depth) as model:
        assert (model.kind, model.speculation.path) == ("ngram", None)
        for options in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}):
            with model.session() as session, model.session(spec_type="none") as alone:
                spec = session.generate(REPEATED, max_tokens=N, ignore_eos=True, **options)
                spec.read()
                expected = alone.generate(REPEATED, max_tokens=N, ignore_eos=True, **options)
                expected.read()
            assert spec.tokens == expected.tokens
            assert spec.stats.kind == "ngram"
        if depth != "auto":
            copied = model.generate(
                REPEATED + spec.tokens + REPEATED, max_tokens=250, temperature=0, ignore_eos=True
            )
            copied.read()
            assert copied.stats.n_drafted > 0


def forced_run(session: Session, prompt: list[int], text: list[int]) -> Any:
    """What a session's rounds do where the target chooses this text."""
    native, chooser = session._native, _native.forced_chooser(text)
    native.feed(prompt, True)
    generation = _native.Generation(
        chooser,
        session.pace,
        n_ctx=session.n_ctx,
        max_tokens=len(text),
        depth=session.depth,
        ignore_eog=True,
    )
    generation.begin(native, native.first(chooser))
    while not generation.end:
        generation.rounds(native, session.model.turns)
        if generation.wants_plain_context:
            session._make_plain_context(session.pace)
    assert generation.tokens == text
    return generation.counts


@pytest.mark.parametrize("letter", ["T", "R"])
def test_ahead_of_a_head_it_is_asked_where_the_text_repeats_itself(
    letter: str, pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and leaves the same state behind."""
    monkeypatch.setattr("llama_sidecar.runtime.llm.costs_for", lambda model: COSTS)
    draw = random.Random(1)
    fresh = [draw.randrange(256) for _ in range(160)]
    counts = {}
    for name, text, ngram in (
        ("copied", REPEATED * 3, True),
        ("fresh", fresh, True),
        ("off", REPEATED * 3, False),
    ):
        with load(pair_of(letter).main, ctx=512, threads=1, ngram=ngram) as model, model.session() as session:
            assert model.kind == "mtp"
            counts[name] = forced_run(session, REPEATED, text)
            with model.session(spec_type="none") as alone:
                forced_run(alone, REPEATED, text)
                assert session._native.n_past == alone._native.n_past
                for one in (session, alone):
                    one._native.step(_native.greedy_chooser(), 0, True)
                found, expected = (np.array(one._native.logits(0)) for one in (session, alone))
                assert np.allclose(found, expected, atol=1e-3)
    copied, fresh_counts = counts["copied"], counts["fresh"]
    assert copied.n_ngram_rounds > 20 and copied.n_ngram_accepted > 0.8 * copied.n_ngram_drafted
    assert copied.n_rounds < counts["off"].n_rounds / 2
    assert fresh_counts.n_ngram_rounds <= 2
    assert counts["off"].n_ngram_rounds == counts["off"].n_ngram_drafted == 0


def test_the_next_prompt_and_an_early_end_leave_it_right(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_sidecar.runtime.llm.costs_for", lambda model: COSTS)
    with load(pair_of("T").main, ctx=512, threads=1) as model, model.session() as session:
        text = session.generate(REPEATED, max_tokens=120, temperature=0, ignore_eos=True)
        for _ in zip(range(9), text, strict=False):  # left in the middle of a block, perhaps
            pass
        text.close()
        for prompt in (REPEATED + text.tokens, REPEATED[:10], REPEATED * 2):
            again = session.generate(prompt, max_tokens=80, temperature=0, ignore_eos=True)
            again.read()
            with model.session(spec_type="none") as alone:
                expected = alone.generate(prompt, max_tokens=80, temperature=0, ignore_eos=True)
                expected.read()
            assert again.tokens == expected.tokens


@pytest.mark.parametrize("spec_type", ["auto", "ngram"])
def test_a_restored_session_still_knows_what_was_said(
    spec_type: str, pair_of: PairOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("llama_sidecar.runtime.llm.costs_for", lambda model: COSTS)
    with load(pair_of("R").main, ctx=512, threads=1, depth="auto", spec_type=spec_type) as model:
        with model.session() as session:
            text = session.generate(REPEATED, max_tokens=20, temperature=0, ignore_eos=True)
            text.read()
            session.save(tmp_path / "saved")
            held = session._native.look_up(4)
        with model.session(restore=tmp_path / "saved") as restored:
            assert restored._native.look_up(4) == held
            fed = forced_run(restored, [restored._native.last, *REPEATED], REPEATED)
            assert fed.n_ngram_rounds > 3


# Whether it is asked


def test_it_is_not_asked_before_it_was_right() -> None:
    pace = Pace(COSTS)
    assert pace.depth_found(4, 8) == 0
    for _ in range(8):
        pace.compare_found(3, 4, 0)
    assert pace.depth_found(4, 8) == 0
    for _ in range(8):
        pace.compare_found(8, 4, 4)
    assert pace.depth_found(4, 8) == 4
    assert pace.depth_found(2, 8) == 2
    assert pace.depth_found(4, 3) == 0  # short matches were wrong, and that is known apart


def test_a_head_that_is_faster_is_asked_first() -> None:
    pace = Pace(replace_costs(first_draft_s=1e-3, draft_step_s=1e-3))
    while pace.depth() < 4:
        pace.observe(pace.depth(), pace.depth(), 1e-3, COSTS.verify_s[pace.depth()])
    for _ in range(30):
        pace.compare_found(8, 4, 4)
        pace.observe(4, 4, 4e-3, COSTS.verify_s[4])
    assert pace.depth_found(4, 8) == 0 or pace.speedup(4) < 4.2
    for _ in range(60):
        pace.compare_found(8, 4, 2)
    assert pace.depth_found(4, 8) == 0


def replace_costs(**changes: float) -> Costs:
    from dataclasses import replace

    return replace(COSTS, **changes)  # type: ignore[arg-type]


def test_without_a_drafter_all_else_is_plain_decoding() -> None:
    pace = Pace(COSTS, has_drafter=False)
    assert not pace.drafting() and pace.depth() == 0
    for _ in range(3000):
        pace.observe(0, 0, 0.0, 1.0)
        assert not pace.drafting() and pace.depth() == 0


def test_a_way_there_and_back_must_pay() -> None:
    """A recurrent model decodes plainly in another context, and stays after a look-up until staying has cost the way."""
    costs = replace_costs(plain_s=0.9)
    pace = Pace(costs, has_drafter=False, switch_s=0.2)
    for _ in range(20):
        pace.compare_found(8, 4, 4)
    assert pace.depth_found(4, 8) == 4
    pace.switch_s = 50.0
    assert pace.depth_found(4, 8) == 0
    pace.switch_s = 0.2
    pace.observe_found(4, 4, 1.2)
    assert pace.drafting() and pace.depth() == 0
    n_stays = 0
    while pace.drafting():
        pace.observe(0, 0, 0.0, 1.0)
        n_stays += 1
    assert n_stays in (4, 5)  # 0.1 s each, 0.4 s the way


def test_what_is_told_wrongly_is_refused() -> None:
    pace = Pace(COSTS)
    for told in ((0, 0), (3, 4), (9, 1), (4, -1)):
        with pytest.raises(ValueError, match="found tokens stood"):
            pace.observe_found(*told, 1.0)


# In use


def test_bench_and_costs_know_it(pair_of: PairOf) -> None:
    main = pair_of("R").main
    with load(main, spec_type="ngram-simple", ctx=512, threads=1) as model:
        measured = costs.calibrate(model, budget_s=1)
        assert measured.max_depth == model.depth == 7
        assert measured.draft_s(7) < measured.plain_s
        report = measure(model, [Prompt("hello hello hello hello", "chat")], n=64, budget_s=30)
        assert report.tokens_equal
        assert "file" not in report.source["drafter"] and report.source["drafter"]["kind"] == "ngram"


@pytest.mark.parametrize("words", [["--depth", "3"], []])
def test_the_command_line_names_it(words: list[str], pair_of: PairOf) -> None:
    main = str(pair_of("T").main)
    common = ["-p", bytes(REPEATED).decode(), "-n", "40", "--temp", "0", "-c", "256", "-t", "1", *words]
    result = CliRunner().invoke(command, [main, "--spec-type", "ngram", *common, "--json"])
    assert result.exit_code == 0, result.output
    stats = json.loads(result.stdout)["stats"]
    assert stats["kind"] == "ngram"
    result = CliRunner().invoke(command, [main, "--spec-type", "ngram", "--no-ngram", *common])
    assert result.exit_code == 1 and "contradict each other" in str(result.exception)
    with pytest.raises(LoadError, match="contradict each other"):
        load(main, pair_of("T").sidecar, spec_type="ngram")


def speed_over_plain(costs: Costs, switch_s: float, n: int, is_copied: Callable[[int, bool], bool]) -> float:
    """Writes n tokens with the look-up alone, simulated: `is_copied` says of a token's position, and of whether the sequence is
    where rows can be taken back, whether it follows on what was there before."""
    pace = Pace(costs, has_drafter=False, switch_s=switch_s)
    spent, n_matched, was_there, n_tokens = 0.0, 0, False, 0
    while n_tokens < n:
        n_found = 4 if n_matched >= 3 else 0
        depth = pace.depth_found(n_found, n_matched) if n_found else 0
        is_there = depth > 0 or pace.drafting()
        n_right = 0
        while n_right < n_found and is_copied(n_tokens + n_right, is_there):
            n_right += 1
        n_accepted = min(depth, n_right)
        verify_s = costs.verify_s[depth] if is_there else costs.plain_s
        if depth:
            pace.observe_found(depth, n_accepted, verify_s)
        else:
            pace.observe(0, 0, 0.0, verify_s)
        if n_found:
            pace.compare_found(n_matched, min(n_right, n_accepted) + 1, min(n_right, n_accepted + 1))
        spent += verify_s + costs.overhead_s + switch_s * (is_there != was_there)
        was_there = is_there
        for i in range(n_tokens, n_tokens + n_accepted + 1):
            n_matched = n_matched + 1 if is_copied(i, is_there) else 0
        n_tokens += n_accepted + 1
    return n_tokens * costs.round_s(0) / spent


LOOKED_UP = Costs(
    plain_s=0.97, verify_s=(1.0, 1.3, 1.7, 2.1, 2.8), first_draft_s=0.5, draft_step_s=0.5, overhead_s=0.03
)


@pytest.mark.parametrize("switch_s", [0.3, 0.6, 1.2, 2.4, 5.0])
def test_a_way_that_one_round_does_not_pay_is_paid_by_what_was_missed(switch_s: float) -> None:
    """Copied text in long pieces gains about as much as where the way is free; where none is copied, nothing is lost; a text that
    ends to repeat itself whenever it is followed takes back no more than it could have given."""
    assert speed_over_plain(LOOKED_UP, switch_s, 2000, lambda i, there: i % 400 >= 100) > 1.3
    assert speed_over_plain(LOOKED_UP, switch_s, 2000, lambda i, there: False) == pytest.approx(1)
    assert speed_over_plain(LOOKED_UP, switch_s, 2000, lambda i, there: i % 8 > 3) > 0.99
    assert speed_over_plain(LOOKED_UP, switch_s, 2000, lambda i, there: not there) > 0.9
