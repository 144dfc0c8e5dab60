"""Costs: measured in turns on a simulated machine and on real tiny models, remembered, and shown by `llama-sidecar tune`."""

from __future__ import annotations

import doctest
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import PairOf

from llama_sidecar.runtime import LoadError, PromptError, load
from llama_sidecar.runtime import costs as costs_module
from llama_sidecar.runtime import pace as pace_module
from llama_sidecar.runtime.cache_folder import VARIABLE, CacheFolder
from llama_sidecar.runtime.costs import (
    BUSY_AGE_S,
    MAX_AGE_S,
    Costs,
    _costs,
    _Round,
    _steady,
    calibrate,
    costs_for,
    costs_key,
    recall,
    remember,
    remembered,
)
from llama_sidecar.runtime.pace import Pace
from llama_sidecar.runtime.prompts import Prompt
from llama_sidecar.runtime.tuning import Row, Tuning, tune
from llama_sidecar.scripts.__main__ import cli

TRUE = Costs(  # Q8_0 on 2 cores: the third row is cheap
    plain_s=0.033,
    verify_s=(0.034, 0.068, 0.074, 0.083),
    first_draft_s=0.0024,
    draft_step_s=0.0017,
    catch_up_s=0.0004,
    draft_change_s=0.0003,
    overhead_s=0.0002,
    token_s=0.0001,
    change_s=0.0003,
)
KEY = "0123456789abcdef" * 2


# A machine without a model


class Clock:
    """Time passes as the machine works, `slowness(now)` times slower than on an idle one."""

    def __init__(self, slowness: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now = 0.0
        self._slowness = slowness
        self._rng = random.Random(0)

    def work(self, seconds: float) -> float:
        taken = seconds * self._slowness(self.now) * self._rng.uniform(0.97, 1.03)
        self.now += taken
        return taken


class FakeSession:
    """A session as far as calibration needs one: it writes rounds at the depths it is told, until it is told to stop."""

    n_ctx = 512

    def __init__(self, clock: Clock, true: Costs, depth: int) -> None:
        self._clock, self._true, self.depth = clock, true, depth
        self.pace: Any = None
        self.depths: set[int] = set()

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def time_rows(self, tokens: list[int], n_rows: int, repeats: int) -> list[float]:
        return [self._clock.work(self._true.plain_s) for _ in range(repeats)]

    def generate_synthetic(self, prompt: list[int], *, p_accept: float, max_tokens: int, seed: int) -> Any:
        return SimpleNamespace(read=lambda: self._write(random.Random(seed), p_accept), tokens=[1, 2, 3])

    def cancel(self) -> None:
        self._cancelled = True

    def _write(self, rng: random.Random, p_accept: float) -> None:
        true, self._cancelled = self._true, False
        self._clock.work(true.verify_s[0])  # the prompt
        last_depth, n_stood, n_rows = -1, 0, 0
        while not self._cancelled:
            depth = min(self.pace.depth(), self.depth)
            self.depths.add(depth)
            new_graphs_s = true.change_s if depth != last_depth else 0.0
            n_changes = 0
            for rows in ([1 + n_stood] + [1] * (depth - 1)) * bool(depth):
                n_changes += rows != n_rows
                n_rows = rows
            draft_s = self._clock.work(true.draft_s(depth, n_stood, n_changes))
            verify_s = self._clock.work((true.verify_s[depth] if self.depth else true.plain_s) + new_graphs_s)
            n_stood = 0
            while n_stood < depth and rng.random() < p_accept:
                n_stood += 1
            self._clock.work(true.overhead_s + (1 + n_stood) * true.token_s)
            self.pace.observe(depth, n_stood, draft_s, verify_s)
            last_depth = depth


class FakeModel:
    kind = "mtp"
    drafts_in_one_pass = False
    settings = SimpleNamespace(batch=512, n_threads=2)
    vocab = SimpleNamespace(tokenize=lambda text: list(range(40)))

    def __init__(self, clock: Clock, true: Costs = TRUE) -> None:
        self._clock, self._true, self.depth = clock, true, true.max_depth
        self.sessions: list[FakeSession] = []

    def session(
        self, *, ctx: int, spec_type: str = "auto", depth: int | None = None, **_: object
    ) -> FakeSession:
        depth = 0 if spec_type == "none" else depth or self.depth
        self.sessions.append(FakeSession(self._clock, self._true, depth))
        return self.sessions[-1]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Costs, FakeModel, float]]:
    """Calibrates on a simulated machine: what came out, the model, and the seconds it took."""

    def run(
        true: Costs = TRUE,
        slowness: Callable[[float], float] = lambda now: 1.0,
        budget_s: float = 5.0,
        *,
        in_one_pass: bool = False,
    ) -> tuple[Costs, FakeModel, float]:
        clock = Clock(slowness)
        model: Any = FakeModel(clock, true)
        model.drafts_in_one_pass = in_one_pass
        monkeypatch.setattr("llama_sidecar.runtime.costs.time.perf_counter", lambda: clock.now)
        monkeypatch.setattr(costs_module, "costs_key", lambda model: KEY)
        return calibrate(model, budget_s=budget_s), model, clock.now

    return run


def shares(costs: Costs) -> list[float]:
    """Every part over a plain row: what pace goes by."""
    parts = (*costs.verify_s, costs.draft_s(1, 1), costs.draft_s(costs.max_depth, 1, 2))
    return [part / costs.plain_s for part in parts]


def scaled(costs: Costs, factor: float) -> Costs:
    return replace(
        costs,
        plain_s=costs.plain_s * factor,
        verify_s=tuple(s * factor for s in costs.verify_s),
        first_draft_s=costs.first_draft_s * factor,
        draft_step_s=costs.draft_step_s * factor,
        catch_up_s=costs.catch_up_s * factor,
        draft_change_s=costs.draft_change_s * factor,
    )


# Measuring


def test_a_block_of_drafts_costs_one_decode_at_any_depth(measured: Any) -> None:
    """DFlash and DSpark: a further draft costs next to nothing, which a drafter of single steps is not believed."""
    block = replace(TRUE, first_draft_s=0.010, draft_step_s=0.0002, catch_up_s=0.0)
    costs, _, _ = measured(block, in_one_pass=True)
    assert costs.draft_s(3) == pytest.approx(block.draft_s(3), rel=0.1)
    steps, _, _ = measured(block)
    assert steps.draft_s(3) > 1.3 * block.draft_s(3)


def test_calibration_finds_the_costs_within_its_budget(measured: Any) -> None:
    costs, _, took_s = measured()
    assert took_s < 5
    assert costs.plain_s == pytest.approx(TRUE.plain_s, rel=0.02)
    assert shares(costs) == pytest.approx(shares(TRUE), rel=0.03)
    assert costs.draft_step_s == pytest.approx(TRUE.draft_step_s, rel=0.1)
    assert costs.catch_up_s == pytest.approx(TRUE.catch_up_s, rel=0.3)
    assert costs.draft_change_s == pytest.approx(TRUE.draft_change_s, rel=0.3)
    assert costs.overhead_s + costs.token_s == pytest.approx(TRUE.overhead_s + TRUE.token_s, rel=0.05)
    assert (costs.n_threads, costs.key, costs.max_depth) == (2, KEY, 3)


@pytest.mark.parametrize(
    "slowness",
    [
        lambda now: 1 + now / 20,
        lambda now: 3.0 if now > 1.5 else 1.0,
        lambda now: 3.0 if now < 3.5 else 1.0,
        lambda now: 2.5 if now % 2 < 0.7 else 1.0,
        lambda now: 2.0,
    ],
    ids=["drift", "busy at the end", "busy at the start", "now and then", "all the time"],
)
def test_contention_and_drift_are_not_taken_for_cost(
    measured: Any, slowness: Callable[[float], float]
) -> None:
    costs, _, _ = measured(slowness=slowness)
    assert shares(costs) == pytest.approx(shares(TRUE), rel=0.1)


def test_a_machine_that_is_slow_for_seconds_is_levelled_out(measured: Any) -> None:
    """A model of a third of a millisecond a row, on a host that gives half of its speed for a tenth of a second, again and again."""
    true = scaled(TRUE, 0.01)
    for at in range(8):
        costs, _, _ = measured(true, slowness=lambda now, at=at: 1.8 if (now + at / 40) % 0.2 < 0.1 else 1.0)
        assert shares(costs) == pytest.approx(shares(true), rel=0.04)


@pytest.mark.parametrize("slow", [{1, 2}, {0, 3}, {2, 3}])
def test_shapes_of_which_half_was_slow_are_levelled_out(slow: set[int]) -> None:
    """Medians alone would halve the difference between these and the others."""
    seconds = {0: 1.0, 1: 1.3, 2: 1.6, 3: 2.0}
    turns = []
    for turn in range(2):
        rounds = []
        for depth in (3, 1, 2, 0):
            slowness = 3.0 if turn and depth in slow else 1.0
            verify_s = seconds[depth] * slowness
            same = _Round(False, depth, 0, 0, 1, 0.1 * depth * slowness, verify_s, 0.0)
            rounds += [replace(same, changed=True), *[same] * 6]
        turns.append(([_Round(False, 0, 0, 0, 1, 0.0, 0.9, 0.0)] * 6, rounds))
    costs = _costs(*_steady(turns), 3)
    assert [s / costs.plain_s for s in costs.verify_s] == pytest.approx(
        [s / 0.9 for s in seconds.values()], rel=0.02
    )


@pytest.mark.parametrize("factor", [1.5, 2.5, 5])
def test_no_calibration_takes_longer_than_promised(measured: Any, factor: float) -> None:
    """Five seconds, for rows of up to 0.17 s."""
    assert measured(scaled(TRUE, factor))[2] < 5


def test_a_small_model_is_measured_in_less(measured: Any) -> None:
    assert measured(scaled(TRUE, 0.01))[2] < 0.5


def test_a_model_too_large_for_the_budget_is_measured_where_it_matters(measured: Any) -> None:
    """Half a second a row: only plain rows, the greatest depth and one draft; the widths between lie between."""
    true = scaled(TRUE, 15)
    costs, model, took_s = measured(true, budget_s=2.0)
    assert model.sessions[1].depths == {1, 3}
    assert took_s < 11 * true.plain_s
    assert costs.verify_s[3] == pytest.approx(true.verify_s[3], rel=0.05)
    assert list(costs.verify_s) == sorted(costs.verify_s)
    assert costs.draft_s(3, 1) == pytest.approx(true.draft_s(3, 1), rel=0.1)


def test_one_draft_is_the_smallest_depth(measured: Any) -> None:
    true = replace(TRUE, verify_s=TRUE.verify_s[:2])
    assert shares(measured(true)[0]) == pytest.approx(shares(true), rel=0.04)


def test_of_many_depths_some_are_measured(measured: Any) -> None:
    true = replace(TRUE, verify_s=tuple(0.034 + 0.001 * n for n in range(65)))
    costs, model, took_s = measured(true)
    assert len(model.sessions[1].depths) in (9, 10) and took_s < 5
    assert costs.verify_s == pytest.approx(true.verify_s, rel=0.1)


def test_what_a_change_of_depth_costs_is_not_part_of_a_round(measured: Any) -> None:
    true = replace(scaled(TRUE, 0.03), change_s=0.0003, overhead_s=0.00005, token_s=0.00001)
    costs, _, _ = measured(true)
    assert costs.change_s == pytest.approx(true.change_s, rel=0.1)
    assert shares(costs) == pytest.approx(shares(true), rel=0.04)


# Remembering


def test_costs_survive_json() -> None:
    costs = replace(TRUE, n_threads=4, key=KEY)
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"plain_s": 0},
        {"plain_s": "nan"},
        {"verify_s": [1.0]},
        {"verify_s": 1.0},
        {"verify_s": [1.0, -1.0]},
        {"n_threads": None},
        {"key": ...},
    ],
    ids=str,
)
def test_what_are_no_costs_is_refused(change: dict[str, object]) -> None:
    data = replace(TRUE, key=KEY).to_json() | change
    with pytest.raises(ValueError):
        Costs.from_json({name: value for name, value in data.items() if value is not ...})


@pytest.mark.parametrize("data", [[], None, "text", {}])
def test_what_is_no_object_of_costs_is_refused(data: object) -> None:
    with pytest.raises(ValueError):
        Costs.from_json(data)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of TRUE under KEY, in a cache folder of its own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    assert recall(KEY) is None
    remember(replace(TRUE, key=KEY))
    return CacheFolder().path("costs", f"{KEY}.json")


def test_costs_are_recalled_by_their_key_alone(kept: Path) -> None:
    assert recall(KEY) == replace(TRUE, key=KEY)
    assert recall("f" * 32) is None
    kept.rename(kept.with_name(f"{'f' * 32}.json"))
    assert recall("f" * 32) is None, "another machine's file under this name"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": 3}', None])
def test_a_damaged_file_is_no_memory(kept: Path, content: bytes | None) -> None:
    kept.write_bytes(kept.read_bytes()[:-20] if content is None else content)
    assert recall(KEY) is None


def test_costs_of_a_busy_machine_are_soon_measured_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(replace(TRUE, key=KEY, calm=False))
    assert recall(KEY) == replace(TRUE, key=KEY, calm=False)
    old = kept.stat().st_mtime - BUSY_AGE_S - 1
    os.utime(kept, (old, old))
    assert recall(KEY) is None


@pytest.mark.parametrize("share, calm", [(0.02, True), (0.35, False)])
def test_a_busy_machine_is_noticed(
    measured: Any, monkeypatch: pytest.MonkeyPatch, share: float, calm: bool
) -> None:
    """By how long the thread that measures had to wait for others."""
    monkeypatch.setattr(costs_module, "_waited_s", lambda: share * costs_module.time.perf_counter())
    assert measured()[0].calm is calm


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="Linux with scheduler statistics"
)
def test_the_time_spent_waiting_for_a_processor_is_counted() -> None:
    """Beside a busy loop on the same processor."""
    code = """
import os, time
from llama_sidecar.runtime.costs import _waited_s
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
loop = os.fork()
if loop == 0:
    while True: pass
started, waited = time.perf_counter(), _waited_s()
while time.perf_counter() - started < 0.5: pass
print(_waited_s() - waited)
os.kill(loop, 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert 0.1 < float(done.stdout) < 0.5


def test_old_costs_are_measured_again(kept: Path) -> None:
    old = kept.stat().st_mtime - MAX_AGE_S - 1
    os.utime(kept, (old, old))
    assert recall(KEY) is None


# On real models


def test_a_real_model_is_measured_once_and_pace_can_use_it(
    pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3) as model:
        costs = costs_for(model, budget_s=0.5)
        assert costs.max_depth == 3 and costs.n_threads == 1
        assert 0 <= Pace(costs).depth() <= 3
        monkeypatch.setattr(costs_module, "calibrate", None)
        assert costs_for(model) == costs
    for batch, n_drafts in ((1, None), (3, 2)):
        with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=3, batch=batch) as narrow:
            found = remembered(narrow)
            assert n_drafts == (found and found.max_depth)


def test_without_a_cache_folder_costs_are_measured_each_time(
    pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "a file"))
    with load(pair_of("T").main, ctx=256, threads=1) as model:
        assert costs_for(model, budget_s=0.1).plain_s > 0


def test_the_key_is_that_of_shapes_types_and_settings(
    pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(letter: str = "R", type: str = "Q8_0", seed: int = 0, **options: Any) -> str:
        with load(pair_of(letter, type, seed).main, ctx=256, **({"threads": 1} | options)) as model:
            return costs_key(model)

    same = key()
    assert same == key() == key(seed=1) and len(same) == 32
    others = [key("T"), key(type="F32"), key(threads=2), key(cache_type_k="q8_0")]
    monkeypatch.setenv("GOMP_SPINCOUNT", "1234")
    assert len({same, *others, key()}) == 6
    assert key() == key(depth=1), "costs of a greater depth serve a smaller one"


def test_costs_of_greater_depths_serve_smaller_ones(
    pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune --depth 6` is for runs without --depth as well; how many slots it had is known on."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    main = pair_of("R", "Q8_0").main
    with load(main, ctx=256, threads=1, depth=3) as model:
        assert remembered(model) is None
        costs = replace(TRUE, key=costs_key(model))
        remember(costs)
        assert remembered(model) == costs == costs_for(model)
    with load(main, ctx=256, threads=1, depth=2) as model:
        assert costs_for(model) == replace(costs, verify_s=TRUE.verify_s[:3], n_slots=3)
    with load(main, ctx=256, threads=1, depth=4) as model:
        assert remembered(model) is None


def test_a_model_without_a_drafter_has_no_costs(pair_of: PairOf) -> None:
    with load(pair_of("R").main, spec_type="none") as model, pytest.raises(LoadError, match="no draft"):
        costs_for(model)


# Tuning


def tuning(*speedups: float) -> Tuning:
    rows = [Row(depth, 30 * s, 30 * s, s) for depth, s in enumerate(speedups)]
    return Tuning(TRUE, rows, [0.5] * 3, [Prompt("text", "code")], 16, 0.0, True, {})


def test_the_verdict_may_be_to_leave_it_off() -> None:
    off = tuning(1.0, 0.8, 1.01, 0.99)
    assert off.best_depth == 0 and "leave it off" in off.verdict
    assert [off.verdict_on(depth) for depth in range(4)] == [
        "best",
        "slower than plain",
        "as good",
        "as good",
    ]
    on = tuning(1.0, 0.8, 1.4, 1.39)
    assert on.best_depth == 2 and "1.40 times" in on.verdict
    assert [on.verdict_on(depth) for depth in range(4)] == [
        *("slower than the best", "slower than plain", "best", "as good")
    ]


def test_tune_measures_every_depth_and_remembers_the_costs(pair_of: PairOf) -> None:
    with load(pair_of("R", "Q8_0").main, ctx=256, threads=1, depth=2) as model:
        chat = Prompt([{"role": "user", "content": "Hi"}], "chat")
        prompts = [Prompt("x" * 250, "code"), chat, Prompt("def f", "code")]
        found = tune(model, prompts, n=8, budget_s=1.0)
        assert [row.depth for row in found.rows] == [0, 1, 2] and found.rows[0].speedup == 1
        assert [prompt.content for prompt in found.prompts] == ["def f"], "too long; no template"
        assert recall(costs_key(model)) == found.costs
        with pytest.raises(PromptError, match="too few"):
            tune(model, [Prompt("def f", "code")], n=1)
        with pytest.raises(PromptError, match="no prompt can be used: 300 tokens"):
            tune(model, [Prompt("x" * 300, "code")], n=8, budget_s=0.1)


def test_the_command_prints_a_table_or_json(pair_of: PairOf, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("import os\n")
    arguments = ["tune", str(pair_of("R", "Q8_0").main), "--prompts", str(prompts), "-n", "8", "--depth", "2"]
    arguments += ["--budget", "1", "--ctx", "256", "-t", "1"]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    assert "| 0 (plain) |" in shown.output and ("leave it off" in shown.output or "times" in shown.output)
    data = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert data["schema"] == 1 and data["remembered"] is True and len(data["depths"]) == 3
    assert {"depth", "predicted_tok_s", "measured_tok_s", "speedup", "verdict"} == set(data["depths"][1])
    assert Costs.from_json(data["costs"]).max_depth == 2


@pytest.mark.parametrize("module", [costs_module, pace_module], ids=lambda m: m.__name__)
def test_examples_in_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
