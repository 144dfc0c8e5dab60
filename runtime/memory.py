"""Whether a model fits before it is loaded: what it will take (sidecars/memory.py) against what this machine has left.

What is left is what Linux calls available, or what a control group leaves of its limit, the smaller of both; on macOS what vm_stat
counts as free or quickly freed. Knows no other system, and there everything fits. A file that is mapped counts in full, although
the system could read it again and again: a model that does so is no use. Knows nothing of what other programs will take.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llama_sidecar.sidecars.memory import (
    N_HEAD_BATCH,
    N_MODEL_BATCH,
    Contents,
    Context,
    Drafter,
    Memory,
    memory,
)

from .errors import LoadError
from .placement import CACHE_BITS, DEFAULT_CTX

AUTO_SHARE = 0.9  # of what is left that `--ctx auto` takes: other programs want some, too
MIN_CTX = 256  # tokens
STEP = 256  # cells, to which llama.cpp rounds a context up
NO_LIMIT = 1 << 60  # as control groups of version 1 say it
KV_OPTION, NO_DRAFTS = "-ctk q8_0 -ctv q8_0", "--no-spec"


@dataclass(frozen=True)
class Room:
    """Bytes that are left, and of what: for the message."""

    n_bytes: int
    of: str


def available(root: Path = Path("/")) -> Room | None:
    """What is left for a model; None where this system does not say.

    Args:
        root: of the file system that is asked; for tests.

    Example:
        >>> available().of                                                       # doctest: +SKIP
        "this machine's memory"
    """
    if platform.system() == "Darwin" and root == Path("/"):
        return _mac_room()
    rooms = [room for room in (_system_room(root), *_group_rooms(root)) if room]
    return min(rooms, key=lambda room: room.n_bytes, default=None)


def _system_room(root: Path) -> Room | None:
    found = re.search(r"^MemAvailable: *(\d+) kB", _text(root / "proc/meminfo"), re.M)
    return Room(int(found[1]) * 1024, "this machine's memory") if found else None


def _group_rooms(root: Path) -> Iterator[Room]:
    """What each control group that this process is in leaves of its limit, from its own up to the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            )
        else:
            continue
        own = base / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_dir() and (room := _group_room(folder, *names)):
                yield room
            if folder == base:
                break


def _group_room(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Room | None:
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not (limit.isdecimal() and usage.isdecimal()) or int(limit) >= NO_LIMIT:
        return None
    # Pages of files are in the usage, and given back when room is needed.
    files = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", _text(folder / "memory.stat"), re.M)
    left = int(limit) - int(usage) + sum(map(int, files))
    return Room(max(0, left), f"the control group's limit of {gigabytes(int(limit))}")


def _mac_room() -> Room | None:
    try:
        text = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return mac_room(text)


def mac_room(text: str) -> Room | None:
    """What macOS's vm_stat says is left.

    >>> mac_room("Mach Virtual Memory Statistics: (page size of 16384 bytes)\\nPages free: 10.\\nPages inactive: 5.\\n")
    Room(n_bytes=245760, of="this machine's memory")
    """
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable): *(\d+)", text, re.M)
    return Room(int(size[1]) * sum(map(int, pages)), "this machine's memory") if size and pages else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# Fitting


@dataclass(frozen=True)
class Plan:
    """How a model is to be loaded, as far as its memory goes; `at` says what that takes.

    Args:
        main: the main file.
        head: the file that drafts; None where nothing does, or what the main file has inside (then `embedded`).
        is_head: the drafter computes MTP blocks.
        borrows: it looks at the target's context.
        flash_attn: whether a context of so many cells has flash attention.
        cache_bits: of a key or value, the mean of both.
        n_gpu_layers: layers that are not in this machine's memory.
        n_checkpoints: states of recurrent layers that are kept beside the one at work.
    """

    main: Contents
    head: Contents | None
    embedded: bool
    is_head: bool
    borrows: bool
    depth: int
    paced: bool
    batch: int
    cache_bits: float
    flash_attn: Callable[[int], bool]
    n_gpu_layers: int = 0
    n_checkpoints: int = 0

    def at(self, n_ctx: int) -> Memory:
        """What it takes of this machine's memory with one session of `n_ctx` tokens."""
        flash_attn = self.flash_attn(n_ctx)
        n_batch = min(self.batch, n_ctx)
        n_slots = min(self.depth, max(0, n_batch - 2))
        target = Context(n_ctx, n_batch, self.depth + 1, n_slots, self.cache_bits, flash_attn)
        found = memory(
            self.main,
            target,
            self._drafter(n_ctx, flash_attn),
            two_contexts=self.paced,
            n_checkpoints=self.n_checkpoints,
        )
        return _on_host(found, self.n_gpu_layers, self.main.n_trunk)

    def _drafter(self, n_ctx: int, flash_attn: bool) -> Drafter | None:
        contents = self.head or (self.main if self.embedded else None)
        if contents is None:
            return None
        n_batch = N_HEAD_BATCH if self.is_head else N_MODEL_BATCH if self.borrows else self.batch
        n_batch = min(n_batch, n_ctx)
        n_outputs = n_batch if self.borrows and not self.is_head else 1
        return Drafter(
            contents,
            Context(n_ctx, n_batch, n_outputs, 0, self.cache_bits, flash_attn),
            range(contents.n_trunk if self.is_head else 0, contents.n_blocks),
            own_weights=not self.embedded,
            own_cache=not (self.borrows and self.is_head),
        )

    def quantised(self) -> Plan:
        """With keys and values in Q8_0, which needs flash attention."""
        return replace(self, cache_bits=CACHE_BITS["q8_0"], flash_attn=lambda n_ctx: True)

    def plain(self) -> Plan:
        """Without drafts."""
        return replace(self, head=None, embedded=False, depth=0, paced=False)


def _on_host(found: Memory, n_gpu: int, n_layers: int) -> Memory:
    """Without what is on a GPU: so many of the layers with their caches, the drafter, and what computes."""
    if not n_gpu:
        return found
    left = max(0.0, 1 - n_gpu / max(1, n_layers))
    main, main_cache, states = (int(left * n) for n in (found.main, found.main_cache, found.states))
    return replace(found, main=main, main_cache=main_cache, states=states, head=0, head_cache=0, buffers=0)


def largest_ctx(takes: Callable[[int], int], room: int, most: int) -> int | None:
    """The largest context of at most `most` tokens that fits, a multiple of 256 but for `most` itself; None: not even 256 do.

    `takes(n_ctx)` are the bytes at a context, which grow with it.

    >>> largest_ctx(lambda n_ctx: 100 * n_ctx, 120_000, 4096)
    1024
    """
    if takes(most) <= room:
        return most
    low, high = 0, -(-most // STEP)  # in steps; low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle * STEP) <= room else (low, middle)
    return low * STEP or None


def check(name: str, plan: Plan, n_ctx: int) -> None:
    """Raises LoadError where a context of `n_ctx` tokens does not fit beside the weights of `name`, with what would."""
    wanted, room = plan.at(n_ctx), available()
    if room is None or wanted.total <= room.n_bytes:
        return

    def fitting(way: Plan, most: int) -> int:
        return largest_ctx(lambda n_ctx: way.at(n_ctx).total, room.n_bytes, most) or 0

    others = {KV_OPTION: plan.quantised()} if plan.cache_bits > CACHE_BITS["q8_0"] else {}
    if plan.depth:
        others |= {NO_DRAFTS: plan.plain(), f"{KV_OPTION} {NO_DRAFTS}": plan.quantised().plain()}
    smaller = fitting(plan, n_ctx)
    ways = [f"--ctx {smaller}"] if smaller else []
    ways += [option for option, way in others.items() if fitting(way, n_ctx) == n_ctx][:2]
    if not ways:
        contexts = {option: fitting(way, n_ctx) for option, way in others.items()}
        ways = [f"{option} --ctx {n}" for option, n in contexts.items() if n][:1]
    advice = f"{' or '.join(ways)} would fit" if ways else "it needs smaller weights (another type, or model)"
    raise LoadError(
        f"{name} takes about {gigabytes(wanted.total)} with a context of {n_ctx:,} tokens ({account(wanted)}), and "
        f"{gigabytes(room.n_bytes)} are left of {room.of}: {advice}; --no-memory-check tries all the same"
    )


def auto_ctx(plan: Plan, *, on_gpu: Callable[[int], bool] = lambda n_ctx: True) -> int:
    """The largest context that fits into nine tenths of what is left, at most the model's own; at least 256.

    Where the system does not say what is left it is the default one. `on_gpu(n_ctx)` says whether as many layers as planned are on
    a GPU with such a context.
    """
    most, room = plan.main.trained_ctx or DEFAULT_CTX, available()
    if room is None:
        return min(most, DEFAULT_CTX)
    n_left = int(AUTO_SHARE * room.n_bytes)
    found = largest_ctx(lambda n_ctx: plan.at(n_ctx).total if on_gpu(n_ctx) else n_left + 1, n_left, most)
    return found or min(most, MIN_CTX)


def check_session(wanted: Memory) -> None:
    """Raises LoadError where one more session, beside weights that are loaded, does not fit."""
    room = available()
    if room is not None and wanted.session > room.n_bytes:
        raise LoadError(
            f"a session of {wanted.n_ctx:,} tokens takes about {gigabytes(wanted.session)}, and "
            f"{gigabytes(room.n_bytes)} are left of {room.of}: close others, or make the context smaller"
        )


def account(memory: Memory) -> str:
    """What goes where, in words.

    >>> account(Memory(512, 4 * 10**9, 10**9, 0, 0, 0, 3 * 10**8, 10**8))
    'weights 4.0 GB, keys and values 1.0 GB, buffers 0.4 GB'
    """
    parts = {
        "weights": memory.main,
        "keys and values": memory.main_cache,
        "recurrent states": memory.states,
        "drafting": memory.head + memory.head_cache,
        "buffers": memory.buffers + memory.other,
    }
    return ", ".join(f"{name} {gigabytes(n)}" for name, n in parts.items() if n)


def gigabytes(n_bytes: int) -> str:
    """
    >>> gigabytes(1_234_567_890), gigabytes(12_345_678)
    ('1.2 GB', '12 MB')
    """
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 95e6 else f"{n_bytes / 1e6:.0f} MB"
