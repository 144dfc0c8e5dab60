"""What a client may ask: the bodies of OpenAI's chat and text completions, turned into a prompt and options of `Session.generate`.

Every field is used, refused, or named here as one that changes nothing. Ranges of sampling settings are checked by `Sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..reasoning import preserved_texts, without_reasoning
from ..sampling import ACCEPT, Sampling
from ..vocab import Vocab
from .errors import RequestError
from .fields import Fields, is_a, shown
from .messages import read_messages
from .splitter import Splitter
from .tools import Tools, read_tools

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 32
TEXT_TOKENS = 16  # that a text completion has at most where none are given: OpenAI's default

# Settings that go to the sampler as they are, under llama.cpp's names, and OpenAI's where they are the same.
SAMPLING = tuple(
    field.name for field in fields(Sampling) if field.name not in ("grammar", "json_schema", "logit_bias")
)
# Of no consequence for an answer: whose it is, how it is kept, what it costs.
HARMLESS = ("metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prediction")
EFFORT = "reasoning_effort"  # a variable of the chat template where that has one (gpt-oss)
_ONE = "a request has one answer here; send it again for another"
_TEXT_ALONE = "the model reads and writes text alone"
# Field: values that change nothing, and why any other is refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "store": ((False,), "nothing is stored"),
    "suffix": (("",), "text is completed at its end alone"),
    "modalities": ((["text"],), _TEXT_ALONE),
    "audio": ((), _TEXT_ALONE),
    "functions": (([],), "give tools"),
    "function_call": (("none", "auto"), "give tool_choice"),
    EFFORT: ((), "this model's chat template knows none; give what it knows in chat_template_kwargs"),
    "verbosity": (("medium",), "tell the model in a message"),
    "web_search_options": ((), "there is no search"),
}
_TEMPLATE_OWN = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
)


@dataclass(frozen=True)
class Request:
    """A request that can be answered.

    Args:
        tokens: the prompt's ids.
        options: of `Session.generate`.
        client: whose it is: clients take turns in the queue.
        stream: send the answer as it comes.
        has_usage: end a stream with a chunk of token counts.
        lens: tell of each token where it came from.
        echo: what goes before the text of a text completion.
        splitter: makes what cuts a chat's answer into its parts; None for a text completion.
    """

    tokens: list[int]
    options: Mapping[str, Any]
    client: str
    stream: bool
    has_usage: bool
    lens: bool
    echo: str = ""
    splitter: Callable[[], Splitter] | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.options.get("logprobs") is not None

    @property
    def has_pieces(self) -> bool:
        """Whether its answer goes token by token, and not by what text a round shows."""
        return self.lens or self.has_logprobs


def read_chat(body: Any, vocab: Vocab, *, client: str, n_ctx: int) -> Request:
    """Reads the body of `/v1/chat/completions`.

    Args:
        body: the JSON value.
        vocab: of the model.
        client: whose request it is, where its field `user` does not say.
        n_ctx: tokens an answer has at most where no number is given.

    Raises:
        RequestError: a field unknown, missing, of another kind, or one that cannot be followed.
        PromptError: the chat template or a schema cannot be used.

    Example:
        >>> read_chat({"messages": [{"role": "user", "content": "Hi"}]}, vocab, client="", n_ctx=512)   # doctest: +SKIP
    """
    fields = Fields(body)
    template = vocab.chat_template or ""
    efforts = {EFFORT: fields.take(EFFORT, str)} if EFFORT in template else {}
    common = _read_common(fields, client)
    options = common.pop("options")
    options["max_tokens"] = _max_tokens(fields, "max_completion_tokens", "max_tokens") or n_ctx
    options["logprobs"] = _chat_logprobs(fields)
    messages = read_messages(fields.need("messages", list))
    tools = read_tools(fields, template)
    _bind(options, fields, tools)
    variables = fields.take("chat_template_kwargs", dict, default={})
    if own := sorted(variables.keys() & {*_TEMPLATE_OWN}):
        raise RequestError(
            f"chat_template_kwargs has {own[0]}, which is not for a request to give: leave it out"
        )
    variables = {**{name: value for name, value in efforts.items() if value is not None}, **variables}
    fields.end()
    is_bound = any(options.get(name) is not None for name in ("grammar", "json_schema"))
    if is_bound:
        variables = {"enable_thinking": False, **variables}
    prompt = vocab.render_chat(messages, tools=tools.offered if tools else None, **variables)
    if is_bound:
        prompt = without_reasoning(prompt, template)
    marks = (*preserved_texts(template), *(tools.preserved_texts if tools else ()))
    options["preserved_tokens"] = vocab.control_tokens(marks)
    return Request(
        tokens=vocab.tokenize(prompt, add_special=False),
        options=options,
        splitter=lambda: Splitter(prompt, template, tools),
        **common,
    )


def read_text(body: Any, vocab: Vocab, *, client: str, n_ctx: int) -> Request:
    """Reads the body of `/v1/completions`; arguments and errors as of `read_chat`."""
    fields = Fields(body)
    common = _read_common(fields, client)
    options = common.pop("options")
    options["max_tokens"] = _max_tokens(fields, "max_tokens") or TEXT_TOKENS
    options["logprobs"] = n_top = fields.take("logprobs", int)
    _check_top(n_top, "logprobs")
    _bind(options, fields, None)
    prompt = _one_prompt(fields.need("prompt", str, list))
    echo = fields.take("echo", bool, default=False)
    fields.end()
    if echo and n_top is not None:
        raise RequestError(
            "echo with logprobs: the prompt's tokens have none here; leave one out", param="echo"
        )
    tokens = vocab.tokenize(prompt) if isinstance(prompt, str) else prompt
    if (bad := next((token for token in tokens if not 0 <= token < vocab.n_tokens), None)) is not None:
        raise RequestError(
            f"prompt has token id {shown(bad)}, which is outside the vocabulary of {vocab.n_tokens}",
            param="prompt",
        )
    text = prompt if isinstance(prompt, str) else vocab.text_of(prompt) if echo else ""
    text = text.encode("utf-8", "replace").decode()  # JSON's escapes may spell what is no text
    return Request(tokens=tokens, options=options, echo=text if echo else "", **common)


def _read_common(fields: Fields, client: str) -> dict[str, Any]:
    """What both kinds of request have; `model` has been looked at before."""
    fields.skip("model", *HARMLESS)
    for field, (neutral, why) in REFUSED.items():
        fields.only(field, neutral, why)
    users = [fields.take(field, str) for field in ("user", "safety_identifier")]
    stream = fields.take("stream", bool, default=False)
    stream_options = Fields(fields.take("stream_options", dict, default={}), "stream_options")
    has_usage = stream_options.take("include_usage", bool, default=False)
    stream_options.skip("include_obfuscation")
    stream_options.end()
    if has_usage and not stream:
        raise RequestError("stream_options: the request has no stream; leave it out", param="stream_options")
    options = {name: fields.take(name) for name in SAMPLING}
    options["accept"] = fields.take("accept", str)
    if options["accept"] not in (None, *ACCEPT):
        raise RequestError(
            f"accept {shown(options['accept'])} is none of {', '.join(ACCEPT)}", param="accept"
        )
    options["depth"] = fields.take("depth", int)
    options["ignore_eos"] = fields.take("ignore_eos", bool, default=False)
    options["logit_bias"] = _logit_bias(fields.take("logit_bias", dict))
    options["stop"] = _stops(fields.take("stop", str, list, default=[]))
    return {
        "options": {name: value for name, value in options.items() if value is not None},
        "client": next((user for user in users if user), client),
        "stream": stream,
        "has_usage": has_usage,
        "lens": fields.take("lens", bool, default=False),
    }


def _stops(value: str | list[Any]) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not all(isinstance(one, str) and one for one in stops) or len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop {shown(value)}: at most {MAX_STOPS} texts are expected, none of them empty", param="stop"
        )
    return stops


def _logit_bias(value: Mapping[str, Any] | None) -> dict[int, float] | None:
    """JSON has texts alone as names: of token ids here."""
    if not value:
        return None
    bad = next(
        (token for token in value if not (token.isascii() and token.isdigit() and len(token) < 12)), None
    )
    if bad is not None:
        raise RequestError(f"logit_bias is for {shown(bad)}, which is no token id", param="logit_bias")
    return {int(token): bias for token, bias in value.items()}


def _max_tokens(fields: Fields, *names: str) -> int | None:
    """The most tokens that an answer may have, under whichever name they are given."""
    found: dict[str, int] = {name: n for name in names if (n := fields.take(name, int)) is not None}
    if not found:
        return None
    name, n = next(iter(found.items()))
    if len(set(found.values())) > 1:
        raise RequestError(f"{' and '.join(found)} differ: give one of them", param=name)
    if n < 1:
        raise RequestError(f"{name} {n}: at least 1 is expected", param=name)
    return n


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, n_top = fields.take("logprobs", bool, default=False), fields.take("top_logprobs", int)
    _check_top(n_top, "top_logprobs")
    if n_top and not wanted:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (n_top or 0) if wanted else None


def _check_top(n_top: int | None, name: str) -> None:
    if n_top is not None and not 0 <= n_top <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} {n_top}: 0 to {MAX_TOP_LOGPROBS} are expected", param=name)


def _bind(options: dict[str, Any], fields: Fields, tools: Tools | None) -> None:
    """Takes what binds an answer to a form: at most one of a response format, a grammar, a schema and a forced call."""
    schema = _response_format(fields.take("response_format", dict))
    found = {
        "response_format": schema,
        "grammar": fields.take("grammar", str),
        "json_schema": fields.take("json_schema", dict, str),
        "tools": tools.forced or None if tools else None,
    }
    bound = [name for name, value in found.items() if value is not None]
    if len(bound) > 1 or (tools and bound not in ([], ["tools"])):
        names = " and ".join({*bound, *(["tools"] if tools else [])})
        raise RequestError(f"{names} cannot bind one answer together: give one of them", param=bound[0])
    if tools and tools.forced:
        options["grammar"] = tools.grammar()
    elif bound:
        value = found[bound[0]]
        options["grammar" if bound == ["grammar"] else "json_schema"] = value


def _response_format(value: Mapping[str, Any] | None) -> Any:
    """The JSON schema that it asks for, None for text."""
    if value is None:
        return None
    fields = Fields(value, "response_format")
    kind = fields.need("type", str)
    schema: Any = None
    if kind == "json_object":
        schema = {"type": "object"}
    elif kind == "json_schema":
        inner = Fields(fields.need("json_schema", dict), "response_format.json_schema")
        inner.skip("name", "description", "strict")  # it is always followed
        schema = inner.need("schema", dict)
        inner.end()
    elif kind != "text":
        raise RequestError(
            f"response_format.type {shown(kind)} is none of text, json_object, json_schema",
            param="response_format.type",
        )
    fields.end()
    return schema


def _one_prompt(value: str | list[Any]) -> str | list[int]:
    """The one prompt there may be: a text or token ids, by itself or alone in a list."""
    if isinstance(value, str):
        return value
    if value and all(is_a(token, int) for token in value):
        return value
    if len(value) != 1:
        raise RequestError(
            f"prompt has {len(value)} prompts: one text, or one list of token ids, is expected",
            param="prompt",
        )
    (inner,) = value
    if isinstance(inner, str) or (isinstance(inner, list) and all(is_a(token, int) for token in inner)):
        return inner
    raise RequestError(f"prompt {shown(value)} is neither text nor token ids", param="prompt")
