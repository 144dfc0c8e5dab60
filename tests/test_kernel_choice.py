"""Which kernels a model gets: what is asked for, or what is faster here, measured once on made-up weights and remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import PairOf
from gguf import GGMLQuantizationType as T

from llama_sidecar.runtime import kernel_choice, kernels, load
from llama_sidecar.runtime.cache_folder import CacheFolder
from llama_sidecar.runtime.costs import costs_key
from llama_sidecar.runtime.errors import LoadError
from llama_sidecar.runtime.kernel_choice import choose, typical_shapes
from llama_sidecar.runtime.provenance import provenance
from llama_sidecar.scripts.inspect import command as inspect_command
from llama_sidecar.sidecars import GGUFHeader, read_model

pytestmark = pytest.mark.skipif(kernels.problem() is not None, reason=str(kernels.problem()))


@pytest.fixture
def header(pair_of: PairOf) -> GGUFHeader:
    return read_model(pair_of("R", "Q8_0").main)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The trials that were run, none of which takes time: ours is twice as fast, but for F32 half as fast."""
    run: list[dict[str, Any]] = []

    def try_out(type: T, *, n_rows: Any, shape: Any, n_bytes: int, **options: Any) -> kernels.Trial:
        run.append({"type": type, "n_rows": n_rows, "shape": shape, **options})
        stock = 0.5 if type == T.F32 else 2.0
        return kernels.Trial(type, shape, n_bytes, n_rows, (1.0,) * len(n_rows), (stock,) * len(n_rows))

    monkeypatch.setattr(kernels, "try_out", try_out)
    yield run


def test_the_faster_is_chosen_by_type(header: GGUFHeader, trials: list[dict[str, Any]]) -> None:
    choice = choose("auto", [header], max_rows=5, threads=2)
    assert choice.ours == {T.Q8_0}
    assert str(choice) == f"ours (2.0 times as fast here; {kernels.kernel_set(T.Q8_0)}: Q8_0)"
    assert trials[0]["type"] == T.Q8_0 and trials[0]["n_rows"] == (1, 5) and trials[0]["threads"] == 2
    assert json.loads(json.dumps(choice.to_json()))["trials"][0]["ours_gains"] == 2.0


def test_it_is_measured_once_for_a_machine_and_its_settings(
    header: GGUFHeader, trials: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose("auto", [header], max_rows=5, threads=2)
    n = len(trials)
    assert choose("auto", [header], max_rows=5, threads=2) == first and len(trials) == n
    assert kernel_choice.recall(header, max_rows=5, threads=2) == first.trials
    assert kernel_choice.recall(header, max_rows=5, threads=3) == ()
    choose("auto", [header], max_rows=4, threads=2)
    choose("auto", [header], max_rows=5, threads=3)
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    choose("auto", [header], max_rows=5, threads=2)
    assert len(trials) == 4 * n


def test_what_is_old_or_damaged_is_measured_anew(header: GGUFHeader, trials: list[dict[str, Any]]) -> None:
    choose("auto", [header], max_rows=1, threads=2)
    n = len(trials)
    (entry,) = CacheFolder().entries()
    os.utime(entry.path, (0, 0))
    choose("auto", [header], max_rows=1, threads=2)
    entry.path.write_text('{"schema": 1, "trials": {"Q8_0": 3}}')
    choose("auto", [header], max_rows=1, threads=2)
    assert len(trials) == 3 * n


def test_where_ours_is_slower_it_is_left(pair_of: PairOf, trials: list[dict[str, Any]]) -> None:
    choice = choose("auto", [read_model(pair_of("R", "F32").main)], max_rows=2, threads=1)
    assert choice.ours == frozenset() and str(choice) == "stock (ours are not clearly faster here)"


@pytest.mark.parametrize(
    ("gains", "ours"),
    [
        ({T.Q8_0: 1.05, T.Q4_0: 1.6}, {T.Q8_0, T.Q4_0}),  # together clearly faster, and none clearly slower
        ({T.Q8_0: 0.8, T.Q4_0: 1.6}, {T.Q4_0}),
        ({T.Q8_0: 1.01, T.Q4_0: 1.1}, set()),
    ],
)
def test_types_are_judged_together_but_one_that_is_slower_is_left(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch, gains: dict[T, float], ours: set[T]
) -> None:
    """A model whose types are all ours has equal rows at every width; a tenth is what trials differ by."""

    def try_out(type: T, *, n_rows: Any, shape: Any, n_bytes: int, **options: Any) -> kernels.Trial:
        return kernels.Trial(type, shape, n_bytes, n_rows, (1.0,) * len(n_rows), (gains[type],) * len(n_rows))

    monkeypatch.setattr(kernels, "try_out", try_out)
    headers = [read_model(pair_of("R", name).main) for name in ("Q8_0", "Q4_0")]
    shapes = [typical_shapes(header) for header in headers]
    monkeypatch.setattr(
        kernel_choice, "typical_shapes", lambda _: {T.Q8_0: shapes[0][T.Q8_0], T.Q4_0: shapes[1][T.Q4_0]}
    )
    assert choose("auto", headers, max_rows=4, threads=2).ours & gains.keys() == ours


def test_on_a_gpu_it_is_stock_and_ours_is_refused(header: GGUFHeader, trials: list[dict[str, Any]]) -> None:
    choice = choose("auto", [header], max_rows=5, threads=2, gpu_layers=3)
    assert str(choice) == "stock (3 layers go to a GPU)" and not trials
    with pytest.raises(LoadError, match=r"cannot be had: 3 layers go to a GPU \(--gpu-layers 0\)"):
        choose("ours", [header], max_rows=5, threads=2, gpu_layers=3)


def test_without_the_device_it_is_stock_with_the_reason(
    header: GGUFHeader, trials: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "problem", lambda: "ggml is 9.9, tested with 0.25.3")
    choice = choose("auto", [header], max_rows=5, threads=2)
    assert str(choice) == "stock (ggml is 9.9, tested with 0.25.3)" and not trials
    with pytest.raises(LoadError, match=r"ggml is 9.9, tested with 0.25.3 \(--kernels stock\)"):
        choose("ours", [header], max_rows=5, threads=2)


def test_ours_is_refused_for_a_file_without_its_types(
    header: GGUFHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "types", lambda: frozenset({T.IQ4_XS}))
    with pytest.raises(LoadError, match=r"none of this file's types \(there are: IQ4_XS; --kernels stock\)"):
        choose("ours", [header], max_rows=5, threads=2)
    assert str(choose("auto", [header], max_rows=5, threads=2)) == "stock (there are none for these types)"


def test_typical_shapes_are_those_of_the_layers(header: GGUFHeader) -> None:
    (n_in, n_out), n_bytes = typical_shapes(header)[T.Q8_0]
    matrices = [t for t in header.tensors.values() if t.type == T.Q8_0 and len(t.shape) > 1]
    n_tokens = len(header.keys["tokenizer.ggml.tokens"])
    shapes = [t.shape[:2] for t in matrices if n_tokens not in t.shape]
    assert (n_in, n_out) in shapes
    assert n_bytes == sum(t.n_bytes for t in matrices)


def test_a_loaded_model_says_what_it_has(pair_of: PairOf) -> None:
    """With a real trial; the choice is part of what costs are kept under, of a figure's provenance and of the stats."""
    made = pair_of("R", "Q8_0")
    keys, choices = set(), set()
    for wanted in ("auto", "ours", "stock"):
        with load(made.main, made.sidecar, depth=2, threads=2, ctx=256, kernels=wanted) as model:
            generation = model.generate("import os", max_tokens=4, temperature=0)
            generation.read()
            assert generation.stats.kernels == str(model.kernels) == provenance(model)["kernels"]["chosen"]
            assert bool(model.kernels.trials) == (wanted == "auto")
            keys.add(costs_key(model))
            choices.add(model.kernels.ours)
    assert len(keys) == len(choices) >= 2  # auto may be either, or some types of each


def test_inspect_shows_what_is_remembered(pair_of: PairOf, trials: list[dict[str, Any]]) -> None:
    path = pair_of("R", "Q8_0").main
    kernel_set = kernels.kernel_set(T.Q8_0)

    def shown(*options: str) -> str:
        result = CliRunner().invoke(inspect_command, [str(path), *options], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    assert json.loads(shown("--json"))["kernels"]["Q8_0"] == {"set": kernel_set, "ours_gains": None}
    from llama_sidecar.runtime.placement import default_threads

    choose("auto", [read_model(path)], max_rows=5, threads=default_threads())
    assert json.loads(shown("--json"))["kernels"]["Q8_0"] == {"set": kernel_set, "ours_gains": 2.0}
    assert f"{kernel_set}, 2.0 times as fast" in shown()


OURS = kernel_choice.Choice(frozenset({T.Q8_0, T.F32}), "test")
STOCK = kernel_choice.Choice(frozenset(), "test")


@pytest.mark.parametrize(
    "wanted, choice, changes, expected",
    [
        ("auto", OURS, {}, "off"),
        ("auto", STOCK, {}, "auto"),
        ("auto", kernel_choice.Choice(frozenset({T.F32}), "a drafter's"), {}, "auto"),
        ("on", OURS, {}, "on"),
        ("off", STOCK, {}, "off"),
        ("auto", OURS, {"cache_type_v": "q8_0"}, "auto"),
        ("auto", OURS, {"cache_type_v": "BF16"}, "off"),
        ("auto", OURS, {"n_ctx": 1 << 22}, "auto"),
    ],
)
def test_flash_attention_is_off_where_our_kernels_compute_everything(
    wanted: str, choice: kernel_choice.Choice, changes: dict[str, Any], expected: str, header: GGUFHeader
) -> None:
    settings = {"n_ctx": 512, "batch": 512, "cache_type_v": "f16"} | changes
    assert kernel_choice.flash_attention(wanted, choice, header, **settings) == expected


def test_text_of_our_kernels_is_equal_at_any_length_as_it_comes(pair_of: PairOf) -> None:
    """Past 256 cells, where llama.cpp's flash attention computes one row otherwise than several."""
    made = pair_of("T", "Q8_0")
    with load(made.main, made.sidecar, kernels="ours", threads=2, ctx=512) as model:
        assert model.settings.flash_attn == "off"
        texts = []
        for depth in (0, 3):
            with model.session(depth=depth) as session:
                generation = session.generate("The quick brown fox " * 15, max_tokens=48, temperature=0)
                generation.read()
                texts.append(generation.tokens)
        assert texts[0] == texts[1]
