"""`Llama`, in place of `llama_cpp.Llama`: its arguments, its results and chunks, with speculation inside.

Prompts, results and defaults are llama-cpp-python's (llama_cpp/llama.py of the release that is installed), and so are its chat
formats, which are called with this class in place of its own. Decodes nothing: `load` and its sessions do. What cannot be had
here, drop_in_arguments.py says.
"""

from __future__ import annotations

import codecs
import functools
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from llama_sidecar.sidecars import open_main

from . import drop_in_arguments as arguments_of
from . import placement
from .chat_template import ChatTemplate
from .completion_text import chunks, text_before
from .drafter_choice import Speculation
from .errors import ArgumentError, LoadError, PromptError
from .library import llama
from .llm import load
from .sampling import Sampling, TokenLogprobs
from .session import Generation, Session
from .stats import Stats
from .weights import target_params

_RANDOM = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: a fresh one
_CTX_STEP = 256  # llama.cpp rounds contexts up to a multiple of it, and llama_cpp.Llama uses all of it
_LOGPROBS = ("tokens", "text_offset", "token_logprobs", "top_logprobs")


class Llama:
    """Takes what `llama_cpp.Llama` takes, and gives what it gives, with speculation inside.

    Args:
        model_path: the main GGUF; its sidecar is found beside it, or named as `sidecar`.
        n_gpu_layers: layers on a GPU; -1: all of them.
        seed: where the seeds of texts that are given none come from.
        n_ctx: context in tokens; 0: the model's own.
        n_batch: prompt tokens per decode.
        n_threads: CPU threads (default: the physical cores).
        logits_all: log-probabilities can be asked for either way.
        flash_attn: flash attention, on or off.
        last_n_tokens_size: tokens of the text that the penalties look at.
        chat_format: one of llama-cpp-python's chat formats (default: the file's own template).
        chat_handler: a chat format of your own, called as llama-cpp-python calls it.
        type_k, type_v: ggml types of the KV cache, as numbers.
        verbose: let llama.cpp's log through to stderr.
        options: those of `load` under its names (sidecar, spec_type, depth, kernels, exact, ...), and llama_cpp.Llama's others
            at their defaults.

    Raises:
        ArgumentError: an argument that llama_cpp.Llama does not have, or that only its default can be had of; no such file.
        LlamaSidecarError: as `load` does.

    Example:
        >>> llm = Llama("demo-Q8_0.gguf", n_ctx=2048, verbose=False)                  # doctest: +SKIP
        >>> llm("def main():", max_tokens=32, temperature=0)["choices"][0]["text"]    # doctest: +SKIP
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        seed: int = _RANDOM,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_threads: int | None = None,
        logits_all: bool = False,
        flash_attn: bool = False,
        last_n_tokens_size: int = 64,
        chat_format: str | None = None,
        chat_handler: Callable[..., Any] | None = None,
        type_k: int | None = None,
        type_v: int | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        self.model_path = os.fspath(model_path)
        self.verbose = verbose
        self.last_n_tokens_size = last_n_tokens_size
        if not Path(model_path).exists():
            raise ArgumentError(f"{model_path}: no such file")
        for name, number in (("n_ctx", n_ctx), ("n_batch", n_batch)):
            if not isinstance(number, int):
                raise ArgumentError(f"{name} {number!r} is not a whole number")
        if hasattr(chat_handler, "clip_model_path"):
            raise ArgumentError("chat_handler: there are no images here: use llama_cpp.Llama")
        main = open_main(model_path)
        if not n_ctx:
            n_ctx = int(main.header.keys.get(f"{main.header.arch}.context_length", placement.DEFAULT_CTX))
        self._model = load(
            model_path,
            gpu_layers=placement.ALL_LAYERS if n_gpu_layers == -1 else n_gpu_layers,
            ctx=-(-n_ctx // _CTX_STEP) * _CTX_STEP,
            batch=min(n_batch, n_ctx),
            threads=n_threads or None,
            flash_attn="on" if flash_attn else "off",
            cache_type_k=arguments_of.cache_type("type_k", type_k),
            cache_type_v=arguments_of.cache_type("type_v", type_v),
            verbose=verbose,
            **arguments_of.load_options(options),
        )
        self._seed = seed or _RANDOM
        self._session: Session | None = None
        self._stats: Stats | None = None
        self.metadata = _metadata(main.header.keys)
        self.chat_handler = chat_handler
        self._chat_handlers = self._own_formats()
        self.chat_format = chat_format or (None if chat_handler else self._usual_format())

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Llama:
        """Downloads a model from the Hugging Face Hub, with its sidecar where there is one beside it, and loads it.

        Args:
            repo_id: ORG/NAME.
            filename: of the main file, or a pattern that one file of the repository matches.
            additional_files: names or patterns of further files to download: the other shards, or another sidecar.
            local_dir: where to; by default the Hub's cache.
            cache_dir: another cache.
            options: as the class takes them.

        Raises:
            ArgumentError: no file matches, or several do.
            LoadError: the Hub cannot be reached or refuses.

        Example:
            >>> Llama.from_pretrained("org/Model-GGUF", "*Q8_0.gguf")                  # doctest: +SKIP
        """
        import huggingface_hub

        try:
            about = huggingface_hub.HfApi().model_info(repo_id)
            names = sorted(file.rfilename for file in about.siblings or [])
            main, *others = (
                arguments_of.only_match(names, name, repo_id)
                for name in (filename, *(additional_files or ()))
            )
            sidecar = None if additional_files else arguments_of.sidecar_of(main, names)
            path, *_ = (
                huggingface_hub.hf_hub_download(
                    repo_id, name, revision=about.sha, local_dir=local_dir, cache_dir=cache_dir
                )
                for name in [main, *others, *([sidecar] if sidecar else [])]
            )
        except ArgumentError:
            raise
        except Exception as error:  # of whichever HTTP library huggingface_hub uses
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise LoadError(f"{repo_id} cannot be had from the Hugging Face Hub: {reason}") from error
        return cls(path, **options)

    # Text

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = (),
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, float] | None = None,
    ) -> Any:
        """Completes a prompt, as `llama_cpp.Llama.create_completion` does.

        Args:
            prompt: text, or token ids.
            max_tokens: tokens to write at most; None or less than 1: as many as the context leaves.
            temperature, top_k, top_p, min_p, typical_p: as in `Sampling`; temperature 0 is greedy.
            frequency_penalty, presence_penalty, repeat_penalty: of tokens of the text; the prompt does not count.
            logprobs: also give each token's log-probability, and so many likeliest tokens.
            echo: the prompt, a text, comes before the completion.
            stop: strings that end the text; they are not part of it.
            stream: give an iterator of chunks, about a token each.
            seed: of all draws; by default one of a series that begins with the seed of the class.
            model: what the result calls the model.
            grammar: a `llama_cpp.LlamaGrammar`, or GBNF.
            logit_bias: what is added to the logits of these token ids.
            suffix, tfs_z, mirostat_mode, mirostat_tau, mirostat_eta, stopping_criteria, logits_processor: at their defaults alone.

        Returns:
            A dictionary of OpenAI's form `text_completion`, or an iterator of them.

        Raises:
            ArgumentError: an argument that cannot be had here, a prompt longer than the context.
            PromptError: an argument out of its range; nothing to complete.

        Example:
            >>> llm.create_completion("def main():", max_tokens=8)["usage"]["completion_tokens"]    # doctest: +SKIP
            8
        """
        arguments_of.check_defaults(self.create_completion, locals())
        if echo and (logprobs is not None or not isinstance(prompt, str)):
            raise ArgumentError(
                "echo is for a prompt that is text, and not for logprobs, which the prompt has none of here"
            )
        tokens = self._prompt_tokens(prompt)
        if len(tokens) >= self.n_ctx():
            raise ArgumentError(f"Requested tokens ({len(tokens)}) exceed context window of {self.n_ctx()}")
        n_left = self.n_ctx() - len(tokens)
        request = _Request(
            model=model or self.model_path,
            prompt=prompt,
            tokens=tokens,
            echo=echo,
            stops=[text for text in ([stop] if isinstance(stop, str) else stop or ()) if text],
            options={
                "max_tokens": min(max_tokens, n_left) if max_tokens and max_tokens > 0 else n_left,
                "logprobs": logprobs,
                "temperature": temperature,
                "top_k": max(0, top_k),
                "top_p": top_p,
                "min_p": min_p,
                "typical_p": typical_p,
                "frequency_penalty": frequency_penalty,
                "presence_penalty": presence_penalty,
                "repeat_penalty": repeat_penalty,
                "repeat_last_n": self.last_n_tokens_size,
                "penalize_prompt": False,
                "seed": self._next_seed(seed),
                "grammar": getattr(grammar, "_grammar", grammar),
                "logit_bias": {int(token): bias for token, bias in (logit_bias or {}).items()} or None,
            },
        )
        return self._stream(request) if stream else self._complete(request)

    @functools.wraps(create_completion)
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.create_completion(*arguments, **options)

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = (),
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """Answers a conversation through the chat format, as `llama_cpp.Llama.create_chat_completion` does.

        Args:
            messages: of OpenAI's form; text alone.
            tools: functions that the model may call; the chat format shows them to it.
            tool_choice: {"type": "function", "function": {"name": ...}} makes the answer a call of that function, by a grammar of its
                parameters; "required" does the same with a single tool. Otherwise the call is in the text, as the model writes it.
            functions, function_call: the same under their old names.
            response_format: {"type": "json_object"}, with a "schema" or not, or OpenAI's {"type": "json_schema", ...}.
            logprobs, top_logprobs: give each token's log-probability, and so many likeliest tokens.
            stream: give an iterator of chunks.
            temperature, ...: as in `create_completion`.

        Returns:
            A dictionary of OpenAI's form `chat.completion`, or an iterator of `chat.completion.chunk`.

        Raises:
            ArgumentError: an argument that cannot be had here, a conversation longer than the context.
            PromptError: an argument out of its range; a chat format that fails or takes no such messages.

        Example:
            >>> llm.create_chat_completion([{"role": "user", "content": "Hi"}])          # doctest: +SKIP
        """
        options = {name: value for name, value in locals().items() if name != "self"}
        arguments_of.check_defaults(self.create_chat_completion, options)
        options |= arguments_of.chat_options(options)
        try:
            return self._chat_handler()(llama=self, **options)
        except PromptError:
            raise
        except ValueError as error:
            raise ArgumentError(f"chat format {self.chat_format!r} takes no such request: {error}") from error
        except Exception as error:  # templates are programs from strangers: any error in one is the prompt's
            raise PromptError(f"chat format {self.chat_format!r} failed: {error}") from error

    def create_chat_completion_openai_v1(self, *arguments: Any, **options: Any) -> Any:
        """The same as objects of the openai package, which must be installed."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        found = self.create_chat_completion(*arguments, **options)
        if options.get("stream"):
            return (ChatCompletionChunk(**chunk) for chunk in found)
        return ChatCompletion(**found)

    # Tokens and facts

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of UTF-8 bytes; with `special`, special tokens written out in them count as such."""
        return self._model.vocab.tokenize(text, add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of several tokens; those of control tokens with `special` alone. Tokens before them change nothing."""
        vocab = self._model.vocab
        data = b"".join(vocab.piece(t) or (vocab.spelling(t).encode() if special else b"") for t in tokens)
        opens = len(tokens) > 0 and tokens[0] == self.token_bos()
        return data[1:] if opens and data[:1] == b" " else data

    def n_ctx(self) -> int:
        """The context in tokens."""
        return self._model.n_ctx

    @property
    def context_params(self) -> Any:
        """The context's parameters as llama.cpp's structure, a copy: frameworks read them (llama-index `n_ctx`)."""
        return target_params(self._model.settings, n_ctx=self._model.n_ctx)

    def n_vocab(self) -> int:
        """How many tokens the vocabulary has."""
        return self._model.vocab.n_tokens

    def n_embd(self) -> int:
        """The width of a hidden state."""
        return int(llama().llama_model_n_embd(self._model.weights.model))

    def token_bos(self) -> int:
        """The token that begins a text, -1 where there is none."""
        return int(llama().llama_vocab_bos(self._model.vocab.pointer))

    def token_eos(self) -> int:
        """The token that ends a text, -1 where there is none."""
        return int(llama().llama_vocab_eos(self._model.vocab.pointer))

    def token_nl(self) -> int:
        """The token of a line's end, -1 where there is none."""
        return int(llama().llama_vocab_nl(self._model.vocab.pointer))

    @property
    def stats(self) -> Stats | None:
        """What the last text did and what it cost; None before the first."""
        return self._stats

    @property
    def speculation(self) -> Speculation:
        """What drafts here, or why nothing does."""
        return self._model.speculation

    # Lifetime

    def set_seed(self, seed: int) -> None:
        """Begins another series of seeds for texts that are given none."""
        self._seed = seed

    def reset(self) -> None:
        """Forgets the text: the next prompt begins anew."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def close(self) -> None:
        """Frees contexts and weights. Idempotent."""
        self.reset()
        self._model.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(arguments_of.why_no_attribute(type(self), name))

    # Inside

    def _next_seed(self, seed: int | None) -> int | None:
        """The seed of a text, in the order llama_cpp.Llama would come to it; None where it would be a fresh one."""
        self._seed = random.Random(self._seed).randint(0, 2**32) if seed is None else seed
        bits = self._seed & _RANDOM
        return None if bits == _RANDOM else bits

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        lib, vocab = llama(), self._model.vocab
        bos, sep = self.token_bos(), int(lib.llama_vocab_sep(vocab.pointer))
        opens = lib.llama_vocab_get_add_bos(vocab.pointer) and bos != -1
        closes = sep != -1 or lib.llama_vocab_get_add_eos(vocab.pointer)
        return [
            *([bos] if opens else []),
            *(vocab.tokenize(prompt, add_special=False) if prompt else []),
            *([sep if sep != -1 else self.token_eos()] if closes else []),
        ]

    def _start(self, request: _Request) -> Generation:
        if self._session is None or self._session.closed:
            self._session = self._model.session()
        return self._session.generate(
            request.tokens, stop=request.stops, sampling=Sampling(), **request.options
        )

    def _complete(self, request: _Request) -> dict[str, Any]:
        generation = self._start(request)
        generation.read()
        self._stats = generation.stats
        tokens = generation.tokens
        text = text_before(b"".join(map(self._model.vocab.piece, tokens)), request.stop_bytes)
        logprobs = None
        if request.wants_logprobs:
            each = list(self._spelled_logprobs(request, generation.logprobs))
            logprobs = {name: [one[name][0] for one in each] for name in _LOGPROBS}
        if request.echo:
            text = f"{request.prompt}{text}"
        usage = {
            "prompt_tokens": len(request.tokens),
            "completion_tokens": len(tokens),
            "total_tokens": len(request.tokens) + len(tokens),
        }
        return {**request.chunk(text, logprobs, generation.finish_reason), "usage": usage}

    def _stream(self, request: _Request) -> Iterator[dict[str, Any]]:
        generation = self._start(request)
        try:
            pieces = (self._model.vocab.piece(piece.token) for piece in generation.pieces())
            spelled, n_spelled = self._spelled_logprobs(request, _growing(generation)), 0
            for i, text in chunks(pieces, request.stop_bytes, join=not request.wants_logprobs):
                found = None
                while request.wants_logprobs and n_spelled <= i:
                    found, n_spelled = next(spelled), n_spelled + 1
                yield request.chunk(text, found)
            generation.read()  # behind a stop string there is nothing but its end
            yield request.chunk("", None, generation.finish_reason)
        finally:
            generation.close()
            self._stats = generation.stats

    def _spelled_logprobs(
        self, request: _Request, found: Iterable[TokenLogprobs]
    ) -> Iterator[dict[str, list[Any]]]:
        """Of one token after another, in the lists of OpenAI's form."""
        piece = self._model.vocab.piece

        def spelled(token: int) -> str:
            return piece(token).decode("utf-8", "ignore")

        n_text, decoder = len(request.prompt), codecs.getincrementaldecoder("utf-8")("ignore")
        for one in found:
            top = {spelled(token): logprob for token, logprob in one.top} | {spelled(one.token): one.logprob}
            values = (spelled(one.token), n_text, one.logprob, top)
            yield {name: [value] for name, value in zip(_LOGPROBS, values, strict=True)}
            n_text += len(decoder.decode(piece(one.token)))

    def _own_formats(self) -> dict[str, Callable[..., Any]]:
        """The chat templates of the file, under llama-cpp-python's names."""
        found = {
            key.removeprefix("tokenizer."): text
            for key, text in self.metadata.items()
            if key.startswith("tokenizer.chat_template.")
        }
        if "tokenizer.chat_template" in self.metadata:
            found["chat_template.default"] = self.metadata["tokenizer.chat_template"]
        eos, bos = (self._model.vocab.spelling(token) for token in (self.token_eos(), self.token_bos()))
        return {name: _handler_of(source, eos, bos) for name, source in found.items()}

    def _usual_format(self) -> str:
        """The format that llama_cpp.Llama would take: one it knows the template of, the file's template, or Llama 2's."""
        from llama_cpp.llama_chat_format import guess_chat_format_from_gguf_metadata

        own = "chat_template.default"
        if own not in self._chat_handlers:
            return "llama-2"
        return guess_chat_format_from_gguf_metadata(self.metadata) or own

    def _chat_handler(self) -> Callable[..., Any]:
        from llama_cpp.llama_chat_format import get_chat_completion_handler

        if self.chat_handler is not None:
            return self.chat_handler
        name = str(self.chat_format)
        found: Callable[..., Any] = self._chat_handlers.get(name) or get_chat_completion_handler(name)
        return found


@dataclass(frozen=True)
class _Request:
    """A completion to write, and how its results are called."""

    model: str
    prompt: str | Sequence[int]
    tokens: list[int]
    echo: bool
    stops: list[str]
    options: dict[str, Any]  # of Session.generate
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4()}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stop_bytes(self) -> list[bytes]:
        return [text.encode() for text in self.stops]

    @property
    def wants_logprobs(self) -> bool:
        return self.options["logprobs"] is not None

    def chunk(
        self, text: str, logprobs: dict[str, list[Any]] | None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """A result of OpenAI's form `text_completion`, or a chunk of one."""
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def _metadata(keys: Mapping[str, Any]) -> dict[str, str]:
    """A file's keys as llama.cpp spells them, without lists.

    >>> _metadata({"a": True, "b": 1e-6, "c": 3, "d": [1]})
    {'a': 'true', 'b': '0.000001', 'c': '3'}
    """

    def spelled(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:f}" if isinstance(value, float) else str(value)

    return {key: spelled(value) for key, value in keys.items() if isinstance(value, (str, int, float))}


def _handler_of(source: str, eos: str, bos: str) -> Callable[..., Any]:
    """A chat format of llama-cpp-python's, made of a template, which is compiled when it is first used."""
    from llama_cpp.llama_chat_format import ChatFormatterResponse, chat_formatter_to_chat_completion_handler

    @functools.cache
    def template() -> ChatTemplate:
        return ChatTemplate(source, bos=bos, eos=eos)

    def write(**given: Any) -> Any:
        return ChatFormatterResponse(prompt=template().render(**given), stop=[eos], added_special=True)

    handler: Callable[..., Any] = chat_formatter_to_chat_completion_handler(write)
    return handler


def _growing(generation: Generation) -> Iterator[TokenLogprobs]:
    """Of one token after another, as the text grows; for who asks for no more than there are."""
    n = 0
    while new := generation.logprobs_from(n):
        n += len(new)
        yield from new
