"""Where questions come from: an editor on a terminal (prompt_toolkit, if it is there), a plain line of it, or a pipe.

Readers give one message after another, None at the end. A line that ends with a backslash goes on in the next.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import click

from llama_sidecar.runtime import PromptError

from . import history

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUED = "> ", "  "
GET_MORE = "arrow keys, completion and history: pip install 'llama-sidecar[chat]'"


class Reader(Protocol):
    """Gives messages."""

    def read(self) -> str | None:
        """The next message, without blanks around it and maybe empty; None at the end. Raises KeyboardInterrupt at Ctrl-C."""


class LineReader:
    """Lines of stdin, from a terminal with a prompt."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() line editing

    def read(self) -> str | None:
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            try:
                lines.append(self._line(CONTINUED if lines else PROMPT))
            except KeyboardInterrupt:
                click.echo(err=True)
                raise
            except EOFError:
                if self._is_terminal:
                    click.echo(err=True)
                if not lines:
                    return None
                break
        return "\n".join(line.removesuffix("\\") for line in lines).strip()

    def _line(self, prompt: str) -> str:
        if self._is_terminal and not sys.stdout.isatty():  # a prompt is no answer
            click.echo(prompt, nl=False, err=True)
            prompt = ""
        try:
            return input(prompt if self._is_terminal else "")
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin: not UTF-8 text (byte {error.start} of what was read)") from error
        except OSError as error:  # a folder, a terminal that is gone
            raise PromptError(f"stdin: {error.strerror or error}") from error


class EditorReader:
    """An editor for messages of any number of lines, with a history, completion and a line below.

    Args:
        status: what the line below says in so many columns.
        commands: name -> (arguments, what it does), to be completed.
        options: prompt_toolkit's, for tests: `input` and `output`.
    """

    def __init__(
        self, status: Callable[[int], str], commands: Mapping[str, tuple[str, str]], **options: Any
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.styles import Style

        path = history.history_path()
        if path:
            history.trim(path)
        is_command = Condition(lambda: get_app().current_buffer.text.startswith("/"))
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUED,
            history=FileHistory(str(path)) if path else InMemoryHistory(),
            key_bindings=_bindings(),
            completer=_completer(commands),
            complete_while_typing=is_command,
            bottom_toolbar=lambda: status(get_app().output.get_size().columns),
            style=Style.from_dict(
                {"bottom-toolbar": "noreverse dim", "bottom-toolbar.text": "noreverse dim"}
            ),
            enable_open_in_editor=True,
            enable_suspend=True,
            **options,
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt().strip()
        except EOFError:
            return None


def make_reader(
    status: Callable[[int], str], commands: Mapping[str, tuple[str, str]]
) -> tuple[Reader, str | None]:
    """That of stdin, and what would make it better."""
    if not sys.stdin.isatty():
        return LineReader(is_terminal=False), None
    if not sys.stdout.isatty():
        return LineReader(is_terminal=True), None
    try:
        return EditorReader(status, commands), None
    except ImportError:
        return LineReader(is_terminal=True), GET_MORE


def _bindings() -> KeyBindings:
    """Enter sends, Alt-Enter or a backslash before it begins a line, Ctrl-C empties the message or, without one, interrupts."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


def _completer(commands: Mapping[str, tuple[str, str]]) -> Any:
    """Completes the commands' names, and of those that take a file its path."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/") or "\n" in text:
                return
            name, blank, argument = text.partition(" ")
            if blank:
                if commands.get(name, ("", ""))[0].startswith("FILE"):
                    yield from paths.get_completions(Document(argument), event)
                return
            for word, (arguments, what) in commands.items():
                if word.startswith(name):
                    yield Completion(word, -len(name), display_meta=f"{arguments}  {what}".strip())

    return Commands()
