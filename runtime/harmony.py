"""Answers of gpt-oss, which are messages: `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes`.

The channel analysis is reasoning, final and commentary are what is said, and a message to=functions.NAME is a call of it. Messages
to other recipients, such as a browser of the model's own, count by their channel. The format: OpenAI's "harmony response format".
Knows no functions.
"""

from __future__ import annotations

import re

SIGN = "<|channel|>analysis<|message|>"  # in the chat templates of these models
TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_SAYS = "<|channel|>final<|message|>"
_BODY = "<|message|>"  # begins what a message says; its header is before
_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", "to=")  # what a header begins with
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_MOST = 256  # characters of a header: a longer one is none


class HarmonySplitter:
    """Cuts an answer as it comes.

    Args:
        prompt: of the answer, as the template wrote it: it ends with `<|start|>assistant`, or inside of a message.

    Example:
        >>> splitter = HarmonySplitter("<|start|>assistant")
        >>> splitter.push("<|channel|>analysis<|message|>Hm.<|end|>") + splitter.push("<|channel|>final<|message|>Yes")
        [('reasoning', 'Hm.'), ('content', 'Yes')]
        >>> splitter.push("<|end|><|channel|>commentary to=functions.add json<|message|>{}") + splitter.finish()
        [('call', 'add{}')]
    """

    def __init__(self, prompt: str) -> None:
        self._held = ""
        self._kind = "content" if prompt.endswith(_SAYS) else ""  # of a message, or nothing in a header
        self._name = ""  # of the function that a call is of

    def push(self, text: str) -> list[tuple[str, str]]:
        """What is certain now: ("reasoning" or "content", text), or ("call", the function's name and then its arguments)."""
        self._held += text
        found: list[tuple[str, str]] = []
        while self._kind or self._read_header():
            end = _END.search(self._held)
            n = end.start() if end else len(self._held) - _n_held_back(self._held)
            if self._kind != "call" or end:
                found += self._say(self._held[:n])
                self._held = self._held[n:]
            if not end:
                break
            self._held = self._held[end.end() - end.start() :]
            self._kind = ""
        return found

    def finish(self) -> list[tuple[str, str]]:
        """What was held back, at the answer's end."""
        held, self._held = self._held, ""
        if not self._kind and held.lstrip().startswith(_HEADERS):
            return []
        self._kind = self._kind or "content"
        return self._say(held)

    def _say(self, text: str) -> list[tuple[str, str]]:
        if self._kind == "call":
            return [("call", self._name + text)]
        return [(self._kind, text)] if text else []

    def _read_header(self) -> bool:
        """Takes the next message's header from what is held; False while it is not whole."""
        said = self._held.lstrip()
        if len(said) <= _MOST and any(one.startswith(said[: len(one)]) for one in _HEADERS):
            header, mark, rest = said.partition(_BODY)
            if not mark:
                return False
            self._held = rest
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            if recipient:
                self._kind, self._name = "call", recipient[1]
            else:
                self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        else:  # no message at all
            self._kind = "content"
        return True


def _n_held_back(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    at = text.rfind("<", -max(map(len, TOKENS)), None)
    return len(text) - at if at >= 0 and any(mark.startswith(text[at:]) for mark in TOKENS) else 0


def says_at_once(prompt: str) -> str:
    """The prompt of an answer without reasoning.

    >>> says_at_once("<|start|>assistant")
    '<|start|>assistant<|channel|>final<|message|>'
    """
    return prompt + _SAYS
