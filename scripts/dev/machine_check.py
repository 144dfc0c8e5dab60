"""What building needs of the machine: venv, Python's headers, C and C++ compilers with OpenMP, a GPU's compiler.

Each check returns when all is well and raises `Problem` otherwise: what is missing and the command that mends it, in one
line. Knows nothing of what is built. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

# What to install, by package manager; {python} stands for python3.X.
COMPILERS = {"apt-get": "build-essential", "dnf": "gcc gcc-c++ make", "pacman": "base-devel"}
HEADERS = {"apt-get": "{python}-dev", "dnf": "python3-devel", "pacman": "python", "brew": "python"}
OPENMP = {"apt-get": "gcc g++ libomp-dev", "dnf": "gcc gcc-c++ libomp-devel", "pacman": "gcc openmp"}
VENV_MODULE = {"apt-get": "{python}-venv", "dnf": "python3", "pacman": "python", "brew": "python"}
VULKAN = {
    "apt-get": "glslc libvulkan-dev spirv-headers",
    "dnf": "glslc vulkan-headers vulkan-loader-devel spirv-headers-devel",
    "pacman": "shaderc vulkan-devel spirv-headers",
}

VULKAN_HEADER = Path("/usr/include/vulkan/vulkan_core.h")
LAYER_SETTINGS = "VkLayerSettingEXT"  # the newest thing that ggml-vulkan.cpp asks of Vulkan's headers

C_PROGRAM = "#include <stdio.h>\nint main(void) { return 0; }\n"
CXX_PROGRAM = "#include <optional>\n#include <thread>\nint main() { return std::optional<int>(0).value(); }\n"
OPENMP_PROGRAM = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


class Problem(Exception):
    """What is wrong and how to mend it, in one line."""


def check_venv_module() -> None:
    """Debian and Ubuntu keep ensurepip in a package of its own."""
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        raise Problem(
            f"{sys.executable} cannot make virtual environments (it lacks ensurepip): {fix(VENV_MODULE)}"
        )


def check_headers() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise Problem(f"Python's headers are missing ({header}): {fix(HEADERS)}")


def check_compilers(environment: dict[str, str]) -> dict[str, str]:
    """Compiles three small programs: C, C++17, and C with OpenMP, which is not asked of macOS, where Metal computes.

    Returns CC and CXX of the compilers that passed. Hand them on: left alone, scikit-build-core takes the compiler
    that Python itself was built with, which need not be on this machine.
    """
    c = compiler("C", "CC", ("cc", "gcc", "clang"), environment)
    cxx_names = ("clang++", "c++", "g++") if "clang" in c[0] else ("c++", "g++", "clang++")
    cxx = compiler("C++", "CXX", cxx_names, environment)
    check_compiler("C", c, C_PROGRAM, ".c", environment)
    check_compiler("C++", [*cxx, "-std=c++17"], CXX_PROGRAM, ".cpp", environment)
    if sys.platform != "darwin" and "-DGGML_OPENMP" not in environment.get("CMAKE_ARGS", ""):
        complaint = complaint_of([*c, "-fopenmp"], OPENMP_PROGRAM, ".c", environment)
        if complaint:
            raise Problem(
                f"the C compiler `{shlex.join(c)}` has no OpenMP ({complaint}): {fix(OPENMP)}, "
                "or name another: CC=gcc CXX=g++"
            )
    return {"CC": shlex.join(c), "CXX": shlex.join(cxx)}


def compiler(language: str, variable: str, names: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    """The command of a compiler: what the user's variable says, else the first of `names` on PATH."""
    path = environment.get("PATH", os.defpath)
    asked = shlex.split(environment.get(variable, ""))
    if asked and not shutil.which(asked[0], path=path):
        raise Problem(
            f"{variable}={environment[variable]} is not there: name another {language} compiler or unset {variable}"
        )
    found = asked or [name for name in names if shutil.which(name, path=path)][:1]
    if not found:
        raise Problem(f"no {language} compiler found (looked for {', '.join(names)}): {fix(COMPILERS)}")
    return found


def check_compiler(
    language: str, command: list[str], program: str, suffix: str, environment: dict[str, str]
) -> None:
    complaint = complaint_of(command, program, suffix, environment)
    if complaint:
        raise Problem(
            f"the {language} compiler fails on a small program (`{shlex.join(command)}`: {complaint}): {fix(COMPILERS)}"
        )


def complaint_of(command: list[str], program: str, suffix: str, environment: dict[str, str]) -> str:
    """Compiles and links a small program; returns the first error line, or nothing if that worked."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"probe{suffix}")
        source.write_text(program)
        done = subprocess.run(
            [*command, str(source), "-o", str(Path(folder, "probe"))],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode == 0:
            return ""
        lines = [line.strip().replace(f"{folder}/", "") for line in done.stdout.splitlines()]
    return next(
        (line for line in lines if "error" in line or "cannot" in line), f"exit code {done.returncode}"
    )


def check_gpu(gpu: str) -> None:
    """Is there what compiles for that kind of GPU? (Whether the GPU itself is there shows when a model is loaded.)"""
    if gpu == "metal" and sys.platform != "darwin":
        raise Problem(f"GPU=metal is for macOS, and this is {platform.system()}")
    if gpu == "cuda" and not (os.environ.get("CUDACXX") or shutil.which("nvcc")):
        raise Problem(
            "GPU=cuda needs NVIDIA's CUDA toolkit: install it and put nvcc on PATH, or name it: CUDACXX=/path/to/nvcc"
        )
    if gpu == "vulkan" and not shutil.which("glslc"):
        raise Problem(f"GPU=vulkan needs glslc and the headers of Vulkan and SPIR-V: {fix(VULKAN)}")
    if gpu == "vulkan" and VULKAN_HEADER.is_file() and LAYER_SETTINGS not in VULKAN_HEADER.read_text():
        raise Problem(
            f"GPU=vulkan needs Vulkan's headers of release 1.3.272 or newer, and those in {VULKAN_HEADER.parent} are older: "
            "install newer ones (LunarG's SDK, or a newer distribution)"
        )


def fix(packages: dict[str, str]) -> str:
    """The command that installs a package with this machine's package manager."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.platform == "darwin":
        return f"brew install {packages['brew']}" if "brew" in packages else "xcode-select --install"
    sudo = "" if os.geteuid() == 0 else "sudo "
    for manager, verb in (("apt-get", "install"), ("dnf", "install"), ("pacman", "-S")):
        if shutil.which(manager):
            return f"{sudo}{manager} {verb} {packages[manager].format(python=python)}"
    return (
        f"install it with your package manager (Debian's name: {packages['apt-get'].format(python=python)})"
    )
