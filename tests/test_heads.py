"""Compact heads in the cache folder: made once, made anew when anything is off, within bounds, and never a reason to fail."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import numpy as np
import pytest
from click.testing import CliRunner

from llama_sidecar.runtime import cache_folder, heads
from llama_sidecar.runtime.cache_folder import CacheFolder
from llama_sidecar.runtime.errors import CacheError, HeadsUnavailable
from llama_sidecar.scripts.cache import command
from llama_sidecar.sidecars import MainFile, Sidecar, compact, open_main, open_sidecar

N_VOCAB, N_ROWS = 1024, 512


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> models.Pair:
    return models.write_pair(tmp_path_factory.mktemp("pair"), n_vocab=N_VOCAB)


@pytest.fixture
def sidecar(pair: models.Pair) -> Sidecar:
    return open_sidecar(pair.sidecar)


@pytest.fixture
def main(pair: models.Pair) -> MainFile:
    return open_main(pair.main)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(folder))
    return folder


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The heads written, in order."""
    written: list[Path] = []
    real = compact.write_compact

    def write(source: Sidecar, rows: object, path: Path, **options: object) -> None:
        written.append(path)
        real(source, rows, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(compact, "write_compact", write)
    yield written


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def make(source: Sidecar | MainFile, n_rows: int = N_ROWS, counts: heads.Counts | None = None) -> Path:
    return heads.compact_head(source, n_rows=n_rows, counts=counts)


def test_a_head_is_made_once_and_found_again(sidecar: Sidecar, cache: Path, writes: list[Path]) -> None:
    seen: list[tuple[int, int, str]] = []
    path = heads.compact_head(sidecar, n_rows=N_ROWS, progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] > 0
    assert path.parent == cache / "heads" and path.name.startswith(f"compact-main-{N_ROWS}-")
    small = compact.open_compact(path)
    assert small.source == compact.content_hash(sidecar)
    assert np.array_equal(small.target_ids, np.arange(N_ROWS))
    assert make(sidecar) == path and writes == [path]
    assert make(sidecar, 256) != path and len(writes) == 2
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_large_vocabularies_are_cut_by_themselves_and_small_ones_are_not(
    tmp_path: Path, sidecar: Sidecar, cache: Path
) -> None:
    with pytest.raises(HeadsUnavailable, match="1,024 tokens is drafted whole"):
        heads.compact_head(sidecar)
    with pytest.raises(HeadsUnavailable, match="drafted whole"):
        make(sidecar, N_VOCAB)
    assert not cache.exists()
    large = open_sidecar(models.write_pair(tmp_path, layers=1, n_vocab=66_000).sidecar)
    assert len(compact.open_compact(heads.compact_head(large)).target_ids) == 32_768


def test_the_head_inside_a_main_file(tmp_path: Path, cache: Path) -> None:
    pair = models.write_pair(tmp_path, n_vocab=N_VOCAB, embedded=True)
    from_main, from_sidecar = make(open_main(pair.main)), make(open_sidecar(pair.sidecar))
    assert from_main == from_sidecar  # the same head by content, whatever file it is in
    with pytest.raises(HeadsUnavailable, match="no head"):
        make(open_main(models.write_pair(tmp_path / "plain", n_vocab=N_VOCAB).main))


def other_source(path: Path, sidecar: Sidecar) -> None:
    compact.write_compact(sidecar, range(N_ROWS), path, source_hash="0" * 64)


def other_rows(path: Path, sidecar: Sidecar) -> None:
    compact.write_compact(sidecar, range(1, N_ROWS + 1), path)


def other_types(path: Path, sidecar: Sidecar) -> None:
    compact.write_compact(sidecar, range(N_ROWS), path)  # as versions did that copied every type


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, _: path.unlink(),
        lambda path, _: path.write_bytes(path.read_bytes()[:-1000]),
        lambda path, _: path.write_bytes(b""),
        lambda path, sidecar: path.write_bytes(sidecar.path.read_bytes()),
        other_source,
        other_rows,
        other_types,
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_made_anew(
    damage: Callable[[Path, Sidecar], None], sidecar: Sidecar, cache: Path
) -> None:
    path = make(sidecar)
    good = path.read_bytes()
    damage(path, sidecar)
    assert make(sidecar) == path and path.read_bytes() == good


def test_content_is_hashed_once_until_the_file_changes(
    pair: models.Pair, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mtp-main.gguf"
    path.write_bytes(pair.sidecar.read_bytes())
    hashed: list[Path] = []
    real = compact.content_hash

    def content_hash(source: Sidecar) -> str:
        hashed.append(source.path)
        return real(source)

    monkeypatch.setattr(compact, "content_hash", content_hash)
    first = make(open_sidecar(path))
    assert make(open_sidecar(path)) == first and len(hashed) == 1
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    second = make(open_sidecar(path))
    assert len(hashed) == 2 and second != first
    for memo in (cache / "hashes").iterdir():
        memo.write_text("[]")
    assert make(open_sidecar(path)) == second and len(hashed) == 3


# Rows that follow what is written.


def test_rows_follow_the_counts_only_where_that_gains_something(
    sidecar: Sidecar, main: MainFile, cache: Path, writes: list[Path]
) -> None:
    fixed = make(sidecar, counts=heads.counts_for(main))
    heads.add_counts(main, [900] * (heads.MIN_COUNTED - 1))
    assert make(sidecar, counts=heads.counts_for(main)) == fixed  # too few to tell
    heads.add_counts(main, [900, 5])
    learned = make(sidecar, counts=heads.counts_for(main))
    assert learned != fixed and learned.name.endswith("-learned.gguf")
    assert 900 in compact.open_compact(learned).target_ids
    heads.add_counts(main, [901])  # one in a thousand: the file stays
    assert make(sidecar, counts=heads.counts_for(main)) == learned and len(writes) == 2
    heads.add_counts(main, [902] * 500)  # a third of all: written anew
    assert make(sidecar, counts=heads.counts_for(main)) == learned and len(writes) == 3
    assert {900, 902} <= set(compact.open_compact(learned).target_ids.tolist())
    heads.add_counts(main, [7] * 200_000)  # rows in merge order cover this too
    assert make(sidecar, counts=heads.counts_for(main)) == fixed
    assert make(sidecar) == fixed


def test_counts_are_kept_per_trunk_and_fade(
    main: MainFile, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heads.counts_for(main).tolist() == [0] * N_VOCAB
    heads.add_counts(main, [3, 3, N_VOCAB - 1])
    heads.add_counts(main, np.array([3]))
    heads.add_counts(main, [])
    counts = heads.counts_for(main)
    assert counts.dtype == np.uint32 and (counts[3], counts[N_VOCAB - 1], counts.sum()) == (3, 1, 4)
    other = open_main(models.write_pair(tmp_path / "other", n_vocab=N_VOCAB, seed=1).main)
    assert heads.counts_for(other).sum() == 0
    monkeypatch.setattr(heads, "MAX_COUNTED", 10)
    heads.add_counts(main, [3] * 10)
    assert (heads.counts_for(main)[3], heads.counts_for(main).sum()) == (6, 6)
    (kept,) = (cache / "counts").iterdir()
    assert kept.stat().st_size == 4 * N_VOCAB
    kept.write_bytes(b"cut")
    assert heads.counts_for(main).sum() == 0


def test_counts_of_several_threads_add_up(main: MainFile, cache: Path) -> None:
    def count() -> None:
        for _ in range(5):
            heads.add_counts(main, [1, 2])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heads.counts_for(main)[1:3].tolist() == [20, 20]
    assert files(cache / "counts") == [f"{str(main.trunk)[:32]}.u32"]


# Other processes.

PROGRAM = """
import sys, time
from pathlib import Path
from llama_sidecar.runtime import heads
from llama_sidecar.sidecars import open_sidecar
steps, (action, source, go) = [], sys.argv[1:]

def progress(*step):
    steps.append(step)
    if action == "hang":
        print("writing", flush=True)
        time.sleep(60)

sidecar = open_sidecar(source)
print("ready", flush=True)
while not Path(go).exists():
    time.sleep(0.01)
print(heads.compact_head(sidecar, n_rows=512, progress=progress), bool(steps))
"""


def start(action: str, source: Path, go: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, action, str(source), str(go)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_two_processes_that_want_the_same_head_make_one(
    pair: models.Pair, cache: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    processes = [start("make", pair.sidecar, go) for _ in range(2)]
    go.touch()
    printed = [process.communicate(timeout=60)[0].split() for process in processes]
    assert printed[0][0] == printed[1][0]
    assert sorted(made for _, made in printed) == ["False", "True"]
    assert len(files(cache / "heads")) == 1


def test_a_killed_writer_leaves_nothing_wrong(
    pair: models.Pair, sidecar: Sidecar, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    process = start("hang", pair.sidecar, tmp_path / "go")
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    with pytest.raises(CacheError, match=r"heads\.lock"), CacheFolder().locked("heads", timeout_s=0.1):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = files(cache / "heads")
    assert left.endswith(".part")
    path = make(sidecar)
    assert files(cache / "heads") == [path.name]


# Bounds and refusals.


def test_the_least_recently_used_heads_go_first(
    sidecar: Sidecar, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make(sidecar, n_rows) for n_rows in (64, 128, 192)]
    for i, path in enumerate(paths):
        os.utime(path, (1000 + i, 1000 + i))
    make(sidecar, 64)  # used: now the youngest
    total = sum(entry.n_bytes for entry in CacheFolder().entries())
    monkeypatch.setattr(cache_folder, "MAX_BYTES", total)
    newest = make(sidecar, 256)
    assert not paths[1].exists() and paths[0].exists() and newest.exists()
    monkeypatch.setattr(cache_folder, "MAX_BYTES", 1)
    only = make(sidecar, 320)
    assert files(cache / "heads") == [only.name]  # larger than all that is allowed, but just made


def test_what_a_prediction_keeps_is_listed_and_cleared_and_never_trimmed(
    sidecar: Sidecar, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache / "predict" / "Qwen3.5-0.8B-random-Q8_0.gguf"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(1000))
    (kept.parent / "mine.gguf").write_text("mine")
    monkeypatch.setattr(cache_folder, "MAX_BYTES", 1)
    make(sidecar)
    assert kept.exists()
    assert ("predict", kept) in [(entry.sort, entry.path) for entry in CacheFolder().entries()]
    CacheFolder().clear()
    assert files(cache / "predict") == ["mine.gguf"]


def test_the_number_of_files_is_bounded(
    sidecar: Sidecar, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "MAX_FILES", 2)
    for n_rows in (64, 128, 192):
        os.utime(make(sidecar, n_rows), (n_rows, n_rows))
    assert [entry.path.name[:16] for entry in CacheFolder().entries() if entry.sort == "heads"] == [
        "compact-main-128",
        "compact-main-192",
    ]


def test_a_folder_that_cannot_be_used_is_one_line(sidecar: Sidecar, main: MainFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HeadsUnavailable, match="the cache cannot be used") as error:
            heads.compact_head(sidecar, n_rows=N_ROWS, cache_dir=folder)
        assert "\n" not in str(error.value)
        with pytest.raises(CacheError):
            heads.add_counts(main, [1], cache_dir=folder)
        assert heads.counts_for(main, cache_dir=folder).sum() == 0


def test_whether_anything_can_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder.problem() is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "Permission denied" in str(cache_folder.problem())
    cache.rename(cache.with_name("other"))
    cache.write_text("not a folder")
    assert "the cache cannot be used" in str(cache_folder.problem())

    def no_home() -> Path:
        raise RuntimeError("no home directory")

    for name in ("LLAMA_SIDECAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "no home folder" in str(cache_folder.problem())


def test_a_head_in_a_folder_that_cannot_be_written_is_used(
    sidecar: Sidecar, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(sidecar)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert make(sidecar) == path
    with pytest.raises(HeadsUnavailable, match="Permission denied"):
        make(sidecar, 64)


def test_folders_in_the_cache_are_left_alone(cache: Path) -> None:
    (cache / "heads" / "compact-x.gguf").mkdir(parents=True)
    (cache / "hashes").mkdir()
    (cache / "hashes" / "\x1b[31m\n.json").write_text("{}")
    result = CliRunner().invoke(command, ["list"], catch_exceptions=False)
    assert "\x1b" not in result.output and "1 files" in result.output
    assert [entry.path.parent.name for entry in CacheFolder(cache).clear()] == ["hashes"]
    assert (cache / "heads" / "compact-x.gguf").is_dir()


def test_a_full_disk_leaves_nothing(sidecar: Sidecar, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(HeadsUnavailable, match="No space left"):
            make(sidecar)
    assert files(cache / "heads") == []
    assert make(sidecar).exists()


def test_a_source_that_vanished_is_one_line(pair: models.Pair, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "mtp-main.gguf"
    path.write_bytes(pair.sidecar.read_bytes())
    sidecar = open_sidecar(path)
    path.unlink()
    with pytest.raises(HeadsUnavailable, match="No such file"):
        make(sidecar)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMA_SIDECAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder.default_root() == Path("/home/me/.cache/llama-sidecar")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder.default_root() == Path("/home/me/Library/Caches/llama-sidecar")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    assert cache_folder.default_root() == Path("/home/me/Library/Caches/llama-sidecar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder.default_root() == Path("/xdg/llama-sidecar")
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", "~/own")
    assert cache_folder.default_root() == Path("/home/me/own")


# The command.


def test_the_command_lists_and_clears_what_is_ours_alone(
    sidecar: Sidecar, main: MainFile, cache: Path
) -> None:
    path = make(sidecar)
    heads.add_counts(main, [1])
    (cache / "mine.txt").write_text("mine")
    (cache / "heads" / "mine.gguf").write_text("mine")
    (cache / "heads" / ".compact-x.gguf.1.part").write_text("left by a killed writer")
    listed = json.loads(CliRunner().invoke(command, ["list", "--json"]).output)
    assert (listed["schema"], listed["folder"], listed["max_bytes"]) == (1, str(cache), 4 << 30)
    assert {entry["sort"] for entry in listed["entries"]} == {"heads", "counts", "hashes"}
    assert {"sort": "heads", "name": path.name, "bytes": path.stat().st_size} in [
        {key: entry[key] for key in ("sort", "name", "bytes")} for entry in listed["entries"]
    ]
    assert listed["n_bytes"] == sum(entry["bytes"] for entry in listed["entries"])
    assert abs(listed["entries"][-1]["used_s"] - time.time()) < 60
    short = CliRunner().invoke(command, ["--json"])
    assert json.loads(short.output)["n_bytes"] == listed["n_bytes"]
    wrong = CliRunner().invoke(command, ["--json", "clear"])
    assert wrong.exit_code == 2 and "clear --json" in wrong.output
    plain = CliRunner().invoke(command, [])
    assert plain.exit_code == 0 and path.name[:20] in plain.output and "3 files" in plain.output
    cleared = json.loads(CliRunner().invoke(command, ["clear", "--json"]).output)
    assert (cleared["n_removed"], cleared["n_bytes"]) == (3, listed["n_bytes"])
    assert [name for name in files(cache) if not name.endswith(".lock")] == ["heads/mine.gguf", "mine.txt"]
    assert "0 files" in CliRunner().invoke(command, ["list"]).output
    assert "removed 0 files" in CliRunner().invoke(command, ["clear"]).output
