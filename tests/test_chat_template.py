"""The file's own chat template: what it is given, and that it is compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
import pytest

from llama_sidecar.runtime import Model, PromptError, load
from llama_sidecar.runtime.chat_template import ChatTemplate

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "<assistant>{% if enable_thinking is false %}!{% endif %}"
)
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    pair = models.write_pair(tmp_path_factory.mktemp("template"), template=TEMPLATE)
    with load(pair.main, ctx=256, depth=2) as model:
        yield model


def test_a_template_gets_tools_and_variables(model: Model) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    render = model.vocab.render_chat
    assert render(HELLO) == "<user>Hi\n<assistant>"
    assert render(HELLO, tools=[tool]) == "<tools>add<user>Hi\n<assistant>"
    assert render(HELLO, enable_thinking=False, unknown=1) == "<user>Hi\n<assistant>!"
    assert model.vocab.chat_tokens(HELLO, tools=[tool]) == model.vocab.tokenize(
        render(HELLO, tools=[tool]), add_special=False
    )


def test_reasoning_has_the_name_that_the_template_knows() -> None:
    said = [{"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}]
    for name in ("thinking", "reasoning_content"):
        assert ChatTemplate("{{ messages[0]." + name + " }}").render(said) == "Hm"
    both = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}")
    assert both.render(said) == "Hm"
    call = {**said[0], "tool_calls": [{}]}
    assert ChatTemplate("{{ messages[0].thinking }}").render([call]) == ""


def test_an_image_is_refused_and_not_left_out(model: Model) -> None:
    """Case 27: a template of a model that sees writes a place for it, which nothing would fill."""
    text = {"type": "text", "text": "What is this?"}
    for kind in ("image_url", "image", "input_audio", "video", "file"):
        with pytest.raises(PromptError, match=f"'{kind}': text alone"):
            model.chat([*HELLO, {"role": "user", "content": [text, {"type": kind}]}])
    assert "What is this?" in model.vocab.render_chat([{"role": "user", "content": [text, "and"]}])
    assert model.chat(HELLO, max_tokens=2).read() is not None, "the session goes on"


def test_it_is_compiled_once(model: Model) -> None:
    assert model.vocab.chat_template == TEMPLATE
    model.vocab.render_chat(HELLO)
    assert model.vocab._template is model.vocab._template


def test_a_broken_template_is_the_prompt_s_fault(tmp_path: Path) -> None:
    with (
        load(models.write_pair(tmp_path, template="{% for %}").main, ctx=256, depth=2) as model,
        pytest.raises(PromptError, match="chat template failed"),
    ):
        model.vocab.render_chat(HELLO)
