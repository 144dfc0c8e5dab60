"""JSON schemas before llama-cpp-python's converter turns them into grammars: what it would leave out is refused, bounds of whole numbers apart.

The converter looks at one form of a schema and leaves other keywords in it out: an answer would then not be what was asked for.
`check_followed` names the first such keyword. Bounds of whole numbers, the most usual of them, are put in afterwards
(`IntegerBounds`). Knows no GBNF but that of a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import PromptError

N_DIGITS = 15  # of a whole number without a bound at that side; the converter's own have as many

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_SIZES = ("minItems", "maxItems")
_OBJECT = ("properties", "required", "additionalProperties")
# Keywords that narrow what an answer may be; all others describe, or say where schemas are.
_NARROWS = {
    *_BOUNDS,
    *_LENGTHS,
    *_SIZES,
    *_OBJECT,
    "multipleOf",
    "pattern",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "prefixItems",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "not",
    "if",
    "allOf",
    "anyOf",
    "oneOf",
    "const",
    "enum",
    "$ref",
    "$dynamicRef",
}
_NEUTRAL: dict[str, Any] = {
    "uniqueItems": False,
    "minItems": 0,
    "minLength": 0,
    "minProperties": 0,
    "required": [],
    "additionalProperties": True,
    "additionalItems": False,  # an array of given items has no others
    "unevaluatedProperties": False,  # nor has an object
    "unevaluatedItems": False,
}


def check_followed(schema: Any, root: Mapping[str, Any], place: str = "") -> None:
    """Refuses a schema of which an answer would not follow every keyword.

    Args:
        schema: a part of `root`, at `place` in it.
        root: where references lead.

    Raises:
        PromptError: names the keyword.

    Example:
        >>> check_followed({"type": "string", "uniqueItems": False}, {})
    """
    if not isinstance(schema, Mapping):
        return
    used = _used(schema)
    for key, value in schema.items():
        if key in _NARROWS and key not in used and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            raise PromptError(f"the JSON schema's {key}{_at(place)} cannot be followed here: leave it out")
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and isinstance(schema.get("required"), list):
        missing = [name for name in schema["required"] if name not in properties]
        if missing and "properties" in used:
            raise PromptError(
                f"the JSON schema requires {str(missing[0])[:40]!r}{_at(place)}, which is none of its properties"
            )
    items = schema.get("items") or schema.get("prefixItems")
    if isinstance(items, list):
        for key in _SIZES:
            if schema.get(key, len(items)) != len(items):
                raise PromptError(
                    f"the JSON schema's {key}{_at(place)} is not the number of its items, {len(items)}"
                )
    if "allOf" in used:
        _check_parts(schema["allOf"], root, place)
    for name, part in _parts(schema):
        check_followed(part, root, f"{place}/{name}")


def _used(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The keywords that the converter follows, as it looks for its form."""
    kind = schema.get("type")
    forms: tuple[tuple[bool, tuple[str, ...]], ...] = (
        ("$ref" in schema, ("$ref",)),
        ("oneOf" in schema, ("oneOf",)),
        ("anyOf" in schema, ("anyOf",)),
        (isinstance(kind, list), ()),
        ("const" in schema, ("const",)),
        ("enum" in schema, ("enum",)),
        (
            kind in (None, "object")
            and ("properties" in schema or schema.get("additionalProperties", True) is not True),
            _OBJECT,
        ),
        (kind in (None, "object") and "allOf" in schema, ("allOf",)),
        (kind in (None, "array") and "items" in schema, ("items", *_SIZES)),
        (kind in (None, "array") and "prefixItems" in schema, ("prefixItems", *_SIZES)),
        (kind in (None, "string") and "pattern" in schema, ("pattern",)),
        (kind == "string" and _is_known_format(schema.get("format")), ()),
        (kind == "string", _LENGTHS),
        (kind == "integer", _BOUNDS),
    )
    return next((used for is_so, used in forms if is_so), ())


def _is_known_format(name: Any) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"uuid[1-5]?|date|time|date-time", name))


def _check_parts(parts: Any, root: Mapping[str, Any], place: str) -> None:
    """Of `allOf` the converter takes the properties alone."""
    for part in parts if isinstance(parts, list) else ():
        one = _resolved(part, root)
        for inner in one.get("anyOf", [one]) if isinstance(one, Mapping) else ():
            found = _resolved(inner, root)
            if not (isinstance(found, Mapping) and "properties" in found):
                raise PromptError(
                    f"the JSON schema's allOf{_at(place)} joins other things than properties: write them as one"
                )


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    ref = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return schema
    found: Any = root
    for name in ref[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within one, and their places in it."""
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            yield from ((f"{key}/{name}", one) for name, one in value.items())
        elif key in ("items", "prefixItems", "additionalProperties", "oneOf", "anyOf", "allOf"):
            if isinstance(value, list):
                yield from ((f"{key}/{i}", one) for i, one in enumerate(value))
            else:
                yield key, value


def _at(place: str) -> str:
    return f" at {place[:80]}" if place else ""


class IntegerBounds:
    """Stands constants in place of whole numbers with bounds, which a converter takes, and what they stand for in their place later.

    Example:
        >>> bounds = IntegerBounds()
        >>> mark = bounds.taken_out({"type": "integer", "minimum": 3, "maximum": 5})["const"]
        >>> bounds.put_in(f'root ::= "\\\\"{mark}\\\\""')
        'root ::= ([3-5]) space'
    """

    def __init__(self) -> None:
        self._of_mark: dict[str, str] = {}

    def taken_out(self, schema: Any) -> Any:
        """A schema without bounds of whole numbers. Raises PromptError for bounds that leave nothing."""
        if isinstance(schema, list):
            return [self.taken_out(one) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        if (
            schema.get("type") == "integer"
            and any(name in schema for name in _BOUNDS)
            and not {"const", "enum"} & {*schema}
        ):
            return {"const": self._mark(schema)}
        return {
            key: {name: self.taken_out(one) for name, one in value.items()}
            if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
            else value
            if key in ("const", "enum", "default", "examples")
            else self.taken_out(value)
            for key, value in schema.items()
        }

    def put_in(self, gbnf: str) -> str:
        """The grammar with the numbers in place of the constants."""
        for mark, text in self._of_mark.items():
            gbnf = gbnf.replace(f'"\\"{mark}\\""', f"({text}) space")
        return gbnf

    def _mark(self, schema: Mapping[str, Any]) -> str:
        given = {name: schema[name] for name in _BOUNDS if name in schema}
        if any(not isinstance(value, int) or isinstance(value, bool) for value in given.values()):
            raise PromptError(f"the JSON schema's bounds {json.dumps(given)[:80]} of a whole number are none")
        lows = [given.get("minimum"), *(n + 1 for n in [given.get("exclusiveMinimum")] if n is not None)]
        highs = [given.get("maximum"), *(n - 1 for n in [given.get("exclusiveMaximum")] if n is not None)]
        most = 10**N_DIGITS - 1
        low = max([n for n in lows if n is not None], default=-most)
        high = min([n for n in highs if n is not None], default=most)
        if low > high or max(abs(low), abs(high)) > most:
            raise PromptError(
                f"the JSON schema's bounds leave no whole number of at most {N_DIGITS} digits: {json.dumps(given)[:80]}"
            )
        mark = f"llama-sidecar-{low}-to-{high}-"
        self._of_mark[mark] = integer_gbnf(low, high)
        return mark


def integer_gbnf(low: int, high: int) -> str:
    """An alternative for each run of numbers with the same digits before some that are free.

    >>> integer_gbnf(0, 12), integer_gbnf(-3, 1)
    ('[0-9] | "1" [0-2]', '"-" [1-3] | [0-1]')
    """
    found = [f'"-" {one}' for one in _runs(max(1, -high), -low)] if low < 0 else []
    return " | ".join(found + _runs(max(0, low), high))


def _runs(low: int, high: int) -> list[str]:
    found = []
    while low <= high:
        n_free = 0  # digits at the end that may be any
        while low % 10 ** (n_free + 1) == 0 and low > 0 and low + 10 ** (n_free + 1) - 1 <= high:
            n_free += 1
        step = 10**n_free
        digit = low // step % 10
        n = min(9 - digit, (high - low + 1) // step - 1)
        fixed = str(low // step)[:-1]
        parts = [f'"{fixed}"' if fixed else "", f"[{digit}-{digit + n}]" if n else f'"{digit}"']
        free = [f"[0-9]{{{n_free}}}"] if n_free else []
        found.append(" ".join([part for part in parts if part] + free))
        low += (n + 1) * step
    return found
