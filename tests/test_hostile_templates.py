"""Chat templates from strangers: as llama-cpp-python's formatter writes them, and none runs for ever, fills the memory or escapes."""

from __future__ import annotations

import copy
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llama_sidecar.runtime import chat_template
from llama_sidecar.runtime.chat_template import ChatTemplate
from llama_sidecar.runtime.errors import PromptError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Hi & hello\n"},
    {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None]}}}],
    },
    {"role": "user", "content": [{"type": "text", "text": "wörld"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

SOUND = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}",
    "{%- for m in messages -%}{{ loop.index0 ~ '/' ~ loop.length ~ ' ' ~ m.role | upper }};{%- endfor -%}",
    "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }} {{ ns.seen | join(', ') }} {{ ns.seen | length }}",
    "{{ tools | tojson(indent=2) }}{{ messages[2].tool_calls[0].function.arguments | tojson }}",
    "{% macro show(x, deep=true) %}[{{ x | string | trim }}{% if deep %}{{ show(x, false) }}{% endif %}]{% endmacro %}{{ show('a') }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% generation %}{{ bos_token }}x{% endgeneration %}{{ eos_token }}{{ 'yes' if add_generation_prompt }}",
    "{% set content = 'a</think>b' %}{{ content.split('</think>')[-1].lstrip('\\n') }}{{ '%s-%d' % ('x', 3) }}{{ '{:>4}'.format(7) }}",
    "{% for k, v in {'a': 1, 'b': [2]} | dictsort %}{{ k }}={{ v }}{% endfor %}{{ (1, 2) }}{{ [1] * 3 }}{{ 2 ** 8 }}{{ 7 // 2 }}",
    "{% set x %}{{ messages[0].role }}!{% endset %}{{ x ~ x }}{{ messages | map(attribute='role') | list }}{{ missing is defined }}",
    "{{ 'abc'.replace('b', 'xx') }}{{ 'abc' | replace('a', '') }}{{ ','.join(['a', 'b']) }}{{ 'x' | center(5) }}{{ 'a\nb' | indent(2) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}{{ tools is none }}{{ enable_thinking }}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}{{ messages[::-1] | length }}",
]


@pytest.mark.parametrize("source", SOUND, ids=range(len(SOUND)))
def test_it_writes_what_the_unlimited_formatter_writes(source: str) -> None:
    theirs = Jinja2ChatFormatter(source, eos_token="<e>", bos_token="<b>")
    expected = theirs(messages=MESSAGES, tools=TOOLS, enable_thinking=False).prompt  # type: ignore[arg-type]
    ours = ChatTemplate(source, bos="<b>", eos="<e>").render(MESSAGES, tools=TOOLS, enable_thinking=False)
    assert ours == expected


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repeated": "{{ 'a' * 10 ** 10 }}",
    "a list repeated": "{{ [0] * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "a product of products": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "joined twice": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added twice": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "captured twice": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "nested twice": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == 1 }}",
    "objects twice": "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "tuples twice": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
    "dicts twice": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "format": "{{ '%999999999d' % 1 }}",
    "format from an argument": "{{ '%*d' % (999999999, 1) }}",
    "the format filter": "{{ '%999999999d' | format(1) }}",
    "str.format": "{{ '{:>9999999999}'.format(1) }}",
    "str.format from an argument": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "centre": "{{ 'a' | center(10 ** 10) }}",
    "just": "{{ 'a'.ljust(10 ** 10) }}",
    "indent": "{{ ('a\n' * 99999) | indent(9999) }}",
    "indented JSON": "{{ [1, [2]] | tojson(indent=10 ** 10) }}",
    "batch": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "replace": "{% set x = ('a' * 99999) %}{{ x.replace('a', x) }}",
    "the replace filter": "{% set x = ('a' * 99999) %}{{ x | replace('a', x) }}",
    "join": "{% set x = 'a' * 99999 %}{{ x.join([x] * 9999) }}",
    "the join filter": "{% set x = 'a' * 99999 %}{{ range(99999) | join(x) }}",
    "translate": "{% set x = 'a' * 99999 %}{{ x.translate({97: x}) }}",
    "output": "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "lorem": "{{ lipsum(n=99999) }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "appended to itself": "{% set x = [] %}{% set _ = x.append(x) %}{{ x }}",
    "appended twice": "{% set x = ['a'] %}{% set _ = x.append(x) %}{% set _ = x.extend(x) %}",
    "extended": "{% set x = ['a'] %}{% for i in range(60) %}{% set _ = x.extend(x) %}{% endfor %}",
    "appended for ever": "{% set x = [] %}{% for i in range(99999) %}{% for i in range(99999) %}{% set _ = x.append('a') %}{% endfor %}{% endfor %}",
    "appended and joined": "{% set x = [] %}{% for i in range(9999) %}{% set _ = x.append('a' * 99999) %}{% endfor %}{{ x | join }}",
    "long": "a" * 300_000,
    "no template": "{% for %}",
    "a large number": "{{ messages[10 ** 30] }}{{ 'x' * messages }}",
}


@pytest.fixture
def little_memory() -> Any:
    """So that a template that fills it fails the test and not the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bomb_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, little_memory: None) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(PromptError) as error:
        ChatTemplate(HOSTILE[name]).render(MESSAGES)
    assert time.monotonic() - started < 20, "a C call ran on"
    assert str(error.value).startswith("the file's chat template") and str(error.value).isprintable()
    assert "MemoryError" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set _ = messages[2].tool_calls[0].function.arguments.x.append('y') %}{{ messages[2].tool_calls.pop() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ (messages | attr('__class__')).x }}",
    ],
)
def test_nothing_of_python_is_within_reach(source: str) -> None:
    given = copy.deepcopy(MESSAGES)
    try:
        text = ChatTemplate(source).render(given)
    except PromptError:
        return
    assert "class" not in text and "root" not in text and given == MESSAGES


def test_a_template_may_queue_texts() -> None:
    """As Kimi K2's does with the names of calls; transformers' sandbox refuses it."""
    source = (
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.role) %}{% endfor %}"
        "{{ ns.ids.pop(0) }} {{ ns.ids | join(',') }}"
    )
    assert ChatTemplate(source).render(MESSAGES) == "system user,assistant,user"


def test_what_a_template_raises_is_its_message() -> None:
    with pytest.raises(PromptError, match="the file's chat template failed: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
