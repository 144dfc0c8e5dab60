"""A conversion that was ended goes on where it stopped or begins anew; the files are those of one that was not, or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, tiny_tensors, write_safetensors
from hub_server import REPOSITORY, hub

from llama_sidecar.converter import convert, writer
from llama_sidecar.converter.errors import HubFailed

# Every slice is noted as soon as it is written, and the process kills itself when a share of the bytes is.
KILLED = """
import os, signal, sys
from llama_sidecar.converter import convert, writer
writer.RECORD_S = -1
def kill(done, total, name):
    if done >= float(sys.argv[3]) * total:
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], "Q4_K_M", progress=kill)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "deepseek2", "plain")


def killed(folder: Path, out: Path, share: float) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(out), str(share)], capture_output=True
    )
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()


def hashes(out: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors whose slices are written from now on."""
    write, names = writer._write_slice, []

    def count(one: object, part: writer._Slice) -> None:
        names.append(part.tensor.name)
        write(one, part)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_write_slice", count)
    return names


@pytest.mark.parametrize("share", [0.2, 0.5, 0.98])
def test_killed_and_run_again(
    share: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    convert(folder, whole, "Q4_K_M")
    out = tmp_path / "out"
    killed(folder, out, share)
    left = sorted(path.name for path in out.iterdir())
    assert len(left) == 2 and all(name.startswith(".") and name.endswith(".part") for name in left)
    names, first = counted(monkeypatch), []
    convert(folder, out, "Q4_K_M", progress=lambda *call: first.append(call))
    assert hashes(out) == hashes(whole)
    n_slices = len(names)
    convert(folder, tmp_path / "again", "Q4_K_M")
    assert n_slices < len(names) - n_slices, "nothing was taken over"
    done, total, what = first[0]
    assert done >= min(share, 0.9) * total - total * 0.3 and what == "going on where it stopped"


def test_killed_twice(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "whole", "Q4_K_M")
    for share in (0.2, 0.6):
        killed(folder, tmp_path / "out", share)
    convert(folder, tmp_path / "out", "Q4_K_M")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def other_weights(folder: Path, out: Path) -> None:
    tensors = tiny_tensors("deepseek2", "plain")
    tensors["model.layers.1.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"] * 2
    write_safetensors(folder / "model.safetensors", tensors)


def cut_off(folder: Path, out: Path) -> None:
    for part in out.iterdir():
        os.truncate(part, part.stat().st_size - 5)


def emptied(folder: Path, out: Path) -> None:
    for part in out.iterdir():
        os.truncate(part, 0)


def other_config(folder: Path, out: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"model_type"', '"unused": 1, "model_type"'))


@pytest.mark.parametrize("change", [other_weights, cut_off, emptied, other_config])
def test_what_does_not_fit_any_more_is_not_used(
    change: Callable[[Path, Path], None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed(folder, out, 0.6)
    change(folder, out)
    names = counted(monkeypatch)
    convert(folder, out, "Q4_K_M")
    n_slices = len(names)
    convert(folder, tmp_path / "whole", "Q4_K_M")
    assert n_slices == len(names) - n_slices
    assert hashes(out) == hashes(tmp_path / "whole")


def test_interrupted_after_much_work_says_what_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer, "KEPT_BYTES", 1)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt) as interrupted:
        convert(folder, out, "Q4_K_M", progress=interrupt)
    (note,) = interrupted.value.__notes__
    assert "are done and kept in" in note and str(out) in note
    calls: list[tuple[int, int, str]] = []
    convert(folder, out, "Q4_K_M", progress=lambda *call: calls.append(call))
    assert calls[0][0] > calls[0][1] // 2
    convert(folder, tmp_path / "whole", "Q4_K_M")
    assert hashes(out) == hashes(tmp_path / "whole")


def test_a_running_one_is_not_taken_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, inner = tmp_path / "out", []

    def once(done: int, total: int, name: str) -> None:
        if not inner and done > total // 2:
            inner.append(convert(folder, out, "Q4_K_M"))

    convert(folder, tmp_path / "whole", "Q4_K_M")
    with pytest.raises(writer.OutputExists):
        convert(folder, out, "Q4_K_M", progress=once)
    assert hashes(out) == hashes(tmp_path / "whole")


def test_a_connection_that_breaks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "KEPT_BYTES", 1)
    with hub(folder, monkeypatch, tmp_path / "cache") as server:
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between huggingface_hub's own tries
        convert(f"hf://{REPOSITORY}", tmp_path / "whole")
        n_answers = len(server.sent)
        server.hang_up_after = sum(file.endswith(".safetensors") for file, *_ in server.sent) - 20
        server.sent.clear()
        with pytest.raises(HubFailed, match="cannot be read from") as broken:
            convert(f"hf://{REPOSITORY}", tmp_path / "out")
        assert "goes on from there" in broken.value.__notes__[0]
        server.hang_up_after = None
        server.sent.clear()
        result = convert(f"hf://{REPOSITORY}", tmp_path / "out")
        assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
        assert len(server.sent) < n_answers and result.read_bytes == server.n_sent()
