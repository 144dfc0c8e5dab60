"""A loaded model's vocabulary: text to token ids, ids to text, and chat templates.

Thin calls into llama.cpp and llama-cpp-python's template formatter (a sandboxed Jinja environment). Knows no decoding.
"""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import PromptError, SessionError
from .library import llama

if TYPE_CHECKING:
    from .weights import Weights

N_PIECE_BYTES = 256  # longer pieces take a second call


class Vocab:
    """The vocabulary of a loaded model, for any number of threads.

    Args:
        weights: what it is in; once they are closed every method raises SessionError.
    """

    def __init__(self, weights: Weights) -> None:
        self._lib = llama()
        self._weights = weights
        self._pieces: dict[
            int, bytes
        ] = {}  # asked for so far: a call into the library costs more than a plain round's rest
        self._eog: dict[int, bool] = {}
        self.n_tokens: int = self._lib.llama_vocab_n_tokens(self._vocab)

    @property
    def _model(self) -> Any:
        if self._weights.model is None:
            raise SessionError("the model is closed")
        return self._weights.model

    @property
    def _vocab(self) -> Any:
        return self._lib.llama_model_get_vocab(self._model)

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such.

        Raises:
            PromptError: the text does not tokenize.
        """
        data = text.encode("utf-8", "surrogatepass")
        n_max = len(data) + 8
        ids = (ctypes.c_int32 * n_max)()
        n = self._lib.llama_tokenize(self._vocab, data, len(data), ids, n_max, add_special, True)
        if n < 0:
            raise PromptError(f"the text of {len(data)} bytes does not tokenize (code {n})")
        return list(ids[:n])

    def piece(self, token: int) -> bytes:
        """The bytes of one token; nothing for control tokens."""
        piece = self._pieces.get(token)
        if piece is None or self._weights.model is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def is_eog(self, token: int) -> bool:
        """Whether this token ends the text."""
        is_eog = self._eog.get(token)
        if is_eog is None or self._weights.model is None:
            is_eog = self._eog[token] = bool(self._lib.llama_vocab_is_eog(self._vocab, token))
        return is_eog

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

        template = self._lib.llama_model_chat_template(self._model, None)
        if not template:
            raise PromptError("the file has no chat template: use `run`, which completes text as it stands")
        try:
            formatter = Jinja2ChatFormatter(
                template.decode(),
                eos_token=self._spelling(self._lib.llama_vocab_eos(self._vocab)),
                bos_token=self._spelling(self._lib.llama_vocab_bos(self._vocab)),
            )
            return str(formatter(messages=[dict(m) for m in messages]).prompt)
        except Exception as error:  # templates are programs from strangers: any error in one is the prompt's
            raise PromptError(f"the file's chat template failed: {error}") from error

    def _read_piece(self, token: int) -> bytes:
        vocab, n_bytes = self._vocab, N_PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(n_bytes)
            n = self._lib.llama_token_to_piece(vocab, token, buffer, n_bytes, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            n_bytes = -n

    def _spelling(self, token: int) -> str:
        if token < 0:
            return ""
        text = self._lib.llama_vocab_get_text(self._vocab, token)
        return str(text.decode("utf-8", "replace")) if text else ""


class TextStream:
    """Turns tokens into text as they come: never half a UTF-8 character, never a part of a stop string.

    >>> stream = TextStream(["END"])
    >>> stream.push(b"one E"), stream.push(b"N"), stream.push(b"D two"), stream.stopped
    ('one ', '', '', True)
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = [s for s in stop if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """Adds a token's bytes; returns the text that can be shown now. Sets `stopped` when a stop string is complete."""
        self._held += self._decoder.decode(piece)
        ends = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            return self._release(min(ends))
        return self._release(len(self._held) - self._n_undecided())

    def finish(self, *, cut: bool = False) -> str:
        """What was held back, at the end of a text that no stop string ended; without the character that the end has `cut`."""
        if self.stopped:
            return ""
        if not cut:
            self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _n_undecided(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text
