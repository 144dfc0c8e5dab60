"""How commands show things: notes, streamed text, what a generation cost, a benchmark as Markdown. No command itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import click

from llama_sidecar.runtime import Generation, Stats
from llama_sidecar.runtime.bench import Report


def note(text: str) -> None:
    """One line on stderr that is no error."""
    click.echo(f"note: {text}", err=True)


def stream(generation: Generation) -> None:
    """Writes the text to stdout as it comes, and ends the line."""
    for piece in generation:
        click.echo(piece, nl=False)
    if not generation.text.endswith("\n"):
        click.echo()


def generation_json(generation: Generation) -> str:
    """The finished generation as one JSON object."""
    return json.dumps(
        {
            "schema": 1,
            "text": generation.text,
            "tokens": generation.tokens,
            "finish_reason": generation.finish_reason,
            "stats": generation.stats.to_json(),
        }
    )


def stats_line(generation: Generation) -> str:
    """What a generation did and cost, in one line; why, where nothing drafted.

    `128 tokens, 34.5 tok/s | mtp depth 3: 78% accepted (91 80 62), L 3.3 | prompt 12 tokens in 0.05 s`
    """
    stats = generation.stats
    parts = [f"{stats.n_tokens} tokens, {stats.tok_s:.1f} tok/s", _drafting(stats)]
    reused = f" ({stats.n_reused} held)" if stats.n_reused else ""
    parts.append(f"prompt {stats.n_prompt} tokens{reused} in {stats.prompt_s:.2f} s")
    if generation.finish_reason in ("length", "cancelled"):
        parts.append({"length": "cut at its length", "cancelled": "stopped"}[generation.finish_reason])
    return " | ".join(parts)


def _drafting(stats: Stats) -> str:
    if stats.speculation == "off":
        return f"speculation off: {stats.why}"
    if not stats.n_drafted:
        return f"{stats.kind} depth {stats.depth}: nothing drafted"
    shares = " ".join(f"{100 * share:.0f}" for share in stats.accepted_per_position)
    accepted = 100 * stats.n_accepted / stats.n_drafted
    return f"{stats.kind} depth {stats.depth}: {accepted:.0f}% accepted ({shares}), L {stats.mean_accepted_length:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns lined up.

    >>> print(table(["a", "b"], [["1", "22"]]))
    | a | b  |
    |---|----|
    | 1 | 22 |
    """
    lines = [list(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def summary(report: Report) -> str:
    """The figures as Markdown, with model, drafter, task, acceptance and hardware beside the speed-up."""
    data, figures = report.to_json(), report.figures
    main, drafter, machine, library = (data[name] for name in ("main", "drafter", "machine", "llama_cpp"))
    low, high = figures.speedup_spread
    v = " ".join(f"{value:.2f}" for value in data["v"])
    positions = " ".join(f"{share:.2f}" for share in data["accepted_per_position"])
    round_ms = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in data["round_s"].items())
    width = len(data["v"])
    rows = [
        ("model", f"{main['file']} ({main['arch']}, {main['type']}, {main['bytes'] / 1e6:,.1f} MB)"),
        ("drafter", f"{drafter['kind']}, {_drafter_file(drafter)}, depth {data['depth']}"),
        (
            "hardware",
            f"{machine['cpu']}, {machine['n_cores']} cores, {data['threads']} threads; {data['backend']}",
        ),
        (
            "software",
            f"llama-sidecar {data['version']}, llama-cpp-python {library['llama_cpp_python']} (llama.cpp {library['commit']}), {machine['os']}",
        ),
        (
            "prompts",
            f"{', '.join(data['tasks'])}: {figures.n_pairs} pairs of {data['n']} tokens, {_sampling(report)}, sha256 {data['prompts']['sha256'][:8]}",
        ),
        ("plain", f"{figures.plain_tok_s:.1f} tok/s"),
        ("speculative", f"{figures.spec_tok_s:.1f} tok/s"),
        ("**speed-up**", f"**{figures.speedup:.2f}** (median; {low:.2f} to {high:.2f})"),
        ("token ids", _equality(report)),
        (
            "accepted length",
            f"L = {data['mean_accepted_length']:.2f} tokens a round; right by position: {positions}",
        ),
        ("verification", f"v(n) = {v} for n = 1 to {width}; one row takes {1000 * data['row_s']:.2f} ms"),
        ("draft", f"{1000 * data['draft_step_s']:.2f} ms a token, c = {data['c']:.2f} rows"),
        (
            "bound",
            f"L / v({width}) = {data['bound']:.2f} with drafts for free; reached: {100 * data['share_of_bound']:.0f} %",
        ),
        ("a round", f"{round_ms} ms"),
    ]
    tasks = [
        (
            name,
            str(f.n_pairs),
            f"{f.plain_tok_s:.1f}",
            f"{f.spec_tok_s:.1f}",
            f"{f.speedup:.2f}",
            f"{f.stats.mean_accepted_length:.2f}",
        )
        for name, f in report.tasks.items()
    ]
    columns = ["task", "pairs", "plain tok/s", "speculative tok/s", "speed-up", "L"]
    return f"{table(['', ''], rows)}\n\n{table(columns, tasks)}"


def _drafter_file(drafter: dict[str, object]) -> str:
    if "file" not in drafter:
        return "embedded in the model"
    return f"{drafter['file']} ({drafter['type']}, {drafter['match']})"


def _sampling(report: Report) -> str:
    if report.synthetic_length is not None:
        return f"accepted by coin tosses of L = {report.synthetic_length:g}: the text is meaningless"
    return "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}, seed {report.seed}"


def _equality(report: Report) -> str:
    apart = report.divergence
    if report.tokens_equal is None:
        return "not compared: coin tosses stand in for verification"
    if apart is None:
        return f"equal in all {len(report.pairs)} pairs"
    margin = "" if apart.margin is None else f", where the two best logits are {apart.margin:.2g} apart"
    return f"first apart at token {apart.token} of pair {apart.pair + 1}{margin}"
