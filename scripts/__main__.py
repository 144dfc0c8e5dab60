"""Entry point of `llama-sidecar`: finds the commands by scanning this folder, and turns our errors into one line."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import signal
import sys
from io import TextIOWrapper
from pathlib import Path

import click

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


def fill_closed_streams() -> None:
    """Gives the null device to standard streams that the caller has closed, else a file of ours would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def end_in_order() -> None:
    """Makes SIGTERM and a closed terminal end a command as Ctrl-C does, so that nothing half-written stays."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def notes(error: BaseException | None) -> list[str]:
    """What was added to an exception on its way."""
    from llama_sidecar.sidecars.errors import printable

    return [f"note: {printable(note)}" for note in getattr(error, "__notes__", [])]


def main(command: click.Command = cli) -> None:
    """Runs the command line (or one command); our own errors and Ctrl-C end it with one line and an exit code that is not 0."""
    fill_closed_streams()
    end_in_order()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks is no reason to stop
    try:
        _run(command)
    except KeyboardInterrupt:  # before click, which has its own word for it, or after
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def _run(command: click.Command) -> None:
    from llama_sidecar.sidecars.errors import (
        LlamaSidecarError,
    )  # takes long enough for Ctrl-C: main looks after it

    try:
        command.main(prog_name=command.name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort as abort:
        print("\ninterrupted", *notes(abort.__context__), sep="\n", file=sys.stderr)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LlamaSidecarError as error:
        print(f"error: {error}", *notes(error), sep="\n", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # our files have errors of their own: this is mostly the output's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it goes nowhere
        if error.errno != errno.EPIPE:
            where = error.filename or "the output cannot be written"
            print(f"error: {where}: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
