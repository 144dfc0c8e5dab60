"""Loads a GGUF's weights through llama.cpp and makes contexts over them, with llama_cpp's own structs.

Knows llama.cpp's parameters and its traps (facts gathered from its sources); knows nothing of rounds or drafts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from llama_sidecar.sidecars.memory import N_HEAD_BATCH, N_MODEL_BATCH

from . import _native, kernel_choice, placement
from . import kernels as small_batch
from .errors import LoadError
from .library import forget_errors, last_error, llama
from .sampling import address
from .whole_calls import call_whole

N_BATCH = 512
MAX_DEPTH = 64
MAX_THREADS = 512  # GGML_MAX_N_THREADS


KERNELS = {name: i for i, name in enumerate(kernel_choice.NAMES)}


@dataclass(frozen=True)
class Settings:
    """How models are loaded and contexts made; the names are llama.cpp's options."""

    gpu_layers: int | str = "auto"
    device: str | None = None
    threads: int | None = None
    ctx: int | None = None
    batch: int = N_BATCH
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    kernels: str = kernel_choice.DEFAULT
    use_mmap: bool = True
    use_mlock: bool = False

    def __post_init__(self) -> None:
        placement.choice("flash attention", self.flash_attn, placement.FLASH_ATTN)
        placement.choice("cache type", self.cache_type_k, placement.CACHE_TYPES)
        placement.choice("cache type", self.cache_type_v, placement.CACHE_TYPES)
        placement.choice("kernels", self.kernels, KERNELS)
        limits = (
            ("threads", self.threads, MAX_THREADS),
            ("context length", self.ctx, 2**31 - 1),
            ("batch", self.batch, 2**31 - 1),
        )
        for name, value, most in limits:
            if value is not None and not (isinstance(value, int) and 1 <= value <= most):
                raise LoadError(f"{name} {value!r} is not a whole number between 1 and {most}")
        if not (self.gpu_layers == "auto" or (isinstance(self.gpu_layers, int) and self.gpu_layers >= 0)):
            raise LoadError(f"gpu layers {self.gpu_layers!r} is neither 'auto' nor a number of layers")

    @property
    def n_threads(self) -> int:
        return self.threads or placement.default_threads()


@functools.cache
def repacks() -> bool:
    """Whether weights may be repacked for the CPU (`use_extra_bufts`).

    Not where ggml was built with AMX: GCC 12 drops most of its tile configuration (the intrinsic declares too small an
    operand), and the first product of more than one row ends the process.
    """
    return b"AMX_INT8 = 1" not in llama().llama_print_system_info()


class Weights:
    """A loaded model file. Close it after every context made from it; left alone, it is freed with its last reference.

    Args:
        path: the GGUF (the first shard of a sharded one).
        with_head: also load the MTP tensors in it.
        n_gpu_layers: how many of the last layers go to a GPU.
        device: llama.cpp device names, comma separated, or None for all.
        ours: types whose products of up to 8 rows the small-batch kernels compute; all layers are then on the CPU.
        use_mmap: map the file; else they are read into memory of their own.
        use_mlock: keep them from being swapped out. Where the system refuses, llama.cpp warns and goes on.
        writable: in memory of their own, whatever `use_mmap` says, and as they lie in the file, so that rows can be overwritten.

    Raises:
        LoadError: llama.cpp refuses the file; its own last message is in the text.
    """

    def __init__(
        self,
        path: Path,
        *,
        with_head: bool,
        n_gpu_layers: int,
        device: str | None,
        ours: Collection[Type] = (),
        use_mmap: bool = True,
        use_mlock: bool = False,
        writable: bool = False,
    ) -> None:
        lib = llama()
        params = lib.llama_model_default_params()
        params.load_mtp = with_head
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = repacks() and not writable
        is_mapped = use_mmap and not writable
        if use_mlock:
            params.load_mode = lib.LLAMA_LOAD_MODE_MMAP_MLOCK if is_mapped else lib.LLAMA_LOAD_MODE_MLOCK
        elif not is_mapped:
            params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        devices = placement.device_list(device) if device else None
        if devices is not None:
            params.devices = address(devices)

        def make(unwanted: threading.Event) -> Any:
            goes_on = type(params.progress_callback)(lambda share, data: not unwanted.is_set())
            params.progress_callback = goes_on
            forget_errors()
            with small_batch.placing(ours) if ours else contextlib.nullcontext():
                model = lib.llama_model_load_from_file(os.fsencode(path), params)
            if not model:
                raise LoadError(f"llama.cpp cannot load {path}: {last_error()}")
            return model

        self.model: Any = call_whole(make, lib.llama_model_free)
        self._free = weakref.finalize(self, lib.llama_model_free, self.model)
        self._free.atexit = False  # llm.py sees to that, after the contexts
        self.path = path
        self.n_layer_nextn: int = lib.llama_model_n_layer_nextn(self.model)

    def close(self) -> None:
        """Frees the weights. Idempotent."""
        self.model = None
        self._free()


def make_target_context(
    weights: Weights,
    settings: Settings,
    *,
    n_ctx: int,
    depth: int,
    n_slots: int,
    watched_by: _native.ProductInputs | None = None,
) -> Any:
    """The target's context: rollback slots for `depth` drafts, and as many output rows as a verification has.

    With depth 0 it is the plain context: no slots, one output row. `watched_by` must outlive it.
    """
    params = target_params(settings, n_ctx=n_ctx)
    if watched_by is not None:
        params.cb_eval = type(params.cb_eval)(watched_by.callback)
        params.cb_eval_user_data = watched_by.address
    params.n_rs_seq = min(n_slots, max(0, params.n_ubatch - 2))  # llama.cpp asserts n_ubatch > n_rs_seq + 1
    params.n_outputs_max = min(depth + 1, params.n_batch)
    return _make(weights, params, "target")


def target_params(settings: Settings, *, n_ctx: int) -> Any:
    """llama.cpp's parameters of a target's context, whatever drafts for it."""
    params = _params(settings, n_ctx)
    params.n_batch = params.n_ubatch = min(settings.batch, n_ctx)
    return params


def make_draft_context(
    weights: Weights, settings: Settings, *, n_ctx: int, is_head: bool = True, other: Any = None
) -> Any:
    """The drafter's context, with a batch of its own size.

    An MTP head's has one output row. `other` is the target's context, for a drafter that borrows embeddings, output or cache of
    it, and must outlive this one. A drafter that is no head and borrows nothing is a model by itself, with its own batch.
    """
    params = _params(settings, n_ctx)
    params.n_rs_seq = 0
    n_batch = N_HEAD_BATCH if is_head else N_MODEL_BATCH if other is not None else settings.batch
    params.n_batch = params.n_ubatch = min(n_batch, n_ctx)
    if is_head:
        params.ctx_type = llama().LLAMA_CONTEXT_TYPE_MTP
    if other is not None:
        params.ctx_other = other
    borrows_output = other is not None and not is_head
    params.n_outputs_max = params.n_batch if borrows_output else 1
    params.n_outputs_max_per_seq = params.n_outputs_max  # of those that a backend may sample
    return _make(weights, params, "draft")


def free_context(context: Any) -> None:
    """Frees a context made here."""
    llama().llama_free(context)


def _params(settings: Settings, n_ctx: int) -> Any:
    params = llama().llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = settings.n_threads
    params.flash_attn_type = placement.FLASH_ATTN[settings.flash_attn.lower()]
    params.type_k = placement.CACHE_TYPES[settings.cache_type_k.lower()]
    params.type_v = placement.CACHE_TYPES[settings.cache_type_v.lower()]
    params.no_perf = True
    return params


def _make(weights: Weights, params: Any, role: str) -> Any:
    def make(unwanted: threading.Event) -> Any:
        forget_errors()
        context = llama().llama_init_from_model(weights.model, params)
        if not context:
            raise LoadError(
                f"llama.cpp cannot make the {role} context ({params.n_ctx} tokens): {last_error()}"
            )
        return context

    return call_whole(make, free_context)
