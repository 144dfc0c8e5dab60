"""How models spell calls of functions, inside the marks around them. One function a spelling; none of them knows what is offered.

Hermes, Qwen, Llama 3, Mistral 3   {"name": "f", "arguments": {...}}, or several, one after another or in a list
Command R7B                        [{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]
Qwen3-Coder, Qwen3.5               <function=f><parameter=a>1</parameter></function>
GLM-4.5                            f<arg_key>a</arg_key><arg_value>1</arg_value>
Gemma 4                            call:f{a:1,b:<|"|>text<|"|>}
DeepSeek                           <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, and so on
DeepSeek V3.2, V4                  <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>...
MiniMax-M2                         <invoke name="f"><parameter name="a">1</parameter></invoke>
Kimi K2                            <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
LFM2                               [f(a=1, b="text")]
Mistral Small 3.2, Functionary     f[ARGS]{...}, f>{...}
gpt-oss                            f{...}
Apertus                            [{"f": {...}}]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Found = list[tuple[str, Any]]  # names and arguments: an object, or a text that stands for one

# What begins a call or an argument. More of them in one text are none: the patterns look for the end of each in all that follows.
_BEGINNINGS = (
    "<parameter",
    "<arg_key>",
    "<invoke",
    "<｜DSML｜",
    "<｜tool▁call▁begin｜>",
    "<|tool_call_begin|>",
)
_MOST = 512

_BLANKS = re.compile(r"\s*")
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([\w.-]+)\s*")
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_GEMMA = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([\w.-]+)\n```json\n(.*?)\n```|([\w.-]+)<｜tool▁sep｜>(.*?))<｜tool▁call▁end｜>",
    re.DOTALL,
)
_INVOKE = re.compile(r'<(｜DSML｜|)invoke name="([^"]+)">(.*?)</\1invoke>', re.DOTALL)
_INVOKE_PARAMETER = re.compile(
    r'<(｜DSML｜|)parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</\1parameter>', re.DOTALL
)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_PYTHON = re.compile(  # a text, the beginning of a call, an argument's name, its end, a constant
    r"""'((?:[^'\\]|\\.)*)(?:'|\Z)|"((?:[^"\\]|\\.)*)(?:"|\Z)|(?<![\w.-])(?:([A-Za-z_][\w.-]*)\(|(\w+)\s*=|(True|False|None)\b)|(\))""",
    re.DOTALL,
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"\\'": "'", '"': '\\"'}  # of what stands between single quotes, and JSON's
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|>)?\s*(?=\{)")


def read(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    """The calls that a text is, in whichever spelling; none where it is anything else.

    Args:
        text: what stands between marks, or a whole answer.
        schemas: of functions' arguments, by name: they say which values are text where a spelling does not.

    Example:
        >>> read('{"name": "add", "arguments": {"a": 1}}', {})
        [('add', {'a': 1})]
        >>> read('call:add{a:1,b:<|"|>x<|"|>}', {})
        [('add', {'a': 1, 'b': 'x'})]
    """
    if sum(map(text.count, _BEGINNINGS)) > _MOST:
        return []
    spellings = (_json, _xml, _glm, _gemma, _deepseek, _invoke, _kimi, _python, _named)
    return next((found for spelling in spellings if (found := spelling(text, schemas))), [])


def _json(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    decoder, data, text, at = json.JSONDecoder(), list[Any](), text.strip(), 0
    try:
        while at < len(text):
            one, at = decoder.raw_decode(text, at)
            data += one if isinstance(one, list) else [one]
            at = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return []
    return _named_calls(data)


def _named_calls(data: list[Any]) -> Found:
    """The calls that JSON values are, all of them or none."""
    found = []
    for one in data:
        if not isinstance(one, Mapping):
            return []
        name = one.get("name", one.get("tool_name"))
        arguments = one.get("arguments", one.get("parameters"))
        if len(one) == 1:
            ((name, arguments),) = one.items()
        if not isinstance(name, str) or not isinstance(arguments, (Mapping, str)):
            return []
        found.append((name, arguments))
    return found


def _xml(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    found = _FUNCTION.fullmatch(text)
    return [(found[1], _values(found[1], _PARAMETER.findall(found[2]), schemas))] if found else []


def _glm(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    name = _GLM_NAME.match(text)
    if not name or _GLM_ARGUMENT.sub("", rest := text[name.end() :]).strip():
        return []
    return [(name[1], _values(name[1], _GLM_ARGUMENT.findall(rest), schemas))]


def _gemma(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    found = _GEMMA.fullmatch(text)
    if not found:
        return []
    parts = found[2].split('<|"|>')  # every second one is a text
    data = "".join(
        json.dumps(part) if i % 2 else _GEMMA_KEY.sub(r'\1"\2"\3', part) for i, part in enumerate(parts)
    )
    try:
        return [(found[1], json.loads(data))]
    except (ValueError, RecursionError):
        return []


def _deepseek(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    calls = list(_DEEPSEEK.finditer(text))
    if _DEEPSEEK.sub("", text).strip():
        return []
    try:
        return [(call[1] or call[3], json.loads(call[2] or call[4])) for call in calls]
    except (ValueError, RecursionError):
        return []


def _invoke(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    found: Found = []
    for call in _INVOKE.finditer(text):
        parameters = _INVOKE_PARAMETER.findall(call[3])
        values = _values(call[2], [(name, value) for _, name, _, value in parameters], schemas)
        values |= {name: value for _, name, is_text, value in parameters if is_text == "true"}
        found.append((call[2], values))
        if _INVOKE_PARAMETER.sub("", call[3]).strip():
            return []
    return [] if _INVOKE.sub("", text).strip() else found


def _kimi(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    calls = list(_KIMI.finditer(text))
    if _KIMI.sub("", text).strip():
        return []
    try:
        return [(call[1], json.loads(call[2])) for call in calls]
    except (ValueError, RecursionError):
        return []


def _python(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    """Rewritten as JSON, token by token: what is no list of calls with named arguments becomes none."""
    if not text.lstrip().startswith("["):
        return []

    def rewritten(token: re.Match[str]) -> str:
        single, double, function, argument, constant, end = token.groups()
        if function is not None:
            return f'{{"name": {json.dumps(function)}, "arguments": {{'
        if argument is not None:
            return f"{json.dumps(argument)}: "
        if end or constant:
            return "}}" if end else _CONSTANTS[constant]
        if double is not None:
            return token[0]
        return (
            '"' + re.sub(r"\\.|\"", lambda one: _ESCAPES.get(one[0], one[0]), single, flags=re.DOTALL) + '"'
        )

    try:
        data = json.loads(_PYTHON.sub(rewritten, text), strict=False)
    except (ValueError, RecursionError):
        return []
    return _named_calls(data) if isinstance(data, list) else []


def _named(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    found, at = [], 0
    while call := _NAMED.match(text, at):
        try:
            arguments, at = json.JSONDecoder().raw_decode(text, call.end())
        except (ValueError, RecursionError):
            return []
        found.append((call[1], arguments))
    return [] if text[at:].strip() else found


def _values(
    name: str, found: list[tuple[str, str]], schemas: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    types = schemas.get(name, {}).get("properties")
    known = types if isinstance(types, Mapping) else {}
    return {key.strip(): _value(text, known.get(key.strip())) for key, text in found}


def _value(text: str, schema: Any) -> Any:
    """An argument written as it stands: a text where the schema says so, else JSON where it is some."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
