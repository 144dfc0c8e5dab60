"""The end of a terminal's output that may still change: repainted in place, and only where it differs.

Lines are strings of one row each, with their escape codes, narrower than the terminal. What has scrolled out of the screen cannot
be repainted: it stays as it is. When the terminal has become narrower, lines count as the rows that it has wrapped them into.
Knows nothing of what the lines say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from os import terminal_size
from typing import TextIO

from rich.cells import cell_len

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Terminals that know it show what is between these two at once; others ignore it.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


class Region:
    """The lines at the cursor; begins empty, at the start of a row, and must end so: `update([...], [])`.

    Args:
        file: the terminal.
        size: how large it is now.
    """

    def __init__(self, file: TextIO, size: Callable[[], terminal_size]) -> None:
        self._file, self._size = file, size
        self._shown: list[str] = []  # the cursor is behind the last one
        self._n_gone = 0  # lines before these, which have scrolled out and belong to what is not kept yet

    def update(self, kept: Sequence[str], open: Sequence[str]) -> None:
        """Shows `kept` and then `open` in place of what was open before; the kept ones stay for good.

        >>> import io, os
        >>> region = Region(io.StringIO(), lambda: os.terminal_size((80, 24)))
        >>> region.update([], ["a"])
        >>> region.update(["ab"], ["c"])
        """
        size = self._size()
        self._let_go(size)
        lines = [*kept, *open][self._n_gone :]
        n_kept = max(0, len(kept) - self._n_gone)
        out = self._difference(lines, size)
        if not open and lines:
            out += "\n"
        self._shown = lines[n_kept:]
        self._n_gone = max(0, self._n_gone - len(kept))
        self._let_go(size)
        if out:
            self._file.write(f"{_BEGIN}{out}{_END}")
            self._file.flush()

    def _difference(self, lines: list[str], size: terminal_size) -> str:
        """What turns the shown lines into these."""
        shown = self._shown
        n_same = 0
        while n_same < min(len(shown), len(lines)) and shown[n_same] == lines[n_same]:
            n_same += 1
        if n_same == len(shown) == len(lines):
            return ""
        if shown and n_same == len(shown):
            return "\n" + _joined(lines[n_same:])
        if lines and n_same == len(lines):
            n_same -= 1  # so that the cursor comes to stand behind it
        n_up = sum(self._rows(line, size) for line in shown[n_same:]) - 1
        up = f"\x1b[{n_up}A" if n_up > 0 else ""
        return f"{up}\r{_joined(lines[n_same:])}\x1b[J"

    def _let_go(self, size: terminal_size) -> None:
        """Gives up lines that the screen has no room for."""
        while len(self._shown) > 1 and sum(self._rows(line, size) for line in self._shown) > size.lines - 1:
            del self._shown[0]
            self._n_gone += 1

    @staticmethod
    def _rows(line: str, size: terminal_size) -> int:
        return max(1, -(-cell_len(_ESCAPES.sub("", line)) // max(1, size.columns)))


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(f"{line}\x1b[K" for line in lines)
