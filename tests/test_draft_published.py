"""Converted drafters compute what their published code computes: DFlash, DFlash2, DSpark and EAGLE3 written out in NumPy.

The descriptions are z-lab/dflash (dflash/model.py, arXiv:2602.06036) and vLLM's speculators (models/dspark, models/eagle3,
arXiv:2503.01840); no line of llama.cpp's graphs or converter is behind them. Weights are the checkpoint's, by its own names; what the
target hands out of its layers is llama.cpp's, whose main files are held against transformers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LOGITS_PROMPT as PROMPT
from draft_checkpoints import make_draft, make_target, tiny_config, tiny_tensors

from llama_sidecar.converter import convert
from llama_sidecar.converter.drafts.target import open_target
from llama_sidecar.runtime import load
from llama_sidecar.runtime.reference import LAST_HIDDEN, Context
from llama_sidecar.runtime.reference_heads import make_head
from llama_sidecar.runtime.weights import make_target_context
from llama_sidecar.sidecars import read_header

F = np.ndarray[Any, np.dtype[np.float64]]
LAST, N_DRAFTS, N_LAYERS = 40, 4, 4  # the token that is drafted after; drafts; the target's layers
N_HEAD, N_KV, HEAD = 4, 2, 16


def rms(x: F, weight: F, eps: float) -> F:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def silu(x: F) -> F:
    return x / (1 + np.exp(-x))


def rotated(x: F, positions: range, frequencies: F) -> F:
    """(n, heads, HEAD), whose halves are the two parts of a rotation."""
    angle = np.arange(positions.start, positions.stop)[:, None] * frequencies
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def frequencies_of(config: dict[str, Any]) -> F:
    """With Llama 3's scaling, where there is one."""
    found: F = config["rope_theta"] ** -(np.arange(0, HEAD, 2) / HEAD)
    if scaling := config.get("rope_scaling"):
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * found / (2 * np.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        found = found * share + found / scaling["factor"] * (1 - share)
    return found


def attended(q: F, k: F, v: F, seen: Any) -> F:
    """Rows of q (n, N_HEAD, HEAD) over k and v (m, N_KV, HEAD); `seen` (n, m) says over which."""
    k, v = (np.repeat(one, N_HEAD // N_KV, axis=1) for one in (k, v))
    scores = np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(HEAD)
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", shares, v).reshape(len(q), -1)


class Weights:
    """A checkpoint's tensors in float64, with the target's vocabulary where it has none."""

    def __init__(self, tensors: dict[str, Any], config: dict[str, Any], embeddings: F) -> None:
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.raw, self.config = config, config | config.get("transformer_layer_config", {})
        self.eps, self.mask = self.config["rms_norm_eps"], self._own("mask_token_id")
        self.embeddings = self.tensors.get("embed_tokens.weight", embeddings)
        is_narrow = "draft_vocab_size" in config
        self.output = self["lm_head"] if is_narrow else embeddings
        self.tokens = np.arange(len(self.output)) + (tensors["d2t"] if is_narrow else 0)

    def _own(self, name: str) -> Any:
        return self.config.get("dflash_config", self.config).get(name)

    def __getitem__(self, name: str) -> F:
        return self.tensors[f"{name}.weight"]

    def norm(self, x: F, name: str) -> F:
        return rms(x, self[name], self.eps)

    def heads(self, x: F, name: str) -> F:
        return (x @ self[name].T).reshape(len(x), -1, HEAD)

    def mlp(self, x: F, block: str) -> F:
        gate, up = (x @ self[f"{block}mlp.{part}_proj"].T for part in ("gate", "up"))
        return silu(gate) * up @ self[f"{block}mlp.down_proj"].T


# Each returns the drafts after LAST, and their logits (n_drafted tokens each) where a row has them.
Published = Callable[[Weights, F], tuple[list[int], F | None]]

# DFlash: a block of masks after the last token sees all of itself and the target's rows.


def convolved(w: Weights, x: F, dynamic: F, side: int, name: str) -> F:
    """DFlash2's: each row and the ones before it in the block, by a kernel of its own on top of a fixed one."""
    base = w.tensors[f"{name}.base_kernel"][side]
    n_taps, group = len(base), w.config["dflash_config"]["conv_group_size"]
    kernels = dynamic.reshape(len(x), 2, n_taps, -1)[:, side]
    out = np.zeros_like(x)
    for tap in range(n_taps):
        before = np.concatenate([np.zeros_like(x[:tap]), x[: len(x) - tap]])
        out += (base[tap] + np.repeat(kernels[:, tap], group, axis=-1)) * before
    return out


def dflash_hidden(w: Weights, rows: F, n_masks: int) -> F:
    """The block's rows after the last norm."""
    block = [LAST, *[w.mask] * n_masks]
    context = rms(rows @ w["fc"].T, w["hidden_norm"], w.eps)
    x, n, frequencies = w.embeddings[block], len(rows), frequencies_of(w.config)
    for i in range(w.config["num_hidden_layers"]):
        p = f"layers.{i}."
        h = w.norm(x, f"{p}input_layernorm")
        conv = f"{p}attention_conv"
        is_two = f"{conv}.kernel_projection.weight" in w.tensors
        dynamic = h @ w[f"{conv}.kernel_projection"].T if is_two else h
        h = convolved(w, h, dynamic, 0, conv) if is_two else h
        both = np.concatenate([context, h])
        q = w.norm(w.heads(h, f"{p}self_attn.q_proj"), f"{p}self_attn.q_norm")
        k = w.norm(w.heads(both, f"{p}self_attn.k_proj"), f"{p}self_attn.k_norm")
        v = w.heads(both, f"{p}self_attn.v_proj")
        q = rotated(q, range(n, n + len(block)), frequencies)
        k = rotated(k, range(n + len(block)), frequencies)
        h = attended(q, k, v, np.full((len(q), len(k)), True)) @ w[f"{p}self_attn.o_proj"].T
        x = x + (convolved(w, h, dynamic, 1, conv) if is_two else h)
        h, conv = w.norm(x, f"{p}post_attention_layernorm"), f"{p}mlp_conv"
        dynamic = h @ w[f"{conv}.kernel_projection"].T if is_two else h
        h = w.mlp(convolved(w, h, dynamic, 0, conv) if is_two else h, p)
        x = x + (convolved(w, h, dynamic, 1, conv) if is_two else h)
    return w.norm(x, "norm")


def dflash(w: Weights, rows: F) -> tuple[list[int], F]:
    logits = dflash_hidden(w, rows, N_DRAFTS)[1:] @ w.output.T
    return logits.argmax(-1).tolist(), logits


def dflash2(w: Weights, rows: F) -> tuple[list[int], None]:
    """Of each row's best candidates the one that fits the row and the token before."""
    predecessors, successors = (
        w.tensors[f"candidate_selector.{part}_codebook"] for part in ("predecessor", "successor")
    )
    token, path = LAST, []
    for row in dflash_hidden(w, rows, N_DRAFTS)[1:]:
        logits = row @ w.output.T
        candidates = np.argsort(-logits)[: w.config["dflash_config"]["selector_top_k"]]
        wanted = predecessors[token] * (row @ w["candidate_selector.hidden_projection"].T)
        token = int(candidates[np.argmax(logits[candidates] + successors[candidates] @ wanted)])
        path.append(token)
    return path, None


def dspark_rows(w: Weights, rows: F) -> tuple[F, F, list[int], F]:
    """Of the rows that draft: hidden, the Markov head's embeddings of the tokens before, drafts and logits."""
    is_anchor_first = (
        "transformer_layer_config" not in w.raw
    )  # the known token's own row says the first draft
    hidden = dflash_hidden(w, rows, N_DRAFTS - is_anchor_first)[-N_DRAFTS:]
    token, before, drafts, logits = LAST, [], [], []
    for row in hidden:
        before.append(w["markov_head.markov_w1"][token])
        logits.append(row @ w.output.T + w["markov_head.markov_w2"] @ before[-1])
        token = int(w.tokens[logits[-1].argmax()])
        drafts.append(token)
    return hidden, np.array(before), drafts, np.array(logits)


def dspark(w: Weights, rows: F) -> tuple[list[int], F]:
    return dspark_rows(w, rows)[2:]


# EAGLE3: one Llama block over (the token of p+1, what three layers of the target say at p), and then over its own rows.


def eagle3(w: Weights, rows: F) -> tuple[list[int], F]:
    frequencies, drafts, logits = frequencies_of(w.config), [], []
    said = rms(rows, w["input_norm"], w.eps) if w.config.get("norm_before_fc") else rows
    hidden, tokens = said @ w["fc"].T, [*PROMPT[1:], LAST]
    p = "midlayer." if "midlayer.hidden_norm.weight" in w.tensors else "layers.0."
    for _ in range(N_DRAFTS):
        n = len(tokens)
        normed = w.norm(hidden, f"{p}hidden_norm")
        x = np.concatenate([w.norm(w.embeddings[tokens], f"{p}input_layernorm"), normed], axis=-1)
        q, k, v = (w.heads(x, f"{p}self_attn.{part}_proj") for part in "qkv")
        q, k = (rotated(one, range(n), frequencies) for one in (q, k))
        h = attended(q, k, v, np.tri(n, dtype=bool)) @ w[f"{p}self_attn.o_proj"].T
        h = h + (normed if w.config.get("norm_before_residual") else hidden)
        h = h + w.mlp(w.norm(h, f"{p}post_attention_layernorm"), p)
        logits.append(w.norm(h[-1:], "norm")[0] @ w.output.T)
        drafts.append(int(w.tokens[logits[-1].argmax()]))
        hidden, tokens = np.concatenate([hidden, h[-1:]]), [*tokens, drafts[-1]]
    return drafts, np.array(logits)


# variant -> what its code computes, and the target's layers whose inputs it reads: those after the outputs that DFlash names
CASES: dict[tuple[str, str], tuple[Published, list[int]]] = {
    ("dflash", "zlab"): (dflash, [1, 3]),
    ("dflash", "two"): (dflash2, [1, 3]),
    ("dspark", "own"): (dspark, [1, 2, 3]),
    ("dspark", "speculators"): (dspark, [1, 3]),
    ("eagle3", "sglang"): (eagle3, [1, 2, 3]),
    ("eagle3", "speculators"): (eagle3, [0, 1, LAST_HIDDEN]),
}


@pytest.mark.parametrize(("kind", "variant"), CASES, ids=map("-".join, CASES))
def test_drafts_and_logits_are_those_of_the_published_code(kind: str, variant: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    published, layers = CASES[kind, variant]
    checkpoint = make_target(tmp_path)
    main = convert(checkpoint, tmp_path / "out", "F32").main
    draft = make_draft(tmp_path, kind, variant, checkpoint)
    sidecar = convert(draft, tmp_path / "out", None, "F32", target=checkpoint).sidecar
    assert main and sidecar
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    with load(main, sidecar, ctx=128, threads=1, **exact) as model:  # type: ignore[arg-type]
        pointer = make_target_context(model.weights, model.settings, n_ctx=128, depth=1, n_slots=1)
        target = Context(pointer, layers=layers, masked=False)
        drafting = model.make_draft_context(model.settings, n_ctx=128, target=pointer)
        head = make_head(kind, drafting, n_layers=N_LAYERS)
        assert list(head.layers) == layers
        target.decode(PROMPT, 0, [len(PROMPT) - 1])
        rows = target.rows(len(PROMPT))
        head.observe(0, PROMPT, rows)
        tensors = tiny_tensors(kind, variant, open_target(checkpoint))
        w = Weights(tensors, tiny_config(kind, variant), embeddings_of(main))
        expected, logits = published(w, rows.astype(np.float64))
        has_confidence = "confidence_head.proj.weight" in w.tensors
        if has_confidence:
            head.context._ext.llama_set_embeddings_nextn(drafting, True, False)
        assert head.propose(LAST, N_DRAFTS) == expected
        if logits is not None:  # a block's rows, or of a chain the last
            n_rows = 1 if kind == "eagle3" else N_DRAFTS
            first = getattr(head, "first", 0)
            found = np.array([head.context.logits(first + i)[w.tokens] for i in range(n_rows)])
            np.testing.assert_allclose(found, logits[-n_rows:], atol=1e-3)
        if has_confidence:
            hidden, before, *_ = dspark_rows(w, rows.astype(np.float64))
            sure = np.concatenate([hidden, before], axis=1) @ w["confidence_head.proj"][0]
            sure = 1 / (1 + np.exp(-sure - w.tensors["confidence_head.proj.bias"][0]))
            np.testing.assert_allclose(head.context.all_hidden(N_DRAFTS)[:, 0], sure, atol=1e-4)
        head.context.close()
        target.close()


def embeddings_of(main: Path) -> F:
    """The target's, which are its output, too."""
    header = read_header(main)
    shape = header.tensors["token_embd.weight"].shape[::-1]
    return header.tensor_bytes("token_embd.weight").view(np.float32).reshape(shape).astype(np.float64)
