"""Entry point of `llama-sidecar`: finds the commands by scanning this folder, and turns our errors into one line."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from io import TextIOWrapper
from pathlib import Path

import click

from llama_sidecar.sidecars.errors import LlamaSidecarError

from . import __version__


class Commands(click.Group):
    """The commands, imported only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        folder = str(Path(__file__).parent)
        return sorted(
            m.name for m in pkgutil.iter_modules([folder]) if not m.ispkg and not m.name.startswith("_")
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__package__}.{cmd_name}").command
        return command


@click.group("llama-sidecar", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llama-sidecar")
def cli() -> None:
    """Convert models with a draft head, run them losslessly and faster, and measure what it gains."""


def bound_spinning() -> None:
    """Lets OpenMP threads spin for a short while only, unless the user has chosen otherwise.

    libgomp's threads spin at every barrier; with another job on the cores that costs most of the speed. It reads this
    when it is loaded, so it must be set before a command imports llama_cpp.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(command: click.Command = cli) -> None:
    """Runs the command line (or one command); our own errors and Ctrl-C end it with one line and an exit code that is not 0."""
    bound_spinning()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks is no reason to stop
    try:
        command.main(prog_name=command.name, standalone_mode=False)
    except click.exceptions.Abort:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LlamaSidecarError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
