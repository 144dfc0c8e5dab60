"""What the installed distribution promises: its contents, its public names, and what importing it does not do."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import click
import models
import pytest
from click.testing import CliRunner

from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import LlamaSidecarError

PACKAGES = ("converter", "runtime", "scripts", "sidecars")
DISTRIBUTION = importlib.metadata.distribution("llama-sidecar")
EDITABLE = (
    json.loads(DISTRIBUTION.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)
)
from_wheel = pytest.mark.skipif(
    EDITABLE, reason="an editable install has the source tree's files; `make test` has a wheel"
)
MAX_WHEEL_BYTES = 3_000_000


def python(code: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Runs code in a Python of its own, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What is in it


@from_wheel
def test_wheel_has_no_sources_demo_or_development_scripts() -> None:
    files = [str(file) for file in DISTRIBUTION.files or [] if "__pycache__" not in str(file)]
    assert "llama_sidecar/runtime/llm.py" in files
    assert any(file.startswith("llama_sidecar/runtime/_native.") for file in files)
    unwanted = ("/native/", "/demo/", "/dev/", ".cpp", "CMakeLists", "tests/", ".safetensors")
    assert [f for f in files if f.endswith(".h") or any(part in f for part in unwanted)] == []
    outside = [
        file for file in files if not file.startswith(("llama_sidecar/", "llama_sidecar-", "../../../bin/"))
    ]
    assert outside == [], "the bare folder names must not be importable"


@from_wheel
def test_wheel_is_small() -> None:
    files = [file for file in DISTRIBUTION.files or [] if "__pycache__" not in str(file)]
    unpacked = sum(Path(str(file.locate())).stat().st_size for file in files)
    assert unpacked < MAX_WHEEL_BYTES  # and the packed wheel is smaller still


@from_wheel
def test_licences_are_in_it() -> None:
    names = {Path(str(file)).name for file in DISTRIBUTION.files or []}
    assert {"LICENSE", "NOTICE"} <= names


def test_torch_is_an_extra() -> None:
    requirements = DISTRIBUTION.requires or []
    assert [r for r in requirements if r.startswith("torch") and "extra ==" not in r] == []
    assert any(r.startswith("torch") for r in requirements)


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_typed_and_has_a_version(name: str) -> None:
    package = importlib.import_module(f"llama_sidecar.{name}")
    assert Path(str(package.__file__)).with_name("py.typed").is_file()
    assert package.__version__ == DISTRIBUTION.version


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_there_and_explained(name: str) -> None:
    package = importlib.import_module(f"llama_sidecar.{name}")
    assert package.__doc__
    public = getattr(package, "__all__", [])
    assert public or name == "scripts"
    assert len(public) == len(set(public))
    for item in public:
        value = getattr(package, item)
        assert not (inspect.isclass(value) or inspect.isfunction(value)) or inspect.getdoc(value), (
            f"{item} has no docstring"
        )


def test_every_error_has_one_base() -> None:
    strays = []
    for name in PACKAGES:
        package = importlib.import_module(f"llama_sidecar.{name}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name.startswith("llama_sidecar.scripts") or ".demo" in info.name:
                continue
            module = importlib.import_module(info.name)
            for _, value in inspect.getmembers(module, inspect.isclass):
                if (
                    value.__module__ == info.name
                    and issubclass(value, BaseException)
                    and not issubclass(value, LlamaSidecarError)
                ):
                    strays.append(f"{info.name}.{value.__name__}")
    assert strays == []


def test_an_error_is_one_line_whatever_is_in_it() -> None:
    assert str(LlamaSidecarError("a\nb\x1b[31m")) == r"a\nb\x1b[31m"


# What importing it does not do

IMPORTED = """
import sys
import llama_sidecar.{name}
print(*sorted({{module.partition(".")[0] for module in sys.modules}}))
print(*sorted(module for module in sys.modules if module.startswith("llama_sidecar.")))
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_importing_imports_no_torch_and_no_llama_cpp(name: str) -> None:
    top = python(IMPORTED.format(name=name)).splitlines()[0].split()
    assert {"torch", "transformers", "llama_cpp"} & set(top) == set()


def test_converter_and_runtime_do_not_know_each_other() -> None:
    assert "llama_sidecar.runtime" not in python(IMPORTED.format(name="converter"))
    assert "llama_sidecar.converter" not in python(IMPORTED.format(name="runtime"))


def test_sidecars_needs_little() -> None:
    top, ours = (set(line.split()) for line in python(IMPORTED.format(name="sidecars")).splitlines())
    assert {"tokenizers", "safetensors", "ml_dtypes", "jinja2", "click", "rich"} & top == set()
    assert all(module.startswith("llama_sidecar.sidecars") for module in ours)


def test_importing_changes_nothing_of_the_process() -> None:
    code = """
import logging, os, signal, sys
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return dict(os.environ), handlers, list(logging.root.handlers), logging.root.level, sys.excepthook, os.getcwd()
before = state()
import llama_sidecar.converter, llama_sidecar.runtime, llama_sidecar.sidecars
print(state() == before)
"""
    assert python(code) == "True\n"


WITHOUT_LLAMA_CPP = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llama_cpp":
            raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
sys.meta_path.insert(0, Blocker())
"""


def test_without_llama_cpp_loading_is_one_clear_error(tmp_path: Path) -> None:
    pair = models.write_pair(tmp_path)
    code = """
from llama_sidecar.runtime import LibraryError, load
try:
    load(sys.argv[1])
except LibraryError as error:
    print(error)
"""
    lines = python(WITHOUT_LLAMA_CPP + code, str(pair.main)).splitlines()
    assert len(lines) == 1
    assert "llama-cpp-python is not installed" in lines[0] and "pip install llama-cpp-python" in lines[0]


def test_without_llama_cpp_a_file_can_be_inspected(tmp_path: Path) -> None:
    pair = models.write_pair(tmp_path)
    code = """
sys.argv = ["llama-sidecar", "inspect", sys.argv[1], "--json"]
from llama_sidecar.scripts.__main__ import main
main()
"""
    assert json.loads(python(WITHOUT_LLAMA_CPP + code, str(pair.sidecar)))["schema"] == 1


# The command


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "llama_sidecar.scripts", *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run(run, cwd=cwd, env=environment, capture_output=True, text=True)


def test_command_says_its_version(tmp_path: Path) -> None:
    ours, library, *backends = command("--version", cwd=tmp_path).stdout.splitlines()
    assert ours == f"llama-sidecar {DISTRIBUTION.version}"
    assert library.startswith(
        f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')} (llama.cpp "
    )
    assert backends[0].startswith("backends: ")


def test_every_command_has_help() -> None:
    runner = CliRunner()
    listed = runner.invoke(cli, ["--help"]).output
    for name in cli.list_commands(click.Context(cli)):
        assert f"  {name} " in listed
        done = runner.invoke(cli, [name, "--help"])
        assert done.exit_code == 0 and len(done.output.splitlines()) > 5, name


@from_wheel
def test_demo_from_a_wheel_says_where_the_checkpoint_is(tmp_path: Path) -> None:
    done = command("demo", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ")
        and "make demo" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    assert list(tmp_path.iterdir()) == []
