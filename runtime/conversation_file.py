"""A conversation in a file: JSON with a version, so that people and other programs can read what was said.

    {"format": "llama-sidecar conversation", "version": 1,
     "model": {"name": file name, "hash": see session_file.content_hash},
     "messages": [{"role": "system" | "user" | "assistant", "content": text, "reasoning_content": text, maybe}, ...],
     "said": {"text": the conversation as the chat template wrote it, "tokens": its ids} or null,
     "state": name of a saved session beside this file, or null}

Any model may go on with the messages; `said` and the state are of use to the same one alone, which then need not read all again.
Every field is checked before any is used. Knows no sessions and no templates.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_sidecar.sidecars import whole_file

from .errors import ConversationFileError

FORMAT = "llama-sidecar conversation"
VERSION = 1
MAX_BYTES = 64 << 20  # far beyond any context; a file that is larger is another sort of file
TEXTS = ("role", "content", "reasoning_content")


@dataclass(frozen=True)
class SavedConversation:
    """What a file holds; `state` is the path of the saved session, `said` the text and the token ids of the whole conversation."""

    model: str
    model_hash: str
    messages: list[dict[str, Any]]
    said: tuple[str, list[int]] | None = None
    state: Path | None = None


def write(path: str | os.PathLike[str], saved: SavedConversation) -> None:
    """Writes the file, whole or not at all; one that is there is replaced.

    Raises:
        ConversationFileError: the system refuses, or the name is that of a folder or a device.
    """
    path = Path(path)
    check_name(path)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "model": {"name": saved.model, "hash": saved.model_hash},
        "messages": saved.messages,
        "said": saved.said and {"text": saved.said[0], "tokens": saved.said[1]},
        "state": saved.state and saved.state.name,
    }
    try:
        with whole_file.writing(path) as file:
            file.write(f"{json.dumps(data, ensure_ascii=False, indent=1)}\n".encode(errors="replace"))
    except OSError as error:
        raise ConversationFileError(f"{path} cannot be written: {error.strerror or error}") from error


def check_name(path: Path) -> None:
    """Raises ConversationFileError where no file can be written: the name is that of a folder or a device, or none that there may be."""
    try:
        is_other = not path.name or path.name == ".." or (path.exists() and not path.is_file())
    except OSError as error:
        raise ConversationFileError(f"{path} cannot be written: {error.strerror or error}") from error
    if is_other:
        raise ConversationFileError(f"{path} cannot be written: it is a folder or a device")
    if "\0" in str(path):
        raise ConversationFileError(f"{str(path)!r} cannot be written: no file's name has a NUL in it")


def read(path: str | os.PathLike[str]) -> SavedConversation:
    """Reads a file that `write` has written.

    Raises:
        ConversationFileError: there is no such file, it is no saved conversation or of another version, or its messages are not
            questions and answers in turn.

    Example:
        >>> read("talk.json").messages[0]                                        # doctest: +SKIP
        {'role': 'user', 'content': 'Why is the sky blue?'}
    """
    path = Path(path)
    data = _json(path)
    if data.get("format") != FORMAT:
        raise ConversationFileError(f'{path} is no saved conversation: it has no "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ConversationFileError(f"{path} is of version {data.get('version')!r}, this reads {VERSION}")
    model = data.get("model")
    name, digest = (model.get("name"), model.get("hash")) if isinstance(model, dict) else (None, None)
    state = data.get("state")
    if not (isinstance(name, str) and isinstance(digest, str)):
        raise ConversationFileError(f"{path} does not say which model it is of: 'model' is {model!r}")
    if state is not None and not (
        isinstance(state, str) and state not in ("", ".", "..") and not {"/", "\0"} & {*state}
    ):
        raise ConversationFileError(f"{path}: its state {state!r} is no name of a file beside it")
    return SavedConversation(
        model=name,
        model_hash=digest,
        messages=_messages(path, data.get("messages")),
        said=_said(path, data.get("said")),
        state=path.with_name(state) if state else None,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise ConversationFileError(f"{path}: no saved conversation, but a folder or a device")
        if path.stat().st_size > MAX_BYTES:
            raise ConversationFileError(
                f"{path} is no saved conversation: it has more than {MAX_BYTES >> 20} MiB"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversationFileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConversationFileError(f"{path} is no saved conversation: no JSON ({error})") from error
    return data if isinstance(data, dict) else {}


def _messages(path: Path, messages: Any) -> list[dict[str, Any]]:
    """The messages, if they are an opening or none, then questions and answers in turn, with texts and nothing else."""
    found: list[dict[str, Any]] = messages if isinstance(messages, list) else []
    for i, message in enumerate(found):
        if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in TEXTS[:2])):
            raise ConversationFileError(f"{path}: message {i} has no role or no content that is text")
        if left := [k for k, value in message.items() if k not in TEXTS or not isinstance(value, str)]:
            raise ConversationFileError(f"{path}: {left[0]!r} of message {i} is nothing that is known here")
        try:
            "".join(message.values()).encode()
        except UnicodeEncodeError:
            raise ConversationFileError(f"{path}: message {i} has half a surrogate pair in it") from None
    opening = found[:1] if found and found[0]["role"] == "system" else []
    roles = [message["role"] for message in found[len(opening) :]]
    if messages != found or roles != ["user", "assistant"] * (len(roles) // 2):
        raise ConversationFileError(f"{path}: its messages are not questions and answers in turn")
    return found


def _said(path: Path, said: Any) -> tuple[str, list[int]] | None:
    if said is None:
        return None
    text, tokens = (said.get("text"), said.get("tokens")) if isinstance(said, dict) else (None, None)
    if not (isinstance(text, str) and isinstance(tokens, list) and all(type(t) is int for t in tokens)):
        raise ConversationFileError(f"{path}: 'said' is no text with its token ids")
    return text, tokens
