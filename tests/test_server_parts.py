"""The parts of the server that need no model: fields, messages, tools, the cutting of answers, the queue, counts."""

from __future__ import annotations

import doctest
import importlib
import json
import random
import re
import time
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

from llama_sidecar.runtime.reasoning import ReasoningSplitter
from llama_sidecar.runtime.server import spellings
from llama_sidecar.runtime.server.errors import RequestError
from llama_sidecar.runtime.server.fields import Fields
from llama_sidecar.runtime.server.messages import read_messages
from llama_sidecar.runtime.server.metrics import Metrics
from llama_sidecar.runtime.server.splitter import Splitter
from llama_sidecar.runtime.server.tools import Call, Tools, read_tools
from llama_sidecar.runtime.server.waiting import Waiting

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def tools(template: str = "<tool_call>", **fields: Any) -> Tools:
    found = read_tools(Fields({"tools": [WEATHER], **fields}), template)
    assert found is not None
    return found


def cut(
    text: str, *, offered: Tools | None = None, template: str = "", prompt: str = ""
) -> list[tuple[str, Any]]:
    """What a splitter makes of a text, however it is cut: whole, by characters, and anyhow."""
    found = []
    for seed in range(5):
        pick = random.Random(seed)
        splitter = Splitter(prompt, template, offered)
        parts, rest = [], text
        while rest:
            n = len(rest) if seed == 0 else 1 if seed == 1 else pick.randint(1, 9)
            parts += splitter.push(rest[:n])
            rest = rest[n:]
        parts += splitter.finish()
        joined: list[tuple[str, Any]] = []
        for kind, value in parts:
            if kind != "call" and joined and joined[-1][0] == kind:
                joined[-1] = (kind, joined[-1][1] + value)
            else:
                joined.append((kind, value))
        found.append(joined)
    assert all(one == found[0] for one in found), found
    return found[0]


@pytest.mark.parametrize(
    "name",
    [
        "conversation",
        "harmony",
        "reasoning",
        "server.errors",
        "server.fields",
        "server.messages",
        "server.metrics",
        "server.splitter",
        "server.waiting",
        "server.pool",
        "server.requests",
        "server.spellings",
        "server.tools",
    ],
)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"llama_sidecar.runtime.{name}")
    assert doctest.testmod(module).failed == 0


def test_plain_text_stays_as_it_is() -> None:
    for text in ("Yes", " \n<think>no</think>", HERMES, "{}", "a < b </think>"):
        assert cut(text) == [("content", text)]


def test_reasoning_is_kept_apart() -> None:
    thinks = "{{ '<think>' }}"
    assert cut("<think>\nHm.\n</think>\n\nYes", template=thinks) == [
        ("reasoning", "Hm.\n"),
        ("content", "Yes"),
    ]
    assert cut("Hm.</think>\n\nYes", template=thinks, prompt="<assistant>\n<think>\n") == [
        ("reasoning", "Hm."),
        ("content", "Yes"),
    ]
    assert cut("<think>Hm", template=thinks) == [("reasoning", "Hm")]
    assert cut("Yes <think>", template=thinks) == [("content", "Yes <think>")]
    assert cut("<th", template=thinks) == [("content", "<th")]
    assert cut("Yes", template=thinks, prompt="<think>\n\n</think>\n\n") == [("content", "Yes")]


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [
        ("{{- '<seed:think>' -}}", "<seed:think>", "</seed:think>"),  # of Seed-OSS-36B-Instruct
        ("{{- '<|channel>thought\\n<channel|>' -}}", "<|channel>thought\n", "<channel|>"),  # gemma-4-31B-it
        (
            "{{- '[THINK]' + block['thinking'] + '[/THINK]' }}",
            "[THINK]",
            "[/THINK]",
        ),  # Ministral-3-14B-Reasoning
        (
            "<|START_THINKING|>{{ m }}<|END_THINKING|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
        ),  # c4ai-command-r7b
        ("{{- '<thought>\\n' }}", "<thought>\n", "</thought>"),  # EXAONE-Deep
    ],
)
def test_reasoning_has_the_marks_of_the_template(template: str, opening: str, closing: str) -> None:
    parts = [("reasoning", "Hm."), ("content", "Yes")]
    assert cut(f"{opening}Hm.{closing}\n\nYes", template=template) == parts
    assert cut(f"Hm.{closing}Yes", template=template, prompt=f"<assistant>{opening}") == parts
    assert cut("<think>Hm.</think>", template=template) == [("content", "<think>Hm.</think>")]


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
DSML = (
    '<｜DSML｜CALLS>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜CALLS>'
)
SPELLINGS = {  # what the chat templates of these models write calls in, and one as the model writes it
    "Mistral-Nemo-Instruct-2407": (
        '{{- "[TOOL_CALLS][" }}',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom", "days": 3}, "id": "abcdefghi"}]',
    ),
    "Mistral-Small-3.2-24B-Instruct-2506": (
        "{{- '[TOOL_CALLS]' + tool_call.function.name }}{{- '[CALL_ID]' }}{{- '[ARGS]' }}",
        '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rom", "days": 3}',
    ),
    "Llama-3.1-8B-Instruct": (
        """{{- '"parameters": ' }}""",
        '{"name": "weather", "parameters": {"city": "Rom", "days": 3}}',
    ),
    "DeepSeek-R1": (
        "{{'<｜tool▁calls▁begin｜>'}}{{'<｜tool▁calls▁end｜>'}}",
        DEEPSEEK.format('function<｜tool▁sep｜>weather\n```json\n{"city": "Rom", "days": 3}\n```'),
    ),
    "DeepSeek-V3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}{{'<｜tool▁calls▁end｜>'}}",
        DEEPSEEK.format('weather<｜tool▁sep｜>{"city": "Rom", "days": 3}'),
    ),
    "gemma-4-31B-it": (
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}",
        '<|tool_call>call:weather{city:<|"|>Rom<|"|>,days:3}<tool_call|>',
    ),
    "GLM-4.6": (
        "<tool_call>{function-name}</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    "Qwen2.5-7B-Instruct": (
        "{{- '<tool_call>\\n' }}{{- '\\n</tool_call>' }}",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>',
    ),
    "NVIDIA-Nemotron-Nano-9B-v2": (
        "{{- '<TOOLCALL>[' -}}{{- ']</TOOLCALL>' -}}",
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]</TOOLCALL>',
    ),
    "Phi-4-mini-instruct": (
        "{{ '<|tool_call|>' }}{{ '<|/tool_call|>' }}",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]<|/tool_call|>',
    ),
    "granite-3.3-2b-instruct": (
        "starting with <|tool_call|> and then a list",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}]',
    ),
    "DeepSeek-V3.2": (
        "{{- '\\n\\n<' + dsml_token + 'function_calls>\\n' -}}",
        DSML.replace("CALLS", "function_calls"),
    ),
    "DeepSeek-V4": ("{{- '\\n\\n<' + dsml_token + 'tool_calls>\\n' -}}", DSML.replace("CALLS", "tool_calls")),
    "Kimi-K2-Instruct": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rom", "days": 3}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "MiniMax-M2": (
        "{%- set toolcall_begin_token   = '<minimax:tool_call>'         -%}",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rom</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "MiniMax-M1": (
        "{{ '<tool_calls>\\n' -}}{{ '</tool_calls><end_of_sentence>\\n' -}}",
        '<tool_calls>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_calls>',
    ),
    "LFM2-8B-A1B": (
        '"List of tools: <|tool_list_start|>["',
        """<|tool_call_start|>[weather(city="Rom", days=3)]<|tool_call_end|>""",
    ),
    "LFM2.5-Instruct": (
        '{%- set ns.system_prompt = ns.system_prompt + "List of tools: [" -%}',
        "<|tool_call_start|>[weather(city='Rom', days=3)]<|tool_call_end|>",
    ),
    "Seed-OSS-36B-Instruct": (
        "{%- set toolcall_begin_token   = '<seed:tool_call>'         -%}",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Rom</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    "Apertus-8B-Instruct": (
        "{%- set tool_calls_token = '<|tools_prefix|>' -%}",
        '<|tools_prefix|>[{"weather": {"city": "Rom", "days": 3}}]<|tools_suffix|>',
    ),
    "GigaChat3.1-10B-A1.8B": (
        "{{ '<|function_call|>' }}",
        '<|function_call|>{"name": "weather", "arguments": {"city": "Rom", "days": 3}}',
    ),
    "functionary-medium-v3.1": (
        '<function=example_function_name>{{ \'{"example_name": "example_value"}\' }}</function>',
        '<function=weather>{"city": "Rom", "days": 3}</function>',
    ),
    "c4ai-command-r7b-12-2024": (
        "<|START_ACTION|>[\n]<|END_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rom", "days": 3}}\n]<|END_ACTION|>',
    ),
}


@pytest.mark.parametrize("model", SPELLINGS)
def test_calls_are_found_as_the_template_spells_them(model: str) -> None:
    template, text = SPELLINGS[model]
    offered = tools(template)

    def called(parts: list[tuple[str, Any]]) -> list[Any]:
        return [(one.name, json.loads(one.arguments)) if kind == "call" else one for kind, one in parts]

    call = ("weather", {"city": "Rom", "days": 3})
    assert called(cut(text, offered=offered)) == [call]
    assert cut("Well, " + text[1:], offered=offered)[0] == ("content", "Well, " + text[1:])
    launch = text.replace("weather", "launch")
    assert cut(launch, offered=offered) == [("content", launch)]
    if offered.marks:
        assert called(cut(f"Let me see.\n{text}", offered=offered)) == ["Let me see.\n", call]
        assert called(cut(text + text, offered=offered)) == [call, call]
    for n in range(1, len(text) - 1, 3):  # cut by max_tokens: nothing is lost
        kept = cut(text[:n], offered=offered)
        assert kept == [("content", text[:n])] or kept[0][0] == "call"


def test_arguments_are_what_each_spelling_says() -> None:
    def arguments(model: str, old: str, new: str) -> Any:
        template, text = SPELLINGS[model]
        assert old in text
        ((kind, found),) = cut(text.replace(old, new), offered=tools(template))
        return json.loads(found.arguments) if kind == "call" else found

    python = "city='Rom', days=3"
    odd = {"city": 'L\'Aquila ("x=1", True)\n', "days": None, "at": [True, {"a": "b"}]}
    said = r"""city='L\'Aquila ("x=1", True)\n', days=None, at=[True, {"a": "b"}]"""
    assert arguments("LFM2.5-Instruct", python, said) == odd
    assert arguments("LFM2.5-Instruct", f"({python})", "()") == {}
    for broken in ("city='Rom", "'Rom'", "city=Rom", "city='Rom')", "city=other(a=1)'"):
        assert isinstance(arguments("LFM2.5-Instruct", python, broken), str)
    text = 'string="true">Rom'
    assert arguments("DeepSeek-V3.2", text, 'string="true">12') == {"city": "12", "days": 3}
    assert arguments("DeepSeek-V3.2", 'string="false">3', 'string="false">[3]') == {
        "city": "Rom",
        "days": [3],
    }
    assert arguments("MiniMax-M2", ">Rom<", ">12<") == {"city": "12", "days": 3}, "the schema says text"
    assert arguments("MiniMax-M2", ">Rom<", ">a\n<b>\n<") == {"city": "a\n<b>\n", "days": 3}


def test_several_calls_stand_between_one_pair_of_marks() -> None:
    for model, begins, ends in (
        ("DeepSeek-V4", "<｜DSML｜invoke", "</｜DSML｜tool_calls>"),
        ("Kimi-K2-Instruct", "<|tool_call_begin|>", "<|tool_calls_section_end|>"),
        ("MiniMax-M2", "<invoke", "</minimax"),
        ("MiniMax-M1", "{", "</tool_calls>"),
    ):
        template, text = SPELLINGS[model]
        one = text[text.index(begins) : text.index(ends)]
        twice = text.replace(one, one + one)
        assert [kind for kind, _ in cut(twice, offered=tools(template))] == ["call", "call"], model
    template, text = SPELLINGS["LFM2-8B-A1B"]
    call = text[text.index("[") + 1 : text.index("]")]
    assert len(cut(text.replace(call, f"{call}, {call}"), offered=tools(template))) == 2


@pytest.mark.parametrize(
    "part",
    [
        "<parameter=a>",
        "<arg_key>",
        '<invoke name="a">',
        '<parameter name="a">',
        '<｜DSML｜parameter name="a">',
        "<｜tool▁call▁begin｜>a<｜tool▁sep｜>",
        "<|tool_call_begin|>a<|tool_call_argument_begin|>",
        "\\'",
        '\\"',
        "x",
        "\n",
        "[",
        "{",
        "a=",
        "a(",
    ],
)
def test_a_text_of_many_beginnings_takes_no_time(part: str) -> None:
    """A client can make a model write it, and the answers of all wait meanwhile. Looking for the end of each takes minutes."""
    many = part * (200_000 // len(part))
    for before, after in (
        ("", ""),
        ("<function=weather>", "</function>"),
        ('<invoke name="weather">', "</invoke>"),
        ('<｜DSML｜invoke name="weather">', "</｜DSML｜invoke>"),
        ("[weather(a='", ")]"),
        ("[weather(", ")]"),
        ("weather", "}"),
        ("call:weather{", "}"),
    ):
        began = time.process_time()
        spellings.read(before + many + after, {})
        assert time.process_time() - began < 5, (before, "a tenth of a second")


def test_gpt_oss_writes_messages() -> None:
    template = "{{- '<|start|>assistant<|channel|>analysis<|message|>' }}"
    thought = "<|channel|>analysis<|message|>Hm <b>.<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Yes <|"
    called = '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rom"}'
    call = ("call", Call("weather", '{"city": "Rom"}'))
    said = [("reasoning", "Hm <b>."), ("content", "Yes <|")]
    assert cut(thought + final, template=template) == said
    assert cut(thought + final, template=template, offered=tools(template)) == said
    assert cut(final.removeprefix("<|start|>assistant"), template=template) == said[1:]
    for end in ("", "<|call|>", "<|end|>"):
        assert cut(thought + called + end, template=template, offered=tools(template)) == [said[0], call]
    early = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rom"}'
    assert cut(early, template=template, offered=tools(template)) == [call]
    preamble = "<|channel|>commentary<|message|>Let me see.<|end|>"
    assert cut(preamble + called, template=template, offered=tools(template)) == [
        ("content", "Let me see."),
        call,
    ]
    unknown = called.replace("weather", "launch")
    assert cut(unknown, template=template, offered=tools(template)) == [("content", 'launch{"city": "Rom"}')]
    assert cut(called, template=template) == [("content", 'weather{"city": "Rom"}')]
    browser = "<|channel|>analysis to=browser.search<|message|>{}<|call|>"
    assert cut(browser, template=template) == [("reasoning", "{}")]
    for text in ("Yes", "to be", "<b>", "<|im", "to", "  Yes", "t" * 999, "to=" + "x" * 999):
        assert cut(text, template=template) == [("content", text)]
    assert cut(thought + final[:30], template=template) == said[:1], "a header is no text"
    at_once = '{"a": 1}'
    assert cut(at_once, template=template, prompt="<|start|>assistant<|channel|>final<|message|>") == [
        ("content", at_once)
    ]


def test_calls_are_found_between_marks() -> None:
    call = ("call", Call("weather", '{"city": "Rom"}'))
    assert cut(HERMES, offered=tools()) == [call]
    assert cut(f"Let me see.\n{HERMES}\n{HERMES}\n", offered=tools()) == [
        ("content", "Let me see.\n"),
        call,
        call,
    ]
    assert cut(f"{HERMES}\n{HERMES}", offered=tools(parallel_tool_calls=False)) == [call]
    ((kind, found),) = cut(XML, offered=tools())
    assert kind == "call" and json.loads(found.arguments) == {"city": "12", "days": 3}
    thought = cut(f"<think>Hm</think>\n\n{HERMES}", offered=tools(), template="<think>")
    assert thought == [("reasoning", "Hm"), call]


def test_arguments_with_half_a_character_are_text_all_the_same() -> None:
    half = HERMES.replace("Rom", r"R\ud800m")
    assert cut(half, offered=tools()) == [("call", Call("weather", '{"city": "R?m"}'))]
    quoted = HERMES.replace('{"city": "Rom"}', r'"R\ud800m"')
    assert cut(quoted, offered=tools()) == [("call", Call("weather", "R?m"))]


def test_a_schema_without_properties_reads_arguments_as_they_stand() -> None:
    for properties in (None, [1]):
        function = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
        ((kind, found),) = cut(XML, offered=tools(tools=[{"type": "function", "function": function}]))
        assert kind == "call" and json.loads(found.arguments) == {"city": 12, "days": 3}


def test_what_is_no_call_stays_text() -> None:
    for text in (
        HERMES.replace("weather", "launch"),
        "<tool_call>\nnothing\n</tool_call>",
        HERMES.removesuffix("}\n</tool_call>"),
        "<tool_call>",
        "<tool",
        "  ",
    ):
        assert cut(text, offered=tools()) == [("content", text)]


def test_an_answer_that_is_all_json_may_be_a_call_where_the_template_has_no_marks() -> None:
    bare = tools("")
    text = '{"name": "weather", "parameters": {"city": "Rom"}}'
    call = ("call", Call("weather", '{"city": "Rom"}'))
    assert cut(text, offered=bare) == [call]
    assert cut(f"[{text}, {text}]", offered=bare) == [call, call]
    for other in ('{"city": "Rom"}', '{"name": "weather"', "[1]", f"See: {text}"):
        assert cut(other, offered=bare) == [("content", other)]


def test_a_forced_call_has_a_grammar_of_its_own() -> None:
    marked = tools(tool_choice="required").grammar()
    root = next(line for line in marked.splitlines() if line.startswith("root ::="))
    assert root.startswith('root ::= "<tool_call>\\n" (') and root.endswith(') "\\n</tool_call>"')
    assert '\\"weather\\"' in marked
    assert "<tool_call>" not in tools("", tool_choice="required").grammar()
    again = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    nested = {"type": "function", "function": {"name": "chain", "parameters": again}}
    grammar = tools("", tools=[nested], tool_choice="required").grammar()
    assert (
        "next" in grammar and grammar.count("chain") == 1
    )  # the schema's own root, and not the whole call again
    assert (
        tools().forced == [] and read_tools(Fields({"tools": [WEATHER], "tool_choice": "none"}), "") is None
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "no tools to choose from"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "none of none, auto"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "weather"),
        ({"tools": [{"type": "retrieval"}]}, "functions alone"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters, digits"),
        ({"tools": [WEATHER] * 129}, "at most 128"),
        ({"tools": {}}, "a list is expected"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_tools(Fields(fields), "")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "has none"),
        ([1], r"messages\[0\] is 1: an object is expected"),
        ([{"content": "x"}], r"messages\[0\].role is missing"),
        ([{"role": "king", "content": "x"}], "none of system"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": 1}], "a text or a list is expected"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "an image cannot be used"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio' cannot be used"),
        ([{"role": "user", "content": "x", "weight": 1}], r"unknown: messages\[0\].weight"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}],
            "is no JSON",
        ),
    ],
)
def test_messages_that_cannot_be_used_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_messages(messages)


def test_messages_come_as_templates_take_them() -> None:
    found = read_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "x", "arguments": '{"a": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]
    )
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    assert found[1]["content"] == "ab" and found[2]["content"] == ""
    assert found[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_the_queue_is_fair_to_clients_and_bounded() -> None:
    queue = Waiting[int](4)
    assert [queue.push("flood", i) for i in range(6)] == [None] * 4 + [4, 5]
    assert queue.push("b", 10) == 3 and queue.push("c", 20) == 2  # the flood gives places up, from its end
    assert queue.push("b", 11) == 11  # b would have as many as the flood
    assert [queue.pop() for _ in range(5)] == [0, 10, 20, 1, None]


def test_the_queue_loses_and_doubles_nothing() -> None:
    pick = random.Random(0)
    queue = Waiting[int](7)
    inside: Counter[str] = Counter()
    owner: dict[int, str] = {}
    for item in range(3000):
        client = pick.choice("abcd")
        action = pick.random()
        if action < 0.6:
            owner[item] = client
            inside[client] += 1
            if (out := queue.push(client, item)) is not None:
                inside[owner.pop(out)] -= 1
        elif action < 0.9:
            if (out := queue.pop()) is not None:
                inside[owner.pop(out)] -= 1
        elif owner:
            gone = pick.choice(list(owner))
            assert queue.remove(owner[gone], gone)
            inside[owner.pop(gone)] -= 1
            assert not queue.remove("a", gone)
        assert len(queue) == len(owner) == sum(inside.values()) <= 7
    assert sorted(iter(queue.pop, None)) == sorted(owner)


def test_a_full_queue_of_none_takes_nothing() -> None:
    assert Waiting[int](0).push("a", 1) == 1


def test_metrics_are_in_prometheus_format() -> None:
    text = Metrics().text({"slots": 1, "slots_busy": 0, "waiting": 0})
    lines = text.splitlines()
    assert text.endswith("\n") and not any(line.startswith("# HELP ") and not line[7:] for line in lines)
    names = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    assert len(names) == sum(line.startswith("# HELP ") for line in lines)
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            float(value)
            assert any(name.startswith(known) for known in names)
    assert 'llama_sidecar_first_token_seconds_bucket{le="+Inf"} 0' in lines


def test_the_reasoning_of_a_model_without_marks_is_text() -> None:
    assert ReasoningSplitter("<think>", None).push("x") == [("content", "x")]


def test_the_page_loads_nothing_from_elsewhere_and_names_what_is_there() -> None:
    page = files("llama_sidecar.runtime.server").joinpath("page.html").read_text(encoding="utf-8")
    assert (
        re.findall(r"""(?:src|href|action)\s*=\s*["'](?!data:)|@import|url\(|//\w+\.\w+/(?!2000/svg)""", page)
        == []
    )
    assert "innerHTML" not in page and "eval(" not in page  # what a model writes is text
    ids = re.findall(r' id="(\w+)"', page)
    assert len(ids) == len(set(ids)) and set(re.findall(r'\bat\("(\w+)"\)', page)) <= set(ids)
    for origin in ("drafted", "ngram", "corrected"):
        assert f".lens .{origin}" in page
