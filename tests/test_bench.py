"""The benchmark: its definitions, its prompts, and what a run on a tiny pair reports. Speeds themselves are not tested."""

from __future__ import annotations

import doctest
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
from conftest import PairOf

from llama_sidecar.runtime import (
    LoadError,
    Model,
    PromptError,
    Scripted,
    bench,
    load,
    lossless,
    prompts,
    provenance,
)
from llama_sidecar.runtime.bench import (
    MAX_SHARE,
    MIN_PAIRS,
    MIN_TOKENS,
    Report,
    measure,
    p_accept,
    relative,
    speedup_bound,
)
from llama_sidecar.runtime.lossless import first_divergence, sweep, top_two_margin
from llama_sidecar.runtime.prompts import Prompt, prompts_hash, read_prompts
from llama_sidecar.runtime.provenance import hash_of, machine
from llama_sidecar.runtime.sampling import address
from llama_sidecar.runtime.stats import Stats
from llama_sidecar.runtime.weights import make_target_context
from llama_sidecar.scripts import _show
from llama_sidecar.scripts._report import row, summary

PROMPTS = [Prompt("import os\n", "code"), Prompt("Once upon a time", "prose")]


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of("R").main, depth=2, ctx=512) as model:
        yield model


@pytest.fixture(scope="module")
def report(model: Model) -> Report:
    return measure(model, PROMPTS, n=12)


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_coin_of_a_mean_accepted_length_is_llama_servers(depth: int, share: float) -> None:
    length = 1 + share * depth
    p = p_accept(length, depth)
    assert sum(p**i for i in range(depth + 1)) == pytest.approx(length, abs=1e-9)


def test_a_length_that_no_coin_gives_is_refused() -> None:
    with pytest.raises(PromptError, match="between 1 and 4"):
        p_accept(4.5, 3)


def test_there_are_five_pairs_at_least_and_every_prompt_is_used(report: Report) -> None:
    assert len(report.pairs) == MIN_PAIRS
    assert {pair.prompt.task for pair in report.pairs} == {"code", "prose"}
    assert all(len(pair.plain.tokens) == len(pair.spec.tokens) == 12 for pair in report.pairs)


def test_plain_and_speculative_token_ids_are_compared(report: Report) -> None:
    assert report.tokens_equal is True and report.divergence is None
    assert all(pair.plain.tokens == pair.spec.tokens for pair in report.pairs)


def test_plain_runs_draft_nothing(report: Report) -> None:
    assert all(pair.plain.stats.n_drafted == 0 and pair.plain.stats.kind is None for pair in report.pairs)
    assert all(pair.spec.stats.n_drafted > 0 for pair in report.pairs)


def test_the_report_has_every_published_figure(report: Report) -> None:
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == 1 and data["depth"] == 2 and data["n"] == 12 and data["n_pairs"] == MIN_PAIRS
    assert len(data["v"]) == 3 and data["v"][0] == 1.0
    rounds = report.figures.stats.rounds_per_depth
    verified = sum(n * v for n, v in zip(rounds, data["v"], strict=True)) / sum(rounds)
    assert data["bound"] == pytest.approx(data["mean_accepted_length"] / verified)
    assert set(data["round_s"]) == {"draft", "verify", "accept", "rest"} and data["coverage"] is None
    assert data["c"] == pytest.approx(data["draft_step_s"] / data["row_s"])
    assert data["speedup_spread"][0] <= data["speedup"] <= data["speedup_spread"][1]
    assert len(data["accepted_per_position"]) == 2
    assert data["prompts"] == {"n": 2, "sha256": prompts_hash(PROMPTS)}
    assert data["backend"] == "CPU" and data["machine"]["n_cores"] >= 1 and data["threads"] >= 1
    assert data["main"]["type"] == "F32" and data["drafter"]["kind"] == "mtp"
    memory = data["memory"]
    assert 0 < memory["head"] + memory["head_cache"] <= memory["drafting"] < memory["total"]
    assert f"{memory['drafting'] / 1e6:.0f} MB of it for drafts" in summary(report)
    assert f"| {memory['drafting'] / 1e6:.0f} MB " in row(data)
    assert len(data["main"]["files"][0]["sha256"]) == 64
    assert set(data["tasks"]) == {"code", "prose"}
    assert {"llama_cpp_python", "commit", "system_info"} == set(data["llama_cpp"])


def test_a_round_s_bound_is_that_of_its_depth() -> None:
    stats = Stats(
        "mtp", "on", "", depth=3, n_rounds=4, n_accepted=8, _drafted_at=[4, 4, 3], _accepted_at=[4, 3, 1]
    )
    assert speedup_bound(stats, [1.0, 1.2, 1.5, 2.0]) == pytest.approx((4 + 8) / (1 * 1.5 + 3 * 2.0))


def test_a_pair_reaches_so_much_of_its_own_bound(report: Report) -> None:
    """A machine that was half as fast for one pair, its single decodes included, changes nothing."""
    pair = report.pairs[0]
    slower = replace(pair, row_s={n: [2 * s for s in seconds] for n, seconds in pair.row_s.items()})
    assert slower.share_of_bound == pytest.approx(pair.share_of_bound)
    bound = speedup_bound(pair.spec.stats, relative(pair.row_s))
    assert pair.share_of_bound == pytest.approx(pair.speedup / bound)


def test_a_noisy_machine_gets_no_share_of_the_bound(report: Report) -> None:
    share = median(pair.share_of_bound for pair in report.pairs)
    calm = replace(report, noisy=False)
    assert replace(report, noisy=True).share_of_bound is None
    assert calm.share_of_bound == (pytest.approx(share) if share <= MAX_SHARE else None)
    drifted = [
        replace(pair, row_s={n: [seconds[0] * 10**n] for n, seconds in pair.row_s.items()})
        for pair in calm.pairs
    ]
    assert replace(calm, pairs=drifted).share_of_bound is None, "more than drafting for free"
    assert "reached" not in summary(replace(calm, pairs=drifted))


def test_figures_are_those_of_the_pairs(report: Report) -> None:
    stats = report.figures.stats
    assert stats.n_rounds == sum(pair.spec.stats.n_rounds for pair in report.pairs)
    assert stats.n_accepted == sum(pair.spec.stats.n_accepted for pair in report.pairs)
    assert stats.mean_accepted_length == 1 + stats.n_accepted / stats.n_rounds


def test_coins_stand_in_for_verification_and_nothing_is_compared(model: Model) -> None:
    report = measure(model, PROMPTS, n=60, synthetic_length=2.0)
    assert report.tokens_equal is None and report.to_json()["tokens_equal"] is None
    assert report.figures.stats.mean_accepted_length == pytest.approx(2.0, abs=0.35)  # some 150 rounds
    assert all(len(pair.plain.tokens) == len(pair.spec.tokens) == 60 for pair in report.pairs)


def test_a_budget_shortens_texts_before_it_drops_pairs(model: Model) -> None:
    report = measure(model, PROMPTS, n=400, budget_s=1e-6)
    assert report.n == MIN_TOKENS and len(report.pairs) == 1
    assert any("16 tokens a text instead of 400" in warning for warning in report.warnings)
    assert any("1 pairs instead of 5" in warning for warning in report.warnings)


def test_progress_and_pairs_are_told(model: Model) -> None:
    steps: list[tuple[int, int]] = []
    seen: list[str] = []
    measure(
        model,
        PROMPTS,
        n=8,
        progress=lambda done, total: steps.append((done, total)),
        on_pair=lambda pair: seen.append(pair.prompt.task),
    )
    assert seen == ["code", "prose", "code", "prose", "code"]
    assert steps[-1] == (80, 80) and steps == sorted(steps)


def test_without_a_drafter_there_is_nothing_to_compare(pair_of: PairOf) -> None:
    with (
        load(pair_of("R").main, spec_type="none") as model,
        pytest.raises(LoadError, match="nothing to compare"),
    ):
        measure(model, PROMPTS)


def test_prompts_the_model_cannot_take_are_left_out_and_counted(model: Model) -> None:
    chat = Prompt([{"role": "user", "content": "Hi"}], "chat")
    long = Prompt("x" * 600, "long")
    report = measure(model, [chat, PROMPTS[0], long], n=8)
    assert len(report.warnings) >= 2 and "1 of 3 (the file has no chat template" in report.warnings[0]
    with pytest.raises(PromptError, match="no prompt can be used: the file has no chat template"):
        measure(model, [chat], n=8)


def test_prompts_are_read_from_text_and_from_json_lines(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once\nupon")
    lines = tmp_path / "mine.jsonl"
    lines.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "task": "qa"}\n')
    assert read_prompts(text) == [Prompt("Once\nupon", "story")]
    assert read_prompts(lines) == [Prompt("a", "mine"), Prompt([{"role": "user", "content": "b"}], "qa")]


def test_json_lines_end_where_lines_do_on_every_system(tmp_path: Path) -> None:
    lines = tmp_path / "mine.JSONL"
    lines.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n'.encode())
    assert [prompt.content for prompt in read_prompts(lines)] == ["a\u2028b\u0085c", "d"]


def test_texts_that_fill_the_context_are_refused(model: Model) -> None:
    with pytest.raises(PromptError, match="leave no room for a prompt"):
        measure(model, [Prompt("a", "x")], n=model.n_ctx)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no prompt in it"),
        (b"{", ":1: not JSON"),
        (b"[" * 100_000, ":1: not JSON"),
        (b'{"prompt": "a"}\n{"text": "b"}', ":2: expected"),
        (b'{"prompt": ""}', ":1: expected"),
        (b'{"messages": []}', ":1: expected"),
        (b'{"messages": ["hi"]}', ":1: expected"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)
    with pytest.raises(PromptError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_large_file_is_hashed_at_its_ends_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"head" + bytes(100) + b"tail")
    whole = hash_of(path)
    assert whole == {
        "bytes": 108,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "sha256_of": "whole file",
    }
    ends = hash_of(path, whole_bytes=50, part_bytes=4)
    assert (
        ends["sha256"] == hashlib.sha256(b"headtail").hexdigest() and "first and last 4" in ends["sha256_of"]
    )


@pytest.mark.parametrize("module", [bench, lossless, provenance, prompts, _show], ids=lambda m: m.__name__)
def test_examples_in_docstrings_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_the_machine_has_a_name() -> None:
    assert machine()["cpu"]


def test_widths_are_timed_after_a_text_and_the_session_goes_on(model: Model) -> None:
    with model.session() as session:
        before = session.generate("abc", max_tokens=8, temperature=0)
        before.read()
        for n_rows in (1, 2, 3):
            seconds = session.time_rows([5, 6, 7], n_rows, 40)  # 240 cells in all
            assert len(seconds) == 40 and min(seconds) > 0
        again = session.generate("abc", max_tokens=8, temperature=0)
        again.read()
    assert again.tokens == before.tokens


def test_widths_are_timed_where_texts_are_verified(model: Model) -> None:
    """Also after pace has moved the session to its plain context, where llama.cpp ends the process for a second row."""
    with model.session() as session:
        session.generate("abc", max_tokens=8, temperature=0).read()
        context = make_target_context(model.weights, model.settings, n_ctx=session.n_ctx, depth=0, n_slots=0)
        session._contexts.append(context)
        session._native.set_plain_context(address(context))
        session._native.use_plain(True)
        assert len(session.time_rows([5, 6, 7], 3, 4)) == 4


def test_widths_go_round_when_the_context_ends(model: Model) -> None:
    with model.session(ctx=16) as session:
        assert len(session.time_rows([5, 6, 7], 3, 20)) == 20


def test_the_sweep_finds_every_scripted_text_equal(model: Model) -> None:
    checks = list(sweep(model, model.vocab.tokenize("def f"), depths=(1, 2), n=12))
    assert [(c.depth, c.drafter) for c in checks] == [
        (1, "mix(0)"),
        (1, "mix(1)"),
        (1, "mtp"),
        *((2, name) for name in ("mix(0)", "mix(1)", "mix(2)", "mtp")),
    ]
    assert all(check.divergence is None and check.margin is None for check in checks)


def test_the_margin_is_that_of_the_plain_choice(model: Model) -> None:
    margin = top_two_margin(model, model.vocab.tokenize("def f" * 80))
    assert 0 < margin < 20


def test_where_texts_part_is_found(model: Model) -> None:
    assert first_divergence([], [7]) == 0
    wrong = Scripted(
        [1, 2, 3], 1
    )  # a script of another text: its drafts are wrong, the text is right all the same
    with model.session(scripted=wrong, depth=1) as liar, model.session(spec_type="none") as plain:
        texts = [session.generate("abc", max_tokens=8, temperature=0) for session in (liar, plain)]
        for text in texts:
            text.read()
    assert first_divergence(texts[0].tokens, texts[1].tokens) is None


def test_a_paced_model_is_reported_as_such_and_bounded_at_the_depths_it_had(pair_of: PairOf) -> None:
    with load(pair_of("R").main, ctx=256, threads=1) as model:
        report = measure(model, [Prompt("import os\n", "code")], n=12)
    data = report.to_json()
    assert data["paced"] is True
    assert sum(data["rounds_per_depth"]) > 0
    verified = sum(n * v for n, v in zip(data["rounds_per_depth"], data["v"], strict=False))
    stats = report.figures.stats
    assert data["bound"] == pytest.approx((stats.n_rounds + stats.n_accepted) / verified)
