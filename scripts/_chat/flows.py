"""Text that comes in pieces, as the lines of a terminal: those that are final, and those that may still change.

A flow is given text, and asked at any time for the lines that are final (once: they leave it) and for the open ones. `MarkdownFlow`
renders an answer: all blocks but the last are final, and of a list all items but the last. `TextFlow` shows text as it is, each piece
in a style of its own. Knows no terminal; `Painter` knows its width and what styles it can show.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from typing import Protocol

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

MIN_COLUMNS = 20
N_CODE_LINES = 24  # of an unfinished code block are highlighted anew with each piece, not all that it has
CODE_THEME = "ansi_dark"  # the terminal's own colours, on its own background
_STYLES = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.block_quote": "italic",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.link": "underline",
        "markdown.link_url": "dim",
        "markdown.hr": "dim",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")
_NOTHING = re.compile(r"(?: |\x1b\[[0-9;]*m)*")
_MARKS_ALONE = re.compile(r"\s*(?:[-*_+=`~#>|:]+|\d+[.)]?)\s*")  # a line that may become anything


def safe(text: str) -> str:
    r"""What a terminal may be shown: control characters that a model writes are no escape codes.

    >>> safe("\x1b[31mred\t\n")
    '\ufffd[31mred\t\n'
    """
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)


class Painter:
    """Turns what rich can render into lines with escape codes.

    Args:
        console: whose colours and (each time anew) width count.
    """

    def __init__(self, console: Console) -> None:
        self._outer = console
        self.console = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system=console.color_system or "standard",  # type: ignore[arg-type]
            no_color=console.no_color,
            theme=_STYLES,
            highlight=False,
            legacy_windows=False,
        )

    @property
    def columns(self) -> int:
        """Columns to use: one is left free, since terminals differ in what they do at the last."""
        return max(MIN_COLUMNS, self._outer.width - 1)

    def lines(self, what: RenderableType, *, indent: int = 0) -> list[str]:
        """(n) lines without blanks at their ends."""
        with self.console.capture() as capture:
            self.console.print(what, width=self.columns - indent, end="")
        lines = capture.get().removesuffix("\n").split("\n")
        return ["" if _NOTHING.fullmatch(line) else _BLANKS.sub(r"\1", line) for line in lines]


class Flow(Protocol):
    """Text in pieces, to lines."""

    def add(self, text: str, style: str = "") -> None:
        """Adds a piece."""

    def final(self, painter: Painter) -> list[str]:
        """Lines that no further text can change, once each."""

    def open(self, painter: Painter) -> list[str]:
        """The lines behind them, as they are now."""

    def end(self, painter: Painter) -> list[str]:
        """All that is left, when there is no further text."""


class TextFlow:
    """Text as it is; lines before the last are final. `bar` stands before every line.

    >>> flow = TextFlow()
    >>> flow.add("one\\ntw")
    >>> painter = Painter(Console(color_system=None))
    >>> flow.final(painter), flow.open(painter)
    (['one'], ['tw'])
    """

    def __init__(self, style: str = "", bar: str = "") -> None:
        self._style, self._bar = style, bar
        self._text = Text()

    def add(self, text: str, style: str = "") -> None:
        self._text.append(text, style or None)

    def final(self, painter: Painter) -> list[str]:
        n = self._text.plain.rfind("\n") + 1
        if not n:
            return []
        final, self._text = self._text[: n - 1], self._text[n:]
        return self._lines(final, painter)

    def open(self, painter: Painter) -> list[str]:
        return self._lines(self._text, painter) if self._text else []

    def end(self, painter: Painter) -> list[str]:
        lines, self._text = self.open(painter), Text()
        return lines

    def _lines(self, text: Text, painter: Painter) -> list[str]:
        text = text.copy()
        text.style = self._style
        lines = [
            line
            for part in text.split("\n", allow_blank=True)
            for line in painter.lines(part, indent=len(self._bar))
        ]
        if not self._bar:
            return lines
        bar = painter.lines(Text(self._bar, self._style))[0]
        return [f"{bar} {line}".rstrip() for line in lines]


class MarkdownFlow:
    """Markdown; what is not a whole line decides nothing.

    Every line end within a paragraph is kept, as models mean it, and HTML is text.
    """

    def __init__(self) -> None:
        self._parser = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])
        self._parsed: tuple[str, list[Token]] = ("", [])
        self._rendered = _Answer()
        self._text = ""  # from the first block, or list item, that is not final
        self._gap = False  # whether a blank line goes before it
        self._number: int | None = None  # of that item of an ordered list
        self._fence: str | None = None  # the line that opens a code block whose beginning is final already

    def add(self, text: str, style: str = "") -> None:
        self._text += text

    def final(self, painter: Painter) -> list[str]:
        lines = []
        whole = self._text[: self._text.rfind("\n") + 1]
        starts = list(self._starts(whole))
        for (begin, gap, number), (end, _, _) in itertools.pairwise(starts):
            lines += self._block(whole[begin:end], gap, number, painter)
        if len(starts) > 1:
            begin, self._gap, self._number = starts[-1]
            self._text, self._fence = self._text[begin:], None
        return lines + self._stretch(painter)

    def open(self, painter: Painter) -> list[str]:
        text = _shown(self._text, self._is_fence())
        return self._block(text, self._gap, self._number, painter) if text.strip() else []

    def end(self, painter: Painter) -> list[str]:
        lines = self.final(painter)
        if self._text.strip():
            lines += self._block(self._text, self._gap, self._number, painter)
        self._text, self._gap, self._number, self._fence = "", True, None, None
        return lines

    def _starts(self, text: str) -> Iterator[tuple[int, bool, int | None]]:
        """Where blocks and list items begin: the place in `text`, whether a blank line goes before it, the number of an item."""
        lines = [0]
        for line in _lines(text):
            lines.append(lines[-1] + len(line))
        is_first, number = True, None
        for token in self._parse(text):
            if token.map is None or token.nesting < 0 or token.level > 1:
                continue
            place = lines[token.map[0]]
            if token.level == 0:
                number = None
                if token.type == "ordered_list_open":
                    number = int(token.attrs.get("start", 1))
                    if is_first and self._number is not None:
                        number = self._number
                if not token.type.endswith("list_open"):
                    yield place if not is_first else 0, self._gap if is_first else True, None
                    is_first = False
                else:
                    is_begun = False
            elif token.type == "list_item_open":
                gap = False if is_begun else self._gap if is_first else True
                yield 0 if is_first else place, gap, number
                is_first, is_begun = False, True
                number = None if number is None else number + 1

    def _parse(self, text: str) -> list[Token]:
        if text != self._parsed[0]:
            self._parsed = text, self._parser.parse(text)
        return self._parsed[1]

    def _is_fence(self) -> bool:
        """Whether a code block is open."""
        if "```" not in self._text and "~~~" not in self._text:
            return False
        tokens = self._parse(self._text)
        return bool(tokens) and tokens[-1].type == "fence" and not _is_closed(tokens[-1], self._text)

    def _block(self, text: str, gap: bool, number: int | None, painter: Painter) -> list[str]:
        tokens = self._parse(text)
        if not tokens:
            return []
        if number is not None:
            tokens[0].attrs["start"] = number
        is_code = tokens[0].type == "fence"
        if is_code:
            tokens[0].meta = {"begins": self._fence is None, "ends": _is_closed(tokens[0], text)}
        lines = painter.lines(self._rendered.of(tokens))
        return [""] * gap + (lines if is_code else _stripped(lines))

    def _stretch(self, painter: Painter) -> list[str]:
        """Of a long code block that goes on, the beginning, which is then highlighted for the last time."""
        if not self._is_fence():
            return []
        opening, *code = _lines(self._text)
        n_whole = len(code) - (not self._text.endswith("\n"))
        if n_whole <= N_CODE_LINES:
            return []
        # Where a new statement begins, so that no string or comment is cut, unless there is none for long.
        n = next((i for i in range(n_whole - 1, 0, -1) if not code[i - 1].strip() and code[i][:1].strip()), 0)
        if n == 0 and n_whole <= 4 * N_CODE_LINES:
            return []
        n = n or n_whole - N_CODE_LINES
        lines = self._block(opening + "".join(code[:n]), self._gap, None, painter)
        n_blank = next((i for i in range(n) if code[n - 1 - i].strip()), 0)
        self._text, self._gap, self._fence = opening + "".join(code[n:]), False, opening
        return lines + [""] * n_blank


def _lines(text: str) -> list[str]:
    """The lines as Markdown has them, with their ends: str.splitlines knows line ends, such as U+2028, that are none there."""
    return _LINES.findall(text)


def _stripped(lines: list[str]) -> list[str]:
    """Without the blank lines that rich has around lists and tables."""
    filled = [i for i, line in enumerate(lines) if line] or [0]
    return lines[filled[0] : filled[-1] + 1]


def _is_closed(fence: Token, text: str) -> bool:
    """Whether a code block that ends `text` is complete."""
    assert fence.map is not None
    lines = _lines(text)
    last = lines[min(fence.map[1], len(lines)) - 1].strip()
    is_mark = last.startswith(fence.markup) and not last.strip(fence.markup[0])
    return fence.map[1] - fence.map[0] > 1 and is_mark


def _shown(text: str, is_code: bool) -> str:
    """An unfinished text as it is likely to go on: without a last line that may become anything, and with bold and code closed."""
    head, line_end, line = text.rpartition("\n")
    if _MARKS_ALONE.fullmatch(line):
        return head + line_end
    if is_code:
        return text
    begin = text.rfind("\n\n") + 1
    paragraph = text[begin:]
    if paragraph.count("`") % 2:
        return text.removesuffix("`") if text.endswith("`") else text + "`"
    if paragraph.count("**") % 2:
        text = text.rstrip(" ")
        return text.removesuffix("**") if text.endswith("**") else text + "**"
    return text


class _Heading(Heading):
    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")  # type: ignore[assignment]


class _Code(CodeBlock):
    """A code block between its fences, which are there to be read, and nothing else that would be copied with it."""

    begins, ends, mark, info = True, True, "", ""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        block = cls((token.info or "").partition(" ")[0] or "text", CODE_THEME)
        block.mark, block.info = token.markup, token.info.strip()
        block.begins, block.ends = token.meta.get("begins", True), token.meta.get("ends", True)
        return block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.mark and self.begins:
            yield Text(self.mark + self.info, "dim")
        code = str(self.text).rstrip("\n")
        if code:
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")
        if self.mark and self.ends:
            yield Text(self.mark, "dim")


class _Answer(Markdown):
    """Markdown of tokens that are parsed already; line ends within a paragraph are kept."""

    elements = Markdown.elements | {"heading_open": _Heading, "fence": _Code, "code_block": _Code}

    def __init__(self) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)

    def of(self, tokens: list[Token]) -> _Answer:
        """It, now of these tokens."""
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
                elif child.type == "image":  # rich would show it before its paragraph
                    child.type, child.tag, child.children = "text", "", None
                    child.content = f"{child.content} ({child.attrs.get('src', '')})"
        self.parsed = tokens
        return self
