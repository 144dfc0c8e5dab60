"""A benchmark's figures as Markdown, to paste into an issue as they are. No command itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llama_sidecar.runtime.bench import Report
from llama_sidecar.runtime.memory import gigabytes

from ._show import table


def summary(report: Report) -> str:
    """Two tables: everything at once, with model, drafter, task, acceptance and hardware beside the speed-up; each task."""
    columns = ["task", "pairs", "plain tok/s", "speculative tok/s", "speed-up", "L"]
    everything = [*_what_ran(report), *_how_fast(report), *_what_it_costs(report)]
    return f"{table(['', ''], everything)}\n\n{table(columns, _tasks(report))}"


def study_summary(study: Mapping[str, Any]) -> str:
    """The row of the run as it is used, then the speed-ups at each depth and temperature."""
    parts = [row(study["bench"])]
    tasks = study["bench"]["tasks"]
    parts.append(table(["kind of text", *_SPEEDS], [(name, *_speeds(part)) for name, part in tasks.items()]))
    if study["depths"]:
        rows = [
            (str(part["depth"]), *_speeds(part), _two(part.get("predicted")), _two(part["bound"]))
            for part in study["depths"]
        ]
        parts.append(table(["depth", *_SPEEDS, "predicted", "bound"], rows))
    if study["temperatures"]:
        rows = [(f"{part['temperature']:g}", *_speeds(part)) for part in study["temperatures"]]
        parts.append(table(["temperature", *_SPEEDS], rows))
    return "\n\n".join(parts)


_SPEEDS = ("plain tok/s", "speculative tok/s", "speed-up", "L")


def _speeds(part: Mapping[str, Any]) -> tuple[str, ...]:
    speeds = f"{part['plain_tok_s']:.1f}", f"{part['spec_tok_s']:.1f}", f"{part['speedup']:.2f}"
    return *speeds, f"{part['mean_accepted_length']:.2f}"


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def row(data: Mapping[str, Any]) -> str:
    """One run as one row of a table, with its heading: to paste under those of other machines.

    Args:
        data: what `Report.to_json` gives.
    """
    low, high = data["speedup_spread"]
    main, drafter, machine = data["main"], data["drafter"], data["machine"]
    equal = {True: "equal", False: "differ", None: "not compared"}[data.get("tokens_equal")]
    cells = {
        "model": f"{main.get('name') or main['file']} {main['type']}",
        "drafter": f"{drafter['kind']} {drafter['type']}"
        if "file" in drafter
        else f"{drafter['kind']} inside",
        "hardware": f"{machine['cpu']}, {data['threads']} threads",
        "backend": str(data["backend"]),
        "depth": f"auto, at most {data['depth']}" if data.get("paced") else str(data["depth"]),
        "texts": f"{', '.join(data['tasks'])}; {data['n']} tokens, temperature {data['temperature']:g}",
        "plain tok/s": f"{data['plain_tok_s']:.1f}",
        "speculative tok/s": f"{data['spec_tok_s']:.1f}",
        "speed-up": f"**{data['speedup']:.2f}** ({low:.2f} to {high:.2f})",
        "L": f"{data['mean_accepted_length']:.2f}",
        "bound": f"{data['bound']:.2f}",
        "memory for drafts": gigabytes(data["memory"]["drafting"]) if "memory" in data else "",
        "token ids": equal,
        "version": f"{data['version']} (llama.cpp {data['llama_cpp']['commit']})",
    }
    return table(list(cells), [tuple(cells.values())])


def _what_ran(report: Report) -> Iterator[tuple[str, str]]:
    source = report.source
    main, machine, library = source["main"], source["machine"], source["llama_cpp"]
    yield "model", f"{main['file']} ({main['arch']}, {main['type']}, {main['bytes'] / 1e6:,.1f} MB)"
    yield "drafter", f"{_drafter(source['drafter'])}, depth {_depth(report)}"
    cores = f"{machine['n_cores']} cores, {source['threads']} threads"
    yield "hardware", f"{machine['cpu']}, {cores}; {source['backend']}"
    llama_cpp = f"llama-cpp-python {library['llama_cpp_python']} (llama.cpp {library['commit']})"
    yield "software", f"llama-sidecar {source['version']}, {llama_cpp}, {machine['os']}"
    pairs = f"{len(report.pairs)} pairs of {report.n} tokens"
    yield (
        "prompts",
        f"{', '.join(report.tasks)}: {pairs}, {_sampling(report)}, sha256 {report.prompts_sha256[:8]}",
    )


def _how_fast(report: Report) -> Iterator[tuple[str, str]]:
    figures = report.figures
    low, high = figures.speedup_spread
    yield "plain", f"{figures.plain_tok_s:.1f} tok/s"
    yield "speculative", f"{figures.spec_tok_s:.1f} tok/s"
    yield "**speed-up**", f"**{figures.speedup:.2f}** (median; {low:.2f} to {high:.2f})"
    yield "token ids", _equality(report)


def _what_it_costs(report: Report) -> Iterator[tuple[str, str]]:
    figures, n_rows = report.figures, len(report.v)
    stats = figures.stats
    positions = " ".join(f"{share:.2f}" for share in stats.accepted_per_position)
    yield (
        "accepted length",
        f"L = {stats.mean_accepted_length:.2f} tokens a round; right by position: {positions}",
    )
    v = " ".join(f"{value:.2f}" for value in report.v)
    yield "verification", f"v(n) = {v} for n = 1 to {n_rows}; one row takes {1000 * report.one_row_s:.2f} ms"
    yield "draft", f"{1000 * report.draft_step_s:.2f} ms a token, c = {report.c:.2f} rows"
    what = "at the depths chosen, L / v" if report.paced else f"L / v({n_rows})"
    share = "" if report.share_of_bound is None else f"; reached: {100 * report.share_of_bound:.0f} %"
    yield "bound", f"{what} = {report.bound:.2f} with drafts for free{share}"
    parts = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in report.round_s.items())
    yield "a round", f"{parts} ms"
    if (memory := report.source.get("memory")) is not None:
        whole, drafting = gigabytes(memory["total"]), gigabytes(memory["drafting"])
        parts = f"weights {gigabytes(memory['head'])}, keys and values {gigabytes(memory['head_cache'])}"
        yield (
            "memory",
            f"about {whole} with a context of {memory['n_ctx']:,} tokens, {drafting} of it for drafts ({parts}, the rest the target's)",
        )
    if stats.n_ngram_rounds:
        right = 100 * stats.n_ngram_accepted / stats.n_ngram_drafted
        yield (
            "look-up",
            f"{stats.n_ngram_rounds} of {stats.n_rounds} rounds, {right:.0f} % of its tokens accepted",
        )
    if report.coverage is not None:
        yield "coverage", f"{100 * report.coverage:.1f} % of the tokens written are in the draft vocabulary"


def _tasks(report: Report) -> Iterator[tuple[str, ...]]:
    for name, part in report.tasks.items():
        speeds = f"{part.plain_tok_s:.1f}", f"{part.spec_tok_s:.1f}", f"{part.speedup:.2f}"
        yield name, str(part.n_pairs), *speeds, f"{part.stats.mean_accepted_length:.2f}"


def _drafter(drafter: Mapping[str, Any]) -> str:
    if "file" not in drafter:
        return f"{drafter['kind']}, embedded in the model" if drafter["match"] else drafter["kind"]
    return f"{drafter['kind']}, {drafter['file']} ({drafter['type']}, {drafter['bytes'] / 1e6:,.1f} MB, {drafter['match']})"


def _sampling(report: Report) -> str:
    if report.synthetic_length is not None:
        return f"accepted by coin tosses of L = {report.synthetic_length:g}: the text is meaningless"
    parts = ["greedy"]
    if report.temperature:
        parts = [f"temperature {report.temperature:g}", f"seed {report.seed}", f"accepted by {report.accept}"]
    return ", ".join([*parts, *(f"{name} {value}" for name, value in report.shaping.items())])


def _equality(report: Report) -> str:
    apart = report.divergence
    if report.tokens_equal is None:
        return "not compared: coin tosses stand in for verification"
    if apart is None:
        return f"equal in all {len(report.pairs)} pairs"
    margin = "" if apart.margin is None else f", where the two best logits are {apart.margin:.2g} apart"
    return f"first apart at token {apart.token} of pair {apart.pair + 1}{margin}"


def _depth(report: Report) -> str:
    if not report.paced:
        return str(report.depth)
    rounds = report.figures.stats.rounds_per_depth
    chosen = ", ".join(f"{n} at {depth}" for depth, n in enumerate(rounds) if n)
    return f"chosen by pace (rounds: {chosen})"
