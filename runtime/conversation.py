"""A conversation on a session: what was said so far, in words and in the token ids they were said in.

Thin: the chat template is vocab.py's, the re-use of what the session holds is the session's own.
"""

from __future__ import annotations

from typing import Any

from .session import Generation, Session


class Conversation:
    """Questions and answers on one session, one after another.

    An answer goes on in the token ids it was generated in. Its text need not tokenize into the same ones, and with other
    ids the session, whose recurrent state cannot be trimmed, would have to read all of the conversation again.

    Args:
        session: answers; it should serve nothing else meanwhile, or each change costs the whole prompt.
        system: the system prompt.

    Example:
        >>> talk = Conversation(session, "Be brief.")                 # doctest: +SKIP
        >>> talk.ask("Why is the sky blue?", max_tokens=64).read()    # doctest: +SKIP
    """

    def __init__(self, session: Session, system: str | None = None) -> None:
        self._session = session
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forgets all but the system prompt."""
        self._messages = list(self._opening)
        self._running: tuple[str, str, list[int], Generation] | None = None
        self._said: tuple[str, list[int]] = ("", [])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was said, as far as it was answered; an answer that was cut short is there as far as it got."""
        self._settle()
        return list(self._messages)

    def check(self) -> None:
        """Raises PromptError where the file's chat template is missing or takes no such opening."""
        self._session.model.vocab.render_chat([*self._opening, {"role": "user", "content": "?"}])

    def ask(self, question: str, **options: Any) -> Generation:
        """Begins to answer; options as in `Session.generate`.

        Raises:
            PromptError: no chat template, or the conversation outgrew the context; the question is then forgotten.
        """
        self._settle()
        text = self._session.model.vocab.render_chat([*self._messages, {"role": "user", "content": question}])
        tokens = self._tokens(text)
        answer = self._session.generate(tokens, **options)
        self._running = (question, text, tokens, answer)
        return answer

    def _tokens(self, text: str) -> list[int]:
        said, ids = self._said
        rest = text.removeprefix(said)
        if len(rest) == len(text):  # a template that rewrites earlier answers
            ids = []
        return [*ids, *self._session.model.vocab.tokenize(rest, add_special=False)]

    def _settle(self) -> None:
        """Takes the last question and what was answered into the messages; a question without an answer is dropped."""
        if self._running is None:
            return
        question, text, tokens, answer = self._running
        self._running = None
        if answer.text:
            self._messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.text},
            ]
            if (
                self._session.model.vocab.text_of(answer.tokens) == answer.text
            ):  # no stop string cut into a token
                self._said = (text + answer.text, [*tokens, *answer.tokens])
