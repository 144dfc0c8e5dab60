"""A chat: one conversation between a reader and an output, with the settings that its commands change."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import termios
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from llama_sidecar.runtime import Generation, Model, PromptError, Session, Stats
from llama_sidecar.runtime.conversation import Conversation
from llama_sidecar.runtime.conversation_file import SavedConversation
from llama_sidecar.sidecars import LlamaSidecarError
from llama_sidecar.sidecars.errors import printable

from .._show import stats_line
from . import commands
from .flows import MIN_COLUMNS
from .output import Output, PlainOutput, TerminalOutput
from .reader import Reader
from .status import fitted, plain_tok_s, status_parts

SAID_COLUMNS = 24  # of the first column


def wrapped(text: str, width: int | None, indent: int) -> str:
    """The text in lines of at most `width` columns, where there is a width, the later ones indented.

    >>> wrapped("/undo   take back the last question", 24, 8)
    '/undo   take back the\\n        last question'
    """
    if width is None or width < MIN_COLUMNS or len(text) <= width:
        return text
    return "\n".join(textwrap.wrap(text, width - 1, subsequent_indent=" " * min(indent, width // 2)))


class Talk:
    """What a chat consists of; `commands.py` changes it.

    Args:
        model: answers, in a session of this chat's own.
        output: shows answers.
        system: the system prompt.
        options: of every answer, as in `Session.generate`; without max_tokens an answer may fill the context.
    """

    def __init__(self, model: Model, output: Output, system: str | None, options: dict[str, Any]) -> None:
        self.model, self.output, self.options = model, output, options
        self.session: Session = model.session()
        self.conversation = Conversation(self.session, system)
        self.total: Stats | None = None  # of all answers of this conversation
        self.answer: Generation | None = None  # the last one
        self.leaving = False
        self._n_answers = self._n_retries = 0
        self._plain_tok_s = plain_tok_s(self.session)

    def run(self, reader: Reader) -> bool:
        """Asks and answers until the user leaves; False if a message of a pipe had no answer."""
        unanswered = False
        while not self.leaving:
            try:
                text = reader.read()
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self.say("Ctrl-D leaves")
                continue
            if text is None:
                break
            try:
                if text.startswith("/") and not text.startswith("//"):
                    commands.run(self, text)
                elif text:
                    self.ask(text.removeprefix("/") if text.startswith("//") else text)
            except LlamaSidecarError as error:
                unanswered = True
                self.say(f"error: {error}")
        return sys.stdin.isatty() or not unanswered  # at a terminal the user has seen it

    def ask(self, question: str) -> None:
        """Asks, and shows the answer."""
        self._n_retries = 0
        self._show(lambda: self.conversation.ask(question, **self._options()))

    def retry(self) -> None:
        """Answers the last question anew: with the next seed, where one was given."""
        self._n_retries += 1
        if not self._draws():
            self.say("note: at temperature 0 the answer is the same each time (/temp 0.8)")
        self._show(lambda: self.conversation.retry(**self._options()))

    def clear(self) -> None:
        """Begins a new conversation."""
        self.conversation.clear()
        self._count_anew()

    def load(self, saved: SavedConversation) -> None:
        """Goes on from a saved conversation. Raises ConversationFileError, all being as before."""
        self.conversation.load(saved)
        self._count_anew()

    def _count_anew(self) -> None:
        self.total = self.answer = None
        self._n_answers = 0

    def restore(self, state: Path) -> None:
        """Goes on in a session with a saved state; where that fails, in a new one. Raises SessionFileError then."""
        self.session.close()  # a second context may not fit
        try:
            self.session = self.model.session(restore=state)
        except BaseException:
            self.session = self.model.session()
            raise
        finally:
            self.conversation.session = self.session

    def set_lens(self, on: bool | None) -> None:
        """Turns the lens on or off, or over."""
        if not isinstance(self.output, TerminalOutput):
            raise commands.CommandError("the lens colours a terminal, and this is none")
        self.output.lens = not self.output.lens if on is None else on
        if self.output.lens:
            self.output.explain_lens()
        else:
            self.say("lens off")

    def say(self, *lines: str | tuple[str, str]) -> None:
        """Says something that is no answer, in lines or in rows of two columns."""
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        for line in lines:
            first, rest = line if isinstance(line, tuple) else ("", line)
            begin = f"{first:{SAID_COLUMNS}}" if first else ""
            click.echo(wrapped(begin + printable(rest), width, len(begin)), err=True)

    def status(self, columns: int) -> str:
        """The line below, in so many columns."""
        stats = self.answer.stats if self.answer is not None else None
        parts = status_parts(stats, self._plain_tok_s, self.conversation.n_tokens, self.session.n_ctx)
        return fitted(parts, columns)

    def report(self) -> list[str]:
        """What the last answer and all of them cost, in lines."""
        if self.answer is None or self.total is None:
            return ["nothing was answered yet", *self._context()]
        stats, total, plain = self.answer.stats, self.total, self._plain_tok_s
        lines = [
            f"last answer: {stats_line(self.answer)}",
            f"first token after {stats.first_s:.2f} s: {stats.n_prompt - stats.n_reused:,} tokens read, "
            f"{stats.n_reused:,} held",
        ]
        if plain:
            lines.append(f"plain decoding was measured at {plain:.1f} tok/s: {stats.tok_s / plain:.2f}x")
        accepted = f", {total.n_accepted:,} of {total.n_drafted:,} drafts accepted" if total.n_drafted else ""
        lines.append(
            f"conversation: {self._n_answers} answer{'s' * (self._n_answers != 1)}, {total.n_tokens:,} tokens in "
            f"{total.generate_s:.1f} s{accepted}"
        )
        return [*lines, *self._context()]

    def _context(self) -> list[str]:
        return [f"context {self.conversation.n_tokens:,} of {self.session.n_ctx:,} tokens"]

    def _options(self) -> dict[str, Any]:
        options = {"max_tokens": self.session.n_ctx} | self.options
        if options.get("seed") is not None:
            options["seed"] += self._n_retries
        return options

    def _draws(self) -> bool:
        temperature = self.options.get("temperature")
        return bool(self.model.sampling.temperature if temperature is None else temperature)

    def _show(self, begin: Callable[[], Generation]) -> None:
        try:
            # What a pipe feeds ends with Ctrl-C as any program does.
            stopped = stopped_by_ctrl_c(self.session) if sys.stdin.isatty() else contextlib.nullcontext()
            with stopped, quiet_terminal():
                self.answer = answer = begin()
                self.output.show(self.conversation, answer, self.status)
        except PromptError as error:
            if "the context holds" not in str(error):
                raise
            raise PromptError(
                f"{error}; /undo takes the last exchange back, /clear begins a new conversation"
            ) from error
        self._n_answers += 1
        if self.total is None:
            self.total = Stats(
                answer.stats.kind, answer.stats.speculation, answer.stats.why, answer.stats.depth
            )
        self.total.include(answer.stats)
        if isinstance(self.output, PlainOutput):
            self.say(f"[{stats_line(answer)}]")
        elif answer.finish_reason == "cancelled":
            self.say("[stopped]")
        if answer.finish_reason == "length":
            self._say_why_cut()
        elif not answer.text:
            self.say("[no answer]")

    def _say_why_cut(self) -> None:
        n, n_ctx = self.conversation.n_tokens, self.session.n_ctx
        if n >= n_ctx:
            self.say(
                f"[cut: the context of {n_ctx:,} tokens is full. /undo takes the last exchange back, /clear begins anew, "
                "--ctx gives more]"
            )
        elif isinstance(self.output, TerminalOutput):
            self.say(f"[cut after {self.options.get('max_tokens')} tokens: -n gives more]")


@contextlib.contextmanager
def stopped_by_ctrl_c(session: Session) -> Iterator[None]:
    """Inside, Ctrl-C ends the answer and nothing else; signals are the main thread's, so elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: session.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_ours(fd: int) -> bool:
    """Whether a terminal is read by this process: changing it from the background would stop us, and it may be nobody's."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Inside, a terminal does not show what is typed: it is read by the next question."""
    fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    if fd is None or not _is_ours(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    quiet = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
