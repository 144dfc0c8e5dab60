"""A benchmark in parts: at several depths and temperatures, with what the measured costs predict at each depth.

The parts are runs of bench.py one after another, each within its share of the time there is. What comes out is JSON alone, so that
it can be kept, compared and drawn later (report/). Interrupted after its first part, a study is what it has until then. Knows
nothing of terminals or drawing.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from llama_sidecar.sidecars import whole_file

from .bench import Report, measure
from .costs import Costs, costs_for
from .errors import LoadError, PromptError, ReportError
from .llm import Model
from .prompts import Prompt
from .weights import MAX_DEPTH

SCHEMA = 1
MAIN_SHARE = 0.4  # of the time there is, for the run at the model's own depth and temperature
MAX_TEMPERATURE = 10.0
EMBEDDED = re.compile(r'<script type="application/json" id="results">(.*?)</script>', re.S)

Progress = Callable[[str, int, int], None]


def run_study(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    depths: Sequence[int] = (),
    temperatures: Sequence[float] = (),
    budget_s: float,
    command: str = "",
    progress: Progress = lambda part, done, total: None,
    **options: Any,
) -> dict[str, Any]:
    """Measures a model at its own depth and temperature, then at further ones.

    Args:
        model: with a drafter.
        prompts: as in `measure`.
        depths: drafts in every round, of further runs; 0 is plain decoding, which every run has.
        temperatures: of further runs.
        budget_s: seconds for everything; the first run takes four tenths of it where there are others.
        command: what reproduces this, kept in the result.
        progress: called with what is measured, the tokens done of it and the tokens in all.
        options: as in `measure`.

    Returns:
        `{"schema": 1, "study": 1, "command": ..., "bench": ..., "depths": [...], "temperatures": [...], "warnings": [...]}`; each part
        is what `Report.to_json` gives, those of `depths` with the speed-up that was `predicted`.

    Raises:
        LoadError: nothing drafts for this model, or a depth is more than it can draft; PromptError: as in `measure`.

    Example:
        >>> run_study(model, prompts, depths=(1, 2, 3), budget_s=120.0)["depths"][1]["speedup"]        # doctest: +SKIP
        1.31
    """
    for depth in depths:
        if not 0 <= depth <= min(MAX_DEPTH, model.max_depth):
            raise LoadError(f"depth {depth} is not between 0 and {model.max_depth}, what drafts here allows")
    for temperature in temperatures:
        if not 0 <= temperature <= MAX_TEMPERATURE:
            raise PromptError(f"temperature {temperature} is not between 0 and {MAX_TEMPERATURE:g}")
    if not budget_s > 0:
        raise PromptError(f"a budget of {budget_s} seconds is no time at all")
    own = float(options.get("temperature", 0.0))
    others: list[dict[str, Any]] = [{"depth": depth} for depth in dict.fromkeys(depths) if depth]
    others += [{"temperature": t} for t in dict.fromkeys(temperatures) if t != own]
    if others and options.get("synthetic_length") is not None:
        raise PromptError(
            "coins of one mean accepted length are for one run: leave depths and temperatures out"
        )
    deadline = time.perf_counter() + budget_s
    costs = costs_for(model) if depths and model.kind else None

    def part(name: str, share_s: float, **of_part: Any) -> Report:
        return measure(
            model,
            prompts,
            budget_s=share_s,
            progress=lambda done, total: progress(name, done, total),
            **(options | of_part),
        )

    main = part("as it is used", MAIN_SHARE * budget_s if others else budget_s)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "study": SCHEMA,
        "command": command,
        "bench": main.to_json(),
        "depths": [],
        "temperatures": [],
        "warnings": [],
    }
    reports: list[Report] = []
    try:
        for i, other in enumerate(others):
            ((what, value),) = other.items()
            left_s = (deadline - time.perf_counter()) / (len(others) - i)
            report = part(f"{what} {value:g}", max(1.0, left_s), source=main.source, **other)
            if what == "depth":
                reports.append(report)
            else:
                found["temperatures"].append(report.to_json())
    except KeyboardInterrupt:
        found["warnings"].append("it was interrupted: some parts are missing")
    if temperatures and own in temperatures:
        found["temperatures"].append(found["bench"])
    found["temperatures"].sort(key=lambda part: part["temperature"])
    found["depths"] = list(_with_predictions(reports, costs))
    return found


def _with_predictions(reports: Sequence[Report], costs: Costs | None) -> Iterator[dict[str, Any]]:
    """The runs at each depth, with the speed-up that the costs predict at the acceptance which the deepest of them had."""
    chances = max((conditional(r.figures.stats.accepted_per_position) for r in reports), key=len, default=[])
    for report in sorted(reports, key=lambda report: report.depth):
        depth = report.depth
        covered = costs is not None and depth <= min(costs.max_depth, len(chances))
        predicted = costs.speedup(chances[:depth]) if costs is not None and covered else None
        yield report.to_json() | {"predicted": predicted}


def conditional(accepted: Sequence[float]) -> list[float]:
    """The chance that each draft stands when all before it do, from the share that stood at each position.

    >>> conditional([0.8, 0.4, 0.0, 0.0])
    [0.8, 0.5, 0.0, 0.0]
    """
    return [after / before if before else 0.0 for before, after in pairwise([1.0, *accepted])]


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what `bench --json` printed, or the results inside a report's page; a single run becomes a study of one part.

    Raises:
        ReportError: the file cannot be read, or is neither.

    Example:
        >>> read_results("results.json")["bench"]["speedup"]                    # doctest: +SKIP
        1.31
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if found := EMBEDDED.search(text):
        text = found[1]
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON ({error}); expected what bench --json prints") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ReportError(f'{path}: expected an object with "schema": {SCHEMA}, as bench --json prints it')
    if "study" not in data:
        data = {"schema": SCHEMA, "study": SCHEMA, "bench": data}
    parts: dict[str, Any] = {"command": "", "depths": [], "temperatures": [], "warnings": []}
    whole = data | {name: empty for name, empty in parts.items() if name not in data}
    try:
        _check_texts(whole["warnings"], (whole["command"],))
        for part in (whole["bench"], *whole["depths"], *whole["temperatures"]):
            _check_part(part)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ReportError(
            f"{path}: {error} is missing or of the wrong kind; expected what bench --json prints"
        ) from error
    return whole


def _check_part(part: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError, ValueError or OverflowError for what a report cannot be drawn of."""
    for name in ("tasks", "main", "drafter", "machine", "llama_cpp", "prompts", "round_s"):
        if not isinstance(part[name], dict):
            raise TypeError(repr(name))
    for figures in (part, *part["tasks"].values()):
        names = ("n_pairs", "plain_tok_s", "spec_tok_s", "speedup", "mean_accepted_length")
        low, high = figures["speedup_spread"]
        _check_numbers(figures, names, low, high, *figures["accepted_per_position"])
    _check_numbers(part, ("bound", "depth", "temperature", "c", "row_s", "n", "threads"))
    _check_numbers(part["round_s"], ("draft", "verify", "accept", "rest"))
    _check_numbers(
        {}, (), *(part[name] for name in ("share_of_bound", "predicted") if part.get(name) is not None)
    )
    if apart := part.get("first_divergence"):
        _check_numbers(apart, ("pair", "token"))
    main, drafter, library = part["main"], part["drafter"], part["llama_cpp"]
    _check_texts(part.get("warnings", []), (part["version"], part["backend"], main["file"], main["type"]))
    _check_texts([], (drafter["kind"], part["machine"]["cpu"], library["commit"]))
    if "file" in drafter:
        _check_texts([], (drafter["file"], drafter["type"]))


def _check_numbers(data: Mapping[str, Any], names: Sequence[str], *values: Any) -> None:
    for name, value in [*((name, data[name]) for name in names), *(("a figure", value) for value in values)]:
        if not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise TypeError(repr(name))


def _check_texts(texts: Any, others: Sequence[Any]) -> None:
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in (*texts, *others))):
        raise TypeError("a text")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
        ReportError: it cannot be written.

    Example:
        >>> write_text("out.html", "<!doctype html>")                           # doctest: +SKIP
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ReportError(f"{path} cannot be written: it is there, and no file")
        with whole_file.writing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
