"""Conversations beyond question and answer: retry, undo, reasoning apart, and the file they are saved in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest

from llama_sidecar.runtime import Model, PromptError, conversation_file, load
from llama_sidecar.runtime.conversation import Conversation
from llama_sidecar.runtime.errors import ConversationFileError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "<assistant>{% if enable_thinking %}<think>\n{% endif %}"
)
ASKED: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_pair(tmp_path_factory.mktemp("talk"), template=TEMPLATE).main


@pytest.fixture(scope="module")
def model(main: Path) -> Iterator[Model]:
    with load(main, ctx=512, depth=2) as model:
        yield model


def test_retry_asks_the_last_question_in_the_place_of_its_answer(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        first = talk.ask("One", **ASKED).read()
        second = talk.ask("Two", **ASKED)
        second.read()
        again = talk.retry(**ASKED)
        assert again.read() == second.text and again.stats.n_prompt == second.stats.n_prompt
        assert [m["content"] for m in talk.messages] == ["One", first, "Two", again.text]


def test_retry_without_a_question_says_so(model: Model) -> None:
    with model.session() as session, pytest.raises(PromptError, match="nothing was asked"):
        Conversation(session).retry()


def test_a_retry_that_fails_leaves_the_answer(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        before = talk.messages
        with pytest.raises(PromptError):
            talk.retry(temperature=-1)
        assert talk.messages == before


def test_a_question_without_an_answer_can_be_asked_again(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).close()
        assert talk.retry(**ASKED).read() and len(talk.messages) == 2


def test_a_retry_of_what_has_no_answer_leaves_an_earlier_one_to_the_same_question(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        first = talk.ask("Go on", **ASKED).read()
        talk.ask("Go on", **ASKED).close()
        again = talk.retry(**ASKED).read()
        assert [m["content"] for m in talk.messages] == ["Go on", first, "Go on", again]
        talk.retry(**ASKED).read()
        assert len(talk.messages) == 4


def test_undo_takes_back_the_last_exchange_alone(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session, "Be brief.")
        first = talk.ask("One", **ASKED)
        first.read()
        n = talk.n_tokens
        talk.ask("Two", **ASKED).read()
        assert talk.n_tokens > n
        assert talk.undo() == "Two" and talk.n_tokens == n
        assert [m["content"] for m in talk.messages] == ["Be brief.", "One", first.text]
        assert talk.retry(**ASKED).read() == first.text
        assert talk.undo() == "One" and talk.undo() is None and talk.n_tokens == 0


def test_after_undo_the_next_answer_is_what_it_would_have_been(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        talk.ask("Two", **ASKED).read()
        talk.undo()
        undone = talk.ask("Three", **ASKED)
        undone.read()
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        straight = talk.ask("Three", **ASKED)
        straight.read()
    assert undone.tokens == straight.tokens


class Said:
    """Stands in for a generation that has written `text`."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, list(text.encode())

    def __iter__(self) -> Iterator[str]:
        return iter(self.text)


@pytest.mark.parametrize(
    "thinking, text, reasoning, content",
    [
        (False, "Yes", "", "Yes"),
        (False, "<think>\nHm.\n</think>\n\nYes", "Hm.", "Yes"),
        (True, "Hm.\n</think>\n\nYes", "Hm.", "Yes"),
        (True, "Hm", "Hm", ""),
    ],
)
def test_reasoning_is_a_part_and_a_field_of_its_own(
    model: Model, monkeypatch: pytest.MonkeyPatch, thinking: bool, text: str, reasoning: str, content: str
) -> None:
    with model.session() as session:
        monkeypatch.setattr(session, "generate", lambda tokens, **_: Said(text))
        talk = Conversation(session, enable_thinking=thinking)
        talk.ask("Really?")
        parts = {"reasoning": "", "content": ""}
        for kind, part in talk.parts():
            parts[kind] += part
        assert (parts["reasoning"].strip(), parts["content"]) == (reasoning, content)
        answer = talk.messages[-1]
        assert answer["content"] == content and answer.get("reasoning_content", "").strip() == reasoning


def test_a_saved_conversation_goes_on_as_it_would_have(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with model.session() as session:
        talk = Conversation(session, "Be brief.")
        talk.ask("Grüße 日本", **ASKED).read()
        talk.save(path)
        messages = talk.messages
        straight = talk.ask("And?", **ASKED)
        straight.read()
    assert json.loads(path.read_text("utf-8"))["messages"] == messages
    assert [file.name for file in tmp_path.iterdir()] == ["talk.json"]
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("forgotten", **ASKED).read()
        talk.load(conversation_file.read(path))
        assert talk.messages == messages and talk.system == "Be brief."
        loaded = talk.ask("And?", **ASKED)
        loaded.read()
    assert loaded.tokens == straight.tokens and loaded.stats.n_prompt == straight.stats.n_prompt


def test_with_the_state_nothing_is_read_again(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        state = talk.save(path, with_state=True)
        straight = talk.ask("And?", **ASKED)
        straight.read()
    saved = conversation_file.read(path)
    assert saved.state == state and state is not None
    with model.session(restore=state) as session:
        talk = Conversation(session)
        talk.load(saved)
        loaded = talk.ask("And?", **ASKED)
        loaded.read()
    assert loaded.tokens == straight.tokens
    assert loaded.stats.n_reused == straight.stats.n_reused > 0


def test_another_model_goes_on_from_the_words(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        talk.save(path)
    other = models.write_pair(tmp_path / "other", template=TEMPLATE, seed=1).main
    with load(other, ctx=256, spec_type="none") as second, second.session() as session:
        talk = Conversation(session)
        talk.load(conversation_file.read(path))
        assert talk.n_tokens == 0 and talk.ask("And?", **ASKED).read()


@pytest.mark.parametrize(
    "damage", [lambda ids: ids[:-1], lambda ids: [*ids[:-1], ids[-1] ^ 1], lambda ids: [9999, *ids]]
)
def test_tokens_that_do_not_spell_the_text_are_refused_and_nothing_is_forgotten(
    model: Model, tmp_path: Path, damage: Callable[[list[int]], list[int]]
) -> None:
    path = tmp_path / "talk.json"
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        talk.save(path)
        talk.ask("Two", **ASKED).read()
        before, data = talk.messages, json.loads(path.read_text("utf-8"))
        for tokens, is_good in ((data["said"]["tokens"], True), (damage(data["said"]["tokens"]), False)):
            path.write_text(json.dumps(data | {"said": data["said"] | {"tokens": tokens}}), "utf-8")
            if is_good:
                Conversation(session).load(conversation_file.read(path))
                continue
            with pytest.raises(ConversationFileError, match="do not spell its text"):
                talk.load(conversation_file.read(path))
        assert talk.messages == before


GOOD: dict[str, Any] = {
    "format": conversation_file.FORMAT,
    "version": 1,
    "model": {"name": "m.gguf", "hash": "0"},
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}],
    "said": None,
    "state": None,
}


@pytest.mark.parametrize(
    "change, why",
    [
        ({"format": "other"}, "no saved conversation"),
        ({"version": 2}, "version 2"),
        ({"model": "m.gguf"}, "which model"),
        ({"messages": None}, "questions and answers in turn"),
        ({"messages": GOOD["messages"][:1]}, "questions and answers in turn"),
        ({"messages": [{"role": "user"}]}, "message 0"),
        ({"messages": [{"role": "user", "content": 1}]}, "message 0"),
        ({"messages": [{"role": "user", "content": "Hi", "tool_calls": []}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"said": {"text": "Hi", "tokens": [1.5]}}, "said"),
        ({"said": {"text": "Hi", "tokens": [True]}}, "said"),
        ({"state": "/etc/passwd"}, "no name of a file"),
        ({"state": ".."}, "no name of a file"),
        ({"state": "."}, "no name of a file"),
        ({"state": "a\0b"}, "no name of a file"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(GOOD), "utf-8")
    conversation_file.read(path)
    path.write_text(json.dumps(GOOD | change), "utf-8")
    with pytest.raises(ConversationFileError, match=why) as caught:
        conversation_file.read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(ConversationFileError, match="no saved conversation"):
        conversation_file.read(path)
    with pytest.raises(ConversationFileError, match="folder"):
        conversation_file.read(tmp_path)
    with pytest.raises(ConversationFileError, match="No such file"):
        conversation_file.read(tmp_path / "none.json")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    saved = conversation_file.SavedConversation("m", "0", [])
    with pytest.raises(ConversationFileError, match="folder"):
        conversation_file.write(tmp_path, saved)
    with pytest.raises(ConversationFileError, match="No such file"):
        conversation_file.write(tmp_path / "none" / "talk.json", saved)
    for path in (tmp_path / ("x" * 300), tmp_path / "a\0b", Path("/"), tmp_path / ".."):
        with pytest.raises(ConversationFileError, match="cannot be written"):
            conversation_file.write(path, saved)
    with pytest.raises(ConversationFileError, match="too long"):
        conversation_file.read(tmp_path / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_written_leaves_no_state_behind(model: Model, tmp_path: Path) -> None:
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("One", **ASKED).read()
        (tmp_path / "talk.json").mkdir()
        for path in (tmp_path / "talk.json", Path("/"), tmp_path / ".."):
            with pytest.raises(ConversationFileError, match="cannot be written"):
                talk.save(path, with_state=True)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_a_conversation_takes_no_more_than_the_context(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        answer = talk.ask("One", **{**ASKED, "max_tokens": session.n_ctx})
        answer.read()
        assert answer.finish_reason == "length"
        assert answer.stats.n_prompt + len(answer.tokens) == session.n_ctx + 1, "the last one is not decoded"
        assert talk.n_tokens == session.n_ctx and len(talk.messages) == 2 and talk.n_tokens == session.n_ctx
