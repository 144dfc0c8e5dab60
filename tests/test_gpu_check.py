"""scripts/dev/gpu_check.py goes all the way on the CPU, in seconds; stopped early it leaves what it has."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from conftest import PairOf

DEV = Path(__file__).resolve().parents[1] / "scripts" / "dev"
PARTS = ["memory", "widths", "sweep", "bench", "draft_step", "depths"]


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEV / "gpu_check.py"), *map(str, arguments), "--ctx", "512", "-t", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_whole_check(pair_of: PairOf, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    result = check(pair_of("R", "Q8_0").main, "-n", 8, "--budget", 2, "--json-out", path)
    data = json.loads(path.read_text())
    assert data["missing"] == [] and [part for part in PARTS if part not in data] == []
    # Random weights have near-ties everywhere; on one thread Q8_0 rows are equal to the bit at every width.
    assert result.returncode == 0, result.stderr
    assert data["sweep"]["lossless"] and data["sweep"]["n_equal"] == data["sweep"]["n_texts"] > 0
    round_ = data["bench"]["round"]
    assert round_["n_syncs"] > 0 and round_["logits_bytes"] > 0 and 0 < data["bench"]["host_share"] < 1
    step = data["draft_step"]
    assert step["backend picks"]["logits_bytes"] > step["host picks"]["logits_bytes"]  # token ids beside them
    assert step["backend picks"]["n_accepted"] == step["host picks"]["n_accepted"]
    assert set(data["depths"]) == {"L 3", "L 2.5"}
    assert set(data["depths"]["L 3"]["tok_s"]) == {"0", "1", "2", "3", "4", "pace"}
    assert data["source"]["backend"] == "CPU" and not list(tmp_path.glob("*.part"))
    for title in (
        "no GPU: the installed llama-cpp-python was built without one",
        "memory",
        "widths that agree",
        "token ids",
        "speed-up",
        "synchronisations",
        "draft step",
        "best",
    ):
        assert title in result.stdout


def test_out_of_time_it_leaves_what_it_has(pair_of: PairOf, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    result = check(pair_of("R", "Q8_0").main, "-n", 200, "--budget", 60, "--limit", 5, "--json-out", path)
    data = json.loads(path.read_text())
    assert result.returncode == 1 and data["stopped"] == "the limit of 5 seconds"
    assert "depths" in data["missing"] and set(data["missing"]) < set(PARTS)
    assert "memory" in data and "depths" in result.stderr and "Traceback" not in result.stderr


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack for this machine, with this project's sources and no others."""
    folder = tmp_path / "pack"
    (folder / "llama_cpp").mkdir(parents=True)
    (folder / "gpu_run.sh").write_bytes((DEV / "gpu_run.sh").read_bytes())
    write_manifest(folder)
    for archive, root, what in (
        ("project", DEV.parents[1], "scripts/dev/machine_check.py"),
        ("library", folder, "llama_cpp"),
    ):
        subprocess.run(["tar", "-cJf", folder / f"{archive}.tar.xz", "-C", root, what], check=True)
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels" / "nothing-1-py3-none-any.whl", "w") as wheel:
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            wheel.writestr(f"nothing-1.dist-info/{name}", text)
    return folder


def program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program on PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def write_manifest(pack: Path, python: str = "", arch: str = "") -> None:
    python = python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    (pack / "manifest").write_text(f"python {python}\narch {arch or platform.machine()}\n")


def run(pack: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """gpu_run.sh on a machine without nvcc, GPU and driver."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "CUDACXX": "nvcc-99", **settings}
    command = ["bash", str(pack / "gpu_run.sh"), "--out", str(pack.parent / "out"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=pack.parent, timeout=300
    )


def test_what_is_wrong_is_one_line(pack: Path) -> None:
    """Before anything is built: options, Python, processor, compilers, space."""

    def error(*arguments: str, **settings: str) -> str:
        result = run(pack, *arguments, **settings)
        assert result.returncode > 0 and result.stderr.count("\n") == 1, result
        return result.stderr

    assert error("--fast") == "error: unknown option --fast (there are --limit, --out, --work)\n"
    assert error(BACKEND="rocm") == "error: BACKEND=rocm is none of cuda, vulkan, cpu\n"
    assert error(PYTHON="python-99") == "error: no python-99: PYTHON=... names one\n"
    assert error() == (  # no silent step down to the processor
        "error: CUDACXX=nvcc-99 is not there: name another nvcc or unset CUDACXX; "
        "BACKEND=cpu checks the processor alone, BACKEND=vulkan other GPUs\n"
    )
    assert "no cmake found" in error(PATH=path_without(pack, "cmake"), BACKEND="cpu")
    program(pack, "df", "printf 'Filesystem 1M-blocks Used Available\\nnone 9 2 7\\n'")
    assert " has 7 MiB free and building takes 4000: --work names another folder" in error(
        PATH=f"{pack}{os.pathsep}{os.environ['PATH']}"
    )
    write_manifest(pack, arch="vax")
    assert f"this machine is {platform.machine()}, the pack is for vax: pack with ARCH=" in error()
    write_manifest(pack, python="2.7")
    assert "the pack is for 2.7: pack with PYTHON_VERSION=" in error()
    (pack / "manifest").unlink()
    assert "no pack lies in" in error() and "gpu_pack.sh makes one" in error()


def path_without(pack: Path, name: str) -> str:
    """A PATH with all programs but one."""
    folder = pack / "programs"
    folder.mkdir()
    for path in reversed(os.environ["PATH"].split(os.pathsep)):
        for file in Path(path).glob("*"):
            if file.name != name:
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).symlink_to(file)
    return str(folder)


@pytest.mark.parametrize(
    "limit, says", [("3000", "llama-sidecar does not build: "), ("0", "not built within 0 s")]
)
def test_a_build_that_ends_early_leaves_nothing_running(pack: Path, limit: str, says: str) -> None:
    """cmake stands in for a compiler that never ends, beside a project that does not build: what cmake started goes, too."""
    running = pack / "running"
    wait = f"until [ -s {running} ]; do sleep 0.1; done"
    program(
        pack,
        "cmake",
        f"[ $1 = --version ] && exec echo cmake version 3.30; sleep 300 & echo $! > {running}; wait",
    )
    program(pack, "ninja", "exit")
    program(pack, "python", f'case "$*" in *\' wheel \'*) {wait}; exit 1;; esac; exec {sys.executable} "$@"')
    path = f"{pack}{os.pathsep}{os.environ['PATH']}"
    result = run(pack, "--limit", limit, BACKEND="cpu", PATH=path, PYTHON=str(pack / "python"))
    assert result.returncode == 1 and says in result.stderr, result
    if running.exists() or limit != "0":  # it may have been stopped before it began
        state = ["ps", "-o", "stat=", "-p", running.read_text().strip() or "0"]
        until = time.monotonic() + 10
        while subprocess.run(state, capture_output=True, text=True).stdout[:1] not in ("", "Z"):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_without_a_venv_nothing_is_packed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(tmp_path / "none")}
    packed = subprocess.run(
        ["bash", str(DEV / "gpu_pack.sh")], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert packed.returncode == 1 and "make demo first" in packed.stderr
