"""What rejected drafts leave: nothing. State bytes after rewinds of every length, by sort of memory and KV type.

Decodes are exact ones, so that nothing but a fault can set bytes apart: see test_exact.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import numpy as np
import pytest
from checkpoints import make_checkpoint
from gguf import GGMLQuantizationType as T
from models import N_EMBD, N_VOCAB

from llama_sidecar.converter import convert
from llama_sidecar.runtime import LoadError, Model, Scripted, load

PROMPT = [65 + 7 * i % 50 for i in range(36)]
DEPTH = 4
TARGETS = {  # by sort of memory: an architecture and its variant, see checkpoints.py
    "attention": "glm4moe-air",
    "attention, latent": "deepseek2-plain",
    "sliding window": "step35-plain",
    "sliding window, parallel blocks": "cohere2moe-rms",
    "sliding window, compressed": "deepseek4-plain",
    "recurrent": "mamba-",
    "hybrid": "qwen35-tied",
    "hybrid, mamba 2": "nemotron_h_moe-wide",
    "hybrid, latent": "bailingmoe3-plain",
}
KV: dict[str, dict[str, Any]] = {
    "F16": {},
    "Q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"},
}
NO_Q8_0 = ("recurrent", "attention, latent", "hybrid, latent")  # no keys, or keys of no whole blocks
N_LONG = 300  # a window's cells are used again from 257 on


def write_mamba(folder: Path) -> Path:
    """Nothing but recurrent layers."""
    folder.mkdir(parents=True, exist_ok=True)
    random = drafts.Random(3)
    inner, state, rank, kernel = 2 * N_EMBD, 16, 4, 4
    tensors = {"token_embd.weight": random.matrix(N_VOCAB, N_EMBD), "output_norm.weight": random.norm()}
    for i in range(3):
        p = f"blk.{i}."
        tensors |= {
            p + "attn_norm.weight": random.norm(),
            p + "ssm_in.weight": random.matrix(2 * inner, N_EMBD),
            p + "ssm_conv1d.weight": random.matrix(inner, kernel),
            p + "ssm_conv1d.bias": 0.1 * random.norm(inner),
            p + "ssm_x.weight": random.matrix(rank + 2 * state, inner),
            p + "ssm_dt.weight": random.matrix(inner, rank),
            p + "ssm_dt.bias": random.norm(inner),
            p + "ssm_a": -np.exp(random.rng.uniform(-2, 1, (inner, state))).astype(np.float32),
            p + "ssm_d": random.norm(inner),
            p + "ssm_out.weight": random.matrix(N_EMBD, inner),
        }
    keys = {
        "block_count": 3,
        "context_length": 4096,
        "embedding_length": N_EMBD,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    return drafts.write(folder / "main.gguf", "mamba", keys, tensors, T.Q8_0)


Main = Callable[[str], Path]


@pytest.fixture(scope="module")
def main_of(tmp_path_factory: pytest.TempPathFactory) -> Main:
    """The main file of a sort of memory, written at first use."""

    @functools.cache
    def written_main(sort: str) -> Path:
        folder = tmp_path_factory.mktemp("target")
        if sort == "recurrent":
            return write_mamba(folder)
        arch, variant = TARGETS[sort].split("-")
        main = convert(make_checkpoint(folder, arch, variant), folder / "out", "Q8_0", "Q8_0").main
        assert main
        return main

    return written_main


def written(model: Model, n: int, **options: Any) -> tuple[list[int], bytes, int]:
    """Greedy ids, the state behind them, and how often a checkpoint was needed."""
    with model.session(**options) as session:
        text = session.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True)
        text.read()
        return text.tokens, session._native.state(), session.n_restores


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("sort", [sort for sort in TARGETS if sort != "recurrent"])
def test_rewinds_leave_the_state_of_a_run_that_never_drafted(sort: str, kv: str, main_of: Main) -> None:
    if kv == "Q8_0" and sort in NO_Q8_0:
        pytest.skip("its keys are no whole blocks")
    n = N_LONG if sort.startswith("sliding") else 64
    options: dict[str, Any] = {"ctx": 512, "threads": 1, "depth": 3, "kernels": "stock", "exact": True}
    with load(main_of(sort), **options, **KV[kv]) as model:
        tokens, state, _ = written(model, n, spec_type="none")
        for n_right in range(DEPTH + 1):
            scripted = Scripted([*PROMPT, *tokens], n_right)
            assert written(model, n, depth=DEPTH, scripted=scripted) == (tokens, state, 0), n_right
        assert written(model, n) == (tokens, state, 0), model.kind


def test_a_recurrent_target_without_slots_is_put_back_from_checkpoints(main_of: Main) -> None:
    """llama.cpp keeps none for Mamba. Nothing drafts for it but a text that repeats itself, or a script; it has no exact decoding."""
    main = main_of("recurrent")
    with load(main, ctx=512, threads=1, kernels="stock") as model:
        tokens, state, _ = written(model, 64, spec_type="none")
        for n_right in range(DEPTH + 1):
            scripted = Scripted([*PROMPT, *tokens], n_right)
            found = written(model, 64, depth=DEPTH, scripted=scripted)
            assert found[:2] == (tokens, state) and (found[2] > 0) == (n_right < DEPTH), n_right
    with (
        load(main, ctx=512, threads=1, kernels="stock", exact=True) as model,
        pytest.raises(LoadError, match="none for some architectures"),
    ):
        model.session(depth=DEPTH, scripted=Scripted(PROMPT, 0))
