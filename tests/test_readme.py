"""The README says what is true: its tables are the scans', its commands parse, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from pathlib import Path

import click
import pytest

from llama_sidecar.runtime._native import drafter_kinds
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import KINDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def family_rows() -> list[str]:
    """As the script that maintainers make the table with prints them."""
    rows: list[str] = runpy.run_path(str(ROOT / "scripts" / "dev" / "family_table.py"))["rows"]()
    return rows


def kind_rows() -> list[str]:
    drafting = set(drafter_kinds())
    return [
        f"| {kind.title} | `{kind.prefix}NAME-TYPE.gguf` | `{kind.llama_name}` | yes | {'yes' if kind.name in drafting else 'not yet'} |"
        for kind in sorted(KINDS.values(), key=lambda kind: kind.rank)
    ]


def command_rows() -> list[str]:
    context = click.Context(cli)
    commands = [(name, cli.get_command(context, name)) for name in cli.list_commands(context)]
    return [
        f"| `{name}` | {command.get_short_help_str(limit=300)} |" for name, command in commands if command
    ]


@pytest.mark.parametrize("rows", [command_rows, family_rows, kind_rows])
def test_tables_are_what_the_scans_find(rows: object) -> None:
    assert callable(rows)
    assert "\n".join(rows()) in README, "put these rows into the README:\n" + "\n".join(rows())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def commands() -> list[str]:
    """Every `llama-sidecar ...` line of a code block, without prompt and comment."""
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", README, re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [
        line.removeprefix(".venv/bin/") for line in lines if re.match(r"(\.venv/bin/)?llama-sidecar ", line)
    ]


def test_commands_parse() -> None:
    assert commands()
    for line in commands():
        _, name, *arguments = shlex.split(line, comments=True)
        command: click.Command = importlib.import_module(f"llama_sidecar.scripts.{name}").command
        context = click.Context(command)
        command.make_parser(context).parse_args(arguments)  # raises at an option that is not there


def test_make_targets_exist() -> None:
    targets = set(
        re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= targets
