"""Tiny random targets that hand out layer inputs, and tiny drafters for them, written straight to GGUF.

Targets are of three architectures: Llama and Qwen 3 (here), and Qwen 3.5 (models.py's R). A drafter's weights are random and
small beside one matrix that is fitted to a text the target itself writes, so that some of its drafts stand and every part of it
has a say in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
from models import HEAD_DIM, N_EMBD, N_FF, N_HEAD, N_KV, N_VOCAB, byte_tokens

T = gguf.GGMLQuantizationType
N_LAYERS = 4
TARGETS = ("llama", "qwen3", "qwen35")
MASK = 7  # the token that stands for an unknown one
KERNEL, GROUP, RANK, TOP_K = (
    2,
    16,
    32,
    4,
)  # of DFlash2's convolutions and selector, and of DSpark's Markov head


def write_target(folder: Path, arch: str, type: T = T.Q8_0, seed: int = 0) -> Path:
    """A main file of four layers."""
    folder.mkdir(parents=True, exist_ok=True)
    if arch == "qwen35":
        return models.write_pair(folder, type=type, seed=seed).main
    random = Random(seed)
    tensors = {"token_embd.weight": random.matrix(N_VOCAB, N_EMBD), "output_norm.weight": random.norm()}
    tensors["output.weight"] = random.matrix(N_VOCAB, N_EMBD)
    for i in range(N_LAYERS):
        tensors |= random.block(f"blk.{i}.", with_norms=arch == "qwen3")
    keys = block_keys(N_LAYERS) | {"vocab_size": N_VOCAB}
    return write(folder / "main.gguf", arch, keys, tensors, type)


class Random:
    """Random weights of one seed."""

    def __init__(self, seed: int, scale: float = 1.5) -> None:
        self.rng, self.scale = np.random.default_rng(seed), scale

    def matrix(self, n_rows: int, n_cols: int) -> np.ndarray:
        return (self.rng.standard_normal((n_rows, n_cols)) * (self.scale / np.sqrt(n_cols))).astype(
            np.float32
        )

    def norm(self, n: int = N_EMBD) -> np.ndarray:
        return (1 + 0.1 * self.rng.standard_normal(n)).astype(np.float32)

    def block(self, p: str, *, n_in: int = N_EMBD, with_norms: bool) -> dict[str, np.ndarray]:
        """A transformer block whose attention takes rows of `n_in`; `with_norms` are those of queries and keys."""
        tensors = {
            p + "attn_norm.weight": self.norm(),
            p + "ffn_norm.weight": self.norm(),
            p + "attn_q.weight": self.matrix(HEAD_DIM * N_HEAD, n_in),
            p + "attn_k.weight": self.matrix(HEAD_DIM * N_KV, n_in),
            p + "attn_v.weight": self.matrix(HEAD_DIM * N_KV, n_in),
            p + "attn_output.weight": self.matrix(N_EMBD, HEAD_DIM * N_HEAD),
            p + "ffn_gate.weight": self.matrix(N_FF, N_EMBD),
            p + "ffn_up.weight": self.matrix(N_FF, N_EMBD),
            p + "ffn_down.weight": self.matrix(N_EMBD, N_FF),
        }
        if with_norms:
            tensors |= {p + f"attn_{part}_norm.weight": self.norm(HEAD_DIM) for part in "qk"}
        return tensors


def block_keys(n_blocks: int) -> dict[str, Any]:
    return {
        "block_count": n_blocks,
        "context_length": 4096,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }


def write(
    path: Path,
    arch: str,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray],
    type: T,
    n_padding: int = 0,
) -> Path:
    """Writes a GGUF; keys are without the architecture's prefix, matrices of whole blocks get the type.

    `n_padding` tokens follow the 256 bytes.
    """
    out = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        name = name if name.startswith("tokenizer.") else f"{arch}.{name}"
        if isinstance(value, bool):
            out.add_bool(name, value)
        elif isinstance(value, int):
            out.add_uint32(name, value)
        elif isinstance(value, float):
            out.add_float32(name, value)
        else:
            out.add_array(name, value)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen35")
    out.add_token_list(byte_tokens() + [f"[PAD{N_VOCAB + i}]" for i in range(n_padding)])
    out.add_token_types([1] * N_VOCAB + [5] * n_padding)
    out.add_token_merges(["Ġ Ġ"])
    out.add_eos_token_id(0)
    out.add_add_bos_token(False)
    out.add_name("tiny")
    for name, data in tensors.items():
        if data.dtype == np.float32 and data.ndim == 2 and data.shape[1] % 32 == 0 and "conv" not in name:
            out.add_tensor(name, gguf.quants.quantize(data, type), raw_dtype=type)
        else:
            out.add_tensor(name, data)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def write_eagle3(
    folder: Path,
    *,
    layers: tuple[int, ...] = (1, 2, 3),
    type: T = T.Q8_0,
    own: bool | str = False,
    n_rows: int | None = None,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    scale: float = 1.5,
    fc: np.ndarray | None = None,
    d2t: np.ndarray | None = None,
    n_padding: int = 0,
    seed: int = 1,
) -> Path:
    """`eagle3-main.gguf`; `own` embeddings and output ("embeddings": these alone), the latter with `n_rows` rows of spread tokens if given."""
    random = Random(seed, scale)
    tensors = {"fc.weight": random.matrix(N_EMBD, 3 * N_EMBD) if fc is None else fc}
    tensors["output_norm.weight"] = random.norm()
    if norm_before_fc:
        tensors["enc.output_norm.weight"] = random.norm(3 * N_EMBD)
    tensors |= random.block("blk.0.", n_in=2 * N_EMBD, with_norms=False)
    tensors["blk.0.attn_norm_2.weight"] = random.norm()
    if own:
        tensors["token_embd.weight"] = Random(seed).matrix(N_VOCAB, N_EMBD)
    if own is True:
        tensors["output.weight"] = Random(seed + 1).matrix(n_rows or N_VOCAB, N_EMBD)
    if n_rows:
        tensors["d2t"] = np.arange(n_rows, dtype=np.int64) * 2 + 1 if d2t is None else d2t
    keys = block_keys(1) | {
        "target_layers": list(layers),
        "target_hidden_size": N_EMBD,
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
    }
    return write(folder / "eagle3-main.gguf", "eagle3", keys, tensors, type, n_padding)


def write_dflash(
    folder: Path,
    *,
    layers: tuple[int, ...] = (1, 2, 3),
    n_blocks: int = 2,
    block_size: int = 6,
    type: T = T.Q8_0,
    own: bool | str = False,
    n_rows: int | None = None,
    causal: bool = False,
    window: int | None = None,
    sections: bool = False,
    no_values: bool = False,
    selector: bool = False,
    markov: bool = False,
    confidence: bool = False,
    anchor: bool = True,
    scale: float = 1.5,
    fc: np.ndarray | None = None,
    text: list[int] | None = None,
    seed: int = 1,
) -> Path:
    """`dflash-main.gguf` or, with a `markov` head, `dspark-main.gguf`; `selector` makes it a DFlash2.

    `window` gives every second block sliding attention, `sections` rotates as a drafter for an M-RoPE target does, `no_values`
    leaves the value matrices out. `confidence` and `anchor` are DSpark's, and its Markov head says what follows what in a `text`.
    """
    random = Random(seed, scale)
    n_features = len(layers) * N_EMBD
    tensors = {
        "fc.weight": random.matrix(N_EMBD, n_features) if fc is None else fc,
        "enc.output_norm.weight": random.norm(),
        "output_norm.weight": random.norm(),
    }
    keys = block_keys(n_blocks) | {
        "target_layers": list(layers),
        "block_size": block_size,
        "attention.causal": causal,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    for i in range(n_blocks):
        tensors |= random.block(f"blk.{i}.", with_norms=True)
        if no_values:
            del tensors[f"blk.{i}.attn_v.weight"]
        if selector:
            for part in ("attn", "ffn"):
                base = random.rng.standard_normal((2, KERNEL, N_EMBD)) / KERNEL
                tensors[f"blk.{i}.{part}_conv_base"] = base.astype(np.float32)
                n_out = 2 * KERNEL * (N_EMBD // GROUP)
                tensors[f"blk.{i}.{part}_conv_proj.weight"] = random.matrix(n_out, N_EMBD)
    if selector:
        tensors["selector_hidden.weight"] = random.matrix(RANK, N_EMBD)
        for part in ("predecessor", "successor"):
            tensors[f"selector_{part}.weight"] = random.matrix(N_VOCAB, RANK)
        keys |= {"conv_kernel_size": KERNEL, "conv_group_size": GROUP, "selector_rank": RANK}
        keys["selector_top_k"] = TOP_K
    if window:
        keys |= {
            "attention.sliding_window": window,
            "attention.sliding_window_pattern": [i % 2 == 0 for i in range(n_blocks)],
        }
    if sections:
        keys["rope.dimension_sections"] = [HEAD_DIM // 2, 0, 0, 0]
    if own:
        tensors["token_embd.weight"] = Random(seed).matrix(N_VOCAB, N_EMBD)
    if own is True:
        tensors["output.weight"] = Random(seed + 1).matrix(n_rows or N_VOCAB, N_EMBD)
    if n_rows:
        tensors["d2t"] = np.arange(n_rows, dtype=np.int64) * 2 + 1
    if markov:
        keys |= {"sample_from_anchor": anchor, "has_confidence_head": confidence}
        tensors["markov_w1.weight"] = random.matrix(N_VOCAB, RANK)
        tensors["markov_w2.weight"] = random.matrix(n_rows or N_VOCAB, RANK)
        if text is not None:
            before = tensors["markov_w1.weight"][text[:-1]]
            after = 60.0 * np.eye(N_VOCAB, dtype=np.float32)[text[1:]]
            solved = np.linalg.solve(before.T @ before + 1e-2 * np.eye(RANK), before.T @ after)
            tensors["markov_w2.weight"] = solved.T.astype(np.float32)
        if confidence:
            tensors["conf_proj.weight"] = random.matrix(1, N_EMBD + RANK)
            tensors["conf_proj.bias"] = np.array([0.3], np.float32)
    name = "dspark-main.gguf" if markov else "dflash-main.gguf"
    return write(folder / name, "dflash", keys, tensors, type)


def output_matrix(path: Path) -> np.ndarray:
    """The output of a main file, or the embeddings where they are tied: (n_vocab, n_embd)."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    found = tensors.get("output.weight", tensors["token_embd.weight"])
    return gguf.quants.dequantize(found.data, found.tensor_type).reshape(N_VOCAB, N_EMBD)


def target_rows(path: Path, text: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The target's rows of a text: (len(text), n_embd for each layer)."""
    from llama_sidecar.runtime import load
    from llama_sidecar.runtime.reference import Context
    from llama_sidecar.runtime.weights import make_target_context

    with load(path, spec_type="none", ctx=256, threads=1) as model:
        context = Context(
            make_target_context(model.weights, model.settings, n_ctx=256, depth=0, n_slots=0), layers=layers
        )
        context.decode(text, 0, [])
        rows = context.rows(len(text))
        context.close()
    return rows


def greedy_text(path: Path, prompt: list[int], n: int) -> list[int]:
    """The prompt and n greedy tokens."""
    from llama_sidecar.runtime import load

    with load(path, spec_type="none", ctx=256, threads=1) as model:
        generation = model.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
        generation.read()
    return prompt + generation.tokens


def fitted_fc(main: Path, prompt: list[int], layers: tuple[int, ...], ahead: int) -> np.ndarray:
    """An `fc` (n_embd, n_embd for each layer) after which a row at p is like the output's row of the token at p + `ahead`.

    It is fitted to the text that the target writes after the prompt, so that a head that does little else drafts it rightly.
    """
    text = greedy_text(main, prompt, 80)
    rows, output = target_rows(main, text, layers), output_matrix(main)
    n = len(text) - ahead
    wanted = output[text[ahead:]]
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    given = rows[:n]
    solved = np.linalg.solve(given.T @ given + 1e-3 * np.eye(given.shape[1]), given.T @ wanted)
    return (8 * solved.T).astype(np.float32)
