"""What caches and compute buffers take is what llama.cpp says when it makes them, for every family, main file and head."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from checkpoints import WITH_HEAD, make_checkpoint

from llama_sidecar.converter import convert
from llama_sidecar.sidecars import read_header
from llama_sidecar.sidecars.memory import (
    Contents,
    Context,
    Size,
    compute_bytes,
    layer_cache_bytes,
    pair_memory,
)

N_CTX, N_BATCH = 16384, 256


@pytest.mark.parametrize(("arch", "variant"), WITH_HEAD)
def test_caches_and_buffers_take_what_llama_cpp_says(arch: str, variant: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    result = convert(make_checkpoint(tmp_path, arch, variant), tmp_path / "out")
    assert result.main and result.sidecar
    n_slots = 0 if arch == "qwen3next" else 2  # which llama.cpp keeps no earlier states of
    for path, is_head, slots in ((result.main, False, n_slots), (result.sidecar, True, 0)):
        header = read_header(path)
        found = sum(
            layer_cache_bytes(
                header.arch, header.keys, header.tensors, n_ctx=N_CTX, n_slots=slots, n_batch=N_BATCH
            )
        )
        caches, buffers = said_by_llama_cpp(path, is_head, slots)
        assert found / 2**20 == pytest.approx(sum(caches), abs=0.006 * len(caches))
        contents = Contents.of(header)
        blocks = range(contents.n_trunk, contents.n_blocks) if is_head else None
        context = Context(N_CTX, N_BATCH, n_outputs=N_BATCH, n_slots=slots)
        estimate = compute_bytes(contents, context, blocks) / 2**20
        assert buffers - 1 < estimate < 1.3 * buffers + 8, "too high rather than too low"


def test_scores_count_where_there_is_no_flash_attention() -> None:
    keys = {"x.block_count": 1, "x.embedding_length": 8, "x.attention.head_count": 4}
    contents = Contents("x", keys, {"blk.0.attn_q.weight": Size(8, 100)})
    with_it, without = (
        compute_bytes(contents, Context(1024, 64, flash_attn=flash_attn)) for flash_attn in (True, False)
    )
    assert without - with_it == 64 * 1024 * (4 * 4 + 2)  # scores of 4 heads, and a mask twice as wide


def test_a_pair_counts_what_each_part_takes() -> None:
    main = Contents(
        "x",
        {"x.block_count": 1, "x.attention.head_count_kv": 2, "x.attention.key_length": 64}
        | {"x.attention.value_length": 64, "x.embedding_length": 64, "x.attention.head_count": 2},
        {"token_embd.weight": Size(100_000, 6_400_000), "blk.0.attn_k.weight": Size(128, 8192)},
    )
    head_keys = {**main.keys, "x.block_count": 2, "x.nextn_predict_layers": 1}
    names = {"token_embd.weight": Size(100_000, 6_400_000), "blk.1.attn_k.weight": Size(128, 8192)}
    head = Contents("x", head_keys, names)
    plain, pair = (pair_memory(main, file, 1024) for file in (None, head))
    assert plain.main == pair.main == 6_408_192 and plain.main_cache == 1024 * 2 * 128 * 2
    assert plain.head == plain.head_cache == 0 and pair.head_cache == plain.main_cache
    assert pair.head == 8192 + 6_400_000 * 32_768 // 100_000, "the runtime cuts the head's vocabulary"
    assert pair.total == sum(
        (pair.main, pair.main_cache, pair.states, pair.head, pair.head_cache, pair.buffers, pair.other)
    )


def test_a_head_inside_that_does_not_draft_takes_nothing() -> None:
    """Nothing reads the blocks behind the trunk."""
    keys = {"x.block_count": 2, "x.nextn_predict_layers": 1, "x.embedding_length": 8}
    main = Contents("x", keys, {"blk.0.ffn_up.weight": Size(8, 100), "blk.1.ffn_up.weight": Size(8, 70)})
    assert pair_memory(main, None, 512).main == 100
    assert pair_memory(main, main, 512, embedded=True).main == 170


def said_by_llama_cpp(path: Path, is_head: bool, n_slots: int) -> tuple[list[float], float]:
    """The sizes of its caches, and that of its buffers, in MiB, that llama.cpp writes into its log while it makes a context."""
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
        context_params.n_batch = context_params.n_ubatch = N_BATCH
        context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context_params.n_rs_seq = n_slots
        if is_head:
            context_params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        context = llama_cpp.llama_init_from_model(model, context_params)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    finally:
        llama_cpp.llama_log_set(before, data)
    log = "".join(lines)
    caches, buffers = (
        [float(size) for size in re.findall(rf"(?:{what}) buffer size = *([\d.]+) MiB", log)]
        for what in ("KV|RS|state", "compute|output")
    )
    return caches, sum(buffers)
