"""Where a chat's questions come from: the editor's keys, its history, what it completes; and the line below it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llama_sidecar.scripts._chat import history, reader
from llama_sidecar.scripts._chat.commands import COMMANDS, completions
from llama_sidecar.scripts._chat.reader import EditorReader

GUIDE = Path(__file__).parents[1] / "docs" / "CHAT.md"
Type = Callable[[str], "list[str | None]"]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "llama-sidecar" / history.NAME


@pytest.fixture
def typed(state: Path) -> Iterator[Type]:
    """What is read when these keys are typed; "interrupted" for a Ctrl-C."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def type(keys: str) -> list[str | None]:
            editor = EditorReader(lambda columns: "", completions())
            pipe.send_text(keys + "\x04")
            found: list[str | None] = []
            while True:
                try:
                    found.append(editor.read())
                except KeyboardInterrupt:
                    found.append("interrupted")
                if found[-1] is None:
                    return found

        yield type


@pytest.mark.parametrize(
    "keys, messages",
    [
        ("Hello\r", ["Hello"]),
        ("  one\\\rtwo  \r", ["one\ntwo"]),
        ("one\x1b\rtwo\r", ["one\ntwo"]),
        ("C:\\ is\r", ["C:\\ is"]),
        ("\x1b[200~one\ntwo\\\nthree\x1b[201~\r", ["one\ntwo\\\nthree"]),
        ("日本語 😀\r", ["日本語 😀"]),
        ("forgotten\x03kept\r", ["kept"]),
        ("\x03again\r", ["interrupted", "again"]),
        ("\r\r", ["", ""]),
        ("", []),
    ],
)
def test_keys(typed: Type, keys: str, messages: list[str]) -> None:
    assert typed(keys) == [*messages, None]


def test_the_history_is_kept_for_the_next_chat_and_for_nobody_else(typed: Type, state: Path) -> None:
    typed("first\rone\\\rtwo\r")
    assert typed("\x1b[A\r") == ["one\ntwo", None]
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700


def test_a_history_that_has_grown_loses_its_older_half(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("".join(f"\n# 2026-01-01\n+message {i}\n" for i in range(1000)))
    history.trim(path, 8000)
    text = path.read_text()
    assert text.startswith("# ") and text.endswith("+message 999\n") and 3000 < len(text) <= 4000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_without_a_state_folder_there_is_no_history_on_disk(
    typed: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    assert typed("first\r") == ["first", None]


def test_a_state_folder_that_is_a_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-sidecar").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history.history_path() is None


def completed(text: str) -> list[str]:
    completer = reader._completer(completions())
    return [c.text for c in completer.get_completions(Document(text), CompleteEvent())]


def test_commands_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text("")
    assert completed("/s") == ["/system", "/save", "/stats"]
    assert completed("/load " + str(tmp_path / "ta")) == ["lk.json"]
    assert completed("s") == completed("/help ") == completed("/s\n/s") == []


def test_without_the_editor_a_plain_line_serves_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    found, advice = reader.make_reader(lambda columns: "", {})
    assert isinstance(found, reader.LineReader) and advice is not None and "llama-sidecar[chat]" in advice
    lines = ["one\\", "two"]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0))
    assert found.read() == "one\ntwo"


def test_the_guide_lists_the_commands_that_there_are() -> None:
    shown: dict[object, str] = {}
    for name, (function, arguments, what) in COMMANDS.items():
        spelled = f"{name} {arguments}".strip().replace("|", "\\|")
        shown.setdefault(function, f"| `{spelled}` | {what} |")
    rows = "\n".join(shown.values())
    assert rows in GUIDE.read_text("utf-8"), f"put these rows into {GUIDE}:\n{rows}"
