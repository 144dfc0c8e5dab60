"""What the commands of a chat change, and what they say, with a tiny model behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest

from llama_sidecar.runtime import Model, load
from llama_sidecar.scripts._chat import commands
from llama_sidecar.scripts._chat.output import PlainOutput
from llama_sidecar.scripts._chat.status import fitted, plain_tok_s
from llama_sidecar.scripts._chat.talk import Talk

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "<assistant>{% if enable_thinking %}<think>\n{% endif %}"
)
OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    main = models.write_pair(tmp_path_factory.mktemp("chat"), template=TEMPLATE).main
    with load(main, ctx=256, depth=3) as model:
        yield model


class Chat:
    """A chat whose user types what he is given."""

    def __init__(self, model: Model, capsys: pytest.CaptureFixture[str], **options: Any) -> None:
        self.talk = Talk(model, PlainOutput(), None, {**OPTIONS, **options})
        self._capsys = capsys

    def __call__(self, *lines: str) -> str:
        """What it says to these lines."""
        self._lines = [*lines]
        self._capsys.readouterr()
        self.talk.run(self)
        shown = self._capsys.readouterr()
        self.answers = shown.out
        return shown.err

    def read(self) -> str | None:
        return self._lines.pop(0) if self._lines else None


@pytest.fixture
def chat(model: Model, capsys: pytest.CaptureFixture[str]) -> Iterator[Chat]:
    chat = Chat(model, capsys)
    yield chat
    chat.talk.session.close()


def test_help_lists_every_command_once(chat: Chat) -> None:
    said = chat("/help")
    for name in commands.COMMANDS:
        assert (f"\n{name} " in f"\n{said}") or name in ("/quit", "/bye")
    assert said.count("/exit") == 1


@pytest.mark.parametrize(
    "line, said",
    [
        ("/s", "error: there is no command /s: /system or /save or /stats?"),
        ("/und", "error: there is no command /und: /undo?"),
        ("/etc/hosts is what?", "a question that begins with / begins with //"),
        ("/clear all", "error: /clear takes nothing, and 'all' follows it"),
        ("/temp warm", "error: 'warm' is no temperature"),
        ("/temp -1", "error: '-1' is no temperature"),
        ("/temp nan", "error: 'nan' is no temperature"),
        ("/temp", "temperature 0"),
        ("/temp auto", "the file's own"),
        ("/temp 0.5", "temperature 0.5"),
        ("/depth", "depth 3"),
        ("/depth 9", "error: 9 tokens: at most 3 here"),
        ("/depth deep", "error: 'deep' is neither"),
        (f"/depth {'9' * 5000}", "…' is neither a number"),
        ("/depth ٣", "error: '٣' is neither"),
        (f"/temp {'9' * 5000}", "…' is no temperature"),
        ("/depth 0", "depth 0, plain decoding"),
        ("/system", "no system prompt"),
        ("/system Be brief.", "system prompt: Be brief."),
        ("/undo", "error: there is nothing to take back"),
        ("/retry", "error: there is no question to answer again"),
        ("/save", "error: which file?"),
        ("/save talk.json", "error: there is nothing to save yet"),
        ("/load none.json", "error: none.json: No such file"),
        ("/lens", "error: the lens colours a terminal"),
        ("/lens maybe", "error: 'maybe' is neither on nor off"),
        ("/think", "reasoning as the template has it"),
        ("/think on", "reasoning on"),
        ("/stats", "nothing was answered yet"),
        ("/stats", "context 0 of 256 tokens"),
    ],
)
def test_what_commands_say(chat: Chat, line: str, said: str) -> None:
    found = chat(line)
    assert said in found and "Traceback" not in found


def test_an_error_changes_nothing_and_the_chat_goes_on(chat: Chat) -> None:
    chat("/temp 0.5", "/temp warm", "/depth 2", "/depth 9")
    assert chat.talk.options["temperature"] == 0.5 and chat.talk.options["depth"] == 2


def test_depth_and_temperature_hold_for_the_next_answer(chat: Chat) -> None:
    chat("/depth 0", "Hello")
    assert chat.talk.answer is not None and chat.talk.answer.stats.speculation == "off"
    chat("/depth auto", "Hello")
    assert chat.talk.answer.stats.depth == 3


def test_a_question_may_begin_with_a_slash(chat: Chat) -> None:
    chat("//etc is what?")
    assert chat.talk.conversation.messages[0]["content"] == "/etc is what?"


def test_undo_retry_and_clear(chat: Chat) -> None:
    chat("One", "Two")
    second = chat.talk.conversation.messages[-1]
    assert "at temperature 0 the answer is the same" in chat("/retry")
    assert chat.talk.conversation.messages[-1] == second
    assert "taken back: Two" in chat("/undo")
    assert [m["content"] for m in chat.talk.conversation.messages][::2] == ["One"]
    chat("/clear")
    assert chat.talk.conversation.messages == []


def test_a_retry_with_a_seed_draws_anew(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(model, capsys, temperature=2.0, seed=7)
    chat("One")
    first = chat.talk.conversation.messages[-1]["content"]
    assert "the same" not in chat("/retry")
    assert chat.talk.conversation.messages[-1]["content"] != first
    chat("/clear", "One")
    assert chat.talk.conversation.messages[-1]["content"] == first
    chat.talk.session.close()


def test_stats_count_the_conversation(chat: Chat) -> None:
    said = chat("One", "Two", "/stats")
    assert "conversation: 2 answers, 12 tokens" in said
    assert chat.talk.total is not None and chat.talk.total.n_tokens == 12
    used = chat.talk.conversation.n_tokens
    assert f"context {used:,} of 256 tokens" in said
    assert chat("/clear", "Three", "/stats").count("conversation: 1 answer, 6 tokens") == 1


def test_save_and_load_with_the_state(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    assert f"saved {path}, and {tmp_path / 'talk.session'}" in chat(
        "/system Be brief.", "One", f"/save {path} state"
    )
    messages = chat.talk.conversation.messages
    said = chat("/clear", "/system off", "Other", f"/load {path}")
    assert "1 question" in said and "the last: One" in said
    assert "nothing was answered yet" in chat("/stats")
    assert chat.talk.conversation.messages == messages and chat.talk.conversation.system == "Be brief."
    chat("And?")
    assert chat.talk.answer is not None and chat.talk.answer.stats.n_reused > 20


def test_a_state_that_cannot_be_used_costs_time_alone(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat("One", f"/save {path} state")
    messages = chat.talk.conversation.messages
    (tmp_path / "talk.session").write_bytes(b"broken")
    said = chat("/clear", f"/load {path}")
    assert "note: " in said and "will be read again" in said
    assert chat.talk.conversation.messages == messages
    chat("And?")
    assert chat.talk.answer is not None and len(chat.talk.answer.tokens) == 6


def test_a_file_of_another_sort_leaves_the_conversation(chat: Chat, tmp_path: Path) -> None:
    chat("One")
    messages = chat.talk.conversation.messages
    (tmp_path / "other.json").write_text(json.dumps({"format": "other"}))
    assert "no saved conversation" in chat(f"/load {tmp_path / 'other.json'}")
    assert chat.talk.conversation.messages == messages


def test_a_full_context_says_what_to_do(chat: Chat) -> None:
    chat.talk.options["max_tokens"] = 256
    said = chat("One")
    assert "[cut: the context of 256 tokens is full. /undo takes the last exchange back" in said
    said = chat("Two")
    assert "error: the prompt has" in said and "/undo" in said and "/clear" in said
    chat.talk.options["max_tokens"] = 6
    assert "tok/s" in chat("/undo", "Two")


def test_the_line_below_says_what_there_is_room_for(chat: Chat) -> None:
    assert chat.talk.status(80) == "context 0 of 256"
    chat("One")
    line = chat.talk.status(80)
    assert "tok/s" in line and f"context {chat.talk.conversation.n_tokens} of 256" in line
    assert chat.talk.status(14) == line.split(" · ")[0] or len(chat.talk.status(14)) <= 14
    assert fitted(["a \x1b[2J"], 80) == "a \\x1b[2J"


def test_plain_speed_is_what_was_measured_or_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path))  # where nothing was measured before
    with model.session() as session:
        assert session.pace is None and plain_tok_s(session) is None  # a fixed depth measures nothing
