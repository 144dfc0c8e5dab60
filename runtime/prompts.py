"""Prompts for measuring: text to complete or conversations to answer, read from a file. Knows nothing of speed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PromptError
from .llm import Model


@dataclass(frozen=True)
class Prompt:
    """A text to complete, or the messages of a conversation to answer. `task` names its sort in the figures."""

    content: str | list[dict[str, Any]]
    task: str

    def tokens(self, model: Model) -> list[int]:
        """Token ids of this prompt. Raises PromptError where the model has no chat template for messages."""
        if isinstance(self.content, str):
            return model.vocab.tokenize(self.content)
        return model.vocab.chat_tokens(self.content)


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts: each line of a `.jsonl` file is one, any other file is one prompt as it stands.

    A line is `{"prompt": TEXT}` or `{"messages": [{"role": ..., "content": ...}, ...]}`, with `"task"` if wanted.

    Raises:
        PromptError: the file cannot be read, is empty, or has a line that is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PromptError(f"{path}: {reason}") from error
    if path.suffix.lower() != ".jsonl":
        prompts = [Prompt(text, path.stem)] if text.strip() else []
    else:
        lines = text.removeprefix("\ufeff").split("\n")  # JSON strings may hold what splitlines() splits at
        prompts = [
            _parse(line, f"{path}:{number}", path.stem)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    if not prompts:
        raise PromptError(f"{path}: there is no prompt in it")
    return prompts


def _parse(line: str, place: str, task: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{place}: not JSON ({error})") from error
    match entry:
        case {"prompt": str(text)} if text:
            content: str | list[dict[str, Any]] = text
        case {"messages": [*messages]} if messages and all(_is_message(m) for m in messages):
            content = messages
        case _:
            wanted = '{"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'
            raise PromptError(f"{place}: expected {wanted}, found {line.strip()[:60]}")
    return Prompt(content, str(entry.get("task", task)))


def _is_message(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("role"), str) and "content" in entry


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over the prompts' contents in order: equal sets have equal hashes whatever file they were in."""
    return hashlib.sha256(json.dumps([p.content for p in prompts], sort_keys=True).encode()).hexdigest()


def usable(
    model: Model, prompts: Sequence[Prompt], n: int
) -> tuple[list[tuple[Prompt, list[int]]], list[str]]:
    """The prompts with their token ids; those that the model cannot take, with `n` tokens behind, are left out with a warning.

    Raises:
        PromptError: all of them are.
    """
    found: list[tuple[Prompt, list[int]]] = []
    refused: dict[str, int] = {}
    for prompt in prompts:
        try:
            tokens = prompt.tokens(model)
            if not tokens:
                raise PromptError("it is empty")
            if len(tokens) + n > model.n_ctx:
                raise PromptError(f"it has more than {model.n_ctx - n} tokens, what --ctx leaves beside -n")
            found.append((prompt, tokens))
        except PromptError as error:
            refused[str(error)] = refused.get(str(error), 0) + 1
    if not found:
        raise PromptError(f"no prompt can be used: {'; '.join(refused) or 'there is none'}")
    return found, [f"prompts left out: {count} of {len(prompts)} ({why})" for why, count in refused.items()]
