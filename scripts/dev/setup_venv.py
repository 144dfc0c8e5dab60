"""Makes `.venv` ready in a bare clone: build and test tools, llama-cpp-python, this project's own wheel.

    python3 scripts/dev/setup_venv.py [--tools-only] [--gpu cuda|vulkan|metal|cpu]

A step is skipped while what it depends on has not changed; `.venv/setup.json` remembers that. Needs only the standard
library, and parses under old Pythons so that it can say that they are too old. What is run in `.venv` afterwards is the
Makefile's matter.
"""

import argparse
import ast
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036 - said to those who run an older one
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"error: {sys.executable} is Python {version} and 3.10 or newer is needed; if there is a newer one, name it: "
        "make PYTHON=python3.12 ..."
    )

from build_progress import run_with_progress
from machine_check import Problem, check_compilers, check_gpu, check_headers, check_venv_module, dotted

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STATE = VENV / "setup.json"
BUILD = ROOT / ".build"
WHEELS = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
LOCK = (
    ROOT / "requirements" / "dev.lock"
)  # versions and hashes of all that is installed, from constraints.txt and pyproject.toml
PIP = [str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]

LIBRARY = "llama-cpp-python"
LIBRARY_CORE_MINUTES = 8  # compiling llama-cpp-python for the CPU, on one core
GPU_OPTIONS = {"cpu": "", "cuda": "-DGGML_CUDA", "vulkan": "-DGGML_VULKAN", "metal": "-DGGML_METAL"}
NO_AMX = "-U__AMX_INT8__"
PACKAGES = ("converter", "sidecars", "runtime", "scripts")
NOT_IN_WHEEL = (Path("sidecars/demo"), Path("scripts/dev"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Makes .venv ready: tools, llama-cpp-python, this project's wheel."
    )
    parser.add_argument("--tools-only", action="store_true", help="stop before anything is compiled")
    parser.add_argument("--gpu", default="", help="build llama-cpp-python for: " + ", ".join(GPU_OPTIONS))
    options = parser.parse_args(argv)
    try:
        set_up(options.gpu.lower(), options.tools_only)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def set_up(gpu: str, tools_only: bool) -> None:
    if gpu and gpu not in GPU_OPTIONS:
        raise Problem(f"GPU={gpu} is none of {', '.join(GPU_OPTIONS)}")
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second make waits for the first
        make_venv()
        install_tools()
        if not tools_only:
            install_library(gpu)
            install_project()


# The four steps


def make_venv() -> None:
    """Makes `.venv`, or finishes one whose making was interrupted. One that works is left alone, whoever made it."""
    if VENV.exists():
        theirs, ours = venv_version(), sys.version_info[:2]
        if theirs is None and (VENV / "bin").exists():
            raise Problem(
                ".venv does not work any more (its Python is gone); remove it with `make clean` and try again"
            )
        if theirs not in (None, ours):
            raise Problem(
                f".venv holds Python {dotted(theirs)} and {dotted(ours)} was asked for; "
                "remove it with `make clean` and try again"
            )
        if theirs and succeeds([*PIP, "--version"]):
            return
    check_venv_module()
    check_headers()
    check_compilers(dict(os.environ))
    say(f"making .venv with Python {platform.python_version()}")
    run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(VENV)], "making .venv")


def install_tools() -> None:
    """Installs the files that LOCK has hashes of, and no others; all but llama-cpp-python, which is compiled."""
    entries = locked(LOCK.read_text(encoding="utf-8"))
    check_lock(entries, pyproject())
    key = digest([LOCK.read_bytes()])
    state = read_state()
    if state.get("tools") == key:
        return
    say("installing build and test tools, and what is needed to run")
    install_locked([entry for name, entry in entries.items() if name != LIBRARY])
    write_state({**state, "tools": key})


def install_library(gpu: str) -> None:
    """Compiles and installs the llama-cpp-python that pyproject.toml pins, unless `.venv` has what is asked for."""
    requirement = pinned_library(pyproject())
    wishes = {name: os.environ.get(name, "") for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "CC", "CXX")}
    wishes["GPU"] = gpu
    state = read_state()
    built: dict[str, str] = state.get("library", {})
    if fulfils(built, wishes):  # what is not asked for stays as it is
        if built["requirement"] == requirement and installed("llama_cpp_python"):
            return
        wishes = {name: built.get(name, "") for name in wishes}
    gpu = wishes["GPU"]
    check_headers()
    compilers = check_compilers({**os.environ, **wishes}) | check_gpu(gpu)
    say(announcement(requirement, gpu, n_cores()))
    # No cache and no binary: pip would take a wheel that it built earlier with other CMAKE_ARGS, or one that somebody else
    # built for another machine. No isolation: what builds it are the pinned tools in `.venv`.
    entry = write_requirements([locked(LOCK.read_text(encoding="utf-8"))[LIBRARY]])
    exactly_this = [
        "--no-cache-dir",
        "--no-binary",
        LIBRARY,
        "--force-reinstall",
        "--no-deps",
        "--require-hashes",
    ]
    command = [*PIP, "install", "-v", "--no-build-isolation", *exactly_this, "-r", str(entry)]
    environment = library_environment({**os.environ, **wishes, **compilers}, platform.machine())
    log = BUILD / "llama-cpp-python.log"
    run_with_progress(command, clean_environment(environment), "compiling llama-cpp-python", log)
    check_library()
    write_state({**state, "library": {**wishes, "GPU": gpu or "cpu", "requirement": requirement}})


def install_project() -> None:
    """Builds this project's wheel into dist/ and installs it, unless the one in `.venv` has the same sources."""
    sources = wheel_sources(ROOT)
    key = digest(
        [part for path in sources for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]
    )
    state = read_state()
    if state.get("project") == [key, installed("llama_sidecar")] and any(WHEELS.glob("llama_sidecar-*.whl")):
        return
    check_headers()
    compilers = check_compilers(dict(os.environ))
    say("building and installing llama-sidecar")
    for old in WHEELS.glob("llama_sidecar-*.whl"):
        old.unlink()
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(WHEELS), str(ROOT), **compilers)
    wheel = str(next(WHEELS.glob("llama_sidecar-*.whl")))
    pip("install", "--force-reinstall", "--no-deps", wheel)  # another content may have the same version
    write_state({**state, "project": [key, installed("llama_sidecar")]})


# What the steps depend on


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def development_tools(text: str) -> list[str]:
    """The requirements of the extra `dev`. (Python 3.10 reads no TOML; the list stands on one line.)"""
    found = re.search(r"^dev = (\[.*\])$", text, re.MULTILINE)
    if not found:
        raise Problem("pyproject.toml has no line `dev = [...]` among its optional dependencies")
    return list(ast.literal_eval(found[1]))


def dependencies(text: str) -> list[str]:
    """The requirements of the project itself."""
    found = re.search(r"^dependencies = (\[.*?^\])$", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise Problem("pyproject.toml has no `dependencies = [...]`")
    return list(ast.literal_eval(found[1]))


def locked(text: str) -> dict[str, str]:
    """A lock's entries, by the names of packages; one that differs between systems or Pythons has several in its entry."""
    found: dict[str, str] = {}
    for entry in re.findall(r"^[\w.-]+==.*(?:\n[ \t].*)*", text, re.MULTILINE):
        name = package_name(entry)
        found[name] = f"{found[name]}\n{entry}" if name in found else entry
    return found


def check_lock(entries: dict[str, str], text: str) -> None:
    """Raises Problem where the lock does not have what pyproject.toml asks for."""
    asked = [*dependencies(text), *development_tools(text)]
    missing = sorted({package_name(requirement) for requirement in asked} - entries.keys())
    if missing:
        raise Problem(
            f"{LOCK.relative_to(ROOT)} lacks {', '.join(missing)}, which pyproject.toml asks for: run `make lock`"
        )
    requirement = pinned_library(text)
    if not re.match(re.escape(requirement) + r"(?![\w.])", entries[LIBRARY]):
        found = entries[LIBRARY].split()[0]
        raise Problem(f"{LOCK.relative_to(ROOT)} has {found}, pyproject.toml {requirement}: run `make lock`")


def package_name(requirement: str) -> str:
    """The name that a requirement begins with, spelled as a lock spells it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+?(?=[^\w.-]|$)", requirement)[0]).lower()  # type: ignore[index]


def pinned_library(text: str) -> str:
    """The requirement that pins the library, for example `llama-cpp-python==0.3.36`."""
    found = re.search(r'^\s*"(llama-cpp-python==[\w.]+)"', text, re.MULTILINE)
    if not found:
        raise Problem('pyproject.toml does not pin "llama-cpp-python==..." among its dependencies')
    return found[1]


def fulfils(built: dict[str, str], wishes: dict[str, str]) -> bool:
    """Was the library built as is asked for now? What is not asked for (an empty wish) may be as it is.

    So `make test` after `make demo GPU=cuda` keeps the CUDA build, and `GPU=cpu` asks for one without.
    """
    return bool(built) and all(not value or value == built.get(name) for name, value in wishes.items())


def wheel_sources(root: Path) -> list[Path]:
    """Every file that the wheel is made from, sorted."""
    files = [root / name for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE")]
    for path in (path for package in PACKAGES for path in (root / package).rglob("*")):
        parents = path.relative_to(root).parents
        if path.parent.name != "__pycache__" and not any(folder in parents for folder in NOT_IN_WHEEL):
            files.append(path)
    return sorted(path for path in files if path.is_file())


def library_environment(user: dict[str, str], machine: str) -> dict[str, str]:
    """The environment in which llama-cpp-python is built: the user's, what GPU asks for, and no AMX on x86-64.

    GCC 12 miscompiles ggml's AMX tile configuration (it takes 8 of the 64 bytes for read and drops the stores to the
    others): the first product of several rows with quantised weights is a general protection fault. ggml compiles
    that code where the compiler defines __AMX_INT8__. -mno-amx-int8 would not help: ggml's -march=native comes later.
    """
    arguments = shlex.split(user.get("CMAKE_ARGS", ""))
    gpu_option = GPU_OPTIONS[user.get("GPU") or "cpu"]
    if gpu_option and gpu_option not in map(option_name, arguments):
        arguments.append(f"{gpu_option}=on")
    if "-DLLAVA_BUILD" not in map(option_name, arguments):
        arguments.append("-DLLAVA_BUILD=off")  # images and sound, which nothing here uses
    result = dict(user)
    if machine.lower() in ("x86_64", "amd64"):
        for variable, option in (("CFLAGS", "-DCMAKE_C_FLAGS"), ("CXXFLAGS", "-DCMAKE_CXX_FLAGS")):
            result[variable] = f"{user.get(variable, '')} {NO_AMX}".strip()
            # Where CMAKE_ARGS gives these flags, CMake takes them instead of the variable's.
            arguments = [f"{a} {NO_AMX}" if option_name(a) == option else a for a in arguments]
    return {**result, "CMAKE_ARGS": shlex.join(arguments)}


def option_name(argument: str) -> str:
    """`-DNAME` of `-DNAME=value` or `-DNAME:TYPE=value`."""
    return argument.partition("=")[0].partition(":")[0]


def announcement(requirement: str, gpu: str, n_cores: int) -> str:
    minutes = max(1, round(LIBRARY_CORE_MINUTES / n_cores))
    text = f"compiling {requirement.replace('==', ' ')}, once; this takes about {count(minutes, 'minute')}"
    return f"{text} on {count(n_cores, 'core')}" + (
        f", and several times that for {gpu}" if gpu not in ("", "cpu") else ""
    )


def check_library() -> None:
    """Loads the library that was just built, and makes sure that it is one without AMX (see `library_environment`)."""
    code = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
    done = subprocess.run([str(VENV / "bin/python"), "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise Problem(
            f"llama-cpp-python was built and does not load: {(done.stderr.splitlines() or ['no message'])[-1]}"
        )
    if "AMX_INT8 = 1" in done.stdout:
        raise Problem(
            "llama-cpp-python was built with AMX, which GCC 12 breaks; take what asks for it out of CMAKE_ARGS"
        )


# Running things


def install_locked(entries: list[str]) -> None:
    pip("install", "--no-deps", "--require-hashes", "-r", str(write_requirements(entries)))


def write_requirements(entries: list[str]) -> Path:
    """A file that pip reads a lock's entries from."""
    path = BUILD / "requirements.txt"
    path.write_text("\n".join(entries) + "\n", encoding="utf-8")
    return path


def pip(*arguments: str, **environment: str) -> None:
    run([*PIP, "-qq", *arguments], f"pip {arguments[0]}", **environment)


def run(command: list[str], what: str, **environment: str) -> None:
    """Runs a command, with variables added to its environment; its output is shown only if it fails."""
    done = subprocess.run(
        command,
        env=clean_environment({**os.environ, **environment}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        raise Problem(f"{what} failed (its output is above)")


def clean_environment(user: dict[str, str]) -> dict[str, str]:
    """The user's, with `.venv`'s programs first and without what would install elsewhere. Indexes and proxies stay."""
    elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in user.items() if name not in elsewhere}
    return {**kept, "PIP_USER": "0", "PATH": f"{VENV / 'bin'}{os.pathsep}{user.get('PATH', os.defpath)}"}


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(text: str) -> None:
    print(text, flush=True)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# What earlier runs left


def read_state() -> dict[str, Any]:
    try:
        state = json.loads(STATE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(state: dict[str, Any]) -> None:
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    new.replace(STATE)


def venv_version() -> tuple[int, ...] | None:
    """Major and minor version of `.venv`'s Python, or None where it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [str(VENV / "bin/python"), "-c", code], capture_output=True, stdin=subprocess.DEVNULL
        )
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def installed(package: str) -> int:
    """A number that changes with every installation of a package in `.venv`; 0 where it is not installed."""
    records = VENV.glob(f"lib/python*/site-packages/{package}-*.dist-info/RECORD")
    return sum(path.stat().st_mtime_ns for path in records)


def digest(parts: list[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
