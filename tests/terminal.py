"""A small terminal for tests: what a screen of some size, and what has scrolled out of it, look like after some output.

Knows what our output uses and no more: line ends, carriage returns, cursor up, erasing, and the wrapping of long lines. Anything else
is an error of the test's. Every character is one column wide.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|([\s\S])")


class Terminal:
    """Write to it as to a file.

    >>> terminal = Terminal(10, 3)
    >>> terminal.write("one\\ntwo\\x1b[1A\\rONE\\x1b[K")
    >>> terminal.lines()
    ['ONE', 'two']
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.n_rows = columns, rows
        self.scrolled: list[str] = []
        self._screen = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        for arguments, code, character in _TOKEN.findall(text):
            if character:
                self._put(character)
            else:
                self._control(arguments, code)

    def flush(self) -> None: ...

    def lines(self) -> list[str]:
        """All that can be seen or scrolled back to, without blanks at the ends and the empty rows below."""
        lines = [line.rstrip() for line in [*self.scrolled, *self._screen]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _control(self, arguments: str, code: str) -> None:
        if code == "A":
            self._row = max(0, self._row - int(arguments or 1))
        elif code == "K" and not arguments:
            self._screen[self._row] = self._screen[self._row][: self._column]
        elif code == "J" and not arguments:
            self._screen[self._row] = self._screen[self._row][: self._column]
            del self._screen[self._row + 1 :]
        else:
            assert code == "m" or (code in "hl" and arguments == "?2026"), (arguments, code)

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        else:
            assert character >= " ", repr(character)
            if self._column == self.columns:
                self._down()
            line = self._screen[self._row].ljust(self._column)
            self._screen[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._screen):
            self._screen.append("")
        if len(self._screen) > self.n_rows:
            self.scrolled.append(self._screen.pop(0))
            self._row -= 1
