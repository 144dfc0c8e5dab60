"""Functions that a model may call: what a request offers, the grammar of a call that is forced, calls found in an answer.

Calls are read where the model writes them in `<tool_call>` marks, as JSON (Hermes, Qwen2.5, Qwen3) or as XML (Qwen3-Coder,
Qwen3.5), and as an answer that is nothing but JSON (Llama 3.1). Other spellings stay text. Schemas are not checked against what an
answer of free choice holds; one that is forced follows them by its grammar.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..grammar import schema_grammar
from .errors import RequestError
from .fields import Fields, shown

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A function and its arguments, as JSON."""

    name: str
    arguments: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """As answers have it; in a stream's chunks with its place among the calls."""
        call = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True)
class Tools:
    """What a request offers.

    Args:
        offered: for the template, in OpenAI's spelling.
        schemas: of each function's arguments.
        forced: the functions of which one must be called; none: as the model likes.
        marked: whether the template writes calls between marks.
        parallel: whether an answer may call more than one.
    """

    offered: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    forced: Sequence[str]
    marked: bool
    parallel: bool

    def grammar(self) -> str:
        """The GBNF of one call of a function that is forced.

        Raises:
            PromptError: a schema that cannot be turned into a grammar.
        """
        schemas = {f"arguments{i}": self.schemas[name] for i, name in enumerate(self.forced)}
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": _moved(schema, f"#/$defs/{key}")},
                "required": ["name", "arguments"],
            }
            for name, (key, schema) in zip(self.forced, schemas.items(), strict=True)
        ]
        definitions = {key: _moved(schema, f"#/$defs/{key}") for key, schema in schemas.items()}
        schema = {"$defs": definitions, **(calls[0] if len(calls) == 1 else {"anyOf": calls})}
        text = schema_grammar(schema)
        if not self.marked:
            return text
        opening, closing = (json.dumps(mark) for mark in (f"{OPEN}\n", f"\n{CLOSE}"))
        return re.sub(r"(?m)^root ::= (.*)$", lambda m: f"root ::= {opening} ({m[1]}) {closing}", text)

    def read(self, text: str) -> list[Call]:
        """The calls in what stands between two marks, or in a whole answer; none where it is no call of a function offered."""
        if found := _FUNCTION.fullmatch(text):
            calls: list[Call | None] = [self._read_xml(found[1], found[2])]
        else:
            try:
                data = json.loads(text)
            except (ValueError, RecursionError):
                return []
            calls = [_read_json(one) for one in (data if isinstance(data, list) else [data])]
        known = [call for call in calls if call is not None and call.name in self.schemas]
        return known if len(known) == len(calls) else []

    def _read_xml(self, name: str, body: str) -> Call:
        types = self.schemas.get(name, {}).get("properties")
        known = types if isinstance(types, Mapping) else {}
        arguments = {key: _value(text, known.get(key)) for key, text in _PARAMETER.findall(body)}
        return Call(name, _as_json(arguments))


def _value(text: str, schema: Any) -> Any:
    """An argument written as it stands: a text where the schema says so, else JSON where it is some."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_json(data: Any) -> Call | None:
    if not isinstance(data, Mapping):
        return None
    name, arguments = data.get("name"), data.get("arguments", data.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, (Mapping, str)):
        return None
    return Call(name, _as_json(arguments))


def _as_json(arguments: Any) -> str:
    """Arguments as JSON, which a text is already; escapes that spell half a character are no text, and become "?"."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` of another one now: its references lead there."""
    if isinstance(schema, Mapping):
        return {
            key: f"{place}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(one, place) for one in schema] if isinstance(schema, list) else schema


def read_tools(fields: Fields, template: str) -> Tools | None:
    """Takes `tools`, `tool_choice` and `parallel_tool_calls` of a request; None where nothing may be called.

    Raises:
        RequestError: no functions, a choice that is none of them.
    """
    offered = fields.take("tools", list, default=[])
    choice = fields.take("tool_choice", str, dict, default="auto")
    parallel = fields.take("parallel_tool_calls", bool, default=True)
    if len(offered) > MAX_TOOLS:
        raise RequestError(f"tools has {len(offered)}: at most {MAX_TOOLS} are expected", param="tools")
    schemas = dict(_read_function(Fields(one, f"tools[{i}]")) for i, one in enumerate(offered))
    forced = _forced(choice, list(schemas))
    if not schemas or choice == "none":
        return None
    return Tools(offered, schemas, forced, OPEN in template, parallel)


def _read_function(tool: Fields) -> tuple[str, Mapping[str, Any]]:
    tool.only("type", ("function",), "there are functions alone")
    function = Fields(tool.need("function", dict), tool.name("function"))
    name = function.need("name", str)
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{function.name('name')} {shown(name)}: 1 to 64 letters, digits, . _ and - are expected",
            param=function.name("name"),
        )
    parameters = function.take("parameters", dict, default={"type": "object"})
    function.skip("description", "strict")
    function.end()
    tool.end()
    return name, parameters


def _forced(choice: str | Mapping[str, Any], names: list[str]) -> list[str]:
    if choice in ("auto", "none"):
        return []
    if not names:
        raise RequestError(f"tool_choice {shown(choice)}: there are no tools to choose from", param="tools")
    if choice == "required":
        return names
    if isinstance(choice, str):
        raise RequestError(
            f"tool_choice {shown(choice)} is none of none, auto, required and an object that names a function",
            param="tool_choice",
        )
    fields = Fields(choice, "tool_choice")
    fields.only("type", ("function",), "a function is named by its name alone")
    name = Fields(fields.need("function", dict), "tool_choice.function").need("name", str)
    fields.end()
    if name not in names:
        raise RequestError(
            f"tool_choice names {shown(name)}, which is none of the tools: {', '.join(names)}",
            param="tool_choice",
        )
    return [name]
