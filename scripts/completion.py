"""`llama-sidecar completion`: what a shell needs to complete commands and options. click writes it and answers the shell's questions."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "fish", "zsh")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def command(shell: str | None) -> None:
    """Print what makes a SHELL complete the commands, options and files of llama-sidecar.

    Without SHELL it is that of $SHELL. The lines go into the file that the shell reads when it starts:

    \b
    echo 'eval "$(llama-sidecar completion bash)"' >> ~/.bashrc
    echo 'eval "$(llama-sidecar completion zsh)"' >> ~/.zshrc        # behind compinit
    llama-sidecar completion fish > ~/.config/fish/completions/llama-sidecar.fish
    """
    from .__main__ import PROGRAM, cli

    name = shell or Path(os.environ.get("SHELL", "")).name
    found = get_completion_class(name) if name in SHELLS else None
    if found is None:
        raise click.UsageError(
            f"$SHELL is {name or 'not set'}: say which shell is meant, {' or '.join(SHELLS)}"
        )
    variable = f"_{PROGRAM}_COMPLETE".replace("-", "_").upper()
    click.echo(found(cli, {}, PROGRAM, variable).source())
