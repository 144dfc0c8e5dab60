"""Faults by injection: whatever the system refuses, and whenever a process is killed, every file is the old one or the new one.

faults.c lets the nth system call fail or kills the process there; fault_runs.py does so for each n. FAULTS_ALL=1 strikes
more of the calls that read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from conftest import PairOf
from models import write_pair
from served import TEMPLATE, served

from llama_sidecar.converter import convert
from llama_sidecar.converter.edit import merge
from llama_sidecar.converter.errors import BadShard
from llama_sidecar.runtime import load
from llama_sidecar.runtime.cache_folder import CacheFolder
from llama_sidecar.sidecars import LlamaSidecarError, whole_file
from llama_sidecar.sidecars.errors import TruncatedFile

TESTS = Path(__file__).parent
FILES = ("convert", "split", "merge", "graft", "requant", "compact")
KEPT = ("session", "conversation", "head", "counts", "costs")
TRIALS = [
    *((name, what) for name in (*FILES, *KEPT) for what in ("kill", "full", "refused")),
    *((name, "unreadable") for name in (*FILES, "head", "counts")),
]


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("Linux, and a C compiler")
    library: Path = tmp_path_factory.mktemp("faults") / "faults.so"
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", library, TESTS / "faults.c", "-ldl"], check=True)
    return library


@pytest.mark.parametrize(("name", "what"), TRIALS, ids=["-".join(trial) for trial in TRIALS])
def test_files_are_old_or_new(faults: Path, name: str, what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TESTS / "fault_runs.py", name, what, tmp_path / "trials"],
        env={**os.environ, "LD_PRELOAD": str(faults)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1, "nothing was struck"


# What the user sees


def command(
    faults: Path, fault: str, *arguments: str | Path, sorts: str = ""
) -> subprocess.CompletedProcess[str]:
    """The command line with a fault, spelled as faults.c says."""
    environment = {**os.environ, "LD_PRELOAD": str(faults), "FAULTS": fault, "FAULTS_SORTS": sorts}
    run = [sys.executable, "-m", "llama_sidecar.scripts", *map(str, arguments)]
    return subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("number", "sorts", "said"),
    [
        (errno.ENOSPC, "w", "the disk of {out} filled up while the files were written: free some space"),
        (errno.EDQUOT, "w", "the disk of {out} filled up"),
        (errno.EIO, "f", "{out} cannot be written: Input/output error"),
        (errno.EACCES, "o", "{out} cannot be written: Permission denied"),
        (errno.EROFS, "m", "{out} cannot be written: Read-only file system"),
    ],
    ids=["full", "quota", "disk", "permission", "read-only"],
)
def test_a_conversion_that_cannot_write_says_so_in_one_line(
    faults: Path, number: int, sorts: str, said: str, tmp_path: Path
) -> None:
    checkpoint, out = make_checkpoint(tmp_path, "qwen35", "tied"), tmp_path / "out"
    done = command(faults, f"e{number} 1 {out}", "convert", checkpoint, "--out", out, sorts=sorts)
    assert done.returncode == 1
    assert said.format(out=out) in one_error(done)
    assert not out.exists()


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The line with which a command gave up."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


@pytest.mark.parametrize("name", ["split", "merge", "graft", "requant"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=["full", "permission"])
def test_a_command_on_files_that_cannot_write_says_so_in_one_line(
    faults: Path, name: str, number: int, pair_of: PairOf, tmp_path: Path
) -> None:
    pair, out = pair_of("T"), tmp_path / "out"
    if name == "split":
        whole = write_pair(tmp_path, recurrent=False, layers=1, embedded=True).main
        arguments: list[str | Path] = [whole, "--out", out]
    elif name == "merge":
        arguments = [pair.main, pair.sidecar, "--out", out / "whole.gguf"]
    else:
        arguments = [pair.sidecar, *([pair.main] if name == "graft" else ["--type", "Q8_0"]), "--out", out]
    sorts = "w" if number == errno.ENOSPC else "o"
    line = one_error(command(faults, f"e{number} 1 {out}", name, *arguments, sorts=sorts))
    assert str(out) in line and ("filled up" if number == errno.ENOSPC else "Permission denied") in line
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize("name", ["inspect", "run", "requant", "convert"])
def test_a_file_that_may_not_be_read_is_one_line(
    faults: Path, name: str, pair_of: PairOf, tmp_path: Path
) -> None:
    arguments: dict[str, list[str | Path]] = {
        "inspect": [pair_of("T").main],
        "run": [pair_of("T").main, "-p", "x", "-n", "1"],
        "requant": [pair_of("T").sidecar, "--type", "Q8_0", "--out", tmp_path / "out"],
    }
    if name == "convert":
        arguments[name] = [make_checkpoint(tmp_path, "qwen35", "tied"), "--out", tmp_path / "out"]
    source = Path(arguments[name][0])
    folder = source if source.is_dir() else source.parent
    line = one_error(command(faults, f"e{errno.EACCES} 1 {folder}", name, *arguments[name], sorts="O"))
    assert str(folder) in line and "Permission denied" in line
    assert not (tmp_path / "out").exists()


SHORT_TEXT = ["-p", "def f", "-n", "8", "--temp", "0", "--threads", "1", "--ctx", "128"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_without_a_cache_the_text_is_the_same(
    faults: Path, number: int, pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is read-only, full or somebody else's costs time, never a text."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(cache))
    options = ["run", pair_of("R", "Q8_0").main, *SHORT_TEXT]
    plain = command(faults, "c 1 /nowhere", *options)
    shutil.rmtree(cache)
    done = command(faults, f"e{number} 1 {cache}", *options, sorts="owtfrlm")
    assert plain.returncode == done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout and "Traceback" not in done.stderr
    assert not cache.exists()


def test_two_programs_share_an_empty_cache(pair_of: PairOf, tmp_path: Path) -> None:
    """Both measure, cut a head and count at once; what they leave serves a third."""
    environment = {**os.environ, "LLAMA_SIDECAR_CACHE": str(tmp_path)}
    options = [*SHORT_TEXT, "--draft-vocab", "128"]
    run = [sys.executable, "-m", "llama_sidecar.scripts", "run", pair_of("R", "Q8_0").main, *options]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    texts = []
    for programs in ([start(), start()], [start()]):
        for program in programs:
            text, said = program.communicate(timeout=300)
            assert program.returncode == 0 and "Traceback" not in said and "error" not in said, said
            texts.append(text)
    assert texts[0] and len(set(texts)) == 1
    assert {entry.sort for entry in CacheFolder(tmp_path).entries()} >= {"heads", "counts", "hashes", "costs"}
    assert not list(tmp_path.rglob(".*.part"))


def test_a_server_lives_with_faults(faults: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form of scripts/dev/soak.py --faults: every third call that concerns the cache fails, with stops in between."""
    pytest.importorskip("starlette")
    soak = runpy.run_path(str(TESTS.parent / "scripts" / "dev" / "soak.py"))
    for name, value in soak["with_faults"](tmp_path).items():
        monkeypatch.setenv(name, value)
    main = write_pair(tmp_path, template=TEMPLATE).main
    options = ("--slots", "4", "--queue", "8", "--ctx", "1024", "--depth", "2", "--threads", "1")
    with served(main, *options) as server:
        with soak["naps"](server.process.pid):
            report = soak["soak"](server, n_requests=60, n_clients=6)
        assert [found for found in report.problems() if "memory" not in found] == [], report
        assert server.process.poll() is None
    assert not any("Traceback" in line for line in server.log)


# Files that change while they are read


def test_a_checkpoint_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    checkpoint, out = make_checkpoint(tmp_path, "qwen35", "tied"), tmp_path / "out"
    (weights,) = checkpoint.glob("*.safetensors")

    def shrink(done: int, total: int, name: str) -> None:
        os.truncate(weights, 10_000)

    with pytest.raises(BadShard, match="while it was read: it was changed or cut"):
        convert(checkpoint, out, progress=shrink)
    assert not out.exists()


def test_a_model_that_shrinks_while_it_is_read(pair_of: PairOf, tmp_path: Path) -> None:
    pair = pair_of("T")
    main = Path(shutil.copy(pair.main, tmp_path / "main.gguf"))

    def shrink(done: int, total: int, name: str) -> None:
        os.truncate(main, main.stat().st_size // 2)

    with pytest.raises(TruncatedFile, match="became shorter while"):
        merge(main, pair.sidecar, tmp_path / "whole.gguf", progress=shrink)
    assert list(tmp_path.iterdir()) == [main]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names the file by /proc")
@pytest.mark.parametrize("shrunk", ["main", "sidecar"])
def test_a_server_lives_on_when_its_model_shrinks(shrunk: str, pair_of: PairOf, tmp_path: Path) -> None:
    """llama.cpp has mapped it: what it computes from then on is nobody's answer, and the server says so for as long as it lives."""
    folder = Path(shutil.copytree(pair_of("R", "Q8_0").main.parent, tmp_path / "mödels"))
    main = folder / pair_of("R", "Q8_0").main.name
    file = {"main": main, "sidecar": folder / pair_of("R", "Q8_0").sidecar.name}[shrunk]
    with served(
        main, "--ctx", "256", "--threads", "2", "--kernels", "stock", "--draft-vocab", "full"
    ) as server:
        ask = {"prompt": "def f", "max_tokens": 4, "ignore_eos": True}
        assert server.request("/v1/completions", ask)[0] == server.request("/health")[0] == 200
        os.truncate(file, 4096)
        for _ in range(2):
            status, body, _ = server.request("/v1/completions", ask)
            message = body["error"]["message"]
            assert status == 500 and message.startswith(f"{file} became shorter while it was in use")
        assert server.request("/health")[:2] == (503, body)
    assert server.process.returncode == 0
    assert [line for line in server.log if "a request failed" in line and str(file) in line], server.log
    assert not any("Traceback" in line for line in server.log)


SHRINK = """
import os, sys
from llama_sidecar.runtime import session
from llama_sidecar.scripts.__main__ import main
prefill = session.Generation._prefill
def shrink(*arguments):
    os.truncate(sys.argv[2], 4096)
    return prefill(*arguments)
session.Generation._prefill = shrink
main()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names the file by /proc")
@pytest.mark.parametrize(("name", "code"), [("run", 1), ("bench", 1), ("verify", 2)])
def test_a_command_ends_in_one_line_when_its_model_shrinks(
    name: str, code: int, pair_of: PairOf, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pair_of("T").main.parent, tmp_path / "models"))
    main = folder / pair_of("T").main.name
    options = ["-n", "8", "--ctx", "256", "--threads", "2", "--kernels", "stock"]
    done = subprocess.run(
        [sys.executable, "-c", SHRINK, name, str(main), *options],
        input="def f",
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith(f"error: {main} became shorter while it was in use"), done
    assert done.returncode == code and "Traceback" not in done.stderr


@pytest.mark.parametrize("handled", [False, True])
def test_a_bus_error_that_is_somebody_elses(handled: bool) -> None:
    """Sent by another process it ends this one as ever; a handler that is there already stays."""
    first = "signal.signal(signal.SIGBUS, lambda *_: sys.exit(9));" if handled else ""
    text = "import os, signal, sys; from llama_sidecar.runtime import _native;"
    text += f"{first}_native.survive_bus_errors(); os.kill(os.getpid(), signal.SIGBUS)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == (9 if handled else -signal.SIGBUS)
    assert done.stderr.startswith("" if handled else "\nerror: a file that is in use became shorter")
    assert done.stderr.count("\n") == (0 if handled else 2)


# The cache


NUMBERS: dict[str, Any] = {
    "googols": 10**400,
    "infinite": math.inf,
    "negative": -1,
    "lists": [[]],
    "texts": "x",
}


def _numbers_changed(tree: Any, value: Any) -> Any:
    """A JSON tree with another value for each of its numbers, but for the schema's."""
    if isinstance(tree, dict):
        return {name: v if name == "schema" else _numbers_changed(v, value) for name, v in tree.items()}
    if isinstance(tree, list):
        return [_numbers_changed(v, value) for v in tree]
    return value if type(tree) in (int, float) else tree


def _damaged(data: bytes, damage: str, is_json: bool) -> bytes:
    if damage in NUMBERS:
        return json.dumps(_numbers_changed(json.loads(data), NUMBERS[damage])).encode() if is_json else data
    return {
        "empty": b"",
        "zeros": bytes(len(data)),
        "half": data[: len(data) // 2],
        "noise": os.urandom(len(data)),
        "deep": b"[" * 100_000,
    }[damage]


@pytest.mark.parametrize("damage", ["empty", "zeros", "half", "noise", "deep", *NUMBERS])
def test_a_cache_of_damaged_files_is_none(
    damage: str, pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a power failure or a bad disk leaves it, or somebody's editor."""
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path))
    options = {"ctx": 128, "threads": 1, "learn": True, "draft_vocab": 128}

    def text() -> list[int]:
        with load(pair_of("R", "Q8_0").main, **options) as model:
            running = model.generate("def f", max_tokens=8, temperature=0, ignore_eos=True)
            running.read()
            return running.tokens

    expected = text()
    kept = [entry.path for entry in CacheFolder().entries()]
    assert {path.parent.name for path in kept} >= {"heads", "counts", "hashes", "costs"}
    for path in kept:
        path.write_bytes(_damaged(path.read_bytes(), damage, is_json=path.suffix == ".json"))
    assert text() == expected


# A file that appears whole or not at all


def test_a_writer_that_lives_is_not_taken_for_one_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    with whole_file.writing(path) as first:
        first.write(b"first")
        with whole_file.writing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    left = whole_file.part_of(path, "1")
    left.write_text("half")
    whole_file.part_of(tmp_path / "other", "1").write_text("half")
    whole_file.sweep(tmp_path, path.name)
    assert {entry.name for entry in tmp_path.iterdir()} == {"notes", ".other.1.part"}
    whole_file.sweep(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]


def test_an_error_within_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("old")
    with pytest.raises(LlamaSidecarError), whole_file.writing(path) as file:
        file.write(b"new")
        raise LlamaSidecarError("no")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
