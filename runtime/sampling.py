"""How the target's next token is chosen: greedy, or by temperature and truncation, penalties, biases and a grammar.

The arithmetic is llama.cpp's sampler chain in its own order; this module says which samplers, and what is out of range. Defaults
come from the file's `general.sampling.*` keys, else from llama.cpp's own. Knows nothing of drafts: native/sampling.h does.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import _native
from .errors import PromptError
from .grammar import check_gbnf, schema_grammar
from .library import forget_errors, last_error, llama

if TYPE_CHECKING:
    from .vocab import Vocab

MAX_SEED = 2**32 - 2  # the one above it makes llama.cpp draw a fresh seed
ACCEPT = ("auto", "match", "reject")  # rules of acceptance
WHOLE = -1  # as a number of last tokens: the whole context

# name: least and most, whether the least itself is too small
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 1e6, False),
    "top_k": (0, 2**31 - 1, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "typical_p": (0, 1, True),
    "repeat_last_n": (WHOLE, 2**20, False),
    "repeat_penalty": (1e-3, 1e3, False),
    "frequency_penalty": (-1e3, 1e3, False),
    "presence_penalty": (-1e3, 1e3, False),
    "dry_multiplier": (0, 1e3, False),
    "dry_base": (1, 1e3, False),
    "dry_allowed_length": (1, 2**20, False),
    "dry_penalty_last_n": (WHOLE, 2**20, False),
    "seed": (0, MAX_SEED, False),
}
_WHOLE_NUMBERS = (
    "top_k",
    "repeat_last_n",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "seed",
)


@dataclass(frozen=True)
class Sampling:
    """Settings of one generation, under llama.cpp's names and with its defaults.

    Args:
        temperature: 0 is greedy: the largest logit after biases, penalties, DRY and grammar, with no truncation.
        top_k: choose among so many likeliest; 0: all.
        top_p: ... of this total probability.
        min_p: ... of at least this share of the likeliest's.
        typical_p: ... by how near their surprise is to the expected one (arXiv:2202.00666); 1 is off.
        repeat_last_n: tokens, the prompt's included, that the three penalties look at; -1: the whole context.
        penalize_prompt: whether penalties and DRY look at the prompt at all, or at the text alone.
        repeat_penalty: divides the logits of tokens that occur there; 1 is off (arXiv:1909.05858).
        frequency_penalty: is taken from their logits, once for each time.
        presence_penalty: is taken from their logits once.
        dry_multiplier: of the penalty for going on with what was said before (DRY); 0 is off.
        dry_base, dry_allowed_length: the penalty is multiplier * base ** (length - allowed length).
        dry_penalty_last_n: tokens that DRY looks at; -1: the whole context.
        dry_sequence_breakers: texts that a repetition does not reach across.
        logit_bias: what is added to the logits of these token ids; -inf bans one.
        grammar: GBNF with a rule `root`: the text is one of its sentences.
        json_schema: the text is JSON of this schema, an object or its JSON; in place of a grammar.
        seed: of all draws; None draws a fresh one.

    >>> Sampling(temperature=0.7, seed=1).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_last_n: int = 64
    penalize_prompt: bool = True
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = WHOLE
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    json_schema: Mapping[str, Any] | str | bool | None = None
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0 or self.top_k == 1

    @property
    def penalizes(self) -> bool:
        """Whether a token's penalty depends on the tokens before it."""
        counts = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return (counts and self.repeat_last_n != 0) or self._dry

    @property
    def adjusts(self) -> bool:
        """Whether the largest logit is not always what greedy takes."""
        is_bound = self.grammar is not None or self.json_schema is not None
        return self.penalizes or is_bound or bool(self.logit_bias)

    @property
    def _dry(self) -> bool:
        return self.dry_multiplier != 0 and self.dry_penalty_last_n != 0

    def with_options(self, **options: Any) -> Sampling:
        """These settings with every option that is not None put over them.

        Raises:
            PromptError: an option is unknown, out of its range, or contradicts another.
        """
        unknown = sorted(options.keys() - self.__dataclass_fields__.keys())
        if unknown:
            raise PromptError(
                f"sampling: unknown: {', '.join(unknown)} (there are: {', '.join(self.__dataclass_fields__)})"
            )
        given = {name: value for name, value in options.items() if value is not None}
        if "grammar" in given and "json_schema" not in given:
            given["json_schema"] = None
        if "json_schema" in given and "grammar" not in given:
            given["grammar"] = None
        chosen = replace(self, **given)
        broken = [
            problem
            for name, bounds in _RANGES.items()
            if (problem := _outside(name, getattr(chosen, name), *bounds))
        ]
        broken += chosen._contradictions()
        if broken:
            raise PromptError("sampling: " + "; ".join(broken))
        return chosen

    def _contradictions(self) -> list[str]:
        found = []
        if self.grammar is not None and self.json_schema is not None:
            found.append("a grammar and a JSON schema are both given: which is meant?")
        if not (self.grammar is None or isinstance(self.grammar, str)):
            found.append(f"the grammar {self.grammar!r} is not a text in GBNF")
        breakers = self.dry_sequence_breakers
        is_several = isinstance(breakers, Sequence) and not isinstance(breakers, (str, bytes))
        if not (is_several and all(_is_utf8(text) for text in breakers)):
            found.append(f"dry_sequence_breakers {breakers!r} are not several texts")
        if not isinstance(self.logit_bias, Mapping):
            return [*found, f"logit_bias {self.logit_bias!r} is not a mapping of token ids to numbers"]
        for token, bias in self.logit_bias.items():
            if not (_is_number(token) and isinstance(token, int)):
                found.append(f"logit_bias is for the token {token!r}, which is no id")
            elif not (_is_number(bias) and -math.inf <= bias <= 1e6):
                found.append(f"logit_bias {bias!r} of token {token} is not a number of at most a million")
        return found


def _is_utf8(text: Any) -> bool:
    """Whether it is a text that libraries can be given: what is no UTF-8 on a command line comes as lone surrogates."""
    return isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _outside(name: str, value: Any, least: float, most: float, is_open: bool) -> str | None:
    """What is wrong with a number, or None."""
    if value is None and name == "seed":
        return None
    if name in _WHOLE_NUMBERS and not (_is_number(value) and isinstance(value, int)):
        return f"{name} {value!r} is not a whole number"
    if not _is_number(value) or not (least <= value <= most) or (is_open and value == least):
        above = "is not above" if is_open else "is not a number of at least"
        return f"{name} {value!r} {above} {least:g} and at most {most:.10g}"
    return None


def file_defaults(keys: Mapping[str, Any]) -> Sampling:
    """The file's own sampling settings (`general.sampling.*`), greedy where it has none.

    >>> file_defaults({"general.sampling.temp": 0.6, "general.sampling.top_k": 20}).top_k
    20
    """
    found = {
        "temperature": keys.get("general.sampling.temp"),
        "top_k": keys.get("general.sampling.top_k"),
        "top_p": keys.get("general.sampling.top_p"),
        "min_p": keys.get("general.sampling.min_p"),
        "repeat_last_n": keys.get("general.sampling.penalty_last_n"),
        "repeat_penalty": keys.get("general.sampling.penalty_repeat"),
    }
    try:
        return Sampling().with_options(**found)
    except (PromptError, TypeError, ValueError):
        return Sampling()  # a file's nonsense is not the user's mistake


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was to the target, before any sampler; `top` are the likeliest tokens and theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Chooser:
    """A native chooser and what it needs kept alive. Close it when the generation ends; else it goes with its last reference."""

    def __init__(
        self, native: Any, free: Callable[[], None] = lambda: None, n_logprobs: int | None = None
    ) -> None:
        self.native = native
        self._recorder: Any = None
        if n_logprobs is not None:
            self.native = self._recorder = _native.LogprobsChooser(native, min(n_logprobs, 2**31 - 1))
        self._free = weakref.finalize(self, free)
        self._free.atexit = False

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of the tokens chosen so far, where they are kept; also after its end."""
        return self.logprobs_from(0)

    def logprobs_from(self, start: int) -> list[TokenLogprobs]:
        """The same from the `start`th token on: a stream does not copy all of them with every piece."""
        found = self._recorder.found(start) if self._recorder is not None else []
        return [TokenLogprobs(one.token, one.logprob, one.top) for one in found]

    def close(self) -> None:
        self.native = None
        self._free()


def rule_of(accept: str, sampling: Sampling) -> str:
    """The rule of acceptance that is meant: greedy has only one, and a seed gives plain decoding's text unless it is told not to.

    Raises:
        PromptError: there is no such rule.

    >>> rule_of("auto", Sampling(temperature=1.0)), rule_of("auto", Sampling(temperature=1.0, seed=1))
    ('auto', 'match')
    """
    if accept not in ACCEPT:
        raise PromptError(f"accept {accept!r} is none of {', '.join(ACCEPT)}")
    if sampling.greedy or (accept == "auto" and sampling.seed is not None):
        return "match"
    return accept


def make_chooser(
    sampling: Sampling,
    vocab: Vocab,
    prompt: Sequence[int],
    n_ctx: int,
    *,
    n_logprobs: int | None = None,
    rule: str = "match",
    rules: _native.RuleChoice | None = None,
) -> Chooser:
    """Builds the chooser for these settings: our own arg-max for plain greedy, llama.cpp's chain otherwise.

    Args:
        vocab: of the target.
        prompt: the tokens before the text: penalties and DRY look at them.
        n_ctx: the whole context, in tokens.
        n_logprobs: how many likeliest tokens to keep of each; None keeps no log-probabilities.
        rule: "match" (one draw a token, as plain), "reject" (speculative sampling), or "auto": `rules` finds the faster one.

    Raises:
        PromptError: a bias of a token that the vocabulary lacks, a grammar that does not parse, a schema that is none.
    """
    if sampling.greedy and not sampling.adjusts:
        return Chooser(_native.greedy_chooser(), n_logprobs=n_logprobs)
    lib = llama()
    grammar = _make_grammar(sampling, vocab)
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())

    def free() -> None:
        lib.llama_sampler_free(chain)
        if grammar:
            lib.llama_sampler_free(grammar)

    try:
        seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
        parts = _adjusting(sampling, vocab, n_ctx)
        if sampling.greedy:
            parts.append(lib.llama_sampler_init_greedy())
        else:
            parts += _truncating(sampling)
            if rule == "match":
                parts.append(lib.llama_sampler_init_dist(seed))
        for part in parts:
            lib.llama_sampler_chain_add(chain, part)
        if sampling.penalizes and sampling.penalize_prompt:
            for token in prompt:
                lib.llama_sampler_accept(chain, token)
        bound = address(grammar) if grammar else 0
        if rule == "match":
            native = _native.chain_chooser(address(chain), bound)
        else:
            chosen = rules if rule == "auto" else None
            native = _native.speculative_chooser(address(chain), sampling.penalizes, bound, seed, chosen)
    except BaseException:
        free()
        raise
    return Chooser(native, free, n_logprobs)


def _adjusting(sampling: Sampling, vocab: Vocab, n_ctx: int) -> list[Any]:
    """The samplers that change logits and remove no token: biases, penalties, DRY."""
    lib, found = llama(), []
    if sampling.logit_bias:
        foreign = [token for token in sampling.logit_bias if not 0 <= token < vocab.n_tokens]
        if foreign:
            raise PromptError(
                f"logit_bias is for token {foreign[0]}, which is outside the vocabulary of {vocab.n_tokens}"
            )
        biases = (lib.llama_logit_bias * len(sampling.logit_bias))(*sampling.logit_bias.items())
        found.append(lib.llama_sampler_init_logit_bias(vocab.n_tokens, len(biases), biases))
    if sampling.penalizes:
        last_n = n_ctx if sampling.repeat_last_n == WHOLE else sampling.repeat_last_n
        found.append(
            lib.llama_sampler_init_penalties(
                vocab.n_tokens,
                last_n,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
    if sampling._dry:
        texts = [text.encode() for text in sampling.dry_sequence_breakers]
        found.append(
            lib.llama_sampler_init_dry(
                vocab.pointer,
                sampling.dry_multiplier,
                sampling.dry_base,
                sampling.dry_allowed_length,
                n_ctx if sampling.dry_penalty_last_n == WHOLE else sampling.dry_penalty_last_n,
                (ctypes.c_char_p * len(texts))(*texts),
                len(texts),
            )
        )
    return found


def _truncating(sampling: Sampling) -> list[Any]:
    """The samplers that leave fewer tokens, and the temperature."""
    lib = llama()
    return [
        lib.llama_sampler_init_top_k(sampling.top_k),
        lib.llama_sampler_init_typical(sampling.typical_p, 1),
        lib.llama_sampler_init_top_p(sampling.top_p, 1),
        lib.llama_sampler_init_min_p(sampling.min_p, 1),
        lib.llama_sampler_init_temp(sampling.temperature),
    ]


def _make_grammar(sampling: Sampling, vocab: Vocab) -> Any:
    """The grammar's own sampler, or None where nothing is bound."""
    schema, text = sampling.json_schema, sampling.grammar
    if schema is None and text is None:
        return None
    gbnf = str(text) if schema is None else schema_grammar(schema)
    try:
        check_gbnf(gbnf)
        forget_errors()
        made = llama().llama_sampler_init_grammar(vocab.pointer, gbnf.encode(), b"root")
        if not made:
            raise PromptError(f"the grammar is no GBNF that llama.cpp takes: {last_error()}")
    except PromptError as error:
        if schema is None:
            raise
        raise PromptError(f"the JSON schema cannot be used: {error}") from error
    return made


def address(pointer: Any) -> int:
    """The address a ctypes pointer (or void pointer) holds."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0
