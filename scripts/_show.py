"""How commands show things: notes, streamed text, what a generation cost, Markdown tables. No command itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import click

from llama_sidecar.runtime import Generation, Stats
from llama_sidecar.sidecars.errors import printable


def note(text: str) -> None:
    """One line on stderr that is no error."""
    click.echo(f"note: {printable(text)}", err=True)


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
    if generation.finish_reason != "stop":
        parts.append({"length": "no more room (-n, --ctx)"}.get(str(generation.finish_reason), "stopped"))
    return printable(" | ".join(parts))


def _drafting(stats: Stats) -> str:
    if stats.speculation == "off":
        return f"speculation off: {stats.why}"
    if not stats.n_drafted:
        return f"{stats.kind} depth {stats.depth}: nothing drafted"
    shares = " ".join(f"{100 * share:.0f}" for share in stats.accepted_per_position)
    accepted = 100 * stats.n_accepted / stats.n_drafted
    looked_up = f", n-gram {stats.n_ngram_rounds} of {stats.n_rounds} rounds" if stats.n_ngram_rounds else ""
    drafted = f"{stats.kind} depth {stats.depth}: {accepted:.0f}% accepted ({shares})"
    return f"{drafted}, L {stats.mean_accepted_length:.2f}{looked_up}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns lined up but the last, which may be long.

    >>> print(table(["a", "b"], [["1", "22"], ["10", "3"]]))
    | a  | b |
    |----|---|
    | 1  | 22 |
    | 10 | 3 |
    """
    lines = [list(header), *([printable(cell).replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)] + [0]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|".join("-" * (width + 2) for width in [*widths[:-1], len(header[-1])])
    return "\n".join([text[0], f"|{rule}|", *text[1:]])
