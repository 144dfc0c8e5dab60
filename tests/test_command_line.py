"""What all commands have in common: environment variables for options, completion by the shell, the version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner

from llama_sidecar.scripts.__main__ import cli

COMMAND = [sys.executable, "-m", "llama_sidecar.scripts"]
NAMES = cli.list_commands(click.Context(cli))


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def options(of: click.Command) -> Iterator[click.Option]:
    for param in of.params:
        if isinstance(param, click.Option) and not param.is_eager:
            yield param


def values(name: str, *arguments: str) -> dict[str, object]:
    """What a command would be called with."""
    return dict(command(name).make_context(name, list(arguments)).params)


def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_two_variables_of_its_own(name: str) -> None:
    names = [variable for option in options(command(name)) for variable in option.envvar or []]
    assert len(names) == len(set(names)) == 2 * len(list(options(command(name))))
    assert all(variable.startswith("LLAMA_SIDECAR_") for variable in names)
    assert "LLAMA_SIDECAR_CACHE" not in names  # the cache folder's


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_read_from_its_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options(command(name)):
        for variable in option.envvar or []:
            with monkeypatch.context() as patch:
                patch.setenv(variable, "1")
                _, source = option.consume_value(click.Context(command(name)), {})
                assert source is ParameterSource.ENVIRONMENT, variable


def test_the_command_line_counts_most_then_the_variable_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ("run", "x.gguf", "-p", "a")
    monkeypatch.setenv("LLAMA_SIDECAR_THREADS", "3")
    monkeypatch.setenv("LLAMA_SIDECAR_NO_SPEC", "1")
    monkeypatch.setenv("LLAMA_SIDECAR_NGRAM", "0")
    monkeypatch.setenv("LLAMA_SIDECAR_STOP", "END STOP")
    found = values(*run)
    assert (found["threads"], found["no_spec"], found["ngram"]) == (3, True, False)
    assert found["stop"] == ("END", "STOP")
    monkeypatch.setenv("LLAMA_SIDECAR_RUN_THREADS", "2")
    assert values(*run)["threads"] == 2 and values("chat", "x.gguf")["threads"] == 3
    assert values(*run, "-t", "1", "--ngram", "--stop", "x")["threads"] == 1
    assert values(*run, "--ngram")["ngram"] is True


def test_a_bad_value_says_which_variable_it_comes_from() -> None:
    run = ("run", "x.gguf", "-p", "a")
    result = call(*run, LLAMA_SIDECAR_THREADS="many")
    assert result.returncode == 2
    assert result.stderr.endswith(
        "note: the value comes from the environment variable LLAMA_SIDECAR_THREADS\n"
    )
    assert "LLAMA_SIDECAR" not in call(*run, "--threads", "many").stderr
    assert "LLAMA_SIDECAR" not in call(*run, "-t", "many", LLAMA_SIDECAR_RUN_THREADS="2").stderr


def test_the_help_says_so() -> None:
    assert "LLAMA_SIDECAR_THREADS" in CliRunner().invoke(cli, ["--help"]).output
    assert "LLAMA_SIDECAR_SPLIT_OUT" in CliRunner().invoke(cli, ["split", "--help"]).output


def test_the_list_of_commands_is_what_their_own_helps_say() -> None:
    listed = CliRunner().invoke(cli, ["--help"], terminal_width=400, max_content_width=400).output
    for name in NAMES:
        assert f"{name} {command(name).get_short_help_str(300)}" in " ".join(listed.split())


def complete(words: str, number: int) -> list[str]:
    """What bash is told, by a process that then says which modules it has imported."""
    code = "import sys; sys.argv=['llama-sidecar']; from llama_sidecar.scripts.__main__ import main\n"
    code += "try: main()\nfinally: import json; print(json.dumps(list(sys.modules)), file=sys.stderr)"
    variables = {"_LLAMA_SIDECAR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables, timeout=60
    )
    modules = set(json.loads(result.stderr))
    assert "llama_cpp" not in modules
    if number == 1:
        assert not modules & {"numpy", "rich", "llama_sidecar.runtime", "llama_sidecar.converter"}
    return result.stdout.splitlines()


def test_a_shell_completes_commands_options_words_and_files() -> None:
    assert complete("llama-sidecar c", 1) == [f"plain,{name}" for name in NAMES if name.startswith("c")]
    assert complete("llama-sidecar chat --thr", 2) == ["plain,--threads"]
    assert complete("llama-sidecar chat --depth a", 3) == ["plain,auto"]
    assert complete("llama-sidecar run mod", 2) == ["file,mod"]


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_what_completion_prints_is_a_script_of_the_shell(shell: str) -> None:
    result = call("completion", shell)
    assert result.returncode == 0 and "_LLAMA_SIDECAR_COMPLETE" in result.stdout
    if shutil.which(shell):
        subprocess.run(
            [shell, "-n"], input=result.stdout, text=True, check=True, timeout=60
        )  # reads, runs nothing


def test_completion_takes_the_user_s_shell_or_asks() -> None:
    assert call("completion", SHELL="/usr/bin/zsh").stdout.startswith("#compdef llama-sidecar")
    result = call("completion", SHELL="/bin/tcsh")
    assert result.returncode == 2 and "tcsh: say which shell is meant, bash or fish or zsh" in result.stderr


def test_the_version_is_that_of_all_that_computes() -> None:
    import llama_cpp

    result = call("--version")
    ours, library, backends, _ = result.stdout.splitlines()
    assert (
        ours.startswith("llama-sidecar 0.")
        and f"llama-cpp-python {llama_cpp.__version__} (llama.cpp " in library
    )
    assert backends.startswith("backends: ") and "CPU" in backends


def test_the_version_without_the_library_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    result = call("--version", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1 and result.stdout.startswith("llama-sidecar 0.")
    assert result.stderr.startswith("error: llama-cpp-python is not installed")
