"""The server as OpenAI's own Python client sees it: answers equal to the direct API's, streams, tools, schemas, logprobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import models
import pytest
from served import HELLO, TEMPLATE, Served, served

from llama_sidecar.runtime import Model, load

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
TOOL_TEMPLATE = TEMPLATE.replace("'tool' %}", "'nobody' %}") + "{% if tools %}<tool_call>?{% endif %}"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/$defs/digit"}},
            "required": ["a", "b"],
            "$defs": {"digit": {"enum": [7, 8]}},
        },
    },
}


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At Q8_0, where llama.cpp's rows are equal to the bit at every width: what a slot holds already changes no answer.

    With our kernels it may: they compute up to 8 rows otherwise than the CPU backend computes the rest of a prompt."""
    folder = tmp_path_factory.mktemp("served")
    return models.write_pair(folder, template=TEMPLATE, type=gguf.GGMLQuantizationType.Q8_0).main


@pytest.fixture(scope="module")
def server(main: Path) -> Iterator[Served]:
    with served(
        main, "--ctx", "2048", "--slots", "2", "--depth", "3", "--threads", "1", "--kernels", "stock"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(main: Path) -> Iterator[Model]:
    with load(main, ctx=2048, depth=3, threads=1, kernels="stock") as model:
        yield model


def direct(model: Model, prompt: str | list[dict[str, Any]], **options: Any) -> str:
    """What the API answers without a server."""
    options = {"temperature": 0, "ignore_eos": True, **options}
    with model.session() as session:
        generation = session.generate if isinstance(prompt, str) else session.chat
        return generation(prompt, **options).read()  # type: ignore[operator]


def test_a_chat_is_answered_as_directly(client: Any, model: Model) -> None:
    answer = client.chat.completions.create(model="main", messages=HELLO, max_tokens=30, **GREEDY)
    assert answer.choices[0].message.content == direct(model, HELLO, max_tokens=30)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.role == "assistant"
    usage = answer.usage
    assert usage.completion_tokens == 30
    assert usage.prompt_tokens == len(model.vocab.chat_tokens(HELLO))
    assert usage.total_tokens == usage.prompt_tokens + 30
    details = usage.completion_tokens_details
    stats = answer.stats
    assert details.accepted_prediction_tokens == stats["n_accepted"]
    assert details.rejected_prediction_tokens == stats["n_drafted"] - stats["n_accepted"] > 0
    assert stats["kind"] == "mtp"


def test_a_stream_is_the_same_in_pieces(client: Any, model: Model) -> None:
    chunks = list(
        client.chat.completions.create(
            model="main",
            messages=HELLO,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == direct(model, HELLO, max_tokens=200)
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 4
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 200
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_text_is_completed_as_directly(client: Any, model: Model) -> None:
    wanted = direct(model, "def f", max_tokens=24)
    answer = client.completions.create(model="main", prompt="def f", max_tokens=24, **GREEDY)
    assert answer.choices[0].text == wanted
    chunks = client.completions.create(model="main", prompt="def f", max_tokens=24, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
    echoed = client.completions.create(model="main", prompt="def f", max_tokens=24, echo=True, **GREEDY)
    assert echoed.choices[0].text == "def f" + wanted
    tokens = model.vocab.tokenize("def f")
    for prompt in (tokens, [tokens], ["def f"]):
        again = client.completions.create(model="main", prompt=prompt, max_tokens=24, **GREEDY)
        assert again.choices[0].text == wanted
    assert len(client.completions.create(model="main", prompt="x", **GREEDY).choices[0].text) <= 16


def test_sampling_settings_reach_the_sampler(client: Any, model: Model) -> None:
    def ask(**options: Any) -> str:
        text: str = (
            client.completions.create(model="main", prompt="x", max_tokens=20, **options).choices[0].text
        )
        return text

    settings = {"temperature": 1.5, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5}
    extra = {"ignore_eos": True, "top_k": 0, "min_p": 0, "repeat_penalty": 1.1}
    wanted = direct(model, "x", max_tokens=20, **settings, **extra)
    assert ask(**settings, extra_body=extra) == wanted
    assert ask(**{**settings, "seed": 8}, extra_body=extra) != wanted
    banned = model.vocab.tokenize(direct(model, "x", max_tokens=1))[0]
    assert ask(**GREEDY, logit_bias={str(banned): -100})[:1] != chr(banned)


def test_stop_strings_end_an_answer_and_are_not_in_it(client: Any, model: Model) -> None:
    text = direct(model, HELLO, max_tokens=30)
    stop = text[9:11]
    answer = client.chat.completions.create(
        model="main", messages=HELLO, max_tokens=30, stop=[stop], **GREEDY
    )
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_direct_api(client: Any, model: Model) -> None:
    with model.session() as session:
        wanted = session.chat(HELLO, max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
        wanted.read()
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3, **GREEDY}
    answer = client.chat.completions.create(model="main", messages=HELLO, **options)
    chunks = client.chat.completions.create(model="main", messages=HELLO, stream=True, **options)
    streamed = [
        one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
    ]
    for found in (answer.choices[0].logprobs.content, streamed):
        assert [bytes(one.bytes) for one in found] == [
            model.vocab.piece(one.token) for one in wanted.logprobs
        ]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted.logprobs])
        assert all(len(one.top_logprobs) == 3 for one in found)
    text = client.completions.create(model="main", prompt="x", max_tokens=5, logprobs=2, **GREEDY)
    found = text.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 5
    assert all(len(top) == 2 for top in found.top_logprobs)


def test_a_json_schema_binds_an_answer(client: Any, model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "one", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(
        model="main", messages=HELLO, max_tokens=60, response_format=form, temperature=0
    )
    content = answer.choices[0].message.content
    assert json.loads(content)["a"] in (1, 2) and answer.choices[0].finish_reason == "stop"
    assert content == direct(model, HELLO, max_tokens=60, json_schema=schema, ignore_eos=False)


def test_the_lens_says_where_each_token_came_from(client: Any) -> None:
    answer = client.chat.completions.create(
        model="main",
        messages=HELLO,
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "lens": True},
    )
    lens = answer.choices[0].lens
    assert len(lens) == 40
    assert "".join(one["text"] for one in lens) == answer.choices[0].message.content
    assert sum(one["origin"] in ("drafted", "ngram") for one in lens) == answer.stats["n_accepted"]
    chunks = client.chat.completions.create(
        model="main",
        messages=HELLO,
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "lens": True},
    )
    assert [one for chunk in chunks for one in chunk.choices[0].lens] == lens


def test_four_clients_at_once_get_what_each_would_alone(client: Any, model: Model) -> None:
    prompts = [f"def {name}" for name in "abcd"]
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        chunks = client.completions.create(
            model="main", prompt=prompt, max_tokens=120, stream=True, user=prompt, **GREEDY
        )
        found[prompt] = "".join(chunk.choices[0].text for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {prompt: direct(model, prompt, max_tokens=120) for prompt in prompts}


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["main"]
    assert client.models.retrieve("main").owned_by == "llama-sidecar"
    with pytest.raises(openai.NotFoundError, match=r"'gpt-5' is not here.*'main'"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert client.completions.create(model="main.gguf", prompt="x", max_tokens=1).choices


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a model whose template knows tools."""
    pair = models.write_pair(tmp_path_factory.mktemp("tools"), template=TOOL_TEMPLATE)
    with served(pair.main, "--ctx", "1024", "--slots", "1", "--depth", "3", "--threads", "1") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_tool_is_called_with_arguments_of_its_schema(tooled: Any, choice: Any) -> None:
    options: dict[str, Any] = {"tools": [ADD], "tool_choice": choice, "max_tokens": 120, "temperature": 0}
    answer = tooled.chat.completions.create(model="main", messages=HELLO, **options)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add" and arguments["a"] in (1, 2) and arguments["b"] in (7, 8)
    assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
    chunks = list(tooled.chat.completions.create(model="main", messages=HELLO, stream=True, **options))
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (streamed.index, streamed.function.arguments) == (0, call.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    talk = [
        *HELLO,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert tooled.chat.completions.create(model="main", messages=talk, tools=[ADD], max_tokens=4).choices


def test_tools_of_free_choice_leave_an_answer_as_it_is(tooled: Any) -> None:
    answer = tooled.chat.completions.create(model="main", messages=HELLO, tools=[ADD], max_tokens=9, **GREEDY)
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content
