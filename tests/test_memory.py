"""What caches take is what llama.cpp says when it makes them, for every family, main file and head."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from checkpoints import WITH_HEAD, make_checkpoint

from llama_sidecar.converter import convert
from llama_sidecar.sidecars import read_header
from llama_sidecar.sidecars.memory import layer_cache_bytes

N_CTX = 16384


@pytest.mark.parametrize(("arch", "variant"), WITH_HEAD)
def test_caches_take_what_llama_cpp_says(arch: str, variant: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    result = convert(make_checkpoint(tmp_path, arch, variant), tmp_path / "out")
    assert result.main and result.sidecar
    n_slots = 0 if arch == "qwen3next" else 2  # which llama.cpp keeps no earlier states of
    for path, is_head, slots in ((result.main, False, n_slots), (result.sidecar, True, 0)):
        header = read_header(path)
        found = sum(
            layer_cache_bytes(
                header.arch, header.keys, header.tensors, n_ctx=N_CTX, n_slots=slots, n_batch=256
            )
        )
        said = said_by_llama_cpp(path, is_head, slots)
        assert found / 2**20 == pytest.approx(sum(said), abs=0.006 * len(said))


def said_by_llama_cpp(path: Path, is_head: bool, n_slots: int) -> list[float]:
    """The sizes, in MiB, that llama.cpp writes into its log while it makes a context."""
    import llama_cpp

    lines: list[str] = []
    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    callback = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode()))
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        params = llama_cpp.llama_model_default_params()
        params.load_mtp = is_head
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        context_params = llama_cpp.llama_context_default_params()
        context_params.n_ctx, context_params.n_seq_max, context_params.swa_full = N_CTX, 1, False
        context_params.n_batch = context_params.n_ubatch = 256
        context_params.n_rs_seq = n_slots
        if is_head:
            context_params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        context = llama_cpp.llama_init_from_model(model, context_params)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    finally:
        llama_cpp.llama_log_set(before, data)
    return [
        float(size) for size in re.findall(r"(?:KV|RS|state) buffer size = *([\d.]+) MiB", "".join(lines))
    ]
