"""`llama-sidecar cache`: what runs have left in the user's cache folder, and removing it. Formats what runtime/cache_folder.py says."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from llama_sidecar.runtime.cache_folder import MAX_BYTES, CacheFolder, Entry
from llama_sidecar.sidecars.errors import printable

from ._console import tables

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for a program instead of tables.")


@click.group(invoke_without_command=True)
@JSON
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List or clear what runs have kept for the next one.

    There are compact heads, hashes of model files, what drafting costs here, which numbers of rows decode equally and models that
    predict was told to keep, which are made again when they are needed, and how often each model wrote each token (counts, never text). The folder is
    $LLAMA_SIDECAR_CACHE, or llama-sidecar in your cache folder.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command, as_json=as_json)
    elif as_json:
        raise click.UsageError(
            f"--json goes behind {ctx.invoked_subcommand}: cache {ctx.invoked_subcommand} --json"
        )


@command.command("list")
@JSON
def list_command(as_json: bool = False) -> None:
    """List the cached files, first those that go first when it is full."""
    folder = CacheFolder()
    entries = folder.entries()
    if as_json:
        facts = {
            "max_bytes": MAX_BYTES,
            "n_bytes": _n_bytes(entries),
            "entries": [_facts(e) for e in entries],
        }
        click.echo(json.dumps({"schema": 1, "folder": str(folder.root), **facts}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    for header in ("what", "size", "last used"):
        table.add_column(header, no_wrap=True)
    for entry in entries:
        used = datetime.fromtimestamp(entry.used_s).strftime("%Y-%m-%d %H:%M")
        table.add_row(escape(printable(entry.path.name)), entry.sort, _size(entry.n_bytes), used)
    console = tables()
    if entries:
        console.print(table)
    bound = f"beyond {_size(MAX_BYTES)} the least recently used go"
    summary = f"{len(entries)} files, {_size(_n_bytes(entries))}, in {folder.root}; {bound}"
    console.print(escape(printable(summary)), soft_wrap=True)


@command.command("clear")
@JSON
def clear_command(as_json: bool) -> None:
    """Remove all cached files. Programs that are using one are not disturbed."""
    folder = CacheFolder()
    removed = folder.clear()
    if as_json:
        facts = {"n_removed": len(removed), "n_bytes": _n_bytes(removed)}
        click.echo(json.dumps({"schema": 1, "folder": str(folder.root), **facts}, indent=2))
        return
    click.echo(printable(f"removed {len(removed)} files, {_size(_n_bytes(removed))}, from {folder.root}"))


def _facts(entry: Entry) -> dict[str, Any]:
    return {
        "sort": entry.sort,
        "name": entry.path.name,
        "bytes": entry.n_bytes,
        "used_s": round(entry.used_s, 3),
    }


def _n_bytes(entries: list[Entry]) -> int:
    return sum(entry.n_bytes for entry in entries)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"
