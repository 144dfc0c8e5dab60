"""What a model takes is compared with what is left before anything is loaded; what is said to fit does."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import PairOf

from llama_sidecar.runtime import LoadError, load, memory, placement
from llama_sidecar.runtime.memory import Room, available, largest_ctx
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import memory as estimates
from llama_sidecar.sidecars import open_sidecar

GROWTH = """
import json, sys
from pathlib import Path
from llama_sidecar.runtime import load
from llama_sidecar.runtime.library import llama

def resident():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS"].split()[0])

llama()
before = resident()
with load(sys.argv[1], threads=1, **json.loads(sys.argv[2])) as model:
    model.generate(list(range(3, 250)), max_tokens=16, temperature=0, ignore_eos=True).read()
    found = model.memory_plan.at(model.n_ctx)
    print(json.dumps([found.total, found.buffers, resident() - before]))
"""
NEAR_BYTES = (
    64 << 20
)  # of what a tiny model takes: what a first load measures costs and kernels with is in it, too


def left(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(memory, "available", lambda: Room(n_bytes, "this machine's memory"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("options", [{}, {"ctx": 32768}, {"spec_type": "none", "ctx": 32768}])
@pytest.mark.parametrize("letter", ["R", "T"])
def test_a_model_takes_what_was_said(pair_of: PairOf, letter: str, options: dict[str, object]) -> None:
    command = [sys.executable, "-c", GROWTH, str(pair_of(letter).main), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said, buffers, grown = json.loads(done.stdout)
    assert grown < 1.1 * said + NEAR_BYTES
    assert said - buffers < 1.1 * grown + NEAR_BYTES, "a short prompt touches a part of the buffers"


def test_too_little_memory_is_refused_with_a_context_that_fits(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = pair_of("T").main
    with load(main, ctx=64, threads=1) as model:
        plan = model.memory_plan
    room = plan.at(8192).total
    left(monkeypatch, room)
    with pytest.raises(LoadError, match="would fit") as refusal:
        load(main, ctx=1 << 20, threads=1)
    text = str(refusal.value)
    assert (
        "\n" not in text and main.name in text and "keys and values" in text and "--no-memory-check" in text
    )
    fits = re.search(r"--ctx (\d+)", text)
    assert fits
    with load(main, ctx=int(fits[1]), threads=1) as model:
        assert model.memory_plan.at(model.n_ctx).total <= room
    with pytest.raises(LoadError, match="would fit"):
        load(main, ctx=int(fits[1]) + 256, threads=1)


def test_each_way_out_that_is_named_is_one(pair_of: PairOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options as the command line takes them: narrower keys and values, no drafts, a smaller context."""
    main = pair_of("T").main
    with load(main, ctx=64, threads=1) as model:
        plan, n_ctx = model.memory_plan, 65536
    seen = set()
    for way in (plan.quantised(), plan.plain(), plan.quantised().plain()):
        left(monkeypatch, way.at(n_ctx).total)
        with pytest.raises(LoadError, match="would fit") as refusal:
            memory.check("main.gguf", plan, n_ctx)
        advice = (
            str(refusal.value).partition(" are left of ")[2].partition(": ")[2].partition(" would fit")[0]
        )
        for words in map(shlex.split, advice.split(" or ")):
            seen.update(words)
            chosen = plan.quantised() if "-ctk" in words else plan
            chosen = chosen.plain() if "--no-spec" in words else chosen
            size = int(words[words.index("--ctx") + 1]) if "--ctx" in words else n_ctx
            assert chosen.at(size).total <= way.at(n_ctx).total, words
    assert {"--ctx", "-ctk", "--no-spec"} <= seen


def test_a_model_that_cannot_fit_says_so_and_loads_where_it_is_told_to(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = pair_of("T").main
    left(monkeypatch, 1000)
    with pytest.raises(LoadError, match="needs smaller weights"):
        load(main, ctx=64, threads=1)
    with load(main, ctx=64, threads=1, memory_check=False) as model:
        assert model.generate("x", max_tokens=2, temperature=0).read()


def test_the_automatic_context_is_the_largest_that_fits(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = pair_of("T").main
    with load(main, ctx=64, threads=1) as model:
        plan = model.memory_plan
        most = plan.main.trained_ctx
    left(monkeypatch, int(plan.at(512).total / memory.AUTO_SHARE) + 1)
    with load(main, ctx="auto", threads=1) as model:
        assert model.n_ctx == 512 and model.session().n_ctx == 512
    left(monkeypatch, 1 << 40)
    with load(main, ctx="auto", threads=1) as model:
        assert model.n_ctx == most
    with pytest.raises(LoadError, match="context length 'all'"):
        load(main, ctx="all", threads=1)


def test_the_automatic_context_pushes_no_layer_off_a_gpu(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has room for all of the model's context, the GPU not."""
    pair = pair_of("T")
    free = 0
    monkeypatch.setattr(
        placement, "gpus", lambda: [placement.Gpu("GPU0", placement.GPU_RESERVE_BYTES + free)]
    )
    monkeypatch.setattr(placement, "DEFAULT_CTX", 256)
    left(monkeypatch, 1 << 40)
    with load(pair.main, ctx=64, threads=1) as model:
        sidecar, most = open_sidecar(pair.sidecar), model.memory_plan.main.trained_ctx
        while model._place(sidecar, 1024) != placement.ALL_LAYERS:
            free += 1 << 17
        assert model._place(sidecar, most) != placement.ALL_LAYERS
    with load(pair.main, ctx="auto", threads=1) as model:
        assert model.gpu_layers == placement.ALL_LAYERS and 1024 <= model.n_ctx < most
        assert model._place(sidecar, model.n_ctx) == placement.ALL_LAYERS


def test_where_the_system_does_not_say_what_is_left_everything_fits(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: None)
    with load(pair_of("T").main, ctx="auto", threads=1) as model:
        assert model.n_ctx == min(model.memory_plan.main.trained_ctx, 8192)


def test_one_session_more_is_refused_where_it_does_not_fit(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(pair_of("T").main, ctx=256, threads=1) as model:
        needed = model.memory_plan.at(256).session
        left(monkeypatch, needed)
        with model.session():
            pass
        left(monkeypatch, needed - 1)
        with pytest.raises(LoadError, match="a session of 256 tokens takes about"):
            model.session()


def test_layers_on_a_gpu_are_not_in_this_machine_s_memory(pair_of: PairOf) -> None:
    from dataclasses import replace

    with load(pair_of("T").main, ctx=256, threads=1) as model:
        plan = model.memory_plan
    sizes = [replace(plan, n_gpu_layers=n).at(256).total for n in (0, 1, 2, 999)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[-1]


def test_the_command_line_takes_a_word_or_a_number(pair_of: PairOf) -> None:
    run = CliRunner().invoke(cli, ["run", str(pair_of("T").main), "-p", "x", "--ctx", "most"])
    assert run.exit_code == 2 and "neither a number of tokens nor auto" in run.output


# What is left


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       16000 kB\nMemAvailable:    8000 kB\n"}


def test_linux_says_what_is_available(tmp_path: Path) -> None:
    assert available(write(tmp_path, MEMINFO)) == Room(8000 * 1024, "this machine's memory")


def test_nothing_is_known_where_nobody_says(tmp_path: Path) -> None:
    assert available(tmp_path) is None


def test_a_control_group_limits_what_is_left_and_so_do_those_above_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/job"
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/user/job\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "300\n",
            "sys/fs/cgroup/user/memory.max": "4000000\n",
            "sys/fs/cgroup/user/memory.current": "3000000\n",
            "sys/fs/cgroup/user/memory.stat": "anon 5\nactive_file 100\ninactive_file 20\n",
        },
    )
    room = available(root)
    assert room == Room(1_000_120, "the control group's limit of 4 MB")


def test_control_groups_of_version_1_are_asked_too(tmp_path: Path) -> None:
    """In a container the path is the host's, and what is mounted is the group itself."""
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000\n",
            "sys/fs/cgroup/memory/memory.stat": "active_file 7\ntotal_active_file 100\n",
        },
    )
    room = available(root)
    assert room and room.n_bytes == 500_100
    write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert available(root) == Room(8000 * 1024, "this machine's memory"), "no limit at all"


def test_a_model_s_own_context_need_not_be_a_multiple() -> None:
    assert largest_ctx(lambda n_ctx: n_ctx, 10_000, 1000) == 1000
    assert largest_ctx(lambda n_ctx: n_ctx, 900, 1000) == 768
    assert largest_ctx(lambda n_ctx: n_ctx, 255, 1000) is None


@pytest.mark.parametrize("module", [memory, estimates], ids=lambda m: m.__name__)
def test_examples_in_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
