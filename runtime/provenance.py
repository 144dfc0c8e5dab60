"""Where a figure comes from: machine, backend, library and files, so that a measured speed can be believed.

Reads what the system and the files say of themselves; measures nothing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llama_sidecar.sidecars import GGUFHeader, read_model

from . import _native, placement
from .library import llama
from .llm import Model

HASH_WHOLE_BYTES = (
    4 << 30
)  # larger files are hashed at both ends alone: a benchmark should not read 40 GB first
HASH_PART_BYTES = 64 << 20


def provenance(model: Model) -> dict[str, Any]:
    """All facts about what `model` is and runs on, ready for `json.dumps`."""
    settings = model.settings
    choice = model.speculation
    drafter: dict[str, Any] = {"kind": choice.kind, "why": choice.why, "match": choice.match}
    if choice.path not in (None, model.main.path):
        drafter |= file_facts(read_model(choice.path))
    return {
        "main": file_facts(model.main.header),
        "drafter": drafter,
        "machine": machine(),
        "backend": backend(model),
        "kernels": model.kernels.to_json(),
        "exact": model.exact,
        "exactness": model.exactness.to_json() if model.exactness else None,
        "threads": settings.n_threads,
        "gpu_layers": model.gpu_layers,
        "ctx": model.n_ctx,
        "memory": _memory(model),
        "batch": settings.batch,
        "flash_attn": settings.flash_attn,
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "use_mmap": settings.use_mmap,
        "llama_cpp": library(),
        "version": version("llama-sidecar"),
    }


def _memory(model: Model) -> dict[str, int]:
    """Bytes that the model takes with one session, as memory.py tells; `drafting` is what it would take less without drafts."""
    found, plain = (plan.at(model.n_ctx) for plan in (model.memory_plan, model.memory_plan.plain()))
    return found.to_json() | {"drafting": found.total - plain.total}


def machine() -> dict[str, Any]:
    """The processor's name, physical cores and logical CPUs this process may use, and the system.

    >>> sorted(machine())
    ['cpu', 'n_cores', 'n_cpus', 'os']
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "cpu": _cpu_name(),
        "n_cores": placement.default_threads(),
        "n_cpus": len(usable),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        try:
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            pass
    return platform.processor() or platform.machine()


def backend(model: Model) -> str:
    """What the target's layers run on: "CPU", or the devices' names and how many layers they have."""
    if not model.gpu_layers:
        return "CPU"
    names = model.settings.device or ", ".join(gpu.name for gpu in placement.gpus())
    layers = "all" if model.gpu_layers == placement.ALL_LAYERS else model.gpu_layers
    return f"{names} ({layers} layers)"


def library() -> dict[str, str]:
    """The release of llama-cpp-python, the llama.cpp commit inside it, and how that was built."""
    module = llama()
    import llama_cpp  # after llama(), which chooses how its threads wait

    try:
        commit = module._lib.ggml_commit
        commit.restype = ctypes.c_char_p
        built_from = commit().decode()
    except AttributeError:  # builds before ggml knew its commit
        built_from = "unknown"
    system_info = " ".join(llama().llama_print_system_info().decode().split())
    return {"llama_cpp_python": llama_cpp.__version__, "commit": built_from, "system_info": system_info}


@functools.cache
def native() -> str:
    """A hash of this project's own native code: another build may take another time."""
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16]


def file_facts(header: GGUFHeader) -> dict[str, Any]:
    """Name, architecture, types (tensors of each, and the one with most bytes) and hashes of a GGUF, shard by shard."""
    n_tensors: dict[str, int] = {}
    n_bytes: dict[str, int] = {}
    for info in header.tensors.values():
        n_tensors[info.type_name] = n_tensors.get(info.type_name, 0) + 1
        n_bytes[info.type_name] = n_bytes.get(info.type_name, 0) + info.n_bytes
    return {
        "file": header.path.name,
        "name": header.keys.get("general.name"),
        "arch": header.arch,
        "bytes": header.file_bytes,
        "type": max(n_bytes, key=lambda name: n_bytes[name]),
        "types": n_tensors,
        "files": [{"file": path.name, **hash_of(path)} for path in header.paths],
    }


def hash_of(
    path: Path, *, whole_bytes: int = HASH_WHOLE_BYTES, part_bytes: int = HASH_PART_BYTES
) -> dict[str, Any]:
    """The SHA-256 of a file, or of its two ends when it has more than `whole_bytes`; `sha256_of` says which."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    if size <= whole_bytes:
        parts, scope = [(0, size)], "whole file"
    else:
        parts = [(0, part_bytes), (size - part_bytes, part_bytes)]
        scope = f"first and last {part_bytes} bytes"
    with path.open("rb") as file:
        for start, left in parts:
            file.seek(start)
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
    return {"bytes": size, "sha256": digest.hexdigest(), "sha256_of": scope}
