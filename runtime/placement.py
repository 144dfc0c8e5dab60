"""Where things go: threads, context length, layers on a GPU. Knows sizes, never loads anything.

The loop itself calls nothing but llama.cpp's backends, so the same code drafts and verifies wherever these put it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_sidecar.sidecars import GGUFHeader
from llama_sidecar.sidecars.keys import block_of
from llama_sidecar.sidecars.memory import layer_cache_bytes

from .errors import LoadError
from .library import llama

DEFAULT_CTX = 8192
ALL_LAYERS = 999
GPU_RESERVE_BYTES = 512 << 20  # compute buffers, the desktop, and what other programs take meanwhile
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
CACHE_BITS = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8.5,
    "q5_1": 6,
    "q5_0": 5.5,
    "q4_1": 5,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}
DISCRETE_GPU, INTEGRATED_GPU = 1, 2  # of ggml_backend_dev_type
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


def default_threads() -> int:
    """Physical cores this process may use: a second thread on a core slows matrix products down."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        cores = set()
        for cpu in usable:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            try:
                cores.add(siblings.read_text().strip())
            except OSError:
                cores.add(str(cpu))
        return max(1, len(cores))
    if platform.system() == "Darwin":
        try:
            out = subprocess.run(
                ["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True, timeout=5
            )
            return max(1, int(out.stdout))
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
    return max(1, os.cpu_count() or 1)


def default_ctx(keys: Mapping[str, Any], arch: str) -> int:
    """The smaller of the model's context length and 8,192.

    >>> default_ctx({"qwen35.context_length": 4096}, "qwen35")
    4096
    """
    return min(int(keys.get(f"{arch}.context_length", DEFAULT_CTX)), DEFAULT_CTX)


def choice(name: str, value: str, known: Mapping[str, int]) -> int:
    """Looks a user's word up. Raises LoadError that lists the words there are."""
    try:
        return known[value.lower()]
    except (KeyError, AttributeError):
        raise LoadError(f"{name} {value!r} is unknown (there are: {', '.join(known)})") from None


@dataclass(frozen=True)
class Gpu:
    """What the loaded llama.cpp can place layers on."""

    name: str
    free_bytes: int


def gpus() -> list[Gpu]:
    """GPUs that llama.cpp places layers on, in its order, with their free memory.

    Integrated ones (Jetson, DGX Spark, APUs) count where there is no other, as in llama.cpp's own choice (src/llama.cpp).
    """
    if not llama().llama_supports_gpu_offload():
        return []
    ggml = _ggml()
    found: dict[int, list[Gpu]] = {DISCRETE_GPU: [], INTEGRATED_GPU: []}
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        kind = ggml.ggml_backend_dev_type(device)
        if kind in found:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            found[kind].append(Gpu(ggml.ggml_backend_dev_name(device).decode(), free.value))
    return found[DISCRETE_GPU] or found[INTEGRATED_GPU]


def output_device(device: str | None) -> str | None:
    """The device of the target's output layer, where a drafter belongs: of several the last; None where there is no choice.

    Args:
        device: the user's device names, as for `device_list`, or None.

    >>> output_device("CUDA0,CUDA1"), output_device("none")
    ('CUDA1', None)
    """
    names = [name.strip() for name in device.split(",")] if device else [gpu.name for gpu in gpus()]
    return names[-1] if len(names) > 1 else None


def devices() -> list[str]:
    """What the loaded llama.cpp can compute on, by its own names ("CPU", "CUDA0", ...)."""
    ggml = _ggml()
    found = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    return [ggml.ggml_backend_dev_name(device).decode() for device in found]


def device_list(names: str) -> Any:
    """llama.cpp's NULL-terminated device array for `CUDA0,CUDA1` (or `none`). Raises LoadError that lists what there is."""
    ggml = _ggml()
    found = (
        []
        if names == "none"
        else [ggml.ggml_backend_dev_by_name(n.strip().encode()) for n in names.split(",")]
    )
    if not all(found):
        raise LoadError(f"device {names!r} is unknown (there are: {', '.join(devices())}, none)")
    return (ctypes.c_void_p * (len(found) + 1))(*found, None)


def _ggml() -> ctypes.CDLL:
    """libggml of the loaded llama.cpp, with the few device functions declared."""
    folder = Path(str(llama().__file__)).parent / "lib"
    candidates = [folder / name for name in ("libggml.so", "libggml.dylib")]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise LoadError(f"no libggml beside llama_cpp (looked for {', '.join(c.name for c in candidates)})")
    ggml = ctypes.CDLL(str(found))
    pointer = ctypes.c_void_p
    for name, restype, argtypes in (
        ("ggml_backend_dev_count", ctypes.c_size_t, []),
        ("ggml_backend_dev_get", pointer, [ctypes.c_size_t]),
        ("ggml_backend_dev_by_name", pointer, [ctypes.c_char_p]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [pointer]),
        ("ggml_backend_dev_type", ctypes.c_int, [pointer]),
        (
            "ggml_backend_dev_memory",
            None,
            [pointer, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
        ),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = restype, argtypes
    return ggml


def n_gpu_layers(
    main: GGUFHeader, *, free_bytes: int, n_ctx: int, cache_bits: float, n_slots: int, drafter_bytes: int
) -> int:
    """Whole layers of `main` that fit beside KV cache, recurrent slots and the drafter; all of them as `ALL_LAYERS`.

    Args:
        free_bytes: free memory of the devices together.
        cache_bits: bits of a K and a V element together, halved (16 for F16).
        n_slots: rollback slots of the recurrent state.
        drafter_bytes: weights and KV of the drafter, which goes where the target's output goes.
    """
    n_layers = int(main.keys[f"{main.arch}.block_count"])
    per_layer = [0] * n_layers
    rest = 0
    for name, info in main.tensors.items():
        block = block_of(name)
        if block and block[0] < n_layers:
            per_layer[block[0]] += info.n_bytes
        elif name != "token_embd.weight":
            rest += info.n_bytes
    state = layer_cache_bytes(
        main.arch, main.keys, main.tensors, n_ctx=n_ctx, cache_bits=cache_bits, n_slots=n_slots
    )
    room = free_bytes - GPU_RESERVE_BYTES
    if sum(per_layer) + sum(state) + rest + drafter_bytes <= room:
        return ALL_LAYERS
    n = 0
    for weights, cells in zip(
        reversed(per_layer), reversed(state), strict=True
    ):  # llama.cpp offloads the last layers
        room -= weights + cells
        if room < 0:
            break
        n += 1
    return n


def idle_gpu_hint() -> str | None:
    """One line for a machine whose NVIDIA GPU the installed llama-cpp-python cannot use."""
    if Path("/proc/driver/nvidia/version").exists() and not llama().llama_supports_gpu_offload():
        return (
            "an NVIDIA GPU is here but llama-cpp-python was built for the CPU: "
            'CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall --no-cache-dir llama-cpp-python==0.3.36'
        )
    return None
