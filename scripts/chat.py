"""`llama-sidecar chat`: a conversation in the terminal. Reads, streams, prints; the session holds what was said."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

from llama_sidecar.runtime import Model, PromptError, Session
from llama_sidecar.runtime.conversation import Conversation
from llama_sidecar.sidecars.errors import printable

from ._options import GroupedCommand, Loader, load_options, read_prompt, sampling_options
from ._show import generation_json, stats_line, stream

HELP = (
    "Ctrl-C stops an answer, /clear starts anew, Ctrl-D leaves; a line that ends with \\ goes on in the next."
)


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
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="With -m: print one JSON object instead of text.")
@load_options
def command(
    open_model: Loader,
    message: str | None,
    system: str | None,
    n: int | None,
    sampling: dict[str, Any],
    as_json: bool,
) -> None:
    """Chat with the model MAIN, a GGUF file, through its own chat template.

    A sidecar beside MAIN (or a draft head inside it) is found and used by itself: the answers are what MAIN alone would
    write, only faster. After each answer a line says how fast, and how many drafted tokens were right.

    \b
    llama-sidecar chat models/Qwen3.5-0.8B-Q8_0.gguf
    llama-sidecar chat models/Qwen3.5-0.8B-Q8_0.gguf -m "Why is the sky blue?"
    """
    if as_json and message is None:
        raise click.UsageError("--json goes with -m TEXT")
    question = None if message is None else read_prompt(message, None)
    with open_model() as model, model.session() as session:
        talk = Conversation(session, system)
        options = {"max_tokens": n or model.n_ctx, **sampling}
        if question is None:
            talk.check()
            click.echo(f"{_title(model)}\n{HELP}", err=True)
            if not _talk(talk, session, options):
                sys.exit(1)
        elif as_json:
            answer = talk.ask(question, **options)
            answer.read()
            click.echo(generation_json(answer))
        else:
            answer = talk.ask(question, **options)
            stream(answer)
            click.echo(stats_line(answer), err=True)


@contextlib.contextmanager
def _stopped_by_ctrl_c(session: Session) -> Iterator[None]:
    """Inside, Ctrl-C ends the answer and nothing else; signals are the main thread's, so elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: session.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _talk(talk: Conversation, session: Session, options: dict[str, Any]) -> bool:
    """Asks and answers until the user leaves; False if a message of a pipe had no answer."""
    unanswered = False
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing and a history
    while (text := _read(is_terminal)) is not None:
        if text == "/clear":
            talk.clear()
        elif text.startswith("/") and text[1:] in ("exit", "quit", "bye"):
            break
        elif text:
            try:
                with _stopped_by_ctrl_c(session):
                    answer = talk.ask(text, **options)
                    stream(answer)
                click.echo(f"[{stats_line(answer)}]", err=True)
            except PromptError as error:
                unanswered |= not is_terminal  # at a terminal the user has seen it
                click.echo(f"error: {error} (/clear starts a new conversation)", err=True)
    return not unanswered


def _read(is_terminal: bool) -> str | None:
    """The user's next message, None at the end of it all."""
    lines: list[str] = []
    try:
        while not lines or lines[-1].endswith("\\"):
            lines.append(input(("... " if lines else "> ") if is_terminal else ""))
    except (EOFError, KeyboardInterrupt) as end:
        if is_terminal:
            click.echo()
        if not lines or isinstance(end, KeyboardInterrupt):
            return None
    return "\n".join(line.removesuffix("\\") for line in lines).strip()


def _title(model: Model) -> str:
    drafting = model.speculation
    source = f" from {drafting.path.name}" if drafting.path else ""
    sidecar = f"{drafting.kind}{source}, depth {model.depth}" if drafting.kind else f"off: {drafting.why}"
    return printable(f"{model.main.path.name} | speculation {sidecar} | context {model.n_ctx} tokens")
