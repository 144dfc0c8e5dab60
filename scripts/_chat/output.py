"""Where an answer goes: rendered as it comes on a terminal, or as plain text into a pipe. Knows what an answer is made of, and no commands."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import click
from rich.console import Console
from rich.text import Text

from llama_sidecar.runtime import Generation
from llama_sidecar.runtime.conversation import Conversation

from .flows import Flow, MarkdownFlow, Painter, TextFlow, safe
from .region import Region

LEAST_PAUSE_S = 0.04  # between two paintings
PAINT_SHARE = 0.05  # of the time at most: the processor has an answer to compute
Status = Callable[[int], str]  # what there is to say in so many columns


class Output(Protocol):
    """Shows answers."""

    def show(self, talk: Conversation, answer: Generation, status: Status) -> None:
        """Runs the answer to its end and shows it."""


class PlainOutput:
    """The answer to stdout as it is, what was thought before it to stderr."""

    def show(self, talk: Conversation, answer: Generation, status: Status) -> None:
        last = {"reasoning": "\n", "content": "\n"}
        for kind, text in talk.parts():
            stream = sys.stderr if kind == "reasoning" else sys.stdout
            click.echo(safe(text) if stream.isatty() else text, nl=False, err=kind == "reasoning")
            last[kind] = text
        for kind in ("reasoning", "content"):
            if not last[kind].endswith("\n") or (kind == "content" and not answer.text):
                click.echo(err=kind == "reasoning")


class TerminalOutput:
    """Streamed Markdown, reasoning dim and behind a bar, and a status line below while it runs; or each token by its origin.

    Args:
        console: writes to the terminal.
        lens: colours tokens by where they came from, in place of rendering.
        markdown: renders the answer; else it is shown as it is.
    """

    def __init__(self, console: Console, *, lens: bool = False, markdown: bool = True) -> None:
        self.lens, self.markdown = lens, markdown
        self._console = console
        self._painter = Painter(console)

    def show(self, talk: Conversation, answer: Generation, status: Status) -> None:
        painting = _Painting(self._console, self._painter, status)
        try:
            for flow, text, style in self._pieces(talk):
                painting.add(flow, text, style)
        finally:
            painting.end()

    def explain_lens(self) -> None:
        """Shows what the lens's colours mean."""
        parts = [Text(what, self._style(origin)) for origin, what in _ORIGINS.items()]
        self._console.print(Text("lens: ").append_text(Text(" · ").join(parts)))

    def _pieces(self, talk: Conversation) -> Iterator[tuple[Flow, str, str]]:
        """The answer in pieces: the flow each belongs to, its text and style."""
        flows: dict[str, Flow] = {
            "reasoning": TextFlow("dim", "┊ "),
            "content": MarkdownFlow() if self.markdown and not self.lens else TextFlow(),
        }
        yield flows["content"], "", ""
        if self.lens:
            for kind, text, origin in talk.pieces():
                yield flows[kind], text, self._style(origin)
        else:
            for kind, text in talk.parts():
                yield flows[kind], text, ""

    def _style(self, origin: str) -> str:
        return (_NO_COLOR if self._console.no_color else _COLORS)[origin]


_ORIGINS = {
    "drafted": "drafted, and it stood",
    "ngram": "found in the text, and it stood",
    "corrected": "corrected by the model",
    "plain": "the model's own",
}
_COLORS = {"drafted": "green", "ngram": "cyan", "corrected": "bold magenta", "plain": ""}
_NO_COLOR = {"drafted": "underline", "ngram": "underline italic", "corrected": "bold reverse", "plain": ""}


class _Painting:
    """One answer on the screen. Painting waits for what is new, and takes no more than its share of the time."""

    def __init__(self, console: Console, painter: Painter, status: Status) -> None:
        self._region = Region(console.file, shutil.get_terminal_size)  # type: ignore[arg-type]
        self._painter, self._status = painter, status
        self._flow: Flow | None = None
        self._kept: list[str] = []  # of flows that have ended
        self._next_s = 0.0

    def add(self, flow: Flow, text: str, style: str) -> None:
        if flow is not self._flow and text:
            self._leave(needs_gap=True)
            self._flow = flow
        flow.add(safe(text), style)
        if time.monotonic() >= self._next_s:
            self._paint()

    def end(self) -> None:
        self._leave()
        self._region.update([*self._kept, ""], [])  # a blank line, so that the next question stands apart

    def _leave(self, needs_gap: bool = False) -> None:
        lines = self._flow.end(self._painter) if self._flow else []
        if lines and needs_gap:
            lines.append("")
        self._kept += lines

    def _paint(self) -> None:
        begun = time.thread_time()
        kept, self._kept = self._kept, []
        lines: list[str] = []
        if self._flow:
            kept += self._flow.final(self._painter)
            lines = self._flow.open(self._painter)
        status = self._painter.lines(Text(self._status(self._painter.columns), "dim"))
        self._region.update(kept, [*lines, *status])
        cost = time.thread_time() - begun
        self._next_s = time.monotonic() + max(LEAST_PAUSE_S, cost / PAINT_SHARE)


def make_output(*, lens: bool = False, markdown: bool = True) -> Output:
    """That of stdout: a terminal that can be painted on, or anything else."""
    console = Console(highlight=False)
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return TerminalOutput(console, lens=lens, markdown=markdown)
    return PlainOutput()
