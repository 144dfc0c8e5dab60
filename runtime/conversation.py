"""A conversation on a session: what was said so far, in words and in the token ids they were said in.

Thin: the chat template is vocab.py's, the re-use of what the session holds is the session's own. Knows no terminal.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import conversation_file
from .conversation_file import SavedConversation
from .errors import ConversationFileError, PromptError
from .reasoning import make_splitter, preserved_texts, reasons
from .session import Generation, Session
from .session_file import content_hash

THINKING = "enable_thinking"  # the chat templates' own name for the switch
STATE_SUFFIX = ".session"  # of the state saved beside a conversation


@dataclass(frozen=True)
class _Exchange:
    """A question and its answer; `said` is the conversation up to here, or to an earlier answer, as text and token ids."""

    question: str
    answer: dict[str, Any]
    said: tuple[str, list[int]] | None
    n_tokens: int


@dataclass(frozen=True)
class _Running:
    question: str
    prompt: str
    tokens: list[int]
    preserved: list[int]
    generation: Generation


class Conversation:
    """Questions and answers on one session, one after another.

    An answer goes on in the token ids it was generated in. Its text need not tokenize into the same ones, and with other
    ids the session would have to read again from there on. Of reasoning, an earlier answer has what the chat template keeps.

    Args:
        session: answers; it should serve nothing else meanwhile, or each change costs the whole prompt.
        system: the system prompt.
        variables: more that the chat template knows, such as `enable_thinking`.

    Example:
        >>> talk = Conversation(session, "Be brief.")                 # doctest: +SKIP
        >>> talk.ask("Why is the sky blue?", max_tokens=64).read()    # doctest: +SKIP
    """

    def __init__(self, session: Session, system: str | None = None, **variables: Any) -> None:
        self.session = session
        #: The system prompt, or None; a change holds from the next question on.
        self.system = system
        #: What the chat template is given beside the messages; a change holds from the next question on.
        self.variables = variables
        self._exchanges: list[_Exchange] = []
        self._running: _Running | None = None
        self._last_question: str | None = None
        self._unanswered = False  # whether that one is not among the exchanges

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said, as far as it was answered; an answer that was cut short is there as far as it got."""
        self._settle()
        return self._messages()

    @property
    def n_tokens(self) -> int:
        """Tokens of the context that it has taken so far, the last answer included; 0 before the first."""
        running, n = self._running, 0
        if running is not None:
            n = len(running.tokens) + len(running.generation.tokens)
        elif self._exchanges:
            n = self._exchanges[-1].n_tokens
        return min(n, self.session.n_ctx)  # a text's last token has no place there yet

    @property
    def thinks(self) -> bool:
        """Whether the chat template knows the marks of reasoning."""
        return reasons(self._template)

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason before it answers; None (the default) leaves it to the chat template.

        Setting it raises PromptError where the template has no switch for it (`enable_thinking`).
        """
        return self.variables.get(THINKING)

    @thinking.setter
    def thinking(self, on: bool | None) -> None:
        self.variables.pop(THINKING, None)
        if on is None:
            return
        if THINKING not in self._template:
            raise PromptError(f"the file's chat template has no {THINKING}, which turns reasoning on and off")
        self.variables[THINKING] = on

    def check(self) -> None:
        """Raises PromptError where the file's chat template is missing or takes no such opening."""
        self._render([*self._opening(), {"role": "user", "content": "?"}])

    def ask(self, question: str, **options: Any) -> Generation:
        """Begins to answer; options as in `Session.generate`.

        Raises:
            PromptError: no chat template, or the conversation outgrew the context; the question is then forgotten.
        """
        self._settle()
        text = self._render([*self._messages(), {"role": "user", "content": question}])
        tokens = self._tokens(text)
        preserved = self.session.model.vocab.control_tokens(preserved_texts(self._template))
        generation = self.session.generate(tokens, preserved_tokens=preserved, **options)
        self._running = _Running(question, text, tokens, preserved, generation)
        self._last_question, self._unanswered = question, True
        return generation

    def retry(self, **options: Any) -> Generation:
        """Answers the last question anew, its last answer forgotten; options and errors as of `ask`.

        Raises:
            PromptError: nothing was asked yet.

        Example:
            >>> talk.retry(temperature=1.0).read()                    # doctest: +SKIP
        """
        self._settle()
        question = self._last_question
        if question is None:
            raise PromptError("there is no question to answer again: nothing was asked yet")
        before = list(self._exchanges)
        if before and not self._unanswered:
            self._exchanges.pop()
        try:
            return self.ask(question, **options)
        except BaseException:
            self._exchanges = before
            raise

    def undo(self) -> str | None:
        """Forgets the last question and its answer, and returns that question; None where nothing was said."""
        self._settle()
        if not self._exchanges:
            return None
        question = self._exchanges.pop().question
        self._last_question = self._exchanges[-1].question if self._exchanges else None
        self._unanswered = False
        return question

    def clear(self) -> None:
        """Forgets all but the system prompt."""
        self._exchanges, self._running, self._last_question, self._unanswered = [], None, None, False

    def parts(self) -> Iterator[tuple[str, str]]:
        """The running answer as it comes, in ("reasoning" or "content", text); without the marks between them.

        Example:
            >>> answer = talk.ask("Why?")                             # doctest: +SKIP
            >>> for kind, text in talk.parts():                       # doctest: +SKIP
            ...     print(kind, text)
            content Because
        """
        running = self._running
        if running is None:
            return
        yield from self._cut(running, running.generation)

    def pieces(self) -> Iterator[tuple[str, str, str]]:
        """As `parts`, but token by token, each with its origin (see `Piece`): ("reasoning" or "content", text, origin).

        Example:
            >>> answer = talk.ask("Why?")                             # doctest: +SKIP
            >>> for kind, text, origin in talk.pieces():              # doctest: +SKIP
            ...     print(kind, text, origin)
            content Because drafted
        """
        running = self._running
        if running is None:
            return
        waiting = deque[tuple[str, str]]()  # texts and origins of tokens that are not shown yet

        def texts() -> Iterator[str]:
            for piece in running.generation.pieces():
                waiting.append((piece.text, piece.origin))
                yield piece.text

        for kind, text in self._cut(running, texts()):
            for shown, origin in _by_token(text, waiting):
                yield kind, shown, origin

    # In a file

    def save(self, path: str | os.PathLike[str], *, with_state: bool = False) -> Path | None:
        """Writes what was said to a file, for `load`; what is there is replaced, whole or not at all.

        Args:
            path: of the JSON (see conversation_file.py).
            with_state: also the session's state, beside it, so that nothing has to be read again: as much as the context takes in
                memory.

        Returns:
            The file of the state, if there is one.

        Raises:
            ConversationFileError, SessionFileError: the system refuses.
            SessionError: there is no state to save.

        Example:
            >>> talk.save("talk.json", with_state=True)               # doctest: +SKIP
            PosixPath('talk.session')
        """
        self._settle()
        path, model = Path(path), self.session.model
        conversation_file.check_name(path)  # before the state, which is large, is written
        state = None
        if with_state:
            state = (
                path.with_suffix(STATE_SUFFIX)
                if path.suffix != STATE_SUFFIX
                else path.with_name(path.name + STATE_SUFFIX)
            )
            self.session.save(state)
        said = self._exchanges[-1].said if self._exchanges else None
        if said is not None and not model.vocab.spells(
            said[1], said[0]
        ):  # a control token, which no text shows
            said = None
        saved = SavedConversation(
            model=model.main.path.name,
            model_hash=content_hash(model.main.header),
            messages=self._messages(),
            said=said,
            state=state,
        )
        conversation_file.write(path, saved)
        return state

    def load(self, saved: SavedConversation) -> None:
        """Goes on from what `conversation_file.read` has read, all that was said here forgotten; it may be another model's.

        Raises:
            ConversationFileError: this model's tokens in it do not spell its text; nothing is forgotten then.

        Example:
            >>> talk.load(conversation_file.read("talk.json"))        # doctest: +SKIP
        """
        model, said = self.session.model, saved.said
        if saved.model_hash != content_hash(model.main.header):
            said = None
        if said is not None and not (
            all(0 <= token < model.vocab.n_tokens for token in said[1])
            and model.vocab.spells(said[1], said[0])
        ):
            raise ConversationFileError(
                "the saved conversation is damaged: the tokens of 'said' do not spell its text; "
                'with "said": null in its place all is read again'
            )
        messages = list(saved.messages)
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.clear()
        self.system = messages.pop(0)["content"] if has_system else None
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            self._exchanges.append(_Exchange(question["content"], answer, None, 0))
        if not self._exchanges:
            return
        last = self._exchanges[-1]
        self._last_question = last.question
        if said is not None:
            self._exchanges[-1] = _Exchange(last.question, last.answer, said, len(said[1]))

    # Inside

    def _opening(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _messages(self) -> list[dict[str, Any]]:
        messages = self._opening()
        for exchange in self._exchanges:
            messages += [{"role": "user", "content": exchange.question}, dict(exchange.answer)]
        return messages

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self.session.model.vocab.render_chat(messages, **self.variables)

    def _tokens(self, text: str) -> list[int]:
        said = self._exchanges[-1].said if self._exchanges else None
        said_text, ids = said or ("", [])
        if not text.startswith(said_text):  # a template that rewrites earlier answers
            said_text, ids = "", []
        return [*ids, *self.session.model.vocab.tokenize(text[len(said_text) :], add_special=False)]

    @property
    def _template(self) -> str:
        return self.session.model.vocab.chat_template or ""

    def _cut(self, running: _Running, pieces: Iterable[str]) -> Iterator[tuple[str, str]]:
        """An answer in ("reasoning" or "content", text): calls are content, for no functions were offered."""
        splitter = make_splitter(running.prompt, self._template)
        for piece in itertools.chain(pieces, [None]):
            for kind, text in splitter.finish() if piece is None else splitter.push(piece):
                yield kind if kind == "reasoning" else "content", text

    def _settle(self) -> None:
        """Takes the last question and what was answered into the messages; a question without an answer is dropped."""
        running, self._running = self._running, None
        if running is None or not running.generation.text:
            return
        generation = running.generation
        texts = {"content": "", "reasoning": ""}
        for kind, text in self._cut(running, [generation.text]):
            texts[kind] += text
        answer = {"role": "assistant", "content": texts["content"]}
        if texts["reasoning"]:
            answer["reasoning_content"] = texts["reasoning"]
        ids = [*running.tokens, *generation.tokens]
        said = self._exchanges[-1].said if self._exchanges else None
        text = self.session.model.vocab.text_of(generation.tokens, preserved=running.preserved)
        if text == generation.text:  # no stop string cut into a token
            said = (running.prompt + generation.text, ids)
        self._exchanges.append(_Exchange(running.question, answer, said, len(ids)))
        self._unanswered = False


def _by_token(text: str, waiting: deque[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Words token by token, with origins; tokens that wait have more, what an answer is cut by, and are used up.

    >>> waiting = deque([("<think>", "plain"), ("\\n\\nHm", "drafted"), (" so", "plain")])
    >>> list(_by_token("Hm s", waiting)), waiting
    ([('Hm', 'drafted'), (' s', 'plain')], deque([('o', 'plain')]))
    """
    while text and waiting:
        token, origin = waiting.popleft()
        ends = (token[i:] for i in range(len(token)))
        end = next((one for one in ends if text.startswith(one) or one.startswith(text)), "")
        if not end:
            continue
        shown, text = text[: len(end)], text[len(end) :]
        yield shown, origin
        if rest := end[len(shown) :]:
            waiting.appendleft((rest, origin))
    if text:
        yield text, "plain"
