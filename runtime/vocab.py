"""A loaded model's vocabulary: text to token ids, ids to text, and chat templates.

Thin calls into llama.cpp and llama-cpp-python's template formatter (a sandboxed Jinja environment). Knows no decoding.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _native
from .errors import PromptError, SessionError
from .library import llama
from .sampling import address

if TYPE_CHECKING:
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

    @property
    def pointer(self) -> Any:
        """llama.cpp's vocabulary. Raises SessionError once the weights are closed."""
        return self._lib.llama_model_get_vocab(_model_of(self._weights))

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such.

        Raises:
            PromptError: the text does not tokenize.
        """
        data = text.encode("utf-8", "surrogatepass")
        n_max = len(data) + 8
        ids = (ctypes.c_int32 * n_max)()
        n = self._lib.llama_tokenize(self.pointer, data, len(data), ids, n_max, add_special, True)
        if n < 0:
            raise PromptError(f"the text of {len(data)} bytes does not tokenize (code {n})")
        return list(ids[:n])

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of several tokens, broken UTF-8 replaced."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation through the file's chat template, with the opening of the answer.

        Raises:
            PromptError: the file has no template, or the template refuses these messages.
        """
        return self.tokenize(self.render_chat(messages), add_special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the file's chat template writes it. Raises PromptError as `chat_tokens` does."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self._lib.llama_model_chat_template(_model_of(self._weights), None)
        if not template:
            raise PromptError("the file has no chat template: use `run`, which completes text as it stands")
        try:
            formatter = Jinja2ChatFormatter(
                template.decode(),
                eos_token=self._spelling(self._lib.llama_vocab_eos(self.pointer)),
                bos_token=self._spelling(self._lib.llama_vocab_bos(self.pointer)),
            )
            return str(formatter(messages=[dict(m) for m in messages]).prompt)
        except Exception as error:  # templates are programs from strangers: any error in one is the prompt's
            raise PromptError(f"the file's chat template failed: {error}") from error

    def _spelling(self, token: int) -> str:
        if token < 0:
            return ""
        text = self._lib.llama_vocab_get_text(self.pointer, token)
        return str(text.decode("utf-8", "replace")) if text else ""


def _piece(weights: Weights, address: int, token: int) -> bytes:
    _model_of(weights)
    piece: bytes = _native.piece(address, token)
    return piece


def _model_of(weights: Weights) -> Any:
    if weights.model is None:
        raise SessionError("the model is closed")
    return weights.model
