"""What a chat paints: finished parts once, unfinished ones in place; and what a pipe gets."""

from __future__ import annotations

import io
import os
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from terminal import Terminal

from llama_sidecar.scripts._chat import flows
from llama_sidecar.scripts._chat.flows import Flow, MarkdownFlow, Painter, TextFlow, safe
from llama_sidecar.scripts._chat.output import PlainOutput, TerminalOutput
from llama_sidecar.scripts._chat.region import Region

BLOCKS = [
    "# A title",
    "Some *text* with **bold words** and `code`,\nin two lines, and <vector> which is no HTML.",
    "A paragraph that is longer than the screen is wide and therefore has to be wrapped somewhere.",
    "* one\n* two, which is a longer item than fits into one line of the screen\n  - nested\n* three",
    "1. first\n1. second\n\n   with a paragraph\n\n1. third",
    "3. three\n4. four",
    "> quoted\n> twice",
    '```python\ndef f(x):\n    """Doc.\n\nflush left"""\n    return x\n\nclass A:\n    pass\n```',
    "~~~\ntilde\n~~~",
    "    indented code",
    "| a | b |\n|---|--:|\n| 1 | 2 |",
    "---",
    "A [link](http://example.org) and an ![image](a.png).",
    "Text\n---",
    "42",
    "Grüße 日本語 😀",
    "\\(a_1 * b_2\\) and 2 ** 3 ** 4",
]


@pytest.fixture
def painter() -> Painter:
    return Painter(Console(width=40, color_system=None))


def whole(text: str, flow: Flow, painter: Painter) -> list[str]:
    flow.add(text)
    return flow.end(painter)


def in_pieces(text: str, flow: Flow, painter: Painter, rng: random.Random) -> list[str]:
    lines: list[str] = []
    while text:
        n = rng.randint(1, 6)
        flow.add(text[:n])
        text = text[n:]
        lines += flow.final(painter)
        flow.open(painter)
    return lines + flow.end(painter)


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


@pytest.mark.parametrize("seed", range(8))
def test_markdown_in_pieces_is_what_it_is_as_a_whole(painter: Painter, seed: int) -> None:
    rng = random.Random(seed)
    text = "\n\n".join(rng.choices(BLOCKS, k=6)) + rng.choice(["", "\n", "\n\n```c\nint unfinished"])
    flow = MarkdownFlow()
    assert plain(in_pieces(text, flow, painter, rng)) == plain(whole(text, MarkdownFlow(), painter)), text


@pytest.mark.parametrize("block", BLOCKS)
def test_no_word_is_lost(painter: Painter, block: str) -> None:
    shown = " ".join(plain(whole(block, MarkdownFlow(), painter)))
    for word in re.findall(r"[^\W_]+", block):
        assert word in shown or word == "1", (word, shown)  # "1. 1. 1." counts on


def test_what_is_final_is_not_rendered_again(painter: Painter) -> None:
    flow = MarkdownFlow()
    flow.add("# One\n\n* two\n* three\n* fo")
    assert plain(flow.final(painter)) == ["One", "", " • two"]
    assert plain(flow.open(painter)) == [" • three", " • fo"]
    flow.add("ur\n\nFive")
    assert plain(flow.final(painter)) == [
        " • three"
    ]  # "Five" may yet become something else: its line is not whole
    flow.add("\n")
    assert plain(flow.final(painter)) == [" • four"]
    assert plain(flow.end(painter)) == ["", "Five"]


@pytest.mark.parametrize("begun", ["#", "-", "**", "```", "1", "2.", "> ", "|"])
def test_a_line_that_may_become_anything_is_not_shown_yet(painter: Painter, begun: str) -> None:
    flow = MarkdownFlow()
    flow.add(f"Text\n\n{begun}")
    shown = plain(flow.final(painter)) + plain(flow.open(painter))
    assert shown == ["Text"]


def test_bold_is_bold_before_it_is_closed(painter: Painter) -> None:
    colours = Painter(Console(width=40, force_terminal=True, color_system="standard"))
    flow = MarkdownFlow()
    flow.add("so **very bo")
    assert plain(flow.open(painter)) == ["so very bo"]
    assert "\x1b[1mvery bo" in "".join(flow.open(colours))


def test_a_long_code_block_is_final_in_stretches_and_the_same(painter: Painter) -> None:
    code = "".join(f"def f_{i}():\n    return {i}\n\n\n" for i in range(100))
    text = f"Code:\n\n```python\n{code.rstrip()}\n```\n\nDone."
    flow, lines, longest = MarkdownFlow(), list[str](), 0
    for line in text.splitlines(keepends=True):
        flow.add(line)
        lines += flow.final(painter)
        longest = max(longest, len(flow.open(painter)))
    lines += flow.end(painter)
    assert plain(lines) == plain(text.splitlines())
    assert longest < 2 * flows.N_CODE_LINES


def test_code_without_a_place_to_cut_is_cut_all_the_same(painter: Painter) -> None:
    text = "```\n" + "".join(f" {i}\n" for i in range(500)) + "```\n"
    flow, lines = MarkdownFlow(), list[str]()
    for line in text.splitlines(keepends=True):
        flow.add(line)
        lines += flow.final(painter)
        assert len(lines) or len(flow.open(painter)) < 5 * flows.N_CODE_LINES
    assert plain(lines + flow.end(painter)) == text.splitlines()


def test_text_is_shown_as_it_is_behind_its_bar(painter: Painter) -> None:
    text = "**Hm**\n\nso much text that it does not fit into one line of the screen"
    lines = in_pieces(text, TextFlow("dim", "┊ "), painter, random.Random(0))
    assert plain(lines) == [
        "┊ **Hm**",
        "┊",
        "┊ so much text that it does not fit",
        "┊ into one line of the screen",
    ]


def test_control_characters_of_a_model_are_no_escape_codes() -> None:
    assert (
        safe("\x1b]0;title\x07 \x9b2J\x00\r ok\n\té") == "\ufffd]0;title\ufffd \ufffd2J\ufffd\ufffd ok\n\té"
    )


# The region


def region_of(terminal: Terminal) -> Region:
    return Region(terminal, lambda: os.terminal_size((terminal.columns, terminal.n_rows)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_a_region_shows_what_it_was_told_and_scrolls_nothing_twice(seed: int) -> None:
    rng = random.Random(seed)
    terminal = Terminal(20, rng.randint(3, 8))
    region = region_of(terminal)
    kept: list[str] = []
    open_: list[str] = []
    n = 0
    for _ in range(40):
        more = [f"line {n + i}" for i in range(rng.randint(0, 3))]
        n += len(more)
        open_ = [*open_, *more]
        n_kept = rng.randint(0, len(open_))
        now, open_ = open_[:n_kept], open_[n_kept:]
        kept += now
        status = [f"status {rng.random():.3f}"] if open_ or rng.random() < 0.5 else []
        region.update(now, [*open_, *status])
        assert terminal.lines() == [*kept, *open_, *status]
    region.update(open_, [])
    assert terminal.lines() == [*kept, *open_]


def test_a_line_that_changes_is_changed_in_place() -> None:
    terminal = Terminal(20, 5)
    region = region_of(terminal)
    region.update([], ["a", "b", "c"])
    region.update([], ["a", "B"])
    assert terminal.lines() == ["a", "B"]
    region.update([], ["a", "B"])
    region.update(["A"], [])
    assert terminal.lines() == ["A"]
    region.update([], ["next"])
    assert terminal.lines() == ["A", "next"]


def test_lines_that_are_equal_are_not_written_again() -> None:
    file = io.StringIO()
    region = Region(file, lambda: os.terminal_size((80, 24)))
    region.update([], ["same", "status 1"])
    n = len(file.getvalue())
    region.update([], ["same", "status 2"])
    assert "same" not in file.getvalue()[n:]
    n = len(file.getvalue())
    region.update([], ["same", "status 2"])
    assert file.getvalue()[n:] == ""


# Whole answers


class Answer:
    """Stands in for a generation."""

    def __init__(self, text: str = "") -> None:
        self.text = text


class Talk:
    """Stands in for a conversation."""

    def __init__(self, *parts: tuple[str, ...]) -> None:
        self._parts = parts

    def parts(self) -> Iterator[tuple[str, ...]]:
        return iter(self._parts)

    pieces = parts


def show(talk: Any, lens: bool = False, **options: Any) -> tuple[str, list[str]]:
    """What a terminal is sent, and what it then shows."""
    terminal, file = Terminal(60, 50), io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, highlight=False, **options)
    TerminalOutput(console, lens=lens).show(talk, Answer(), lambda columns: "status"[:columns])
    terminal.write(file.getvalue())
    return file.getvalue(), terminal.lines()


def test_reasoning_is_shown_apart() -> None:
    talk = Talk(("reasoning", "Hm,"), ("reasoning", " so."), ("content", "**Yes**"), ("content", "."))
    sent, lines = show(talk, color_system="standard")
    assert lines == ["┊ Hm, so.", "", "Yes."]
    assert "\x1b[2m" in sent and "\x1b[1mYes" in sent


def test_the_lens_colours_tokens_by_their_origin() -> None:
    said = [("content", "a", "plain"), ("content", "b", "drafted"), ("content", "*c*", "corrected")]
    sent, lines = show(Talk(("reasoning", "Hm", "ngram"), *said), lens=True, color_system="standard")
    assert lines == ["┊ Hm", "", "ab*c*"] and "\x1b[2;36mHm" in sent
    assert "a\x1b[32mb\x1b[0m\x1b[1;35m*c*" in sent


def test_without_colours_the_lens_underlines() -> None:
    talk = Talk(("content", "a", "plain"), ("content", "b", "drafted"))
    sent, _ = show(talk, lens=True, color_system="standard", no_color=True)
    assert "a\x1b[4mb" in sent and "\x1b[32m" not in sent


def test_an_answer_that_breaks_leaves_the_screen_in_order() -> None:
    class Broken(Talk):
        def parts(self) -> Iterator[tuple[str, str]]:
            yield "content", "begun"
            raise RuntimeError

    terminal, file = Terminal(60, 10), io.StringIO()
    output = TerminalOutput(Console(file=file, force_terminal=True, width=60))
    with pytest.raises(RuntimeError):
        output.show(Broken(), Answer(), lambda columns: "status")  # type: ignore[arg-type]
    terminal.write(file.getvalue() + "> next")
    assert terminal.lines() == ["begun", "", "> next"]


def test_line_ends_that_markdown_does_not_know_lose_nothing(painter: Painter) -> None:
    text = "one\u2028two\n\nthree\u2029four\n\n```c\nint\u2028a;\n```\n\nlast"
    for seed in range(4):
        shown = " ".join(plain(in_pieces(text, MarkdownFlow(), painter, random.Random(seed))))
        for word in re.findall(r"\w+", text):
            assert shown.count(word) == text.count(word), (word, shown)


def test_escape_codes_of_a_model_reach_no_terminal_beside_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    talk: Any = Talk(("reasoning", "\aHm"), ("content", "\aYes"))
    PlainOutput().show(talk, Answer("Yes"), lambda columns: "")  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert shown.err == "\ufffdHm\n" and shown.out == "\aYes\n"


@pytest.mark.parametrize("text", ["Yes", "Yes\n", ""])
def test_a_pipe_gets_the_answer_and_its_line_end_and_nothing_else(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    talk: Any = Talk(("reasoning", "Hm"), *([("content", text)] if text else []))
    PlainOutput().show(talk, Answer(text), lambda columns: "")  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert shown.out == (text or "\n").rstrip("\n") + "\n" and shown.err == "Hm\n"
