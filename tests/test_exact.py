"""Exact decoding: which numbers of rows agree is measured, and with those token ids and states are plain's by construction."""

from __future__ import annotations

import doctest
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import drafts
import pytest
from click.testing import CliRunner
from conftest import PairOf
from gguf import GGMLQuantizationType as T

from llama_sidecar.converter import convert
from llama_sidecar.runtime import LoadError, Model, PromptError, Scripted, exactness, kernels, load
from llama_sidecar.runtime.cache_folder import CacheFolder
from llama_sidecar.runtime.exactness import Exactness, exactness_for, measure, remembered
from llama_sidecar.scripts.bench import command as bench_command
from llama_sidecar.scripts.inspect import command as inspect_command
from llama_sidecar.scripts.run import command as run_command

DEMO = Path(__file__).resolve().parents[1] / "sidecars" / "demo"
PROMPT = list(b"hello world, this is where it starts")
KERNELS = [
    "stock",
    pytest.param("ours", marks=pytest.mark.skipif(kernels.problem() is not None, reason="none")),
]
ANY = Exactness(short=((1, 2, 3, 4, 5, 6, 7, 8),), long=((1, 2, 3, 4, 5, 6, 7, 8),))


def written(
    model: Model, prompt: list[int], n: int, depth: int | None, **options: object
) -> tuple[list[int], bytes]:
    """Greedy ids and the state they leave; `depth` None is plain."""
    how = {"spec_type": "none"} if depth is None else {"depth": depth, **options}
    with model.session(**how) as session:  # type: ignore[arg-type]
        text = session.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
        text.read()
        return text.tokens, session._native.state()


def assert_exact(model: Model, prompts: list[list[int]], n: int, depth: int = 3) -> None:
    """The model's own drafter, and drafters that are right for the first 0 .. depth tokens."""
    for prompt in prompts:
        plain = written(model, prompt, n, None)
        for n_right in range(depth + 1):
            scripted = Scripted([*prompt, *plain[0]], n_right)
            assert written(model, prompt, n, depth, scripted=scripted) == plain
        if model.kind:
            assert written(model, prompt, n, depth) == plain


# That it holds


@pytest.fixture(scope="module", params=["BF16", "Q8_0", "Q4_0", "Q4_K_M"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    main = convert(DEMO, tmp_path_factory.mktemp("demo"), request.param).main
    assert main is not None
    return main


def demo_prompts(n: int) -> list[str]:
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:n]]


@pytest.mark.parametrize("how", KERNELS)
def test_texts_of_the_demo_are_plains_across_256_cells(demo: Path, how: str) -> None:
    """llama.cpp's own kernels differ between widths here: BF16's at any length, all with flash attention beyond 256 cells."""
    with load(demo, kernels=how, exact=True, threads=2, ctx=1024) as model:
        texts = [model.vocab.tokenize(text) for text in demo_prompts(30)]
        across = [*itertools.chain(*texts)][:230]
        assert_exact(model, [texts[0], across], 64)


@pytest.mark.parametrize("how", KERNELS)
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", [*drafts.TARGETS, "glm4moe"])
def test_texts_are_plains_on_every_architecture(
    arch: str, type: str, how: str, tmp_path: Path, pair_of: PairOf
) -> None:
    main = pair_of("T", type).main if arch == "glm4moe" else drafts.write_target(tmp_path, arch, T[type])
    with load(main, kernels=how, exact=True, threads=2, ctx=512) as model:
        assert_exact(model, [PROMPT, PROMPT[:1], (PROMPT * 7)[:230]], 40)


def test_without_it_texts_part_here_and_with_it_they_do_not(tmp_path: Path) -> None:
    """One row of BF16 is summed otherwise than several: on random weights most texts part, sooner or later."""
    if kernels.problem() is not None:
        pytest.skip("the kernels of llama.cpp may be others here")
    n_apart = {True: 0, False: 0}
    main = drafts.write_target(tmp_path, "llama", T.BF16)
    for exact in n_apart:
        with load(main, kernels="stock", exact=exact, threads=2, ctx=256) as model:
            for i in range(12):
                prompt = list(bytes([i + 65]) * 3)
                plain = written(model, prompt, 100, None)[0]
                found = written(model, prompt, 100, 3, scripted=Scripted([*prompt, *plain], 3))[0]
                n_apart[exact] += found != plain
    assert n_apart[True] == 0 < n_apart[False]


def test_seeded_texts_and_continued_ones_are_plains_too(pair_of: PairOf) -> None:
    with load(pair_of("R", "BF16").main, kernels="stock", exact=True, threads=2, ctx=512, depth=3) as model:
        texts = []
        for spec_type in ("none", "auto"):
            with model.session(spec_type=spec_type) as session:
                first = session.generate(PROMPT, max_tokens=30, temperature=0.9, seed=3, ignore_eos=True)
                first.read()
                longer = [*PROMPT, *first.tokens, *b" and on"]
                second = session.generate(longer, max_tokens=30, temperature=0, ignore_eos=True)
                second.read()
                assert second.stats.n_reused == len(PROMPT) + 29
                texts.append((first.tokens, second.tokens, session._native.state()))
        assert texts[0] == texts[1]


def test_the_rule_of_acceptance_is_match(pair_of: PairOf) -> None:
    options = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    with load(pair_of("R", "Q8_0").main, exact=True, ctx=256, depth=3) as model, model.session() as session:
        text = session.generate(PROMPT, **options)  # type: ignore[arg-type]
        text.read()
        assert text.stats.accept == "match"
        with pytest.raises(PromptError, match="reject"):
            session.generate(PROMPT, accept="reject", seed=1, **options)  # type: ignore[arg-type]


# How rounds are filled up


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, pair_of: PairOf) -> Iterator[object]:
    """A model of which only some widths are said to agree."""
    loaded: list[Model] = []

    def load_with(*groups: tuple[int, ...], letter: str = "R", **options: object) -> Model:
        found = Exactness(short=groups, long=groups)
        monkeypatch.setattr("llama_sidecar.runtime.llm.exactness_for", lambda model: found)
        how = {"ctx": 256, "threads": 1, "depth": 3, "kernels": "stock", **options}
        loaded.append(load(pair_of(letter, "Q8_0").main, exact=True, **how))  # type: ignore[arg-type]
        return loaded[-1]

    yield load_with
    for model in loaded:
        model.close()


@pytest.mark.parametrize("letter", ["T", "R"])
@pytest.mark.parametrize(
    "groups", [((1, 2, 3, 4),), ((1,), (2, 3)), ((1,), (4, 8)), ((2, 4), (1, 3)), ((3,),)]
)
def test_any_set_of_widths_gives_the_text_and_the_state(only: object, letter: str, groups: object) -> None:
    """Q8_0's rows are equal to the bit at any width, so that a row too many that was left standing would show."""
    model = only(*groups, letter=letter)  # type: ignore[operator]
    with load(model.main.path, ctx=256, threads=1, spec_type="none", kernels="stock") as free:
        expected = written(free, PROMPT, 48, None)
    assert written(model, PROMPT, 48, None) == expected
    assert_exact(model, [PROMPT], 48)


def test_rounds_have_the_widths_that_agree_and_no_others(
    only: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = only((1,), (2, 4))  # type: ignore[operator]
    assert model.depth == 3 and model.widths(256) == (2, 4)
    with model.session(spec_type="none") as plain, model.session(depth=2) as shallow, model.session() as deep:
        assert (plain.widths, shallow.widths, deep.widths) == ((2,), (2,), (2, 4))
        for session, most in ((plain, 0), (shallow, 1), (deep, 3)):
            text = session.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
            text.read()
            assert text.stats.widths == session.widths
            assert max(i for i, n in enumerate(text.stats.rounds_per_depth) if n) == most


def test_the_end_of_the_context_leaves_room_for_the_rows_that_fill_up(only: object) -> None:
    model = only((3, 4))  # type: ignore[operator]
    prompt = (PROMPT * 8)[:250]
    plain = written(model, prompt, 64, None)
    assert len(plain[0]) == 256 - 250 + 1 - 2
    assert written(model, prompt, 64, 3) == plain
    with model.session() as session, pytest.raises(PromptError, match="255 tokens, the context holds 254"):
        session.generate((PROMPT * 8)[:255])


def test_pace_decides_within_the_widths(only: object) -> None:
    model = only((1,), (2, 3, 4), depth="auto")  # type: ignore[operator]
    with model.session() as session:
        text = session.generate(PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
        text.read()
    assert text.tokens == written(model, PROMPT, 60, None)[0]


@pytest.mark.parametrize(
    ("groups", "batch", "advice"),
    [
        (((1,),), 512, "--kernels ours"),
        ((), 512, "--kernels ours"),
        (((1,), (4, 8)), 3, "at most 3: raise --batch"),
        (((1, 2),), 1, "at most 1: raise --batch"),
    ],
)
def test_where_nothing_agrees_it_is_refused(only: object, groups: object, batch: int, advice: str) -> None:
    with pytest.raises(LoadError, match=rf"exact decoding cannot be had: .*{advice}.* leave --exact out"):
        only(*groups, batch=batch)  # type: ignore[operator]


def test_too_few_rollback_slots_are_refused(only: object) -> None:
    model = only((2, 3, 4))  # type: ignore[operator]
    with model.session(depth=3, n_slots=1) as session:
        assert session.widths == (2,)
    with pytest.raises(LoadError, match="more rollback slots than 0"):
        model.session(depth=3, n_slots=0)


# What is measured


def test_widths_of_llama_cpp_differ_where_they_are_known_to(tmp_path: Path) -> None:
    """One row of BF16 differs from several; flash attention splits one row's sums beyond 256 cells and two threads."""
    if kernels.problem() is not None:
        pytest.skip("the kernels of llama.cpp may be others here")
    main = drafts.write_target(tmp_path, "llama", T.BF16)
    with load(main, kernels="stock", threads=2, flash_attn="on") as model:
        assert measure(model).short == ((1,), (2, 3, 4, 5, 6, 7, 8))
    main = drafts.write_target(tmp_path / "other", "llama", T.Q8_0)
    with load(main, kernels="stock", threads=2, flash_attn="on") as model:
        found = measure(model)
        assert found.short == ANY.short and found.long == ((1,), (2, 3, 4, 5, 6, 7, 8))
    with load(main, kernels="ours", threads=2) as model:
        assert measure(model).long == ANY.long


def test_differences_that_logits_swallow_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flash attention one row's products with F16 keys are summed otherwise than several rows'; a product with Q8_0
    weights rounds its input to 8 bits, so that this reaches the logits of one token in hundreds."""
    if kernels.problem() is not None:
        pytest.skip("the kernels of llama.cpp may be others here")
    main = drafts.write_target(tmp_path, "llama", T.Q8_0)
    monkeypatch.setattr(exactness, "N_PASSES", 1)
    with load(main, kernels="stock", threads=1, flash_attn="off") as model:
        assert measure(model).short == ((1,), (2, 3, 4, 5, 6, 7, 8))


def test_it_is_measured_once_and_then_remembered(pair_of: PairOf, monkeypatch: pytest.MonkeyPatch) -> None:
    CacheFolder().clear()
    main = pair_of("R", "Q8_0").main
    with load(main, ctx=256, threads=1, kernels="stock") as model:
        assert model.exactness is None and model.widths(256) == ()
    with load(main, ctx=256, threads=1, kernels="stock", exact=True) as model:
        found = model.exactness
        assert found is not None and remembered(model) == found
    monkeypatch.setattr(exactness, "measure", lambda model: pytest.fail("measured again"))
    with load(main, ctx=256, threads=1, kernels="stock") as model:
        assert model.exactness == found and model.widths(256) == ()
    with load(main, ctx=256, threads=1, kernels="stock", exact=True) as model:
        assert exactness_for(model) == found
    others: list[dict[str, object]] = [{"threads": 2}, {"flash_attn": "on"}, {"cache_type_k": "f32"}]
    if kernels.problem() is None:
        others.append({"kernels": "ours"})
    for other in others:
        with load(main, **{"ctx": 256, "threads": 1, "kernels": "stock", **other}) as model:  # type: ignore[arg-type]
            assert remembered(model) is None, other


def test_a_damaged_file_or_an_old_one_is_no_memory(pair_of: PairOf) -> None:
    CacheFolder().clear()
    with load(pair_of("T", "Q8_0").main, ctx=256, threads=1, exact=True) as model:
        (path,) = (CacheFolder().root / "exactness").iterdir()
        whole = path.read_bytes()
        for content in (
            b"",
            b"{",
            b"[]",
            b'{"schema": 0}',
            whole.replace(b"8", b"9"),
            whole.replace(b"1", b"[]"),
            whole.replace(b"8", b"1e999"),
            b"[" * 100_000,
        ):
            path.write_bytes(content)
            assert remembered(model) is None, content
        path.write_bytes(whole)
        assert remembered(model) is not None
        os.utime(path, (0, time.time() - 8 * 24 * 3600))
        assert remembered(model) is None


def test_groups() -> None:
    found = Exactness(short=((1, 2),), long=((1,), (3, 4), (2, 8)))
    assert [found.widths(n) for n in (1, 256, 257)] == [(1, 2), (1, 2), (2, 8)]
    assert Exactness(short=((1,),), long=()).widths(256) == ()
    assert Exactness.from_json(json.loads(json.dumps(found.to_json()))) == found
    sums = exactness._Sums()
    for place, width in itertools.product((240, 264), (1, 2, 3)):
        sums.add(width, (place, 0, 0), {"logits": 1, "a": place * (width == 1 and place == 264)})
    assert sums.groups([240]) == ((1, 2, 3),) and sums.groups([240, 264]) == ((1,), (2, 3))


def test_examples() -> None:
    assert doctest.testmod(exactness).failed == 0


# The commands


def test_commands_take_it_and_say_what_it_does(pair_of: PairOf) -> None:
    CacheFolder().clear()
    main = str(pair_of("R", "BF16").main)
    options = [main, "-c", "256", "-t", "2", "--kernels", "stock", "--exact"]
    result = CliRunner().invoke(run_command, [*options, "-p", "hello", "-n", "8", "--json"])
    assert json.loads(result.stdout)["stats"]["widths"] == [2, 3, 4, 5]
    assert "measuring how many rows agree" in result.stderr
    assert "every decode has 2 or 3 or 4 or 5 or 6 or 7 or 8 rows, plain rounds too" in result.stderr
    result = CliRunner().invoke(
        bench_command, [*options, "-n", "8", "--depth", "2", "--budget", "5", "--json"]
    )
    report = json.loads(result.stdout)
    assert report["exact"] and report["exactness"]["short"] == [[1], [2, 3, 4, 5, 6, 7, 8]]
    assert report["tokens_equal"] and any("plain rounds have 2 rows" in text for text in report["warnings"])


def test_inspect_tells_what_was_measured_and_measures_nothing(pair_of: PairOf) -> None:
    CacheFolder().clear()
    main = pair_of("R", "Q8_0").main
    result = CliRunner().invoke(inspect_command, [str(main), "--json"])
    assert json.loads(result.output)["exactness"] == []
    for threads in (1, 2):
        with load(main, ctx=256, threads=threads, exact=True) as model:
            assert model.exactness
    result = CliRunner().invoke(inspect_command, [str(main), "--json"])
    assert len(json.loads(result.output)["exactness"]) == 2
    shown = CliRunner().invoke(inspect_command, [str(main)], env={"COLUMNS": "200"}).output
    assert shown.count("equal rows here") == 2 and "1 2 3 4 5 6 7 8" in shown
    sidecar = CliRunner().invoke(inspect_command, [str(pair_of("R", "Q8_0").sidecar), "--json"])
    assert json.loads(sidecar.output)["exactness"] == []
