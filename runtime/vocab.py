"""A loaded model's vocabulary: text to token ids, ids to text, and chat templates.

Thin calls into llama.cpp and the file's chat template (chat_template.py). Knows no decoding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _native
from .errors import PromptError, SessionError
from .library import llama
from .sampling import address

if TYPE_CHECKING:
    from .chat_template import ChatTemplate
    from .weights import Weights


class Vocab:
    """The vocabulary of a loaded model, for any number of threads.

    Args:
        weights: what it is in; once they are closed, whatever is not remembered raises SessionError.
    """

    def __init__(self, weights: Weights) -> None:
        self._lib = llama()
        self._weights = weights
        #: The bytes of one token; nothing for control tokens.
        self.piece: Callable[[int], bytes] = functools.cache(
            functools.partial(_piece, weights, address(weights.model))
        )
        self.n_tokens: int = self._lib.llama_vocab_n_tokens(self.pointer)
        #: Whether a token ends a text or a turn of a conversation.
        self.is_eog: Callable[[int], bool] = functools.cache(functools.partial(_is_eog, weights))

    @property
    def pointer(self) -> Any:
        """llama.cpp's vocabulary. Raises SessionError once the weights are closed."""
        return self._lib.llama_model_get_vocab(_model_of(self._weights))

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such, unless they are not to be parsed.

        Raises:
            PromptError: the text does not tokenize.
        """
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
        n_max = len(data) + 8
        ids = (ctypes.c_int32 * n_max)()
        n = self._lib.llama_tokenize(self.pointer, data, len(data), ids, n_max, add_special, parse_special)
        if n < 0:
            raise PromptError(f"the text of {len(data)} bytes does not tokenize (code {n})")
        return list(ids[:n])

    def text_of(self, tokens: Sequence[int], *, preserved: Collection[int] = ()) -> str:
        """The text of several tokens, broken UTF-8 replaced; of control tokens it has those that are `preserved`."""
        pieces = (
            self.piece(token) or (self.spelling(token).encode() if token in preserved else b"")
            for token in tokens
        )
        return b"".join(pieces).decode("utf-8", "replace")

    def control_tokens(self, texts: Iterable[str]) -> list[int]:
        """The control tokens that texts are written in: marks in an answer, which has them where they are preserved.

        Example:
            >>> model.vocab.control_tokens(["<|channel>thought"])                # doctest: +SKIP
            [100]
        """
        tokens = {token for text in texts for token in self.tokenize(text, add_special=False)}
        return sorted(token for token in tokens if not self.piece(token) and self.spelling(token))

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation through the file's chat template, with the opening of the answer.

        Args:
            messages: each with a role and its content.
            tools: what the model may call, as OpenAI spells them: each a name and the JSON schema of its arguments.
            variables: more that this template knows, such as `enable_thinking`; others change nothing.

        Raises:
            PromptError: the file has no template, or the template refuses these messages.

        Example:
            >>> model.vocab.chat_tokens([{"role": "user", "content": "Hi"}], enable_thinking=False)   # doctest: +SKIP
        """
        return self.tokenize(self.render_chat(messages, tools=tools, **variables), add_special=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the file's chat template writes it; arguments and errors as of `chat_tokens`."""
        for message in messages:
            _check_text_alone(message.get("content"))
        template = self._template
        if template is None:
            raise PromptError("the file has no chat template: use `run`, which completes text as it stands")
        return template.render(messages, tools=tools, **variables)

    @property
    def chat_template(self) -> str | None:
        """The file's chat template, in Jinja; None where it has none."""
        found = self._lib.llama_model_chat_template(_model_of(self._weights), None)
        return found.decode("utf-8", "replace") if found else None

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        """The compiled chat template: a large one takes as long as a few tokens."""
        from .chat_template import ChatTemplate  # imports Jinja, which completing a text does without

        source = self.chat_template
        if source is None:
            return None
        bos, eos = (token(self.pointer) for token in (self._lib.llama_vocab_bos, self._lib.llama_vocab_eos))
        return ChatTemplate(source, bos=self.spelling(bos), eos=self.spelling(eos))

    def spells(self, tokens: Sequence[int], text: str) -> bool:
        """Whether ids are those of `text`, control tokens written out; blanks aside, which some vocabularies add.

        Example:
            >>> vocab.spells(vocab.tokenize("Hi"), "Hi")                         # doctest: +SKIP
            True
        """
        spelled = b"".join(self.piece(token) or self.spelling(token).encode() for token in tokens)
        return spelled.decode("utf-8", "replace").replace(" ", "") == text.replace(" ", "")

    def spelling(self, token: int) -> str:
        """How the file spells a token ("<|im_end|>"); nothing for one that is not there (-1)."""
        if token < 0:
            return ""
        text = self._lib.llama_vocab_get_text(self.pointer, token)
        return str(text.decode("utf-8", "replace")) if text else ""


def _check_text_alone(content: Any) -> None:
    """Templates of models that see write a place for an image, which would stay empty."""
    parts = content if isinstance(content, (list, tuple)) else ()
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise PromptError(f"a message has a part of type {kind!r}: text alone can be read; leave it out")


def _piece(weights: Weights, address: int, token: int) -> bytes:
    _model_of(weights)
    piece: bytes = _native.piece(address, token)
    return piece


def _is_eog(weights: Weights, token: int) -> bool:
    lib = llama()
    return bool(lib.llama_vocab_is_eog(lib.llama_model_get_vocab(_model_of(weights)), token))


def _model_of(weights: Weights) -> Any:
    if weights.model is None:
        raise SessionError("the model is closed")
    return weights.model
