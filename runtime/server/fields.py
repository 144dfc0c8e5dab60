"""Taking a JSON object apart field by field: each is asked for once, and what nobody asked for is refused.

So nothing that a client sends is silently ignored. Knows no field's meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import RequestError

_WHAT = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_WHAT |= {list: "a list", dict: "an object"}


class Fields:
    """The fields of an object that are not null.

    Args:
        value: the object.
        where: how errors name it, such as "messages[0]"; nothing for a request's own fields.

    Raises:
        RequestError: it is no object.

    Example:
        >>> fields = Fields({"seed": 1, "stop": None})
        >>> fields.take("seed", int), fields.take("stop", str), fields.end()
        (1, None, None)
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise RequestError(f"{where or 'the body'} is {shown(value)}: an object is expected", param=where)
        self._where = where
        self._left = {name: found for name, found in value.items() if found is not None}

    def name(self, field: str) -> str:
        """How errors name a field."""
        return f"{self._where}.{field}" if self._where else field

    def take(self, field: str, *kinds: type, default: Any = None) -> Any:
        """A field's value, `default` where it is missing. Raises RequestError where it is of none of these kinds."""
        if field not in self._left:
            return default
        value = self._left.pop(field)
        if not kinds or is_a(value, *kinds):
            return value
        expected = " or ".join(_WHAT[kind] for kind in kinds)
        raise RequestError(
            f"{self.name(field)} is {shown(value)}: {expected} is expected", param=self.name(field)
        )

    def need(self, field: str, *kinds: type) -> Any:
        """A field that must be there. Raises RequestError where it is not."""
        if field not in self._left:
            raise RequestError(f"{self.name(field)} is missing", param=self.name(field))
        return self.take(field, *kinds)

    def only(self, field: str, allowed: tuple[Any, ...], why: str) -> None:
        """A field that may be there with one of these values. Raises RequestError, which says why, at another."""
        if field in self._left and (value := self._left.pop(field)) not in allowed:
            raise RequestError(f"{self.name(field)} {shown(value)}: {why}", param=self.name(field))

    def skip(self, *fields: str) -> None:
        """Fields that change nothing here."""
        for field in fields:
            self._left.pop(field, None)

    def end(self) -> None:
        """Raises RequestError where a field was not asked for."""
        if self._left:
            names = ", ".join(self.name(field) for field in sorted(self._left)[:5])
            raise RequestError(
                f"unknown: {names} (docs/SERVER.md has the fields that there are; leave it out)",
                param=self.name(min(self._left)),
            )


def is_a(value: Any, *kinds: type) -> bool:
    """Whether a JSON value is of one of these kinds; true is no number, and whole numbers are numbers."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def shown(value: Any) -> str:
    """A value as errors show it, not all of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
