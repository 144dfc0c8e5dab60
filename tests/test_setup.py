"""What a person with a bare clone meets: one line for whatever is missing, and one build that stays until it must change."""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEV = ROOT / "scripts" / "dev"


@pytest.fixture(scope="module", autouse=True)
def _dev_scripts_importable() -> object:
    sys.path.insert(0, str(DEV))
    yield
    sys.path.remove(str(DEV))


@pytest.fixture
def check() -> ModuleType:
    return importlib.import_module("machine_check")


@pytest.fixture
def setup() -> ModuleType:
    return importlib.import_module("setup_venv")


def program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program on PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


# What is missing is one line with the fix


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


def test_an_old_python_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 8, 10, "final", 0))
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(DEV / "setup_venv.py"))
    assert (
        "3.8" in one_line(error)
        and "3.10 or newer" in str(error.value)
        and "make PYTHON=" in str(error.value)
    )


def test_no_python_at_all_is_told_so() -> None:
    done = make("demo", "PYTHON=python-that-is-not-there")
    assert done.returncode != 0
    assert "error: no python-that-is-not-there found" in done.stderr


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_missing_venv_module(check: ModuleType, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        check.importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(check.Problem, match=r"lacks ensurepip.*install") as error:
        check.check_venv_module()
    one_line(error)


def test_missing_headers(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(check.Problem, match=r"Python's headers are missing .*Python\.h.*install") as error:
        check.check_headers()
    one_line(error)


def test_this_machine_passes(check: ModuleType) -> None:
    check.check_venv_module()
    check.check_headers()
    assert set(check.check_compilers(dict(os.environ))) == {"CC", "CXX"}
    assert Path(sysconfig.get_path("include"), "Python.h").is_file()


def test_no_compiler(check: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        check.Problem, match=r"no C compiler found \(looked for cc, gcc, clang\): .*install"
    ) as error:
        check.check_compilers({"PATH": str(tmp_path)})
    one_line(error)


def test_no_cxx_compiler(check: ModuleType, tmp_path: Path) -> None:
    program(tmp_path, "cc", "exit 0")
    with pytest.raises(
        check.Problem, match=r"no C\+\+ compiler found \(looked for c\+\+, g\+\+, clang\+\+\)"
    ) as error:
        check.check_compilers({"PATH": str(tmp_path)})
    one_line(error)


def test_named_compiler_is_not_there(check: ModuleType) -> None:
    with pytest.raises(check.Problem, match="CC=gcc-99 is not there") as error:
        check.check_compilers({**os.environ, "CC": "gcc-99"})
    one_line(error)


def test_the_compilers_that_passed_are_the_ones_used(check: ModuleType, tmp_path: Path) -> None:
    for name in ("clang", "clang++", "c++"):
        program(tmp_path, name, "exit 0")
    assert check.check_compilers({"PATH": str(tmp_path)}) == {"CC": "clang", "CXX": "clang++"}
    assert check.check_compilers({"PATH": str(tmp_path), "CXX": "c++ -pipe"}) == {
        "CC": "clang",
        "CXX": "c++ -pipe",
    }


def test_compiler_that_fails(check: ModuleType, tmp_path: Path) -> None:
    program(tmp_path, "cc", "exit 0")
    program(tmp_path, "c++", "echo 'probe.cpp:1:10: fatal error: optional: No such file' >&2; exit 1")
    with pytest.raises(
        check.Problem, match=r"C\+\+ compiler fails on a small program.*fatal error: optional"
    ) as error:
        check.check_compilers({"PATH": str(tmp_path)})
    one_line(error)


def test_missing_openmp(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check.sys, "platform", "linux")
    no_openmp = 'case "$*" in *-fopenmp*) echo "fatal error: omp.h: No such file"; exit 1;; esac'
    program(tmp_path, "cc", no_openmp)
    program(tmp_path, "c++", no_openmp)
    with pytest.raises(
        check.Problem, match=r"has no OpenMP \(fatal error: omp\.h.*install.*CC=gcc CXX=g\+\+"
    ) as error:
        check.check_compilers({"PATH": str(tmp_path)})
    one_line(error)
    check.check_compilers({"PATH": str(tmp_path), "CMAKE_ARGS": "-DGGML_OPENMP=OFF"})  # the user does without


def test_gpu_tools(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(check.sys, "platform", "linux")
    monkeypatch.setattr(check, "NVCC", tmp_path / "cuda" / "nvcc")
    for gpu, needs in (("cuda", "nvcc"), ("vulkan", "glslc"), ("metal", "macOS")):
        with pytest.raises(check.Problem, match=needs) as error:
            check.check_gpu(gpu)
        one_line(error)
    program(tmp_path, "glslc", "exit 0")
    monkeypatch.setattr(check, "VULKAN_HEADER", tmp_path / "vulkan_core.h")
    assert check.check_gpu("vulkan") == {}  # they may lie elsewhere
    check.VULKAN_HEADER.write_text("#define VK_HEADER_VERSION 239\n")  # Debian 12
    with pytest.raises(check.Problem, match=r"1\.3\.272 or newer") as error:
        check.check_gpu("vulkan")
    one_line(error)
    check.VULKAN_HEADER.write_text("typedef struct VkLayerSettingEXT {\n")
    assert check.check_gpu("vulkan") == {} == check.check_gpu("cpu")
    check.NVCC.parent.mkdir()
    program(check.NVCC.parent, "nvcc", "exit 0")
    assert check.check_gpu("cuda") == {"CUDACXX": str(check.NVCC)}  # where CMake would not look
    program(tmp_path, "nvcc", "exit 0")
    assert check.check_gpu("cuda") == {"CUDACXX": str(tmp_path / "nvcc")}
    monkeypatch.setenv("CUDACXX", "nvcc-99")
    with pytest.raises(check.Problem, match="CUDACXX=nvcc-99 is not there"):
        check.check_gpu("cuda")


def nvcc(folder: Path, *found: object) -> dict[str, str]:
    """A stand-in for nvcc: its programs print what they found, separated by tabs. Returns the environment with it."""
    line = "\\t".join(map(str, found))
    program(
        folder,
        "nvcc",
        f"while [ $1 != -o ]; do shift; done; printf '#!/bin/sh\\nprintf \"{line}\\\\n\"\\n' > $2; chmod +x $2",
    )
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "found, says",
    [
        (("0.0", "13.0", 35, "insufficient"), r"no NVIDIA driver here: `nvidia-smi`.*--gpus all"),
        (
            ("12.4", "13.0", 35, "insufficient"),
            r"driver knows CUDA 12\.4 and the toolkit is 13\.0: update.*CUDACXX=",
        ),
        (("13.0", "13.0", 100, "no device"), r"no GPU that CUDA can use \(no device\): `nvidia-smi`"),
        (
            ("13.0", "13.0", 46, "all devices are busy"),
            r"fails on this GPU: all devices are busy \(driver for CUDA 13",
        ),
        (("killed",), r"does not run here: exit code 0"),
    ],
    ids=["no driver", "old driver", "no GPU", "GPU in use", "killed"],
)
def test_a_gpu_that_cuda_cannot_use(
    check: ModuleType, tmp_path: Path, found: tuple[object, ...], says: str
) -> None:
    with pytest.raises(check.Problem, match=says) as error:
        check.check_cuda(nvcc(tmp_path, *found))
    one_line(error)


def test_a_gpu_that_cuda_can_use(check: ModuleType, tmp_path: Path) -> None:
    found = check.check_cuda(nvcc(tmp_path, "13.0", "12.8", 0, "NVIDIA H100, compute capability 9.0"))
    assert found == "NVIDIA H100, compute capability 9.0, driver for CUDA 13.0, toolkit 12.8"
    program(tmp_path, "nvcc", "echo 'nvcc fatal : Unsupported gpu architecture; an error' >&2; exit 1")
    with pytest.raises(
        check.Problem, match=r"nvcc fails on a small program \(nvcc fatal.*CUDACXX=.*NVCC_CCBIN="
    ) as error:
        check.check_cuda({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    one_line(error)


def test_cmake(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(check.Problem, match=r"no cmake found: install CMake 3\.24 or newer") as error:
        check.check_cmake()
    one_line(error)
    program(tmp_path, "cmake", "echo cmake version 3.22.1")
    with pytest.raises(check.Problem, match=r"cmake is 3\.22: install CMake 3\.24"):
        check.check_cmake()
    program(tmp_path, "cmake", "echo cmake version 3.100.0")
    check.check_cmake()


def test_unknown_gpu(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.main(["--gpu", "voodoo"]) == 1
    assert capsys.readouterr().err == "error: GPU=voodoo is none of cpu, cuda, vulkan, metal\n"


@pytest.mark.parametrize(
    ("manager", "expected"),
    [
        ("apt-get", "apt-get install build-essential"),
        ("dnf", "dnf install gcc"),
        ("pacman", "pacman -S base-devel"),
    ],
)
def test_fix_names_the_package_manager(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manager: str, expected: str
) -> None:
    monkeypatch.setattr(check.sys, "platform", "linux")
    program(tmp_path, manager, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert expected in check.fix(check.COMPILERS)


# How llama-cpp-python is built


def test_no_amx_on_x86_64(setup: ModuleType) -> None:
    built = setup.library_environment({}, "x86_64")
    assert built["CFLAGS"] == built["CXXFLAGS"] == "-U__AMX_INT8__"
    assert "CFLAGS" not in setup.library_environment({}, "aarch64")


def test_the_users_flags_are_kept(setup: ModuleType) -> None:
    user = {
        "CFLAGS": "-O2",
        "CMAKE_ARGS": "-DGGML_BLAS=ON '-DCMAKE_CXX_FLAGS=-g -O1' -DCMAKE_C_FLAGS:STRING=-pipe",
    }
    built = setup.library_environment({**user, "PATH": "/bin"}, "x86_64")
    assert built["CFLAGS"] == "-O2 -U__AMX_INT8__" and built["PATH"] == "/bin"
    assert setup.shlex.split(built["CMAKE_ARGS"]) == [
        "-DGGML_BLAS=ON",
        "-DCMAKE_CXX_FLAGS=-g -O1 -U__AMX_INT8__",
        "-DCMAKE_C_FLAGS:STRING=-pipe -U__AMX_INT8__",
        "-DLLAVA_BUILD=off",
    ]


@pytest.mark.parametrize("gpu", ["cuda", "vulkan", "metal"])
def test_a_gpu_adds_its_option_once(setup: ModuleType, gpu: str) -> None:
    option = f"-DGGML_{gpu.upper()}"
    assert f"{option}=on" in setup.library_environment({"GPU": gpu}, "x86_64")["CMAKE_ARGS"].split()
    given = setup.library_environment({"GPU": gpu, "CMAKE_ARGS": f"{option}=off"}, "x86_64")[
        "CMAKE_ARGS"
    ].split()
    assert f"{option}=off" in given and f"{option}=on" not in given


def test_no_gpu_adds_nothing(setup: ModuleType) -> None:
    for gpu in ("", "cpu"):
        assert setup.library_environment({"GPU": gpu}, "x86_64")["CMAKE_ARGS"] == "-DLLAVA_BUILD=off"


def test_what_is_not_asked_for_is_not_rebuilt(setup: ModuleType) -> None:
    built = {"requirement": "llama-cpp-python==0.3.36", "GPU": "cuda", "CMAKE_ARGS": "-DA=1", "CC": ""}
    assert setup.fulfils(built, {"GPU": "", "CMAKE_ARGS": "", "CC": ""})
    assert setup.fulfils(built, {"GPU": "cuda", "CMAKE_ARGS": "-DA=1", "CC": ""})
    assert not setup.fulfils(built, {"GPU": "cpu", "CMAKE_ARGS": "", "CC": ""})
    assert not setup.fulfils(built, {"GPU": "", "CMAKE_ARGS": "-DA=2", "CC": ""})
    assert not setup.fulfils({}, {"GPU": "", "CMAKE_ARGS": "", "CC": ""})


def test_packages_go_into_the_venv_whatever_pip_is_told(setup: ModuleType) -> None:
    cleaned = setup.clean_environment(
        {"PIP_TARGET": "/x", "PIP_USER": "1", "PYTHONPATH": "/y", "HOME": "/h", "PATH": "/bin"}
    )
    assert (
        cleaned["PIP_USER"] == "0"
        and not {"PIP_TARGET", "PYTHONPATH"} & set(cleaned)
        and cleaned["HOME"] == "/h"
    )
    assert cleaned["PATH"].startswith(str(setup.VENV / "bin")) and cleaned["PATH"].endswith("/bin")


def test_announcement_says_how_long(setup: ModuleType) -> None:
    assert setup.announcement("llama-cpp-python==0.3.36", "", 2) == (
        "compiling llama-cpp-python 0.3.36, once; this takes about 4 minutes on 2 cores"
    )
    assert "about 1 minute on 16 cores, and several times that for cuda" in setup.announcement(
        "x==1", "cuda", 16
    )


IN_NO_LOCK = {"torch", "atheris"}  # pinned where they are installed by themselves: of other extras than `dev`


def test_pyproject_says_what_is_installed(setup: ModuleType) -> None:
    tools = setup.development_tools(setup.pyproject())
    assert {"mypy", "pytest", "ruff", "cmake", "ninja"} <= {tool.partition(">")[0] for tool in tools}
    assert setup.pinned_library(setup.pyproject()).startswith("llama-cpp-python==")
    pinned = {line.partition("==")[0] for line in setup.CONSTRAINTS.read_text().splitlines() if "==" in line}
    assert {tool.partition(">")[0] for tool in tools} | IN_NO_LOCK == pinned


# What is installed: by hash


def test_the_lock_has_all_that_is_asked_for_by_hash_and_names_no_registry(setup: ModuleType) -> None:
    text = setup.LOCK.read_text()
    entries = setup.locked(text)
    setup.check_lock(entries, setup.pyproject())
    assert all("--hash=sha256:" in part for entry in entries.values() for part in entry.split("\n    #")[:1])
    assert "://" not in text and "index-url" not in text
    pinned = [line for line in setup.CONSTRAINTS.read_text().splitlines() if "==" in line]
    for line in pinned:
        name, _, version = line.partition("==")
        assert name in IN_NO_LOCK or f"{name}=={version} " in entries[name], f"{line}: run `make lock`"


LOCK = """\
# Made by `make lock`.
llama-cpp-python==0.3.36 \\
    --hash=sha256:aa
    # via llama-sidecar (pyproject.toml)
numpy==2.2.6 ; python_full_version < '3.11' \\
    --hash=sha256:bb
    # via
    #   gguf
numpy==2.5.5 ; python_full_version >= '3.11' \\
    --hash=sha256:cc
"""
ASKING = """
dependencies = [
    "llama-cpp-python==0.3.36",
    "{asked}>=2",
]
dev = ["NumPy"]
"""


def test_a_locks_entries(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entries = setup.locked(LOCK)
    assert list(entries) == ["llama-cpp-python", "numpy"]
    assert "sha256:bb" in entries["numpy"] and "sha256:cc" in entries["numpy"]
    monkeypatch.setattr(setup, "BUILD", tmp_path)
    written = setup.write_requirements([entries["numpy"]]).read_text()
    assert "sha256:aa" not in written and setup.locked(written) == {"numpy": entries["numpy"]}
    setup.check_lock(entries, ASKING.format(asked="numpy"))


@pytest.mark.parametrize(
    ("asked", "lock", "expected"),
    [
        ("ml_dtypes", LOCK, "lacks ml-dtypes, which pyproject.toml asks for: run `make lock`"),
        ("numpy", LOCK.replace("0.3.36", "0.3.360"), "has llama-cpp-python==0.3.360, pyproject.toml"),
    ],
)
def test_a_lock_that_is_behind_is_told_so(setup: ModuleType, asked: str, lock: str, expected: str) -> None:
    with pytest.raises(setup.Problem, match="make lock") as error:
        setup.check_lock(setup.locked(lock), ASKING.format(asked=asked))
    assert expected in one_line(error)


def test_the_bill_of_materials_has_what_is_required_and_what_is_compiled_in() -> None:
    supply = importlib.import_module("supply")
    parts = [{"bom-ref": name, "name": name} for name in ("root", "numpy", "starlette", "anyio", "pytest")]
    listed = {"root": ["numpy", "starlette", "pytest"], "starlette": ["anyio", "pytest"], "pytest": ["numpy"]}
    needs = {"starlette": ["anyio"], "pytest": ["numpy"]}
    bill = {
        "metadata": {"component": parts[0]},
        "components": parts[1:],
        "dependencies": [{"ref": part["name"], "dependsOn": listed.get(part["name"], [])} for part in parts],
    }
    made = supply.with_compiled_in(supply.what_is_required(bill, needs, {"numpy"}, {"starlette"}))
    assert {one["name"]: one.get("scope") for one in made["components"]} == {
        "numpy": None,
        "starlette": "optional",
        "anyio": "optional",
    }
    assert {one["ref"]: one["dependsOn"] for one in made["dependencies"]} == {
        "root": ["numpy", "starlette"],
        "numpy": [],
        "starlette": ["anyio"],
        "anyio": [],
    }
    assert set(supply.user_extras(supply.pyproject())) >= {"starlette>=1.0", "matplotlib>=3.8"}
    named = {one["name"] for one in made["metadata"]["component"]["components"]}
    notice = (ROOT / "NOTICE").read_text()
    assert named == {"nanobind", "robin-map"} and all(name.replace("-", "_") in notice for name in named)


def test_what_differs_between_two_wheels_is_named(tmp_path: Path) -> None:
    supply = importlib.import_module("supply")
    for name, text in (("one", "a"), ("other", "b")):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("same"), "x")
            wheel.writestr(zipfile.ZipInfo("native.so"), text)
    assert supply.differences(tmp_path / "one", tmp_path / "other") == ["native.so"]


# When it is done again


def test_wheel_sources(setup: ModuleType, tmp_path: Path) -> None:
    wanted = [
        "runtime/llm.py",
        "runtime/native/session.cpp",
        "scripts/demo.py",
        "pyproject.toml",
        "sidecars/FORMAT.md",
    ]
    others = [
        "sidecars/demo/model.safetensors",
        "scripts/dev/x.py",
        "runtime/__pycache__/llm.pyc",
        "tests/test_x.py",
    ]
    for name in (*wanted, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert setup.wheel_sources(tmp_path) == sorted(tmp_path / name for name in wanted)


def test_state_survives_and_a_broken_one_is_none(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "STATE", tmp_path / "setup.json")
    assert setup.read_state() == {}
    setup.write_state({"tools": "abc"})
    assert setup.read_state() == {"tools": "abc"}
    setup.STATE.write_text('{"tools": ')
    assert setup.read_state() == {}


def test_a_venv_whose_python_is_gone(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/nowhere/python3")
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    with pytest.raises(setup.Problem, match="make clean") as error:
        setup.make_venv()
    one_line(error)


def test_a_venv_of_another_python(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    program(tmp_path / ".venv/bin", "python", "echo 3 99")
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    with pytest.raises(setup.Problem, match=r"holds Python 3\.99 .*make clean") as error:
        setup.make_venv()
    one_line(error)


# Progress


def test_steps_of_ninja_and_make(setup: ModuleType) -> None:
    progress = importlib.import_module("build_progress")
    assert progress.parse_step("  [17/140] /usr/bin/c++ -O3 x.cpp") == (17, 140)
    assert progress.parse_step("[ 42%] Building CXX object") == (42, 100)
    assert progress.parse_step("  Downloading x [76.6/76.6 MB]") is None


def test_progress_line() -> None:
    module = importlib.import_module("build_progress")
    progress = module.Progress("compiling it")
    start_s = progress.start_s
    assert progress.text(start_s + 5) == "compiling it: fetching and configuring, 0:05"
    progress.read("[1/2] a little build of CMake's own")
    progress.read("[35/140] c++ a.cpp")
    progress.read("[2/2] another little build")
    progress.first_step_s = start_s + 10
    assert progress.text(start_s + 80) == "compiling it: 35 of 140 steps, 1:20, about 3:30 left"


def test_a_build_shows_plain_lines_and_keeps_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("build_progress")
    module.run_with_progress(
        ["sh", "-c", "echo '[1/1] c++ a.cpp'"], dict(os.environ), "compiling it", tmp_path / "log"
    )
    assert capsys.readouterr().out == "compiling it: done after 0:00\n"
    assert (tmp_path / "log").read_text() == "[1/1] c++ a.cpp\n"


def test_a_failed_build_shows_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("build_progress")
    script = "echo '[1/2] c++ a.cpp'; echo 'a.cpp:1: error: no such thing'; exit 1"
    with pytest.raises(module.Problem, match=r"compiling it failed; .*log$") as error:
        module.run_with_progress(["sh", "-c", script], dict(os.environ), "compiling it", tmp_path / "log")
    one_line(error)
    assert capsys.readouterr().err == "a.cpp:1: error: no such thing\n"


# The Makefile


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_plain_make_lists_the_targets() -> None:
    listed = make()
    assert listed.returncode == 0
    assert listed.stdout == make("help").stdout
    for target in ("demo", "test", "sanitize", "format", "wheel", "lock", "sbom", "reproduce", "clean"):
        assert f"  make {target}" in listed.stdout


def test_the_wheel_has_no_dates_of_its_build() -> None:
    """`make reproduce` compares two of them; it takes minutes."""
    wheels = list((ROOT / "dist").glob("llama_sidecar-*.whl"))
    if not wheels or "SOURCE_DATE_EPOCH" in os.environ:
        pytest.skip("`make wheel` builds it, without SOURCE_DATE_EPOCH")
    with zipfile.ZipFile(wheels[0]) as wheel:
        assert {entry.date_time for entry in wheel.infolist()} == {
            (2022, 11, 9, 12, 37, 20)
        }  # scikit-build-core's


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -eu", 'cd "$(dirname "$0")/.."', "exec make test"]
