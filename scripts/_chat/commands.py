"""The commands of a chat: lines that begin with a slash. One function each, found by its name; knows no terminal."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llama_sidecar.runtime import SessionFileError, conversation_file
from llama_sidecar.sidecars import LlamaSidecarError

if TYPE_CHECKING:
    from .talk import Talk

Command = Callable[["Talk", str], None]
COMMANDS: dict[str, tuple[Command, str, str]] = {}  # name -> what does it, its arguments, what it does
MAX_DIGITS = 9  # of a number: Python refuses thousands of them


class CommandError(LlamaSidecarError):
    """A command that is not there, or cannot be carried out so."""


def run(talk: Talk, line: str) -> None:
    """Carries a line that begins with a slash out.

    Raises:
        LlamaSidecarError: there is no such command, or it cannot be carried out; nothing has changed then.
    """
    name, _, argument = line.partition(" ")
    found = COMMANDS.get(name)
    if found is None:
        begun = [known for known in COMMANDS if known.startswith(name)]
        close = begun or difflib.get_close_matches(name, COMMANDS, 1)
        hint = (
            f": {' or '.join(close)}?"
            if close
            else "; /help lists them, and a question that begins with / begins with //"
        )
        raise CommandError(f"there is no command {_short(name)}{hint}")
    if argument.strip() and not found[1]:
        raise CommandError(f"{name} takes nothing, and {_short(argument)!r} follows it")
    found[0](talk, argument.strip())


def completions() -> dict[str, tuple[str, str]]:
    """Name -> (arguments, what it does), for whoever completes them."""
    return {name: (arguments, what) for name, (_, arguments, what) in COMMANDS.items()}


def command(names: str, arguments: str, what: str) -> Callable[[Command], Command]:
    """Adds a function under its names (the first is shown by /help)."""

    def add(function: Command) -> Command:
        for name in names.split():
            COMMANDS[name] = (function, arguments, what)
        return function

    return add


KEYS = {
    "Enter": "send",
    "Alt-Enter, or \\ Enter": "begin a new line",
    "Ctrl-C": "stop the answer, or empty the line",
    "Ctrl-D": "leave",
}


@command("/help", "", "list the commands")
def help(talk: Talk, argument: str) -> None:
    shown: dict[Command, tuple[str, str]] = {}
    for name, (function, arguments, what) in COMMANDS.items():
        shown.setdefault(function, (f"{name} {arguments}", what))
    talk.say(*shown.values(), *KEYS.items())


@command("/system", "[TEXT|off]", "show or change the system prompt")
def system(talk: Talk, argument: str) -> None:
    conversation = talk.conversation
    if argument:
        before, conversation.system = conversation.system, None if argument == "off" else argument
        try:
            conversation.check()
        except LlamaSidecarError:
            conversation.system = before
            raise
    talk.say(f"system prompt: {conversation.system}" if conversation.system else "no system prompt")


@command("/temp", "[T|auto]", "show or change the temperature; 0 is greedy, auto the file's own")
def temp(talk: Talk, argument: str) -> None:
    if argument == "auto":
        talk.options["temperature"] = None
    elif argument:
        talk.options["temperature"] = _number(argument)
    own = talk.model.sampling.temperature
    now = talk.options.get("temperature")
    talk.say(f"temperature {own:g}, the file's own" if now is None else f"temperature {now:g}")


@command("/depth", "[N|auto]", "show or change how many tokens are drafted per round; 0 decodes plainly")
def depth(talk: Talk, argument: str) -> None:
    most = talk.session.depth
    if argument == "auto":
        talk.options["depth"] = None
    elif argument:
        if not (argument.isascii() and argument.isdecimal() and len(argument) <= MAX_DIGITS):
            raise CommandError(f"{_short(argument)!r} is neither a number of tokens nor auto")
        n = int(argument)
        if most == 0 and n:
            raise CommandError(f"nothing drafts here: {talk.session.why}")
        if n > most:
            raise CommandError(f"{n} tokens: at most {most} here (start with --depth {n} for more)")
        talk.options["depth"] = n
    now = talk.options.get("depth")
    if most == 0:
        talk.say(f"depth 0: {talk.session.why}")
    elif now is None:
        talk.say(f"depth auto, at most {most}" if talk.session.pace is not None else f"depth {most}")
    else:
        talk.say(f"depth {now}" + (", plain decoding" if now == 0 else ""))


@command(
    "/think", "[on|off|auto]", "whether the model reasons before it answers, where its template can say so"
)
def think(talk: Talk, argument: str) -> None:
    conversation = talk.conversation
    if argument:
        conversation.thinking = None if argument == "auto" else _switch(argument)
    now = conversation.thinking
    talk.say(f"reasoning {'as the template has it' if now is None else 'on' if now else 'off'}")


@command("/lens", "[on|off]", "colour each token by where it came from")
def lens(talk: Talk, argument: str) -> None:
    talk.set_lens(_switch(argument) if argument else None)


@command("/retry", "", "answer the last question anew")
def retry(talk: Talk, argument: str) -> None:
    talk.retry()


@command("/undo", "", "take back the last question and its answer")
def undo(talk: Talk, argument: str) -> None:
    question = talk.conversation.undo()
    if question is None:
        raise CommandError("there is nothing to take back")
    talk.say(
        f"taken back: {_short(question)}",
        f"context {talk.conversation.n_tokens:,} of {talk.session.n_ctx:,} tokens",
    )


@command("/clear", "", "begin a new conversation, with the same system prompt")
def clear(talk: Talk, argument: str) -> None:
    talk.clear()
    talk.say("a new conversation")


@command(
    "/save", "FILE [state]", "write the conversation to a file; with state: what the model holds of it, too"
)
def save(talk: Talk, argument: str) -> None:
    name, with_state = (
        (argument.removesuffix(" state").strip(), True) if argument.endswith(" state") else (argument, False)
    )
    path = _path(name)
    if not talk.conversation.messages:
        raise CommandError("there is nothing to save yet")
    state = talk.conversation.save(path, with_state=with_state)
    size = f", and {state} ({state.stat().st_size / 1e6:.0f} MB)" if state else ""
    talk.say(f"saved {path}{size}")


@command("/load", "FILE", "go on from a conversation that was saved")
def load(talk: Talk, argument: str) -> None:
    path = _path(argument)
    saved = conversation_file.read(path)
    problem = None
    if saved.state is not None:
        try:
            talk.restore(saved.state)
        except SessionFileError as error:
            problem = f"{error}: the conversation will be read again"
    talk.load(saved)
    n = sum(message["role"] == "user" for message in saved.messages)
    other = "" if saved.model == talk.model.main.path.name else f", of {saved.model}"
    talk.say(
        f"loaded {path}: {n} question{'s' * (n != 1)}{other}", *([f"note: {problem}"] if problem else [])
    )
    if n:
        talk.say(f"the last: {_short(saved.messages[-2]['content'])}")


@command("/stats", "", "what the last answer and the conversation cost")
def stats(talk: Talk, argument: str) -> None:
    talk.say(*talk.report())


@command("/exit /quit /bye", "", "leave")
def exit(talk: Talk, argument: str) -> None:
    talk.leaving = True


def _switch(word: str) -> bool:
    if word not in ("on", "off"):
        raise CommandError(f"{_short(word)!r} is neither on nor off")
    return word == "on"


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise CommandError(f"{_short(word)!r} is no temperature: a number of at least 0, or auto")
    return value


def _path(name: str) -> Path:
    if not name:
        raise CommandError("which file? its name is missing")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise CommandError(f"{name}: {error}") from error


def _short(text: str, n_most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= n_most else line[: n_most - 1] + "…"
