"""Grammars before llama.cpp reads them: GBNF of a JSON schema, and what its parser does not survive.

Refused here is only what makes the parser overflow the stack or run until memory ends; whether a text is a grammar at all
llama.cpp says. Knows no samplers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import PromptError
from .schema_rules import IntegerBounds, check_followed

MAX_NESTING = 2_000  # parentheses within each other; each takes stack, of which a thread may have half a MiB
MAX_RULES = 5_000  # names may lead from rule to rule in a chain as long, which takes stack, too
MAX_REPETITIONS = 100_000  # the converter writes each of them out

_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength")
_VALUES = ("const", "enum", "default", "examples")  # what they hold is no schema
_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*"'  # literals, sets of characters and comments, in which nothing counts
    r"|\[(?:\\.|[^\]\\])*\]"
    r"|\#[^\n]*"
    r"|(?P<rule>::=)|(?P<open>\()|(?P<close>\))"
    r"|\{(?P<least>[\s\d]+),(?P<most>[\s\d]+)\}",
    re.DOTALL,
)


def check_gbnf(text: str) -> None:
    """Refuses a grammar that llama.cpp's parser would not come back from (src/llama-grammar.cpp).

    Raises:
        PromptError: nothing at all, no text, parentheses or rules beyond the stack, or a repetition whose least is above its most.

    Example:
        >>> check_gbnf('root ::= "a"{1,3}')
    """
    if not text.strip():
        raise PromptError("the grammar is no GBNF that llama.cpp takes: it is empty")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise PromptError("the grammar is no GBNF that llama.cpp takes: it is no UTF-8 text")
    nesting = deepest = n_rules = 0
    for part in _PARTS.finditer(text):
        n_rules += part["rule"] is not None
        nesting += (part["open"] is not None) - (part["close"] is not None)
        deepest = max(deepest, nesting)
        least, most = ((part[name] or "").strip() for name in ("least", "most"))
        if least.isdecimal() and most.isdecimal() and _is_more(least, most):
            raise PromptError(f"the grammar repeats at least {least} and at most {most} times: exchange them")
    for what, n, limit in (
        ("parentheses within each other", deepest, MAX_NESTING),
        ("rules", n_rules, MAX_RULES),
    ):
        if n > limit:
            raise PromptError(f"the grammar has {n:,} {what}, which are at most {limit:,} here: simplify it")


def _is_more(a: str, b: str) -> bool:
    """Compares whole numbers of any length, which int() does not take."""
    a, b = a.lstrip("0"), b.lstrip("0")
    return (len(a), a) > (len(b), b)


def schema_grammar(schema: Mapping[str, Any] | str | bool) -> str:
    """The GBNF of a JSON schema, which llama-cpp-python's converter writes.

    Args:
        schema: an object, its JSON, or True for any JSON object.

    Raises:
        PromptError: it is no JSON of an object, repeats more than can be written out, or asks for what the converter leaves out.

    Example:
        >>> "root ::=" in schema_grammar({"type": "integer"})
        True
    """
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        found = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        found = {} if found is True else found
        if not isinstance(found, dict):
            raise PromptError(
                f'the JSON schema is {json.dumps(found)[:40]}: an object is expected, such as {{"type": "object"}}'
            )
        for name, n in _repetitions(found):
            if n > MAX_REPETITIONS:
                raise PromptError(f"the JSON schema's {name} is above {MAX_REPETITIONS:,}, the most here")
        check_followed(found, found)
        bounds = IntegerBounds()
        return bounds.put_in(str(json_schema_to_gbnf(json.dumps(bounds.taken_out(found)))))
    except RecursionError:
        raise PromptError("the JSON schema nests too deeply") from None
    except PromptError:
        raise
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
    ) as error:  # the converter's, of a form it did not expect
        raise PromptError(
            f"the JSON schema cannot be used: llama-cpp-python's converter does not know its form ({type(error).__name__}: {error})"
        ) from error
    except Exception as error:  # a converter of foreign schemas: any error in it is the schema's
        raise PromptError(f"the JSON schema cannot be used: {error or type(error).__name__}") from error


def _repetitions(schema: Any) -> Iterator[tuple[str, int]]:
    """Every number of repetitions that a schema asks for, and under which name."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in _BOUNDS and isinstance(value, int):
                yield name, value
            elif name == "pattern" and isinstance(value, str):
                for bounds in re.findall(r"\{(\d*),?(\d*)\}", value):
                    yield from ((name, int(n[:9])) for n in bounds if n)
            elif name not in _VALUES:
                yield from _repetitions(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _repetitions(value)
