"""Marks that the vocabulary holds as control tokens: no text shows those, but an answer is cut by them all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
from served import HELLO, served

from llama_sidecar.runtime import Model, PromptError, harmony, load
from llama_sidecar.runtime.conversation import Conversation
from llama_sidecar.runtime.server.answers import ChatAnswer
from llama_sidecar.runtime.server.errors import RequestError
from llama_sidecar.runtime.server.requests import read_chat

CONTROL = {1: "<think>", 2: "</think>", 3: "[TOOL_CALLS]", 4: "<|other|>"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "<assistant>{# [TOOL_CALLS] #}"
)
THOUGHT = 'root ::= <[1]> "Hm" <[4]> <[2]> "Yes"'  # what the model is made to write: token ids and texts
CALLED = 'root ::= "Well. " <[3]> "[{\\"name\\": \\"add\\", \\"arguments\\": {\\"a\\": 1}}]"'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_pair(tmp_path_factory.mktemp("marks"), template=TEMPLATE, control=CONTROL).main


@pytest.fixture(scope="module")
def model(main: Path) -> Iterator[Model]:
    with load(main, ctx=512, depth=2, threads=1) as model:
        yield model


def test_a_text_has_the_control_tokens_that_are_preserved(model: Model) -> None:
    options: dict[str, Any] = {"grammar": THOUGHT, "temperature": 0, "max_tokens": 40}
    assert model.generate("Hi", **options).read() == "HmYes"
    marked = model.generate("Hi", preserved_tokens=[1, 2], **options)
    pieces = list(marked.pieces())
    assert marked.text == "<think>Hm</think>Yes" == "".join(piece.text for piece in pieces)
    assert [piece.token for piece in pieces] == marked.tokens and pieces[0].text == "<think>"
    assert model.vocab.text_of(marked.tokens) == "HmYes"
    assert model.vocab.text_of(marked.tokens, preserved=[1, 2]) == marked.text
    assert model.generate("Hi", preserved_tokens=[1], stop="<think>", **options).read() == ""
    for bad in (-1, model.vocab.n_tokens):
        with pytest.raises(PromptError, match="outside the vocabulary"):
            model.generate("Hi", preserved_tokens=[1, bad])


def test_texts_are_written_in_control_tokens(model: Model) -> None:
    assert model.vocab.control_tokens(["</think>", "a<think>b"]) == [1, 2]
    assert model.vocab.control_tokens(["think", "", "<th ink>"]) == []


def test_a_conversation_keeps_reasoning_apart_and_goes_on_in_its_tokens(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        answer = talk.ask("One", grammar=THOUGHT, temperature=0)
        assert list(talk.parts()) == [
            ("reasoning", "H"),
            ("reasoning", "m"),
            *(("content", c) for c in "Yes"),
        ]
        assert talk.messages[-1] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
        again = talk.ask("Two", grammar=THOUGHT, temperature=0)
        pieces = list(talk.pieces())
        shown = [("reasoning", "H"), ("reasoning", "m"), *(("content", c) for c in "Yes")]
        assert [(kind, text) for kind, text, _ in pieces] == shown
        assert {origin for _, _, origin in pieces} <= {"drafted", "ngram", "corrected", "plain"}
        assert again.stats.n_reused >= answer.stats.n_prompt + len(answer.tokens) - 1


def test_an_answer_s_calls_are_found(model: Model) -> None:
    """As the server makes answers, but made to write one, which a request with tools cannot."""
    request = read_chat({"messages": HELLO, "tools": [ADD]}, model.vocab, client="", n_ctx=512)
    assert request.options["preserved_tokens"] == [1, 2, 3]
    generation = model.generate(request.tokens, **{**request.options, "grammar": CALLED, "temperature": 0})
    generation.read()
    choice = ChatAnswer(request, model.vocab, "m").whole(generation, [])["choices"][0]
    assert choice["message"]["content"] == "Well. " and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1}


def test_messages_of_gpt_oss_are_cut_in_a_conversation_and_in_a_request(tmp_path: Path) -> None:
    control = dict(enumerate(harmony.TOKENS, start=1))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}{# <|channel|>analysis<|message|> #}<|start|>assistant"
    )
    ids = {text.strip("<|>"): f"<[{i}]>" for i, text in control.items()}
    thought = f'{ids["channel"]} "analysis" {ids["message"]} "Hm" {ids["end"]}'
    said = f'{ids["start"]} "assistant" {ids["channel"]} "final" {ids["message"]} "Yes"'
    called = f'{ids["start"]} "assistant to=functions.add" {ids["channel"]} "commentary json" {ids["message"]} "{{}}"'
    pair = models.write_pair(tmp_path, template=template, control=control)
    with load(pair.main, ctx=512, depth=2, threads=1) as model, model.session() as session:
        talk = Conversation(session)
        for _ in range(2):
            talk.ask("Why?", grammar=f"root ::= {thought} {said}", temperature=0).read()
        answer = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
        assert talk.messages[1] == talk.messages[3] == answer and talk.thinks
        request = read_chat({"messages": HELLO, "tools": [ADD]}, model.vocab, client="", n_ctx=512)
        options = {**request.options, "grammar": f"root ::= {thought} {called}", "temperature": 0}
        generation = session.generate(request.tokens, **options)
        generation.read()
        choice = ChatAnswer(request, model.vocab, "m").whole(generation, [])["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "Hm"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
        schema = {"messages": HELLO, "json_schema": {"type": "object"}, "max_tokens": 4}
        bound = read_chat(schema, model.vocab, client="", n_ctx=512)
        assert bound.tokens[-7:] == [2, *model.vocab.tokenize("final", add_special=False), 4]


def test_an_effort_is_the_template_s_variable(tmp_path: Path) -> None:
    template = "{{ reasoning_effort | default('medium') }}"
    with load(models.write_pair(tmp_path, template=template).main, ctx=256, depth=2, threads=1) as model:

        def prompt(**fields: Any) -> str:
            request = read_chat({"messages": HELLO, **fields}, model.vocab, client="", n_ctx=256)
            return model.vocab.text_of(request.tokens)

        assert prompt(reasoning_effort="high") == "high" and prompt() == "medium"
        kwargs = {"reasoning_effort": "low"}
        assert prompt(chat_template_kwargs=kwargs, reasoning_effort="high") == "low"
        with pytest.raises(RequestError, match="reasoning_effort is 1: a text"):
            prompt(reasoning_effort=1)


def test_the_server_keeps_reasoning_apart(main: Path) -> None:
    pytest.importorskip("starlette")
    with served(main, "--ctx", "512", "--slots", "1", "--depth", "2", "--threads", "1") as server:
        message = server.chat(grammar=THOUGHT, temperature=0)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")
