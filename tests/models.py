"""Tiny random GGUF pairs for the runtime's tests: T (attention only) and R (three of four layers recurrent).

T is GLM-4.5 in shape (a dense trunk, two experts in the head), R is Qwen3.5; hidden 64, vocabulary 256, one MTP block. They are written
straight to GGUF with no converter in between, so that a fault of the converter cannot hide one of the loop. The
vocabulary is the 256 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

N_EMBD, N_VOCAB, N_FF, HEAD_DIM, N_HEAD, N_KV = 64, 256, 128, 16, 4, 2
N_EXPERT = 2
SSM_STATE, SSM_GROUPS, SSM_RANK, CONV = 16, 2, 4, 4  # key heads 2, value heads 4, of 16


@dataclass(frozen=True)
class Pair:
    """A main file and its MTP sidecar."""

    main: Path
    sidecar: Path


def byte_tokens() -> list[str]:
    """The 256 byte tokens in GPT-2's printable spelling, in byte order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    spelled = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        spelled.setdefault(byte, chr(256 + len(spelled) - len(printable)))
    return [spelled[byte] for byte in range(256)]


def write_pair(
    folder: Path,
    *,
    layers: int = 4,
    recurrent: bool = True,
    seed: int = 0,
    type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    edit: Callable[[dict[str, np.ndarray]], None] | None = None,
    sidecar_padding: int = 0,
    template: str | None = None,
    n_vocab: int = N_VOCAB,
    embedded: bool = False,
    control: Mapping[int, str] | None = None,
) -> Pair:
    """Writes `main.gguf` and `mtp-main.gguf` with random weights of one seed.

    `recurrent` makes every layer but each fourth a gated-delta layer; without it all layers are attention. `edit` may
    change the tensors before they are written, and give the head more. `sidecar_padding` rows with the largest logits follow
    the sidecar's own. `template` is a chat template. `n_vocab` adds tokens to the bytes. `embedded` puts the head into the main
    file too. `control` spells tokens that are control tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    arch = "qwen35" if recurrent else "glm4moe"
    n_q_rows = HEAD_DIM * N_HEAD * (2 if recurrent else 1)  # Qwen3.5 has a gate beside each query
    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[name] = (rng.standard_normal((rows, columns)) * (1.5 / np.sqrt(columns))).astype(np.float32)

    def vector(name: str, values: np.ndarray) -> None:
        tensors[name] = values.astype(np.float32)

    def experts(name: str, rows: int, columns: int) -> None:
        data = rng.standard_normal((N_EXPERT, rows, columns)) * (1.5 / np.sqrt(columns))
        tensors[name] = data.astype(np.float32)

    def block(i: int, is_recurrent: bool, is_moe: bool = False) -> None:
        p = f"blk.{i}."
        vector(p + "attn_norm.weight", 1 + 0.1 * rng.standard_normal(N_EMBD))
        vector(p + "post_attention_norm.weight", 1 + 0.1 * rng.standard_normal(N_EMBD))
        if is_recurrent:
            inner = SSM_STATE * SSM_RANK
            channels = 2 * SSM_STATE * SSM_GROUPS + inner
            matrix(p + "attn_qkv.weight", channels, N_EMBD)
            matrix(p + "attn_gate.weight", inner, N_EMBD)
            matrix(p + "ssm_alpha.weight", SSM_RANK, N_EMBD)
            matrix(p + "ssm_beta.weight", SSM_RANK, N_EMBD)
            vector(p + "ssm_conv1d.weight", 0.5 * rng.standard_normal((channels, CONV)))
            vector(p + "ssm_a", -np.exp(rng.uniform(-3, 0, SSM_RANK)))
            vector(p + "ssm_dt.bias", rng.standard_normal(SSM_RANK))
            vector(p + "ssm_norm.weight", np.ones(SSM_STATE))
            matrix(p + "ssm_out.weight", N_EMBD, inner)
        else:
            matrix(p + "attn_q.weight", n_q_rows, N_EMBD)
            matrix(p + "attn_k.weight", HEAD_DIM * N_KV, N_EMBD)
            matrix(p + "attn_v.weight", HEAD_DIM * N_KV, N_EMBD)
            matrix(p + "attn_output.weight", N_EMBD, HEAD_DIM * N_HEAD)
            vector(p + "attn_q_norm.weight", np.ones(HEAD_DIM))
            vector(p + "attn_k_norm.weight", np.ones(HEAD_DIM))
        if is_moe:
            matrix(p + "ffn_gate_inp.weight", N_EXPERT, N_EMBD)
            vector(p + "exp_probs_b.bias", np.zeros(N_EXPERT))
            experts(p + "ffn_gate_exps.weight", N_FF, N_EMBD)
            experts(p + "ffn_up_exps.weight", N_FF, N_EMBD)
            experts(p + "ffn_down_exps.weight", N_EMBD, N_FF)
        for shared in ("_shexp",) if is_moe else ("",):
            matrix(p + f"ffn_gate{shared}.weight", N_FF, N_EMBD)
            matrix(p + f"ffn_up{shared}.weight", N_FF, N_EMBD)
            matrix(p + f"ffn_down{shared}.weight", N_EMBD, N_FF)

    matrix("token_embd.weight", n_vocab, N_EMBD)
    vector("output_norm.weight", 1 + 0.1 * rng.standard_normal(N_EMBD))
    shared = list(tensors)
    for i in range(layers):
        block(i, recurrent and (i + 1) % 4 != 0)
    trunk = list(tensors)
    block(layers, False, is_moe=not recurrent)
    matrix(f"blk.{layers}.nextn.eh_proj.weight", N_EMBD, 2 * N_EMBD)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        vector(f"blk.{layers}.nextn.{name}.weight", np.ones(N_EMBD))
    if edit is not None:
        edit(tensors)
    head = [name for name in tensors if name not in trunk]

    def write(path: Path, names: list[str], n_heads: int) -> Path:
        out = gguf.GGUFWriter(path, arch)
        keys = {
            "block_count": layers + n_heads,
            "context_length": 4096,
            "embedding_length": N_EMBD,
            "feed_forward_length": N_FF,
            "attention.head_count": N_HEAD,
            "attention.head_count_kv": N_KV,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "rope.dimension_count": HEAD_DIM // 2,
        }
        if recurrent:
            keys |= {
                "full_attention_interval": 4,
                "ssm.conv_kernel": CONV,
                "ssm.state_size": SSM_STATE,
                "ssm.group_count": SSM_GROUPS,
                "ssm.time_step_rank": SSM_RANK,
                "ssm.inner_size": SSM_STATE * SSM_RANK,
            }
            out.add_array(f"{arch}.rope.dimension_sections", [2, 1, 1, 0])
        else:
            keys |= {
                "leading_dense_block_count": layers,
                "expert_count": N_EXPERT,
                "expert_used_count": 1,
                "expert_feed_forward_length": N_FF,
                "expert_shared_count": 1,
            }
        if n_heads:
            keys["nextn_predict_layers"] = n_heads
        for key, value in keys.items():
            out.add_uint32(f"{arch}.{key}", value)
        out.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
        out.add_float32(f"{arch}.rope.freq_base", 10000.0)
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("qwen35")
        padding = sidecar_padding if n_heads else 0
        words = [f"Ġ{i}" for i in range(N_VOCAB, n_vocab)]
        spelled = byte_tokens() + words + [f"[PAD{n_vocab + i}]" for i in range(padding)]
        named = control or {}
        out.add_token_list([named.get(i, word) for i, word in enumerate(spelled)])
        out.add_token_types([3 if i in named else 1 for i in range(n_vocab)] + [5] * padding)
        out.add_token_merges(["Ġ Ġ"])
        out.add_eos_token_id(0)
        out.add_add_bos_token(False)
        out.add_name("tiny")
        if template is not None:
            out.add_chat_template(template)
        for name in names:
            data = tensors[name]
            if name == "token_embd.weight" and padding:
                data = np.concatenate([data, np.tile(8 * data.mean(axis=0) + 8 * data[:1], (padding, 1))])
            if (
                type != gguf.GGMLQuantizationType.F32
                and data.ndim > 1
                and "conv1d" not in name
                and "gate_inp" not in name
            ):
                out.add_tensor(name, gguf.quants.quantize(data, type), raw_dtype=type)
            else:
                out.add_tensor(name, data)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        return path

    main = write(folder / "main.gguf", trunk + head, 1) if embedded else write(folder / "main.gguf", trunk, 0)
    return Pair(main, write(folder / "mtp-main.gguf", shared + head, 1))
