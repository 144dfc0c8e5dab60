"""Entry point of `llama-sidecar`: finds the commands by scanning this folder, and turns our errors into one line.

Gives every option its environment variables, and answers shells that complete a command's name without importing any.
"""

from __future__ import annotations

import ast
import errno
import importlib
import os
import pkgutil
import signal
import sys
from io import TextIOWrapper
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from . import __version__

PROGRAM = "llama-sidecar"
VARIABLES = "LLAMA_SIDECAR"  # what the names of all environment variables begin with


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
        read_environment(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        width = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            helps = [click.Command(name, help=_summary(name)) for name in names]
            formatter.write_dl([(str(help.name), help.get_short_help_str(width)) for help in helps])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=_summary(name)) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


def read_environment(command: click.Command, *path: str) -> None:
    """Lets variables stand for the options of a command: LLAMA_SIDECAR_THREADS for --threads wherever there is one, and
    LLAMA_SIDECAR_CHAT_THREADS for chat's, which counts more. The command line counts most."""
    own = "_".join((VARIABLES, *path)).upper()
    for param in command.params:
        if isinstance(param, click.Option) and not param.is_eager:
            name = max(param.opts, key=len).lstrip("-").replace("-", "_").upper()
            param.envvar = [f"{own}_{name}", f"{VARIABLES}_{name}"]
            example = f"{VARIABLES}_{name} or, for this command alone, {own}_{name}"
            command.epilog = (
                command.epilog or f"Environment variables set options, too: {example}, and so on."
            )
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            read_environment(inner, *path, name)


def _summary(name: str) -> str:
    """The first paragraph of a command's help, read from its source: importing every command takes a second."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "command"]
    return " ".join((ast.get_docstring(functions[0]) or "").partition("\n\n")[0].split())


def show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Prints our version and that of the library that computes, or why there is none."""
    if not wanted or ctx.resilient_parsing:
        return
    click.echo(f"{PROGRAM} {__version__}")
    from llama_sidecar.runtime.placement import devices
    from llama_sidecar.runtime.provenance import library

    found = library()
    click.echo(f"llama-cpp-python {found['llama_cpp_python']} (llama.cpp {found['commit']})")
    click.echo(f"backends: {', '.join(devices())}\n{found['system_info'].rstrip('| ')}")
    ctx.exit()


@click.group(PROGRAM, cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_version,
    help="Show the version, that of llama.cpp and its backends, and exit.",
)
def cli() -> None:
    """Convert models with a draft head, run them losslessly and faster, and measure what it gains.

    Environment variables set options, too: LLAMA_SIDECAR_THREADS=4 stands for --threads 4 wherever there is one,
    LLAMA_SIDECAR_CHAT_THREADS=4 for chat alone. Values of an option that may be repeated are separated by blanks.
    """


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
    try:
        command.main(prog_name=command.name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort as abort:
        print("\ninterrupted", *notes(abort.__context__), sep="\n", file=sys.stderr)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        if variable := _variable_of(error):
            click.echo(f"note: the value comes from the environment variable {variable}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # our files have errors of their own: this is mostly the output's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it goes nowhere
        if error.errno != errno.EPIPE:
            where = error.filename or "the output cannot be written"
            print(f"error: {where}: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        from llama_sidecar.sidecars.errors import LlamaSidecarError  # not before: shells wait for completions

        if not isinstance(error, LlamaSidecarError):
            raise
        print(f"error: {error}", *notes(error), sep="\n", file=sys.stderr)
        sys.exit(1)


def _variable_of(error: click.ClickException) -> str | None:
    """The environment variable that a refused value comes from; None where it comes from elsewhere."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return None
    if error.ctx.get_parameter_source(str(error.param.name)) != click.core.ParameterSource.ENVIRONMENT:
        return None
    names = error.param.envvar or []
    return next((n for n in ([names] if isinstance(names, str) else names) if os.environ.get(n)), None)


if __name__ == "__main__":
    main()
