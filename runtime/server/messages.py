"""The messages of a chat as a template takes them: checked, text parts joined, arguments of tool calls parsed.

Text alone: an image, a sound or a file in a message is refused. Knows no template.
"""

from __future__ import annotations

import json
from typing import Any

from .errors import RequestError
from .fields import Fields, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Checks the messages and returns those that a template is given.

    Args:
        value: of the field `messages`.

    Raises:
        RequestError: no messages, a role or a field unknown, a part that is no text.

    Example:
        >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}])
        [{'role': 'system', 'content': 'Be brief.'}]
    """
    if not value:
        raise RequestError("messages has none: at least one is expected", param="messages")
    return [_read(Fields(one, f"messages[{i}]")) for i, one in enumerate(value)]


def _read(fields: Fields) -> dict[str, Any]:
    role = fields.need("role", str)
    if role not in ROLES:
        raise RequestError(
            f"{fields.name('role')} {shown(role)} is none of {', '.join(ROLES)}", param=fields.name("role")
        )
    content = fields.take("content", str, list)
    calls = fields.take("tool_calls", list) if role == "assistant" else None
    if content is None and not calls and role != "assistant":
        raise RequestError(f"{fields.name('content')} is missing", param=fields.name("content"))
    if isinstance(content, list):
        name = fields.name("content")
        content = "".join(_text(Fields(part, f"{name}[{i}]")) for i, part in enumerate(content))
    message = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls:
        name = fields.name("tool_calls")
        message["tool_calls"] = [_read_call(Fields(call, f"{name}[{i}]")) for i, call in enumerate(calls)]
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (found := fields.take(field, str)) is not None:
            message[field] = found
    why = "it cannot be used here: leave it out"
    fields.only("annotations", ([],), why)
    fields.only("audio", (), "the model reads and writes text alone")
    fields.skip("refusal")  # what a client was told of an earlier answer
    fields.end()
    return message


def _text(part: Fields) -> str:
    kind = part.need("type", str)
    if kind not in _TEXTS:
        what = "an image" if "image" in kind else f"a part of type {shown(kind)}"
        raise RequestError(
            f"{part.name('type')}: {what} cannot be used: this server reads text alone; send the text parts",
            param=part.name("type"),
        )
    text: str = part.need(_TEXTS[kind], str)
    part.skip("annotations", "cache_control")
    part.end()
    return text


def _read_call(call: Fields) -> dict[str, Any]:
    call.only("type", ("function",), "there are functions alone")
    function = Fields(call.need("function", dict), call.name("function"))
    name, arguments = function.need("name", str), function.take("arguments", str, dict, default={})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(
                f"{function.name('arguments')} {shown(arguments)} is no JSON",
                param=function.name("arguments"),
            ) from None
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if (id := call.take("id", str)) is not None:
        found["id"] = id
    call.skip("index")
    function.end()
    call.end()
    return found
