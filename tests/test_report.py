"""Studies and their reports: parts of a benchmark, the page and the drawing, and what they do with bad files."""

from __future__ import annotations

import copy
import doctest
import json
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from conftest import PairOf

from llama_sidecar.runtime import LoadError, Model, PromptError, load, study
from llama_sidecar.runtime.errors import ReportError
from llama_sidecar.runtime.prompts import Prompt
from llama_sidecar.runtime.report import figure, page
from llama_sidecar.runtime.report.charts import charts
from llama_sidecar.runtime.study import conditional, read_results, run_study, write_text
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.scripts._report import row, study_summary
from llama_sidecar.scripts.bench import BUILT_IN

PROMPTS = [
    Prompt("import os\n", "code"),
    Prompt("Once upon a time", "prose"),
    Prompt('{"a": 1,', "structured"),
]
VOID = {"meta", "link", "br", "path", "use"}


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of("T").main, ctx=256, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def results(model: Model) -> dict[str, Any]:
    return run_study(
        model,
        PROMPTS,
        depths=(0, 2, 1),
        temperatures=(0.0, 0.7),
        n=12,
        budget_s=60.0,
        command="llama-sidecar bench x.gguf --report 'a & b.html'",
    )


@pytest.fixture(scope="module")
def html(results: dict[str, Any]) -> str:
    pytest.importorskip("matplotlib")
    return page(results)


# Measuring


def test_a_study_has_a_part_for_each_depth_and_temperature(results: dict[str, Any]) -> None:
    data = json.loads(json.dumps(results))
    assert data["schema"] == data["study"] == 1 and data["bench"]["paced"] is True
    assert [part["depth"] for part in data["depths"]] == [1, 2]
    assert all(part["paced"] is False and part["tokens_equal"] for part in data["depths"])
    assert [len(part["accepted_per_position"]) for part in data["depths"]] == [1, 2]
    assert [part["temperature"] for part in data["temperatures"]] == [0.0, 0.7]
    assert data["temperatures"][0] == data["bench"], "the run as it is used is at one of them"
    assert all(part["predicted"] > 0 for part in data["depths"])


def test_the_prediction_is_that_of_the_costs_at_the_acceptance_seen(
    results: dict[str, Any], model: Model
) -> None:
    from llama_sidecar.runtime.costs import costs_for

    chances = conditional(results["depths"][1]["accepted_per_position"])
    for part in results["depths"]:
        assert part["predicted"] == pytest.approx(costs_for(model).speedup(chances[: part["depth"]]))


def test_a_study_keeps_to_its_time(model: Model) -> None:
    found = run_study(model, PROMPTS, depths=(1,), n=200, budget_s=0.5)
    assert found["bench"]["n"] < 200 or found["bench"]["n_pairs"] < 5
    assert any("budget" in text for text in found["bench"]["warnings"])


def test_an_interrupted_study_is_what_it_has_until_then(model: Model) -> None:
    def progress(part: str, done: int, total: int) -> None:
        if part == "depth 2":
            raise KeyboardInterrupt

    found = run_study(model, PROMPTS, depths=(1, 2), n=8, budget_s=60.0, progress=progress)
    assert [part["depth"] for part in found["depths"]] == [1] and "interrupted" in found["warnings"][0]
    with pytest.raises(KeyboardInterrupt):
        run_study(
            model, PROMPTS, depths=(2,), n=8, budget_s=60.0, progress=lambda *_: progress("depth 2", 0, 0)
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"depths": (65,)}, LoadError, "depth 65 is not between"),
        ({"temperatures": (-1.0,)}, PromptError, "temperature -1.0 is not between 0 and 10"),
        ({"budget_s": 0.0}, PromptError, "no time at all"),
        ({"depth": 65}, PromptError, "depth 65 is not between 1 and"),
        ({"synthetic_length": 2.0, "depths": (1,)}, PromptError, "coins of one mean .* are for one run"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    model: Model, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_study(model, PROMPTS, **({"budget_s": 9.0} | options))


def test_there_are_prompts_of_every_kind() -> None:
    assert {"code", "prose", "structured", "chat"} == set(BUILT_IN)


# The page


class Checker(HTMLParser):
    """Collects what is wrong with a page that should stand alone."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.wrong: list[str] = []
        self.alts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        for name in ("src", "href", "xlink:href", "action"):
            if (link := values.get(name)) and not link.startswith(("#", "data:")):
                self.wrong.append(f"{tag} {name}={link}")
        if tag == "svg":
            self.alts.append(values.get("aria-label") or "")
            self.wrong += [] if values.get("role") == "img" else ["a drawing without a role"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(f"</{tag}> closes nothing")


def test_the_page_needs_nothing_else_and_says_what_its_charts_show(html: str) -> None:
    checker = Checker()
    checker.feed(html)
    assert not checker.wrong and not checker.open
    assert len(checker.alts) == 5 and all(re.search(r"\d\.\d", alt) for alt in checker.alts)
    assert len(checker.ids) == len(set(checker.ids))
    assert (
        "http:" not in re.sub(r'xmlns[:a-z]*="[^"]*"', "", html)
        and "@import" not in html
        and "url(http" not in html
    )


def test_the_page_has_the_figures_the_machine_and_the_command(html: str, results: dict[str, Any]) -> None:
    main = results["bench"]
    for text in (main["machine"]["cpu"], main["llama_cpp"]["commit"], main["main"]["file"], main["version"]):
        assert text in html
    assert "a &amp; b.html" in html and "prefers-color-scheme: dark" in html
    assert f"{main['speedup']:.2f}" in html and "By depth" in html and "By temperature" in html


def test_colours_are_variables_and_words_are_text(results: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    for chart in charts(results):
        ElementTree.fromstring(chart.svg)
        drawn = re.sub(r"url\(#[^)]*\)|href=\"#[^\"]*\"|id=\"[^\"]*\"", "", chart.svg)
        assert not re.search(r"#[0-9a-f]{6}\b", drawn), (
            f"{chart.title}: a colour that is the same in the dark"
        )
        assert "<text" in chart.svg and 'width="' not in chart.svg.partition(">")[0]


def test_a_page_is_drawn_again_from_itself(html: str, results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    write_text(path, html)
    assert read_results(path) == json.loads(json.dumps(results))
    assert page(read_results(path)) == html


def test_nothing_in_the_results_becomes_markup(results: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    evil = copy.deepcopy(results)
    evil["bench"]["main"]["file"] = "</script><script>alert(1)</script>"
    names = ("<img src=x onerror=alert(1)>", r"$\undefined{", "nul\0 and \x1b[31m")
    evil["bench"]["tasks"] = dict.fromkeys(names, evil["bench"]["tasks"]["code"])
    for chart in charts(evil):
        ElementTree.fromstring(chart.svg)
    ElementTree.fromstring(figure(evil))
    text = page(evil)
    assert "<script>alert" not in text and "<img" not in text


def test_one_run_alone_has_a_page_too(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(results["bench"]))
    alone = read_results(path)
    assert len(charts(alone)) >= 2 and "not in the results" in page(alone)


def test_the_drawing_is_one_file_with_its_own_colours(results: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    svg = figure(results)
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg") and "prefers-color-scheme: dark" in svg and "--paper" in svg


def test_without_matplotlib_it_is_said_how_to_get_it(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ReportError, match=r"pip install 'llama-sidecar\[report\]'"):
        page(results)


# Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", '"schema": 1'),
        (b'{"schema": 2}', '"schema": 1'),
        (b'{"schema": 1}', "'tasks' is missing"),
        (b'{"schema": 1, "study": 1, "bench": []}', "wrong kind"),
        (b'{"schema": 1, "study": 1}', "'bench' is missing"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=message):
        read_results(path)
    with pytest.raises(ReportError, match="No such file"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize(
    "name", ["speedup", "speedup_spread", "round_s", "tasks", "machine", "bound", "n", "main", "drafter"]
)
@pytest.mark.parametrize("value", [None, "x", {}, [1], float("nan"), float("inf"), 10**400])
def test_results_with_a_figure_of_the_wrong_kind_are_refused(
    results: dict[str, Any], tmp_path: Path, name: str, value: object
) -> None:
    if value == {} and name == "tasks":
        pytest.skip("no kinds can be drawn")
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results | {"bench": results["bench"] | {name: value}}))
    with pytest.raises(ReportError, match="expected what bench --json prints"):
        read_results(path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.html"
    write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ReportError, match="cannot be written: No space left"):
        write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ReportError, match="cannot be written"):
        write_text(tmp_path / "none" / "out.html", "new")
    with pytest.raises(ReportError, match="it is there, and no file"):
        write_text("/dev/null", "new")


# The command


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def test_results_are_drawn_and_printed_without_a_model(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    saved = tmp_path / "results.json"
    saved.write_text(json.dumps(results))
    run = bench("--from", saved, "--report", tmp_path / "a.html", "--svg", tmp_path / "a.svg", "--markdown")
    assert run.exit_code == 0, run.output
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>") and (tmp_path / "a.svg").exists()
    assert row(results["bench"]) in run.output
    again = bench("--from", tmp_path / "a.html", "--json")
    assert json.loads(again.stdout) == json.loads(json.dumps(results))
    assert study_summary(results) in bench("--from", saved).output


def test_a_report_is_measured_and_written_by_one_command(pair_of: PairOf, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt.content}) + "\n" for prompt in PROMPTS))
    out = tmp_path / "out.html"
    options = ("--depths", "1,2", "--temps", "0,0.7", "--ctx", 256, "-t", 1, "-n", 12, "--budget", 20)
    run = bench(pair_of("T").main, "--prompts", prompts, "--report", out, "--json", *options)
    assert run.exit_code == 0, run.output
    data = json.loads(run.stdout)
    assert [part["depth"] for part in data["depths"]] == [1, 2] and len(data["temperatures"]) == 2
    assert data == read_results(out)


def test_without_a_model_and_without_results_main_is_missing() -> None:
    run = bench("--depths", "1")
    assert run.exit_code == 2 and "Missing argument 'MAIN'" in run.output


def test_results_and_a_model_at_once_are_refused(tmp_path: Path) -> None:
    run = bench("x.gguf", "--from", tmp_path / "results.json")
    assert run.exit_code == 2 and "leave MAIN out" in run.output


@pytest.mark.parametrize("depths", ["1,x", "-1", "65", ""])
def test_depths_that_are_none_are_refused(depths: str) -> None:
    run = bench("x.gguf", "--depths", depths)
    assert run.exit_code == 2 and "depths, 0 to 64" in run.output


def test_the_row_names_what_others_compare(results: dict[str, Any]) -> None:
    heading, rule, cells = row(results["bench"]).splitlines()
    assert heading.count("|") == rule.count("|") == cells.count("|")
    for text in ("plain tok/s", "speed-up", "bound", results["bench"]["machine"]["cpu"], "equal"):
        assert text in heading + cells


@pytest.mark.parametrize("module", [study], ids=lambda m: m.__name__)
def test_examples_in_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
