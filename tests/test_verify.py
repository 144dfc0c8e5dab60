"""`verify` says identical where it is, near-tie where rounding is all there is, and BUG where a rewind was skipped."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import drafts
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import PairOf

from llama_sidecar.runtime import (
    Generation,
    LoadError,
    Model,
    PromptError,
    load,
    lossless,
    session,
    verification,
)
from llama_sidecar.runtime.lossless import Rounding, compare_widths
from llama_sidecar.runtime.prompts import Prompt
from llama_sidecar.runtime.tuning import tune
from llama_sidecar.runtime.verification import (
    BUG,
    IDENTICAL,
    NEAR_TIE,
    Draws,
    Report,
    Trial,
    same_distribution,
    verify,
)
from llama_sidecar.scripts.verify import command, summary

PROMPTS = [Prompt("hello world, this is where it starts", "text"), Prompt("import os\n", "code")]
N = 24


@pytest.fixture(scope="module", params=["T", "R"])
def model(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Model]:
    """T and R at Q8_0: llama.cpp's rows are then equal to the bit at every width."""
    with load(pair_of(request.param, "Q8_0").main, ctx=256, threads=1, depth=3) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def report(model: Model) -> Report:
    return verify(model, PROMPTS, n=N)


def test_a_sound_model_is_identical_in_texts_states_seeds_and_draws(report: Report) -> None:
    assert report.verdict == IDENTICAL and report.faults == []
    assert len(report.trials) == 2 * 5  # right for the first 0 .. 3, and its own
    assert all(t.divergence is None and t.state_equal and t.next_difference == 0 for t in report.trials)
    assert report.rounding.difference == 0 and report.rounding.n_rows == N and report.rounding.spread > 0
    assert report.seeded == [None] * 4
    assert report.draws is not None and report.draws.p > 1e-4
    lengths = [trial.mean_accepted_length for trial in report.trials[:4]]
    assert lengths == sorted(lengths) and lengths[0] == 1 and lengths[3] > 3


def test_the_report_has_every_published_figure(report: Report) -> None:
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == 1 and data["verdict"] == IDENTICAL and data["faults"] == []
    assert data["widths"]["rows"] == [2, 4] and data["allowed_margin"] == 0
    assert data["main"]["type"] == "Q8_0" and len(data["trials"]) == 10
    assert "**identical**" in summary(report)


def test_the_depths_that_pace_chooses_are_verified_too(pair_of: PairOf) -> None:
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1) as model:
        report = verify(model, PROMPTS[:1], n=N)
    assert report.verdict == IDENTICAL
    assert [trial.drafter for trial in report.trials][-2:] == ["mtp depth 4", "mtp pace"]


def test_exact_decoding_is_verified_too(pair_of: PairOf) -> None:
    """Of BF16 two rows and more agree, with each other alone: every round is filled up, and draws stand by match."""
    with load(pair_of("R", "BF16").main, ctx=512, threads=2, depth=3, exact=True, kernels="stock") as model:
        report = verify(model, PROMPTS[:1], n=N)
    assert report.verdict == IDENTICAL and report.draws is not None
    assert all(t.divergence is None and t.state_equal and t.next_difference == 0 for t in report.trials)


@pytest.mark.parametrize("arch", drafts.TARGETS)
def test_drafters_that_read_layer_inputs_are_verified_too(arch: str, tmp_path: Path) -> None:
    main = drafts.write_target(tmp_path, arch)
    sidecar = drafts.write_dflash(tmp_path, markov=True)
    with load(main, sidecar, ctx=256, threads=1, depth=3) as model:
        report = verify(model, PROMPTS[:1], n=16)
    assert report.verdict == IDENTICAL and report.trials[-1].drafter == "dspark depth 3"


def sabotage(patch: pytest.MonkeyPatch) -> list[int]:
    """Skips one rewind of a speculative session: a row that was to be taken back stays, and the one before it goes.

    The planted row stands at the position that the round went on from, as in a target whose rewind is a row short; nothing
    else of the loop is touched. Returns the positions that were spoilt.
    """
    spoilt: list[int] = []
    go_on = Generation.__next__

    def next_piece(self: Generation) -> str:
        piece = go_on(self)
        native, stats = self._session._native, self.stats
        had_one_right = stats.accepted_per_position[:1] == [1.0] and stats.n_accepted < stats.n_drafted
        if not spoilt and self._request.depth and had_one_right and not self.finished:
            with self._session.model.turns:
                at = native.n_past - 1
                native.rewind(at)
                native.feed([(native.last + 1) % 256], False)
            spoilt.append(at)
        return piece

    patch.setattr(session, "READ_S", 0.0)  # it stands between rounds
    patch.setattr(Generation, "__next__", next_piece)
    return spoilt


def test_one_skipped_rewind_is_a_bug(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = sabotage(monkeypatch)
    report = verify(model, PROMPTS[:1], n=N)
    assert len(spoilt) == 1
    assert report.verdict == BUG and report.faults
    found = [trial for trial in report.trials if report.verdict_on(trial) == BUG]
    assert len(found) == 1 and found[0].next_difference > 0 and not found[0].state_equal
    assert "**BUG" in summary(report)


def test_one_skipped_rewind_is_a_bug_where_widths_round_differently(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(pair_of("R").main, ctx=256, threads=1, depth=3, kernels="stock") as model:
        sound = verify(model, PROMPTS[:1], n=N)
        assert sound.verdict in (IDENTICAL, NEAR_TIE), sound.faults
        assert 0 < sound.rounding.difference < 0.1 * sound.rounding.spread
        assert sound.seeded_p > 0.01, "rounding is measured on the seeded texts, none of which is greedy"
        assert sabotage(monkeypatch) == []
        assert verify(model, PROMPTS[:1], n=N).verdict == BUG


# The verdict


TRIAL = Trial(0, "mtp depth 2", 24, 2.0, None, None, True, 0.0)


def judged(trial: Trial = TRIAL, difference: float = 0.01, **fields: object) -> Report:
    rounding = Rounding(n_rows=100, difference=difference, spread=1.0)
    return replace(Report(PROMPTS, 2, 24, 0, trials=[trial], rounding=rounding), **fields)  # type: ignore[arg-type]


def test_a_difference_within_the_rounding_measured_is_a_near_tie() -> None:
    near = replace(TRIAL, divergence=7, margin=0.03, state_equal=False, next_difference=0.02)
    assert judged(near).verdict == NEAR_TIE
    assert judged(replace(near, margin=0.05)).verdict == BUG
    assert judged(replace(near, next_difference=0.05)).verdict == BUG


def test_where_widths_are_equal_to_the_bit_nothing_is_excused() -> None:
    near = replace(TRIAL, divergence=7, margin=1e-6)
    assert judged(near, difference=0.0).verdict == BUG
    assert judged(difference=0.0).verdict == IDENTICAL


def test_widths_that_have_nothing_in_common_are_a_bug() -> None:
    assert "no rounding" in judged(difference=1.5).faults[0]


def test_seeded_texts_may_part_as_often_as_rounding_turns_draws() -> None:
    assert judged(seeded=[None, 5], seeded_flips=0.1).verdict == NEAR_TIE
    assert judged(seeded=[1] * 6, seeded_flips=0.001).verdict == BUG
    assert judged(seeded=[None, 5], seeded_flips=0.0).verdict == BUG


def test_draws_of_another_distribution_are_a_bug() -> None:
    assert judged(draws=Draws(400, 3, 20, 0.3)).verdict == IDENTICAL
    assert judged(draws=Draws(400, 3, 20, 5e-5)).verdict == BUG


# Its instruments


def test_widths_of_f32_differ_by_rounding_and_margins_are_those_of_rivals(pair_of: PairOf) -> None:
    with load(pair_of("T").main, ctx=256, threads=1, depth=2, kernels="stock") as model:
        prompt = PROMPTS[0].tokens(model)
        with model.session(spec_type="none") as session:
            text = session.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)
            text.read()
        rival = (text.tokens[5] + 1) % 256
        found = compare_widths(model, prompt, text.tokens, depth=2, rivals={5: {rival}, 0: {rival}})
        assert set(found.margins) == {(5, rival), (0, rival)} and found.margins[5, rival] > 0
        assert found.n_rows == 12 and found.difference < 0.01 * found.spread


def test_the_text_compared_need_not_be_the_models_own(model: Model) -> None:
    prompt, text = PROMPTS[0].tokens(model), list(b"any text at all, whatever it likes")
    found = compare_widths(model, prompt, text, depth=3)
    assert found.difference == found.flips == 0 and found.n_rows == len(text)


def test_the_distribution_test_finds_a_wrong_distribution_and_no_other() -> None:
    """Power and calibration: draws of a pair of tokens, the second given the first."""
    random = np.random.default_rng(1)

    def draws(p: float, n: int = 400) -> list[tuple[int, ...]]:
        first = random.random(n) < 0.5
        return [(int(f), int(random.random() < (p if f else 1 - p))) for f in first]

    assert same_distribution(draws(0.7), draws(0.3))[1] < 1e-4, "each token alone is distributed alike"
    chance = [same_distribution(draws(0.7), draws(0.7), n_shuffles=200)[1] for _ in range(60)]
    assert 0.3 < float(np.mean(chance)) < 0.7


def test_rare_sequences_are_joined_with_what_begins_alike() -> None:
    assert same_distribution([(1, k) for k in range(30)], [(1, k) for k in range(30, 60)])[0] == 1


@pytest.mark.parametrize("module", [lossless, verification], ids=lambda m: m.__name__)
def test_examples(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


# The command


def run(arguments: list[str]) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, arguments)
    return result.exit_code, result.stdout, result.stderr


def arguments(pair_of: PairOf, *more: str) -> list[str]:
    return [str(pair_of("R", "Q8_0").main), "-c", "256", "-t", "1", "--depth", "2", "-n", "16", *more]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text("import os\n")
    return str(path)


def test_the_exit_code_is_0_without_a_bug(pair_of: PairOf, prompt_file: str) -> None:
    code, out, _ = run(arguments(pair_of, "--prompts", prompt_file, "--json"))
    assert code == 0 and json.loads(out)["verdict"] == IDENTICAL


def test_the_exit_code_is_1_with_one(
    pair_of: PairOf, prompt_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    code, out, _ = run(arguments(pair_of, "--prompts", prompt_file))
    assert code == 1 and "BUG" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--no-spec"], "nothing to verify"),
        (["-n", "300"], "no room for a prompt in a context of 256"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["-n", "1"], "-n"),
    ],
)
def test_the_exit_code_is_2_where_nothing_can_be_verified(
    pair_of: PairOf, more: list[str], said: str
) -> None:
    code, _, error = run(arguments(pair_of, *more))
    assert code == 2 and said in error


def test_prompts_that_cannot_be_used_are_left_out(model: Model) -> None:
    report = verify(model, [*PROMPTS[1:], Prompt("too long" * 100, "long")], n=4, budget_s=30)
    assert len(report.prompts) == 1 and "left out: 1 of 2" in report.warnings[0]


def test_nothing_to_verify_is_refused(model: Model, pair_of: PairOf) -> None:
    with pytest.raises(PromptError, match="there is none"):
        verify(model, [])
    with pytest.raises(PromptError, match="it is empty"):
        verify(model, [Prompt("", "none")])
    with load(pair_of("R", "Q8_0").main, spec_type="none", ctx=64) as plain, pytest.raises(LoadError):
        verify(plain, PROMPTS)


@pytest.mark.parametrize("budget_s", [math.nan, 0.0, -1.0])
def test_no_time_at_all_is_an_error(model: Model, budget_s: float) -> None:
    with pytest.raises(PromptError, match="no time at all"):
        verify(model, PROMPTS, n=8, budget_s=budget_s)
    with pytest.raises(PromptError, match="no time at all"):
        tune(model, PROMPTS, n=8, budget_s=budget_s)


def test_a_budget_that_is_too_small_says_what_was_left_out(model: Model) -> None:
    report = verify(model, PROMPTS, n=64, budget_s=1e-3)
    said = " ".join(report.warnings)
    assert report.verdict == IDENTICAL and report.n == verification.MIN_TOKENS and report.draws is None
    assert (
        "16 tokens a text instead of 64" in said
        and "1 of 2 prompts" in said
        and "no distribution test" in said
    )
    assert len(report.seeded) == 2, "one seed"
    json.dumps(report.to_json())
