"""`llama-sidecar run`: completes a text as it stands. Parses, streams, prints; no logic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ._options import GroupedCommand, Loader, load_options, read_prompt, sampling_options
from ._show import generation_json, stats_line, stream


@click.command(cls=GroupedCommand)
@click.option("-p", "--prompt", metavar="TEXT", help="The text to complete; - reads it from stdin.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file with the text to complete.")
@click.option(
    "-n",
    "--n-predict",
    "n",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens to write at most.",
)
@sampling_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: text, token ids, why it ended, stats."
)
@load_options
def command(
    open_model: Loader, prompt: str | None, file: Path | None, n: int, sampling: dict[str, Any], as_json: bool
) -> None:
    """Complete a text with the model MAIN, a GGUF file.

    A sidecar beside MAIN (or a draft head inside it) is found and used by itself: the text is what MAIN alone would
    write, only faster. The text goes to stdout, what it cost to stderr.

    \b
    llama-sidecar run models/demo-Q8_0.gguf -p "def fibonacci(n):"
    cat main.py | llama-sidecar run models/demo-Q8_0.gguf -n 200
    """
    text = read_prompt(prompt, file)
    with open_model() as model:
        generation = model.generate(text, max_tokens=n, **sampling)
        if as_json:
            generation.read()
            click.echo(generation_json(generation))
        else:
            stream(generation)
            click.echo(stats_line(generation), err=True)
