"""The guides say what is true: their commands and code are run, on the demo model, and the API reference is the docstrings'."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from llama_sidecar.scripts.__main__ import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHORT = {"bench": ["--budget", "3"]}  # so that a test takes no longer than it must


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the guides are read in: a clone, in which the demo model has been converted."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "sidecars").mkdir()
    (folder / "sidecars" / "demo").symlink_to(ROOT / "sidecars" / "demo", target_is_directory=True)
    return folder


def fits(found: str, expected: str) -> bool:
    """Whether an output is the one in the guide, whose `...` stands for anything; blanks at the ends of lines are nothing."""
    found, expected = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (found, expected))
    pattern = ".*".join(map(re.escape, expected.split("...")))
    return re.fullmatch(pattern, found, re.DOTALL) is not None


def run(line: str) -> str:
    """The output of a command that must succeed."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "llama-sidecar"
    result = CliRunner().invoke(cli, [name, *arguments, *SHORT.get(name, [])])
    assert result.exit_code == 0, f"{line}\n{result.output}{result.exception!r}"
    return result.stdout


def sessions(page: str) -> Iterator[tuple[str, str]]:
    """Every command of the console blocks, with the output that the guide shows."""
    for language, block in BLOCK.findall(text(page)):
        if language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                yield line, output


@pytest.mark.parametrize("page", ["CONVERT.md"])
def test_console_blocks_are_run_and_print_what_they_show(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert list(sessions(page))
    for line, expected in sessions(page):
        found = run(line)
        assert fits(found, expected), f"$ {line}\n{found}"


def test_code_is_run_and_prints_what_it_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run("llama-sidecar convert sidecars/demo --out models --force")
    names: dict[str, Any] = {"__name__": "guide"}
    found, is_run = "", True
    for language, block in BLOCK.findall(text("PYTHON.md")):
        if language == "python":
            is_run = "langchain" not in block or importlib.util.find_spec("langchain_community") is not None
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                if is_run:
                    exec(compile(block, "PYTHON.md", "exec"), names)
            found = output.getvalue()
        elif language == "text" and is_run:
            assert fits(found, block), f"{found!r}\ninstead of\n{block}"


def test_commands_of_troubleshooting_are_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run("llama-sidecar convert sidecars/demo --out models --force")
    lines = [
        line
        for language, block in BLOCK.findall(text("TROUBLESHOOTING.md"))
        if language == "sh"
        for line in block.splitlines()
    ]
    assert len(lines) > 3
    for line in dict.fromkeys(lines):
        run(line.replace("models-of-yours", "sidecars/demo"))


def mentioned(page: str) -> Iterator[list[str]]:
    """The arguments of every llama-sidecar command of a page, in blocks and in lines of text."""
    content = text(page)
    lines = [
        line.strip().removeprefix("$ ") for _, block in BLOCK.findall(content) for line in block.splitlines()
    ]
    lines += re.findall(r"`(llama-sidecar [^`]+)`", content)
    for line in lines:
        if line.startswith("llama-sidecar "):
            yield shlex.split(line.partition(" | ")[0].partition(" > ")[0], comments=True)[1:]


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_commands_in_guides_have_the_options_there_are(page: str) -> None:
    for name, *arguments in mentioned(page):
        if name.startswith("-"):
            continue
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, f"{page}: there is no command {name}"
        command.make_parser(click.Context(command)).parse_args(
            arguments
        )  # raises at an option that is not there


def test_every_guide_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in DOCS.glob("*.md") if f"docs/{path.name}" not in readme] == []


def test_the_api_reference_is_that_of_the_docstrings() -> None:
    pytest.importorskip("griffe", reason="griffe is in the dev extra")
    script = runpy.run_path(str(ROOT / "scripts" / "dev" / "api_reference.py"))
    assert text("API.md") == script["page"](), "run scripts/dev/api_reference.py"


def test_links_inside_guides_lead_to_headings() -> None:
    headings = {
        path.name: {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        }
        for path in DOCS.glob("*.md")
    }
    for page in headings:
        for target, anchor in re.findall(r"\]\(([\w./]*)#([\w.-]+)\)", text(page)):
            name = Path(target or page).name
            if name in headings:
                assert anchor in headings[name], f"{page}: {target}#{anchor}"
