"""What goes back: a running or ended text as OpenAI's objects, whole or in a stream's chunks.

Beyond their fields a finished answer has `stats` (`Stats.to_json`), and with the request's `lens` each choice has `lens`: of every
token its text and where it came from; a stream's chunks then have `drafts`, how many were made and stood so far. Knows no HTTP.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..sampling import TokenLogprobs
from ..session import Generation, Piece
from ..vocab import Vocab
from .requests import Request
from .tools import Call

News = Sequence["str | Piece"]
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has not; OpenAI's


class Answer:
    """One answer of the model `model`; its subclasses spell it.

    Args:
        request: what was asked.
        vocab: spells tokens.
        model: the name that clients know the model by.
    """

    object: str
    prefix: str

    def __init__(self, request: Request, vocab: Vocab, model: str) -> None:
        self._request = request
        self._vocab = vocab
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._n_tokens = 0  # told of

    def whole(self, generation: Generation, news: News) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choice = self._choice(generation, news or [generation.text], finish=True)
        stats = generation.stats
        return {
            **self._head(),
            "choices": [choice],
            "usage": usage(generation),
            "stats": stats.to_json(),
        }

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        return []

    def chunk(self, generation: Generation, news: News) -> list[dict[str, Any]]:
        """The chunk of what has come, where there is anything to show."""
        choice = self._choice(generation, news, finish=False)
        if not choice:
            return []
        chunk = self._chunk(choice)
        if self._request.lens:
            stats = generation.stats
            chunk["drafts"] = {"n_drafted": stats.n_drafted, "n_accepted": stats.n_accepted}
        return [chunk]

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """The last chunks: what was held back and why it ended, then the counts where they are wanted."""
        last = self._chunk(self._choice(generation, [], finish=True))
        last["stats"] = generation.stats.to_json()
        if not self._request.has_usage:
            return [last]
        return [last, {**self._chunk(None), "usage": usage(generation)}]

    def _choice(self, generation: Generation, news: News, *, finish: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": self.object, "created": self._created, "model": self._model}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice] if choice else []}
        if self._request.has_usage:
            chunk["usage"] = None
        return chunk

    def _lens(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Of each token its text and where it came from (`Piece.origin`), where that is wanted."""
        if not self._request.lens:
            return {}
        return {"lens": [{"text": piece.text, "origin": piece.origin} for piece in pieces]}

    def _extras(self, generation: Generation, news: News) -> tuple[list[Piece], list[TokenLogprobs]]:
        """The tokens that came, and the logarithms of theirs, where they are wanted."""
        pieces = [piece for piece in news if isinstance(piece, Piece)]
        found: list[TokenLogprobs] = []
        if self._request.has_logprobs and pieces:
            found = generation.logprobs_from(self._n_tokens)[: len(pieces)]
        self._n_tokens += len(pieces)
        return pieces, found


class ChatAnswer(Answer):
    """As `/v1/chat/completions` answers."""

    object = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, request: Request, vocab: Vocab, model: str) -> None:
        super().__init__(request, vocab, model)
        assert request.splitter is not None
        self._splitter = request.splitter()
        self._n_calls = 0
        if request.stream:
            self.object += ".chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk(choice | self._lens([]))]

    def _choice(self, generation: Generation, news: News, *, finish: bool) -> dict[str, Any]:
        stream = self._request.stream
        parts = self._splitter.push("".join(one if isinstance(one, str) else one.text for one in news))
        parts += self._splitter.finish() if finish else []
        message: dict[str, Any] = {} if stream else {"role": "assistant", "content": None, "refusal": None}
        for kind, values in itertools.groupby(parts, key=lambda part: part[0]):
            found = [value for _, value in values]
            if kind == "call":
                calls = [one for one in found if isinstance(one, Call)]
                numbers = itertools.count(self._n_calls)
                message.setdefault("tool_calls", []).extend(
                    call.to_json(next(numbers) if stream else None) for call in calls
                )
                self._n_calls += len(calls)
            else:
                name = "reasoning_content" if kind == "reasoning" else "content"
                message[name] = (message.get(name) or "") + "".join(map(str, found))
        if not stream and message["content"] is None and not self._n_calls:
            message["content"] = ""
        pieces, logprobs = self._extras(generation, news)
        if not (message or pieces or finish):
            return {}
        tokens = [self._logprob(one) for one in logprobs]
        choice = {
            "index": 0,
            "delta" if stream else "message": message,
            "logprobs": {"content": tokens, "refusal": None} if tokens else None,
            "finish_reason": self._reason(generation) if finish else None,
        }
        return choice | self._lens(pieces)

    def _reason(self, generation: Generation) -> str | None:
        reason = generation.finish_reason
        return "tool_calls" if self._n_calls and reason == "stop" else reason

    def _logprob(self, one: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._spelled(one.token, one.logprob),
            "top_logprobs": [self._spelled(token, logprob) for token, logprob in one.top],
        }

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._vocab.piece(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


class TextAnswer(Answer):
    """As `/v1/completions` answers."""

    object = "text_completion"
    prefix = "cmpl"

    def __init__(self, request: Request, vocab: Vocab, model: str) -> None:
        super().__init__(request, vocab, model)
        self._echo = request.echo
        self._n_text = len(request.echo)

    def _choice(self, generation: Generation, news: News, *, finish: bool) -> dict[str, Any]:
        text = self._echo + "".join(one if isinstance(one, str) else one.text for one in news)
        self._echo = ""
        pieces, logprobs = self._extras(generation, news)
        if not (text or pieces or finish):
            return {}
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(pieces, logprobs) if logprobs else None,
            "finish_reason": generation.finish_reason if finish else None,
        }
        return choice | self._lens(pieces)

    def _logprobs(self, pieces: list[Piece], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        ends = list(itertools.accumulate((len(piece.text) for piece in pieces), initial=self._n_text))
        self._n_text = ends.pop()
        return {
            "tokens": [self._vocab.text_of([one.token]) for one in logprobs],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [
                {self._vocab.text_of([token]): max(logprob, LEAST_LOGPROB) for token, logprob in one.top}
                for one in logprobs
            ],
            "text_offset": ends,
        }


def usage(generation: Generation) -> dict[str, Any]:
    """Counts of tokens; a prediction is a draft here, and one that is rejected costs no tokens of the answer."""
    stats = generation.stats
    return {
        "prompt_tokens": stats.n_prompt,
        "completion_tokens": stats.n_tokens,
        "total_tokens": stats.n_prompt + stats.n_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.n_reused},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.n_accepted,
            "rejected_prediction_tokens": stats.n_drafted - stats.n_accepted,
        },
    }
