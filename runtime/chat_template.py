"""Chat templates: Jinja programs that come inside files from strangers, run in a sandbox with limits.

Jinja's own sandbox keeps a template from Python's insides (no attributes with underscores, nothing that changes what it is
given, no files). What it does not keep it from is running for ever and filling the memory; here every loop and every call
looks at the clock, and everything that a template makes is weighed, before it is made where one step could make gigabytes.
Surroundings as Transformers and llama-cpp-python have them: trimmed blocks, `break` and `continue`, `generation` tags, JSON as
it is. Knows no model and no tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import PromptError

MAX_SOURCE = 1 << 18  # characters of a template; the longest known have 60,000
MAX_SIZE = 1 << 24  # characters of anything a template makes, all its parts together
MAX_NODES = 200_000  # values in anything it makes
MAX_DEPTH = 64  # lists and objects within each other
MAX_WIDTH = 10_000  # columns that a text is padded or indented to
MAX_BITS = 4096  # of an integer
SECONDS = 5.0  # of one text

_OF_QUEUES = ("append", "pop")
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_WIDE_FILTERS = ("center", "indent", "truncate", "batch", "slice", "round", "tojson")
_LEFT_OUT = (
    "urlize",
    "striptags",
    "wordwrap",
    "xmlattr",
    "pprint",
    "random",
)  # slow on long texts, and no template's need
_THINKING = re.compile(r"""[.'"]thinking\b""")  # a message's field
_WIDE_FORMAT = re.compile(
    r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{"
)  # a width of five digits, or one from an argument


class ChatTemplate:
    """A compiled chat template, for any number of threads.

    Args:
        source: the template, in Jinja.
        bos, eos: what it knows as `bos_token` and `eos_token`.

    Raises:
        PromptError: it is no template, or too long.

    Example:
        >>> ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}").render([{"role": "u", "content": "hi"}])
        'u: hi'
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise PromptError(
                f"the file's chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are run"
            )
        self._given = {"bos_token": bos, "eos_token": eos, "raise_exception": _raise, "strftime_now": _now}
        self._knows_thinking = "reasoning_content" not in source and bool(_THINKING.search(source))
        with _within_limits():
            self._template = _environment().from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the template writes it, with the opening of the answer.

        Args:
            messages: objects with `role` and `content`, as the OpenAI API has them; `reasoning_content` is given as `thinking`, too,
                where the template knows that name alone (gpt-oss, LFM2.5).
            tools: descriptions of functions.
            variables: whatever else the template looks at, `enable_thinking` for one.

        Raises:
            PromptError: the template refuses these messages, fails, or goes beyond the limits.
        """
        given: dict[str, Any] = {
            "add_generation_prompt": True,
            "functions": None,
            "function_call": None,
            "tool_choice": None,
        }
        given |= {
            "messages": [self._named(message) for message in messages],
            "tools": list(tools or ()) or None,
        }
        given = _copied(given | variables)  # a template may append to lists, and these are not its own
        with _within_limits():
            parts, n_chars = list[str](), 0
            for part in self._template.generate(self._given | given):
                _look_at_the_clock()
                n_chars += len(part)
                if n_chars > MAX_SIZE:
                    raise _Beyond(f"writes more than {MAX_SIZE:,} characters")
                parts.append(part)
            return "".join(parts)

    def _named(self, message: Mapping[str, Any]) -> dict[str, Any]:
        reasoning = message.get("reasoning_content")
        # gpt-oss's refuses it where there is something said beside calls.
        if (
            not reasoning
            or not self._knows_thinking
            or (message.get("content") and message.get("tool_calls"))
        ):
            return dict(message)
        return {"thinking": reasoning, **message}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _raise(message: str) -> None:
    raise ValueError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


# Limits


class _Beyond(PromptError):
    """What a template did that it may not."""


_running = threading.local()


@contextlib.contextmanager
def _within_limits() -> Iterator[None]:
    """Runs something of a template; whatever it raises is the prompt's fault."""
    _running.deadline = time.monotonic() + SECONDS
    try:
        yield
    except _Beyond as error:
        raise PromptError(f"the file's chat template {error}: it is damaged or hostile") from error
    except RecursionError as error:
        raise PromptError(
            "the file's chat template failed: it calls itself without end, or nests too deeply"
        ) from error
    except Exception as error:  # templates are programs from strangers: any error in one is the prompt's
        raise PromptError(
            f"the file's chat template failed: {str(error)[:500] or type(error).__name__}"
        ) from error


def _look_at_the_clock() -> None:
    if time.monotonic() > _running.deadline:
        raise _Beyond(f"runs for more than {SECONDS:g} seconds")


def _weighed(value: Any) -> Any:
    """The value, if it is no more than a template may make; iterators are left alone."""
    if isinstance(value, (str, bytes)):
        if len(value) > MAX_SIZE:
            raise _Beyond(f"makes more than {MAX_SIZE:,} characters")
        return value
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _Beyond(f"makes an integer of more than {MAX_BITS:,} bits")
    if not isinstance(value, (list, tuple, dict)):
        return value
    n_nodes = n_chars = 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        n_nodes += 1
        if isinstance(one, (str, bytes)):
            n_chars += len(one)
        elif isinstance(one, (list, tuple, dict)):
            parts = [*one, *one.values()] if isinstance(one, dict) else one
            n_nodes += len(parts)
            waiting += [
                (part, depth + 1) for part in parts if isinstance(part, (str, bytes, list, tuple, dict))
            ]
        if n_nodes > MAX_NODES or n_chars > MAX_SIZE or depth > MAX_DEPTH:
            raise _Beyond(
                f"makes more than {MAX_NODES:,} values, {MAX_SIZE:,} characters or {MAX_DEPTH} levels"
            )
    return value


def _check_product(left: Any, right: Any) -> None:
    for one, times in ((left, right), (right, left)):
        if (
            isinstance(one, (str, bytes, list, tuple))
            and isinstance(times, int)
            and len(one) * times > MAX_NODES
        ):
            raise _Beyond(f"repeats something {times:,} times")
        if isinstance(one, int) and one.bit_length() > MAX_BITS:
            raise _Beyond(f"makes an integer of more than {MAX_BITS:,} bits")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise _Beyond(f"makes an integer of more than {MAX_BITS:,} bits")


def _check_format(text: Any) -> None:
    if isinstance(text, (str, bytes)):
        found = text.decode("latin-1") if isinstance(text, bytes) else text
        if ("%" in found or "{" in found) and _WIDE_FORMAT.search(found):
            raise _Beyond("formats to a width that is too large or not its own")


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_WIDTH:
            raise _Beyond(f"pads to {value:,} columns; at most {MAX_WIDTH:,} are made")


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    added = width if isinstance(width, int) else len(str(width))
    if str(text).count("\n") * added > MAX_SIZE:
        raise _Beyond(f"makes more than {MAX_SIZE:,} characters")


def _check_replace(text: str, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and (text.count(old) * len(new)) > MAX_SIZE:
        raise _Beyond(f"makes more than {MAX_SIZE:,} characters")


def _check_join(between: Any, parts: Any) -> list[Any]:
    """The parts, once it is sure that they may be joined."""
    found, n_chars = [], 0
    for part in parts:
        _look_at_the_clock()
        n_chars += len(part if isinstance(part, str) else str(_weighed(part))) + len(str(between))
        if n_chars > MAX_SIZE:
            raise _Beyond(f"makes more than {MAX_SIZE:,} characters")
        found.append(part)
    return found


# Surroundings


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Some templates queue texts in lists of their own (Kimi K2's): see `call`."""
        if isinstance(obj, list) and attr in _OF_QUEUES:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%":
            _check_format(left)
            _weighed(right)
        return _weighed(super().call_binop(context, operator, left, right))

    def call(
        _self, _context: Context, _function: Any, *args: Any, **options: Any
    ) -> Any:  # names that no option of a macro has
        _look_at_the_clock()
        owner, name = getattr(_function, "__self__", None), getattr(_function, "__name__", "")
        if isinstance(owner, list) and name == "append" and not all(isinstance(one, str) for one in args):
            raise _Beyond("appends what is no text")  # lists in lists could grow unweighed
        if isinstance(owner, (str, bytes)):
            if name in _PADDING:
                _check_widths([*args, *options.values()])
            elif name == "replace":
                _check_replace(str(owner), *args)
            elif name == "join":
                args = (_check_join(owner, *args[:1]),)
            elif name == "translate":
                raise _Beyond("translates a text, which is left out here")
        return _weighed(super().call(_context, _function, *args, **options))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **options: Any) -> str:
            _check_format(value.__self__)
            _weighed([args, options])
            return wrapped(*args, **options)

        return checked

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        return "".join(_check_join("", parts))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found: nodes.Template = _Guard().visit(super()._parse(source, name, filename))
        return found


class _Guard(NodeTransformer):
    """Puts a look at the clock into every loop, and a weight on all that is built in an expression."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "weighed")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "weighed")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "weighed") if node.ctx == "load" and node.items else node


def _filtered(node: Any, name: str) -> nodes.Expr:
    return nodes.Filter(node, f"_{name}", [], [], None, None, lineno=node.lineno)


def _each(values: Any) -> Iterator[Any]:
    for value in values:
        _look_at_the_clock()
        yield value


def _joined(values: Any) -> str:
    return "".join(str(part) for part in _check_join("", values))


class _Generation(ext.Extension):
    """`{% generation %}`, with which training code marks answers: only what is in it counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at the clock, and at what it is given and gives."""

    @functools.wraps(filter)  # with what says that it takes the context, too
    def checked(*args: Any, **options: Any) -> Any:
        _look_at_the_clock()
        values = args[1:] if hasattr(filter, "jinja_pass_arg") else args
        for value in values:
            _weighed(value)
        if name in _WIDE_FILTERS:
            _check_widths([*values[1:], *options.values()])
            if name == "indent":
                _check_indent(*values, **options)
        elif name == "format":
            _check_format(values[0])
        elif name == "replace":
            _check_replace(str(values[0]), *values[1:])
        elif name == "join" and len(values) > 0 and "attribute" not in options and len(values) < 3:
            between = values[1] if len(values) > 1 else options.get("d", "")
            args = (*args[: len(args) - len(values)], _check_join(between, values[0]), *values[1:])
        return _weighed(filter(*args, **options))

    return checked


@functools.cache
def _environment() -> _Environment:
    made = _Environment(
        loader=jinja2.BaseLoader(),
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, ext.loopcontrols],
        finalize=_weighed,
    )
    made.globals.pop("lipsum")
    made.filters = {
        name: _guarded(name, filter)
        for name, filter in {**made.filters, "tojson": _to_json}.items()
        if name not in _LEFT_OUT
    }
    made.filters |= {"_each": _each, "_joined": _joined, "_weighed": _weighed}
    return made
