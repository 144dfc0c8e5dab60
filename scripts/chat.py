"""`llama-sidecar chat`: a conversation in the terminal. Parses, and leaves the rest to _chat/."""

from __future__ import annotations

import sys
from typing import Any

import click

from llama_sidecar.runtime import Model

from ._chat.commands import completions
from ._chat.output import PlainOutput, TerminalOutput, make_output
from ._chat.reader import make_reader
from ._chat.talk import Talk
from ._options import GroupedCommand, Loader, load_options, read_prompt, sampling_options
from ._show import generation_json, note, stats_line

HELP = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"


@click.command(cls=GroupedCommand)
@click.option(
    "-m", "--message", metavar="TEXT", help="Ask this, print the answer and leave; - reads it from stdin."
)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "-n",
    "--n-predict",
    "n",
    type=click.IntRange(1),
    help="Tokens an answer has at most.  [default: what the context leaves]",
)
@click.option(
    "--think/--no-think",
    default=None,
    help="Whether the model reasons before it answers, where its template can say so.  [default: the template's]",
)
@click.option("--lens", is_flag=True, help="On a terminal: colour each token by where it came from.")
@click.option(
    "--markdown/--no-markdown",
    default=True,
    show_default=True,
    help="On a terminal: render the answer as it comes, or show it as it is.",
)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="With -m: print one JSON object instead of text.")
@load_options
def command(
    open_model: Loader,
    message: str | None,
    system: str | None,
    n: int | None,
    think: bool | None,
    lens: bool,
    markdown: bool,
    sampling: dict[str, Any],
    as_json: bool,
) -> None:
    """Chat with the model MAIN, a GGUF file, through its own chat template.

    A sidecar beside MAIN (or a draft head inside it) is found and used by itself: the answers are what MAIN alone would
    write, only faster. A line below says how fast, and how many drafted tokens were right; /help lists what else there is.
    Of a pipe each line is a question, and stdout gets the answers as plain text.

    \b
    llama-sidecar chat models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar chat models/Qwen3.5-0.8B-Q8_0.gguf -m "Why is the sky blue?"
    """
    if as_json and message is None:
        raise click.UsageError("--json goes with -m TEXT")
    question = None if message is None else read_prompt(message, None)
    output = make_output(lens=lens, markdown=markdown)
    if lens and isinstance(output, PlainOutput):
        note("--lens colours a terminal, and stdout is none")
    with open_model() as model:
        options = {"max_tokens": n or model.n_ctx, **sampling}
        talk = Talk(model, output, system, options)
        talk.conversation.thinking = think
        if question is None:
            talk.conversation.check()
            reader, advice = make_reader(talk.status, completions())
            talk.say(_title(model, talk.session.depth), *([HELP] if sys.stdin.isatty() else []))
            if advice:
                note(advice)
            if lens and isinstance(output, TerminalOutput):
                output.explain_lens()
            if not talk.run(reader):
                sys.exit(1)
        else:
            answer = talk.answer = talk.conversation.ask(question, **options)
            if as_json:
                answer.read()
                click.echo(generation_json(answer))
            else:
                output.show(talk.conversation, answer, talk.status)
                click.echo(stats_line(answer), err=True)


def _title(model: Model, depth: int) -> str:
    drafting = model.speculation
    source = f" from {drafting.path.name}" if drafting.path else ""
    sidecar = f"{drafting.kind}{source}, depth {depth}" if drafting.kind else f"off: {drafting.why}"
    return f"{model.main.path.name} | speculation {sidecar} | context {model.n_ctx} tokens"
