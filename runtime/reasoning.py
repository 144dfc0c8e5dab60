"""A streamed answer cut into reasoning and what is said: `<think>...</think>` at its beginning, or opened by the chat template.

Those are DeepSeek-R1's marks, which Qwen3, GLM-4.5 and others took over. A template says which marks its model uses; one without any
that are known here has none. Marks that the vocabulary holds as control tokens are in an answer's text where they are preserved
(`preserved_texts`). gpt-oss has messages in place of marks (harmony.py).
"""

from __future__ import annotations

from . import harmony
from .harmony import HarmonySplitter

# In a chat template: how reasoning begins and ends.
MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R7B
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
Marks = tuple[str, str]


def reasoning_marks(template: str) -> Marks | None:
    """Those of a chat template's model; some templates only know how to leave earlier reasoning out, by its end.

    >>> reasoning_marks("{{ '<think>' }}"), reasoning_marks("{{ message }}")
    (('<think>', '</think>'), None)
    """
    return next((marks for marks in MARKS if marks[0] in template or marks[1] in template), None)


def reasons(template: str) -> bool:
    """Whether a chat template's model is known to write its reasoning apart.

    >>> reasons("{{ '<think>' }}"), reasons("{{ message }}")
    (True, False)
    """
    return harmony.SIGN in template or reasoning_marks(template) is not None


def preserved_texts(template: str) -> tuple[str, ...]:
    """What an answer is cut by: control tokens in it are to be preserved (`Session.generate`).

    >>> preserved_texts("{{ '<think>' }}")
    ('<think>', '</think>')
    """
    return harmony.TOKENS if harmony.SIGN in template else reasoning_marks(template) or ()


def make_splitter(prompt: str, template: str) -> ReasoningSplitter | HarmonySplitter:
    """What cuts the answer to a prompt that a chat template wrote.

    >>> make_splitter("<think>", "{{ '<think>' }}").push("Hm</think>Yes")
    [('reasoning', 'Hm'), ('content', 'Yes')]
    """
    if harmony.SIGN in template:
        return HarmonySplitter(prompt)
    return ReasoningSplitter(prompt, reasoning_marks(template))


def without_reasoning(prompt: str, template: str) -> str:
    """The prompt of an answer that is to begin with what it says: a sentence of a grammar has no reasoning before it.

    >>> without_reasoning("<|assistant|><think>", "{{ '<think>' }}")
    '<|assistant|><think>\\n\\n</think>\\n\\n'
    """
    if harmony.SIGN in template:
        return harmony.says_at_once(prompt)
    marks = reasoning_marks(template)
    if marks and opens_reasoning(prompt, marks):
        return f"{prompt.rstrip()}\n\n{marks[1]}\n\n"
    return prompt


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`.

    >>> held_back("so </th", "</think>"), held_back("so <b", "</think>")
    (4, 0)
    """
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)


class ReasoningSplitter:
    """Cuts an answer as it comes.

    Args:
        prompt: of the answer, as the template wrote it: it may have opened the reasoning.
        marks: of its model's reasoning; without them all is said.

    Example:
        >>> splitter = ReasoningSplitter("<|assistant|>", ("<think>", "</think>"))
        >>> splitter.push("<think>Hm") + splitter.push(".</think>\\n\\nYes") + splitter.finish()
        [('reasoning', 'Hm'), ('reasoning', '.'), ('content', 'Yes')]
    """

    def __init__(self, prompt: str, marks: Marks | None) -> None:
        self._open, self._close = marks or ("", "")
        self._held = ""
        self._thought = False  # whether any of the reasoning was shown: line ends before it are not
        self._state = "begin" if marks else "content"
        if marks and opens_reasoning(prompt, marks):
            self._state = "reasoning"

    def push(self, text: str) -> list[tuple[str, str]]:
        """What of the answer is certain now: ("reasoning" or "content", text)."""
        if self._state == "content":
            return [("content", text)] if text else []
        self._held += text
        found: list[tuple[str, str]] = []
        if self._state == "begin":
            opening = self._held.lstrip()
            if opening.startswith(self._open):
                self._state, self._held = "reasoning", opening[len(self._open) :]
            elif not self._open.startswith(opening):
                return self._say()
        if self._state == "reasoning":
            reasoning, mark, rest = self._held.partition(self._close)
            reasoning = reasoning if self._thought else reasoning.lstrip("\n")
            n_held = 0 if mark else held_back(reasoning, self._close)
            if shown := reasoning[: len(reasoning) - n_held]:
                found.append(("reasoning", shown))
                self._thought = True
            self._held = rest if mark else reasoning[len(reasoning) - n_held :]
            if mark:
                self._state = "gap"
        if self._state == "gap" and self._held.strip():
            self._held = self._held.lstrip()
            found += self._say()
        return found

    def finish(self) -> list[tuple[str, str]]:
        """What was held back, at the answer's end."""
        if self._state == "reasoning":
            held, self._held = self._held, ""
            return [("reasoning", held)] if held else []
        return [] if self._state == "gap" else self._say()

    def _say(self) -> list[tuple[str, str]]:
        self._state = "content"
        held, self._held = self._held, ""
        return [("content", held)] if held else []


def opens_reasoning(prompt: str, marks: Marks) -> bool:
    """Whether a prompt ends inside of the reasoning that its template opened.

    >>> marks = "<think>", "</think>"
    >>> opens_reasoning("<|assistant|>\\n<think>\\n", marks), opens_reasoning("<think>\\n\\n</think>\\n\\n", marks)
    (True, False)
    """
    return prompt.rstrip().endswith(marks[0])
