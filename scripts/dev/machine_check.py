"""What building needs of the machine: venv, Python's headers, C and C++ compilers with OpenMP, CMake, a GPU and its compiler.

    python scripts/dev/machine_check.py cuda        (what gpu_run.sh asks; prints the compilers that passed, as NAME=COMMAND lines)

Each check returns when all is well and raises `Problem` otherwise: what is missing and the command that mends it, in one
line. Knows nothing of what is built. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
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
CMAKE = {"apt-get": "cmake", "dnf": "cmake", "pacman": "cmake", "brew": "cmake"}
VULKAN = {
    "apt-get": "glslc libvulkan-dev spirv-headers",
    "dnf": "glslc vulkan-headers vulkan-loader-devel spirv-headers-devel",
    "pacman": "shaderc vulkan-devel spirv-headers",
}

NVCC = Path("/usr/local/cuda/bin/nvcc")  # where NVIDIA's installer puts it, and puts it on no PATH
VULKAN_HEADER = Path("/usr/include/vulkan/vulkan_core.h")
LAYER_SETTINGS = "VkLayerSettingEXT"  # the newest thing that ggml-vulkan.cpp asks of Vulkan's headers

C_PROGRAM = "#include <stdio.h>\nint main(void) { return 0; }\n"
CXX_PROGRAM = "#include <optional>\n#include <thread>\nint main() { return std::optional<int>(0).value(); }\n"
OPENMP_PROGRAM = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
# Runs a kernel; prints the CUDA releases of driver and toolkit, the error's number, and its text or the GPU's name, separated by tabs.
CUDA_PROGRAM = r"""
#include <cstdio>
__global__ void write_one(int * x) { *x = 1; }
int main() {
    int driver = 0, toolkit = 0, one = 0, * x = nullptr;
    cudaDeviceProp gpu = {};
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&toolkit);
    cudaError_t error = cudaMalloc(&x, sizeof one);
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&gpu, 0);
    if (error == cudaSuccess) write_one<<<1, 1>>>(x);
    if (error == cudaSuccess) error = cudaMemcpy(&one, x, sizeof one, cudaMemcpyDeviceToHost);
    if (error == cudaSuccess && one != 1) error = cudaErrorUnknown;
    std::printf("%d.%d\t%d.%d\t%d\t", driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10, int(error));
    if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
    else std::printf("%s, compute capability %d.%d\n", gpu.name, gpu.major, gpu.minor);
    return error != cudaSuccess;
}
"""
CUDA_OLD_DRIVER, CUDA_NO_DEVICE = 35, 100  # of cudaError_t
CMAKE_OLDEST = (3, 24)  # the first that knows CMAKE_CUDA_ARCHITECTURES=native


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


def complaint_of(
    command: list[str], program: str, suffix: str, environment: dict[str, str], out: str | None = None
) -> str:
    """Compiles and links a small program, as `out` if it is to stay; returns the first error line, or nothing if that worked."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"probe{suffix}")
        source.write_text(program)
        done = subprocess.run(
            [*command, str(source), "-o", out or str(Path(folder, "probe"))],
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


def check_gpu(gpu: str) -> dict[str, str]:
    """Is there what compiles for that kind of GPU? (Whether the GPU itself is there shows when a model is loaded.)

    Returns CUDACXX for CUDA: CMake does not look where NVIDIA's installer puts nvcc.
    """
    if gpu == "metal" and sys.platform != "darwin":
        raise Problem(f"Metal is for macOS, and this is {platform.system()}")
    if gpu == "vulkan" and not shutil.which("glslc"):
        raise Problem(f"Vulkan needs glslc and the headers of Vulkan and SPIR-V: {fix(VULKAN)}")
    if gpu == "vulkan" and VULKAN_HEADER.is_file() and LAYER_SETTINGS not in VULKAN_HEADER.read_text():
        raise Problem(
            f"Vulkan's headers must be of release 1.3.272 or newer, and those in {VULKAN_HEADER.parent} are older: "
            "install newer ones (LunarG's SDK, or a newer distribution)"
        )
    return {"CUDACXX": nvcc(dict(os.environ))} if gpu == "cuda" else {}


def nvcc(environment: dict[str, str]) -> str:
    """NVIDIA's compiler: what CUDACXX says, else the first on PATH, else the one where NVIDIA's installer puts it."""
    asked = environment.get("CUDACXX", "")
    found = shutil.which(asked or "nvcc", path=environment.get("PATH", os.defpath))
    if asked and not found:
        raise Problem(f"CUDACXX={asked} is not there: name another nvcc or unset CUDACXX")
    if not found and os.access(NVCC, os.X_OK):
        found = str(NVCC)
    if not found:
        raise Problem(
            f"no nvcc found (neither on PATH nor {NVCC}): install NVIDIA's CUDA toolkit, or name it: CUDACXX=/path/to/nvcc"
        )
    return found


def check_cuda(environment: dict[str, str]) -> str:
    """Compiles a kernel for the GPU that is here and runs it; returns the GPU's name and the releases of driver and toolkit."""
    compiler = nvcc(environment)
    with tempfile.TemporaryDirectory() as folder:
        probe = str(Path(folder, "probe"))
        complaint = complaint_of([compiler, "-arch=native"], CUDA_PROGRAM, ".cu", environment, probe)
        if complaint:
            raise Problem(
                f"{compiler} fails on a small program ({complaint}): "
                "the toolkit must know this GPU and this C++ compiler; another toolkit: CUDACXX=, another compiler: NVCC_CCBIN="
            )
        done = subprocess.run([probe], env=environment, capture_output=True, text=True)
    try:
        driver, toolkit, error, text = done.stdout.rstrip("\n").split("\t")
    except ValueError:
        raise Problem(
            f"a small CUDA program does not run here: {done.stderr.strip() or f'exit code {done.returncode}'}"
        ) from None
    if driver == "0.0" or int(error) == CUDA_NO_DEVICE:
        what = "no NVIDIA driver here" if driver == "0.0" else f"no GPU that CUDA can use ({text})"
        raise Problem(
            f"{what}: `nvidia-smi` must list the GPU; a container must be given it (docker: --gpus all)"
        )
    if int(error) == CUDA_OLD_DRIVER:
        raise Problem(
            f"the NVIDIA driver knows CUDA {driver} and the toolkit is {toolkit}: "
            f"update the driver, or name the nvcc of a toolkit {driver} or older: CUDACXX=/path/to/nvcc"
        )
    if int(error):
        raise Problem(
            f"a small CUDA program fails on this GPU: {text} (driver for CUDA {driver}, toolkit {toolkit})"
        )
    return f"{text}, driver for CUDA {driver}, toolkit {toolkit}"


def check_cmake() -> None:
    """CMake of a release that can compile for the GPU it finds."""
    wanted = dotted(CMAKE_OLDEST)
    try:
        done = subprocess.run(["cmake", "--version"], capture_output=True, text=True)
    except OSError:
        raise Problem(f"no cmake found: install CMake {wanted} or newer ({fix(CMAKE)})") from None
    release = re.search(r"\d+\.\d+", done.stdout)
    if not release or tuple(map(int, release[0].split("."))) < CMAKE_OLDEST:
        raise Problem(
            f"cmake is {release[0] if release else 'of no release'}: install CMake {wanted} or newer (`pip install cmake`)"
        )


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


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


def main(backend: str) -> int:
    """Checks what gpu_run.sh builds with. Prints the compilers for it as NAME=COMMAND lines, what was found to standard error."""
    try:
        check_headers()
        check_cmake()
        passed = check_compilers(dict(os.environ)) | check_gpu(backend)
        if backend == "cuda":
            print(check_cuda({**os.environ, **passed}), file=sys.stderr)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print("\n".join(f"{name}={command}" for name, command in passed.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
