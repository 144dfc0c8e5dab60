"""The small-batch kernels under the embedded checkpoint: speculation changes no token where the stock kernels drift, and the
model is as good as on those."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest

from llama_sidecar.converter import convert
from llama_sidecar.runtime import kernels, load
from llama_sidecar.runtime.library import llama, set_verbose
from llama_sidecar.runtime.vocab import Vocab
from llama_sidecar.runtime.weights import Settings, Weights, free_context, make_target_context
from llama_sidecar.sidecars import open_main

pytestmark = pytest.mark.skipif(kernels.problem() is not None, reason=str(kernels.problem()))

DEMO = Path(__file__).parents[1] / "sidecars" / "demo"
N_TOKENS, DEPTH = 256, 3
# Rows of 384 values are no K blocks: Q8_0 and Q5_0 stand in for Q6_K and Q4_K.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q4_K_M": 15, "IQ4_NL": 25, "BF16": 32}


def held_out() -> list[str]:
    lines = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]
    return [line["prompt"] for line in lines if line.get("kind", "code") == "code"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo at F32, and what `quantized` makes of it."""
    set_verbose(False)
    folder = tmp_path_factory.mktemp("demo")
    convert(DEMO, folder, main_type="F32", sidecar_type="Q8_0")
    return folder


def quantized(folder: Path, type: str) -> Path:
    """The main file at one of llama.cpp's recipes, made once; its sidecar lies beside it."""
    (source,) = folder.glob("[!m]*-F32.gguf")
    path = source.with_name(source.name.replace("F32", type))
    if not path.exists():
        params = llama().llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[type], 1
        code = llama().llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params))
        assert code == 0
    return path


def test_ids_are_equal_at_q4_k_m(folder: Path) -> None:
    """20 prompts x 256 tokens, greedy, depth 3, flash attention off. (Rows of 384 values: Q8_0 and Q5_0 stand in for K types.)"""
    path, sidecar = quantized(folder, "Q4_K_M"), next(folder.glob("mtp-*"))
    n_accepted = 0
    with (
        load(path, sidecar, ctx=512, threads=1, depth=DEPTH, kernels="ours", flash_attn="off") as model,
        model.session(spec_type="none") as plain,
        model.session() as drafting,
    ):
        for prompt in held_out()[:20]:
            texts = []
            for session in (plain, drafting):
                text = session.generate(prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
                text.read()
                texts.append(text.tokens)
            assert texts[0] == texts[1]
            n_accepted += text.stats.n_accepted
    assert n_accepted > 1000


def log_likelihood(path: Path, ours: bool) -> tuple[float, int]:
    """Of the held-out prompts' tokens, each given those before it in its prompt, and how many they are; 8 rows a decode."""
    lib, total, n, n_vocab = llama(), 0.0, 0, len(open_main(path).tokens)
    placed = kernels.types() if ours else frozenset()
    weights = Weights(path, with_head=False, n_gpu_layers=0, device=None, ours=placed)
    vocab = Vocab(weights)
    batch = lib.llama_batch_init(8, 0, 1)
    context = make_target_context(weights, Settings(threads=1), n_ctx=512, depth=7, n_slots=0)
    for prompt in held_out():
        tokens = vocab.tokenize(prompt)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        for pos in range(0, len(tokens) - 1, 8):
            block = tokens[pos : min(pos + 8, len(tokens) - 1)]
            batch.n_tokens = len(block)
            for i, token in enumerate(block):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos + i, 1, True
                batch.seq_id[i][0] = 0
            assert lib.llama_decode(context, batch) == 0
            for i in range(len(block)):
                row = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (n_vocab,))
                row = row.astype(np.float64) - row.max()
                total += float(row[tokens[pos + i + 1]] - np.log(np.exp(row).sum()))
                n += 1
    lib.llama_batch_free(batch)
    free_context(context)
    weights.close()
    return total, n


@pytest.mark.parametrize("type", FILE_TYPES)
def test_perplexity_is_that_of_the_stock_kernels(folder: Path, type: str) -> None:
    """Within 0.1 %, on the held-out prompts."""
    (ours, n), (stock, _) = (log_likelihood(quantized(folder, type), ours) for ours in (True, False))
    assert n > 500
    ratio = np.exp((stock - ours) / n)
    assert abs(ratio - 1) < 1e-3, ratio
