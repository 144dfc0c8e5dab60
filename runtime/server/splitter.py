"""A streamed answer cut into what OpenAI's messages keep apart: reasoning, content, tool calls. Knows no JSON of theirs."""

from __future__ import annotations

from ..reasoning import held_back, make_splitter
from .tools import Call, Tools

Part = tuple[str, "str | Call"]  # "reasoning", "content" or "call", and what it is


class Splitter:
    """Cuts an answer as it comes: `push` its text, then `finish`.

    Args:
        prompt: as the template wrote it.
        template: the chat template itself.
        tools: what may be called, if anything.

    Example:
        >>> Splitter("", "", None).push("Yes")
        [('content', 'Yes')]
    """

    def __init__(self, prompt: str, template: str, tools: Tools | None) -> None:
        self._reasoning = make_splitter(prompt, template)
        self._tools = tools
        self._open, self._close = tools.marks[:2] if tools and tools.marks else ("", "")
        self._held = ""
        self._state = "begin"  # of what is said: nothing but white space so far
        self._n_calls = 0

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        return [part for kind, piece in self._reasoning.push(text) for part in self._take(kind, piece)]

    def finish(self) -> list[Part]:
        """What was held back, at the answer's end."""
        parts = [part for kind, piece in self._reasoning.finish() for part in self._take(kind, piece)]
        held, self._held = self._held, ""
        is_cut = (
            self._state == "call" and self._close and held.lstrip()[:1] not in ("{", "[")
        )  # JSON says itself
        if self._tools and self._state in ("call", "bare") and not is_cut:
            return parts + self._calls(held, (self._open if self._state == "call" else "") + held)
        if self._state == "call":
            held = self._open + held
        if self._n_calls and not held.strip():
            held = ""
        return [*parts, ("content", held)] if held else parts

    def _take(self, kind: str, text: str) -> list[Part]:
        if kind == "reasoning" or self._tools is None:
            return [(kind if kind == "reasoning" else "content", text)]
        if kind == "call":
            return self._calls(text, text)
        self._held += text
        parts: list[Part] = []
        while True:
            if self._state == "call":
                # Without a mark of its end a call goes on to the next one's beginning.
                inside, mark, rest = self._held.partition(self._close or self._open)
                if not mark:
                    return parts
                parts += self._calls(inside, f"{self._open}{inside}{self._close}")
                self._held, self._state = rest, "begin" if self._close else "call"
                continue
            if self._state == "begin":
                said = self._held.lstrip()
                if not said or (self._open.startswith(said) and said != self._open):
                    return parts
                if self._open and said.startswith(self._open):
                    self._state = "content"
                elif not self._n_calls and self._tools.begins_bare(said):
                    self._state = "bare"
                else:
                    self._state = "content"
            if self._state == "bare":
                return parts
            if not self._open:
                held, self._held = self._held, ""
                return [*parts, ("content", held)] if held else parts
            before, mark, after = self._held.partition(self._open)
            if mark:
                if before.strip():
                    parts.append(("content", before))
                self._held, self._state = after, "call"
                continue
            n_held = held_back(before, self._open)
            if shown := before[: len(before) - n_held]:
                parts.append(("content", shown))
            self._held = before[len(before) - n_held :]
            return parts

    def _calls(self, text: str, as_text: str) -> list[Part]:
        """The calls that `text` is, one more than there may be left out; `as_text` where it is none."""
        assert self._tools is not None
        calls = self._tools.read(text.strip())
        if not calls:
            return [("content", as_text)]
        n_before = self._n_calls
        self._n_calls += len(calls)
        if not self._tools.parallel:
            calls = calls[: max(0, 1 - n_before)]
        return [("call", call) for call in calls]
