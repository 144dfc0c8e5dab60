"""scripts/dev/gpu_check.py goes all the way on the CPU, in seconds; stopped early it leaves what it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_the_pack_s_scripts_say_what_is_wrong(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "gpu_run.sh").write_bytes((DEV / "gpu_run.sh").read_bytes())
    (pack / "manifest").write_text("python 2.7\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": sys.executable}
        command = ["bash", str(pack / "gpu_run.sh"), "--out", str(tmp_path / "out"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    assert run("--fast").stderr == "error: unknown option --fast (there are --limit, --out, --work)\n"
    result = run()
    assert result.returncode == 1 and "the pack is for 2.7: pack with PYTHON_VERSION=" in result.stderr
    environment = {**os.environ, "PYTHON": str(tmp_path / "none")}
    packed = subprocess.run(
        ["bash", str(DEV / "gpu_pack.sh")], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert packed.returncode == 1 and "make demo first" in packed.stderr


@pytest.mark.parametrize("name", ["gpu_pack.sh", "gpu_run.sh"])
def test_the_scripts_parse(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(DEV / name)]).returncode == 0
