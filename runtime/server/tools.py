"""Functions that a model may call: what a request offers, the grammar of a call that is forced, calls found in an answer.

Calls are read between the marks that a model's chat template writes them in (`MARKS`), in whichever of the spellings there are
(spellings.py), as an answer that is nothing but a call (Llama 3.1), and as a message to a function (gpt-oss: harmony.py). Other
spellings stay text. Schemas are not checked against what an answer of free choice holds; one that is forced
follows them by its grammar.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..grammar import schema_grammar
from . import spellings
from .errors import RequestError
from .fields import Fields, shown


class Marks(NamedTuple):
    """How calls begin and end in an answer.

    Args:
        begin, end: around them; without an end they go on to the answer's.
        inner: marks between those.
        signs: texts of which a chat template that writes calls so has one (none: `begin`).
    """

    begin: str
    end: str
    inner: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        return any(sign in template for sign in self.signs or (self.begin,))


HERMES = Marks("<tool_call>", "</tool_call>", ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
_DSML = ("｜DSML｜",)
MARKS = (  # the one whose end a template has, too, goes first; else the order counts
    Marks("<tool_calls>", "</tool_calls>"),  # MiniMax-M1, Apriel, whose prose has <tool_call>, too
    HERMES,  # Qwen, GLM-4.5 and others, too
    Marks("<|tool_call>", "<tool_call|>", ('<|"|>',)),  # Gemma 4
    Marks(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),  # DeepSeek V3, R1, V3.1
    Marks(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        _DSML,
        ("<｜DSML｜function_calls>", "dsml_token + 'function_calls>"),
    ),  # DeepSeek V3.2
    Marks(
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        _DSML,
        ("<｜DSML｜tool_calls>", "dsml_token + 'tool_calls>"),
    ),  # DeepSeek V4
    Marks(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),  # Kimi K2
    Marks("<minimax:tool_call>", "</minimax:tool_call>"),  # MiniMax-M2
    Marks(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        signs=("<|tool_call_start|>", "<|tool_list_start|>", '"List of tools: ["'),
    ),  # LFM2, LFM2.5
    Marks("<seed:tool_call>", "</seed:tool_call>"),  # Seed-OSS
    Marks("<|START_ACTION|>", "<|END_ACTION|>"),  # Command R7B, Command A
    Marks("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron Nano v2
    Marks("<|tools_prefix|>", "<|tools_suffix|>"),  # Apertus
    Marks("<|tool_call|>", "<|/tool_call|>"),  # Phi-4-mini
    Marks("<|tool_call|>", ""),  # Granite 3
    Marks("<|function_call|>", ""),  # GigaChat 3.1
    Marks("<function=", "</function>"),  # Functionary 3.1
    Marks("[TOOL_CALLS]", "", ("[CALL_ID]", "[ARGS]")),  # Mistral
)
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


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
        marks: between which the template writes calls; None where it has none that are known.
        parallel: whether an answer may call more than one.
    """

    offered: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    forced: Sequence[str]
    marks: Marks | None
    parallel: bool

    @property
    def preserved_texts(self) -> tuple[str, ...]:
        """What calls are found by in an answer's text: control tokens in it are to be preserved."""
        return (self.marks.begin, self.marks.end, *self.marks.inner) if self.marks else ()

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
        if self.marks != HERMES:  # as an answer that is nothing but a call
            return text
        opening, closing = (json.dumps(mark) for mark in (f"{HERMES.begin}\n", f"\n{HERMES.end}"))
        return re.sub(r"(?m)^root ::= (.*)$", lambda m: f"root ::= {opening} ({m[1]}) {closing}", text)

    def begins_bare(self, said: str) -> bool:
        """Whether an answer may be nothing but a call, without marks, by how it begins: with no white space."""
        return self.marks != HERMES and said[0] in "{["

    def read(self, text: str) -> list[Call]:
        """The calls in what stands between two marks, or in a whole answer; none where it is no call of a function offered."""
        found = spellings.read(text, self.schemas)
        if any(name not in self.schemas for name, _ in found):
            return []
        return [Call(name, _as_json(arguments)) for name, arguments in found]


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
    return Tools(offered, schemas, forced, call_marks(template), parallel)


def call_marks(template: str) -> Marks | None:
    """Between which a chat template writes calls; None where it has no marks that are known here.

    >>> call_marks("{{ '<TOOLCALL>' }}"), call_marks("{{ message }}")
    (Marks(begin='<TOOLCALL>', end='</TOOLCALL>', inner=(), signs=()), None)
    """
    found = [marks for marks in MARKS if marks.is_of(template)]
    return next((marks for marks in found if marks.end in template), found[0] if found else None)


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
