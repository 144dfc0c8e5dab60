"""Models that llama.cpp does not come back from (assertions, divisions by zero, null pointers) are refused before it sees them.

Each case is a sound tiny model with a few edits, most of them found by scripts/dev/fuzz/models.py; without our rule it ends the
process. What only llama.cpp can refuse, and does, is not here.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import gguf_edit
import models
import pytest
import tiny_gguf
from checkpoints import has_head, make_checkpoint
from gguf_edit import Edit

from llama_sidecar.converter import convert
from llama_sidecar.runtime.placement import n_gpu_layers
from llama_sidecar.sidecars import LlamaSidecarError, errors, open_main, open_sidecar
from llama_sidecar.sidecars.memory import Contents, Context, compute_bytes, memory

MISSING, TYPE, WRONG = errors.MissingTensors, errors.BadTensorType, errors.WrongKey
F64, I8, BF16, F16, Q8_1 = 28, 24, 30, 1, 9
NAN, INFINITY = math.nan, math.inf


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a sound model: of the runtime's tests by letter, an architecture, or a family's variant; with " sidecar" its sidecar."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            stem = name.removesuffix(" sidecar")
            folder = tmp_path_factory.mktemp(stem)
            if stem in ("R", "T"):
                pair = models.write_pair(folder, recurrent=stem == "R")
                made[stem], made[f"{stem} sidecar"] = pair.main, pair.sidecar
            elif stem in drafts.TARGETS:
                made[stem] = drafts.write_target(folder, stem)
            else:
                arch, variant = stem.split("-")
                head = "Q8_0" if has_head(arch, variant) else None
                result = convert(make_checkpoint(folder, arch, variant), folder / "out", "Q8_0", head)
                made.update({stem: result.main, f"{stem} sidecar": result.sidecar or result.main})
        return made[name]

    return make


def opened(path: Path, name: str) -> None:
    (open_sidecar if name.endswith(" sidecar") else open_main)(path)


def without_bytes(tokens: int) -> Edit:
    return ["item", "tokenizer.ggml.token_type", tokens, 6]


CASES: list[tuple[str, list[Edit], type[LlamaSidecarError], str]] = [
    # Counts and sizes
    ("R", [["set", "qwen35.context_length", "UINT32", 0]], WRONG, "context_length is 0; 1 to"),
    ("R", [["set", "qwen35.full_attention_interval", "UINT32", 0]], WRONG, "full_attention_interval is 0"),
    (
        "R",
        [["set", "qwen35.attention.head_count", "STRING", "4"]],
        WRONG,
        "head_count is '4'; a whole number",
    ),
    ("R", [["set", "qwen35.attention.head_count", "ARRAY FLOAT64", []]], WRONG, "an array of 0; a whole"),
    ("R", [["set", "qwen35.attention.head_count_kv", "UINT32", 3]], WRONG, "is 3; a divisor of the 4 heads"),
    ("R", [["set", "qwen35.attention.head_count", "UINT32", 0]], WRONG, "head_count is 0; at least the 2"),
    ("R", [["set", "qwen35.attention.head_count", "UINT32", 2**32 - 1]], WRONG, "head_count is 4294967295"),
    ("R", [["set", "qwen35.attention.key_length", "UINT32", 32]], WRONG, "is 32; 16, the length of a value"),
    (
        "R",
        [["set", "qwen35.attention.sliding_window", "UINT32", 2**31]],
        WRONG,
        "sliding_window is 2147483648",
    ),
    ("R", [["set", "qwen35.block_count", "UINT32", 2**32 - 1]], WRONG, "block_count is 4294967295; 1 to 512"),
    ("gemma4-experts", [["set", "gemma4.attention.shared_kv_layers", "UINT32", 3]], WRONG, "is 3; at most 2"),
    (
        "deepseek4-plain",
        [["set", "deepseek4.attention.value_length", "UINT32", 192]],
        WRONG,
        "the length of a value",
    ),
    # Rotary positions
    ("R", [["set", "qwen35.rope.dimension_count", "UINT32", 7]], WRONG, "is 7; an even number"),
    ("R", [["set", "qwen35.rope.dimension_count", "UINT32", 0]], WRONG, "is 0; an even number above 0"),
    ("llama", [["set", "llama.rope.dimension_count", "UINT32", 0]], WRONG, "is 0; an even number above 0"),
    (
        "gemma4-dense",
        [["set", "gemma4.rope.dimension_count_swa", "UINT32", 0]],
        WRONG,
        "dimension_count_swa is 0; an even number above 0",
    ),
    ("R", [["set", "qwen35.rope.dimension_count", "UINT32", 18]], WRONG, "is 18; at most the 16 of a key"),
    ("R", [["set", "qwen35.rope.dimension_sections", "ARRAY INT32", [0, 0, 0, 0]]], WRONG, "sum is 1 to 16"),
    ("R", [["item", "qwen35.rope.dimension_sections", 2, 1 << 24]], WRONG, "sections .* sizes whose sum"),
    ("qwen3", [["set", "qwen3.rope.dimension_count", "UINT32", 8]], WRONG, "is 8; 16 .*rotates whole heads"),
    (
        "llama",
        [["set", "llama.rope.scaling.type", "STRING", "x"]],
        WRONG,
        "'x'; one of none, linear, yarn, longrope",
    ),
    ("R", [["set", "qwen35.rope.freq_base", "FLOAT32", NAN]], WRONG, "freq_base is nan; a number"),
    ("R", [["set", "qwen35.rope.scaling.factor", "FLOAT32", INFINITY]], WRONG, "factor is inf; a number"),
    (
        "deepseek32-all",
        [["set", "deepseek32.rope.dimension_count", "UINT32", 64]],
        WRONG,
        "dimension_count is 64",
    ),
    ("deepseek32-all", [["set", "deepseek32.attention.key_length", "UINT32", 16]], WRONG, "key_length is 16"),
    ("deepseek32-all", [["drop", "deepseek32.attention.head_count_kv"]], WRONG, "head_count_kv is 4; 1 "),
    # Recurrent state
    ("R", [["set", "qwen35.ssm.inner_size", "UINT32", 1]], WRONG, r"inner_size is 1; 64 \(state_size 16"),
    (
        "R",
        [["set", "qwen35.ssm.group_count", "UINT32", 0]],
        WRONG,
        "group_count is 0; a divisor of time_step",
    ),
    (
        "R",
        [["set", "qwen35.ssm.group_count", "UINT32", 3]],
        WRONG,
        "group_count is 3; a divisor of time_step",
    ),
    # Experts
    (
        "T sidecar",
        [["set", "glm4moe.expert_count", "UINT32", 1025]],
        WRONG,
        "expert_count is 1025; 0 to 1,024",
    ),
    ("T sidecar", [["drop", "glm4moe.expert_count"]], WRONG, "used_count is 1; 0, since .* no experts"),
    ("T sidecar", [["drop", "glm4moe.expert_used_count"]], WRONG, "used_count is 0; 1 to the 2 experts"),
    ("T sidecar", [["set", "glm4moe.expert_used_count", "UINT32", 3]], WRONG, "used_count is 3; 1 to the 2"),
    ("T sidecar", [["set", "glm4moe.expert_group_count", "UINT32", 2]], WRONG, "group_count is 2; a divisor"),
    ("R", [["set", "qwen35.expert_group_count", "UINT32", 1]], WRONG, "group_count is 1; 0, since"),
    (
        "T sidecar",
        [["set", "glm4moe.expert_gating_func", "UINT32", 127]],
        WRONG,
        "gating_func is 127; 0 to 4",
    ),
    (
        "mimo2-joined",
        [["value", "mimo2.attention.sliding_window_pattern", [0]]],
        WRONG,
        "pattern is an array of 1; at least one layer with a window",
    ),
    (
        "gemma4-dense",
        [["set", "gemma4.attention.value_length", "UINT32", 127]],
        WRONG,
        "the length of a value",
    ),
    (
        "gemma4-dense",
        [["set", "gemma4.attention.value_length_swa", "UINT32", 8]],
        WRONG,
        r"key_length_swa is \d+; 8, the length of a value",
    ),
    ("gemma4-dense", [["value", "gemma4.attention.sliding_window_pattern", []]], WRONG, "an array of 0; at"),
    (
        "cohere2moe-rms",
        [["set", "cohere2moe.attention.sliding_window_pattern", "UINT32", 1]],
        WRONG,
        "pattern is 1; at least one layer",
    ),
    ("bailingmoe3-plain", [["set", "bailingmoe3.kda.safe_gate", "BOOL", False]], WRONG, "False; true, as"),
    ("bailingmoe3-plain", [["set", "bailingmoe3.kda.gate_lower_bound", "FLOAT32", 0.0]], WRONG, "below 0"),
    (
        "bailingmoe3-plain",
        [["set", "bailingmoe3.expert_group_used_count", "UINT32", 513]],
        WRONG,
        "group_used_count is 513; 1 to",
    ),
    # Types of tensors
    (
        "R",
        [["shape", "blk.0.attn_norm.weight", [64], BF16]],
        TYPE,
        "attn_norm.weight is BF16; .* expected in F32",
    ),
    ("R", [["shape", "blk.0.ssm_norm.weight", [16], F16]], TYPE, "ssm_norm.weight is F16"),
    ("R sidecar", [["shape", "blk.4.nextn.hnorm.weight", [64], Q8_1]], TYPE, "hnorm.weight is Q8_1"),
    (
        "R",
        [["shape", "blk.0.ssm_out.weight", [64, 64], F64]],
        TYPE,
        "ssm_out.weight is F64; a type of weights",
    ),
    (
        "R",
        [["shape", "token_embd.weight", [64, 256], I8]],
        TYPE,
        "token_embd.weight is I8; a type of weights",
    ),
    # Parts of blocks that llama.cpp takes for optional
    ("R", [["remove", "blk.2.attn_qkv.weight"]], MISSING, "blk.2 has recurrent state and lacks attn_qkv"),
    (
        "R",
        [["remove", f"blk.{i}.attn_gate.weight"] for i in range(3)],
        MISSING,
        "recurrent state and lacks attn_qkv or attn_gate",
    ),
    ("T sidecar", [["remove", "blk.4.ffn_down_exps.weight"]], MISSING, "has experts and lacks ffn_down_exps"),
    ("T sidecar", [["remove", "blk.4.ffn_gate_inp.weight"]], MISSING, "has experts and lacks ffn_gate_inp"),
    (
        "T sidecar",
        [["remove", "blk.4.ffn_up_shexp.weight"]],
        MISSING,
        "a shared expert and lacks ffn_up_shexp",
    ),
    ("qwen3", [["remove", "blk.1.ffn_down.weight"]], MISSING, "feed-forward network and lacks ffn_down"),
    (
        "glm_dsa-shared",
        [["item", "glm-dsa.attention.indexer.types", 2, True]],
        MISSING,
        "blk.2 has no indexer",
    ),
    ("glm_dsa-shared", [["remove", "blk.1.indexer.proj.weight"]], MISSING, "blk.1 has an indexer and lacks"),
    ("nemotron_h_moe-latent", [["remove", "blk.4.ssm_conv1d.bias"]], MISSING, "lacks ssm_conv1d.bias"),
    (
        "nemotron_h_moe-latent sidecar",
        [["remove", "blk.5.ffn_latent_down.weight"]],
        MISSING,
        "blk.5 has experts and lacks ffn_latent_down",
    ),
    (
        "nemotron_h_moe-latent sidecar",
        [["remove", "blk.5.nextn.shared_head_norm.weight"]],
        MISSING,
        "blk.5 is a head and lacks nextn.shared_head_norm",
    ),
    ("glm_dsa-shared", [["drop", "glm-dsa.attention.indexer.types"]], MISSING, "has no indexer"),
    (
        "glm_dsa-shared",
        [["item", "glm-dsa.attention.indexer.types", 0, False]],
        WRONG,
        "types is 0 for layer 0; 1, as no layer before",
    ),
    (
        "deepseek4-yarn sidecar",
        [["set", "deepseek4.attention.head_count_kv", "UINT32", 2]],
        WRONG,
        "head_count_kv is 2; 1",
    ),
    (
        "mimo2-joined sidecar",
        [["remove", "blk.6.ffn_gate.weight"]],
        MISSING,
        "blk.6 is a head and lacks ffn_gate",
    ),
    (
        "deepseek2-yarn sidecar",
        [["set", "deepseek2.attention.temperature_scale", "FLOAT32", -1.0]],
        WRONG,
        "temperature_scale is -1.0; none, since there is a head,",
    ),
    # Vocabularies
    ("R", [["set", "tokenizer.ggml.model", "STRING", "none"]], WRONG, "'none'; one of gpt2, llama, bert"),
    ("R", [["set", "tokenizer.ggml.model", "UINT32", 1]], WRONG, "is 1; one of gpt2"),
    ("R", [["set", "tokenizer.ggml.model", "ARRAY INT64", [1, 2]]], WRONG, "an array of 2; one of gpt2"),
    ("R", [["set", "qwen35.rope.scaling.type", "ARRAY INT64", [1, 2]]], WRONG, "an array of 2; one of none"),
    ("R", [["set", "tokenizer.ggml.model", "STRING", "llama"]], WRONG, "without a token for the byte 0x00"),
    ("R", [without_bytes(3)], WRONG, "for token 3, a byte,; a text such as <0x0A>"),
    (
        "R",
        [["value", "tokenizer.ggml.token_type", [1, 1]]],
        WRONG,
        "array of 2; an I32 for each of the 256 tokens",
    ),
    (
        "R",
        [
            ["set", "tokenizer.ggml.add_bos_token", "BOOL", True],
            ["set", "tokenizer.ggml.model", "STRING", "t5"],
        ],
        WRONG,
        "bos_token_id is absent; an id below 256, since tokenizer.ggml.add_bos_token is set",
    ),
    (
        "hy_v3-two",
        [["set", "tokenizer.ggml.model", "STRING", "gemma4"]],
        WRONG,
        "bos_token_id is absent; an id below .*, since gemma4 puts it into every text",
    ),
    (
        "hy_v3-two",
        [
            ["set", "tokenizer.ggml.pre", "STRING", "gemma4"],
            ["set", "tokenizer.ggml.add_bos_token", "BOOL", False],
            ["set", "tokenizer.ggml.bos_token_id", "STRING", "x"],
        ],
        WRONG,
        "bos_token_id is 'x'; an id",
    ),
    (
        "hy_v3-two",
        [
            ["set", "tokenizer.ggml.pre", "STRING", "glm4"],
            ["set", "tokenizer.ggml.add_bos_token", "BOOL", True],
        ],
        WRONG,
        "bos_token_id is absent; an id below .*, since tokenizer.ggml.add_bos_token",
    ),
]


@pytest.mark.parametrize(
    ("name", "edits", "kind", "match"), CASES, ids=[f"{c[0]} {c[1][0][1]}" for c in CASES]
)
def test_it_is_refused_in_one_line(
    name: str,
    edits: list[Edit],
    kind: type[LlamaSidecarError],
    match: str,
    sound: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = gguf_edit.read(sound(name)).apply(*edits).write(tmp_path / "main.gguf")
    with pytest.raises(kind, match=match) as error:
        opened(path, name)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


H, KV, K, V = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
)
N, ROT, SECTIONS, WINDOW = (
    "embedding_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "attention.sliding_window",
)
EXPERTS, USED, GROUPS, CHOSEN = (
    "expert_count",
    "expert_used_count",
    "expert_group_count",
    "expert_group_used_count",
)
PUBLISHED: dict[str, dict[str, Any]] = {  # keys of models that people have
    "qwen2": {N: 3584, H: 28, KV: 4},
    "qwen3moe": {N: 2048, H: 32, KV: 4, K: 128, V: 128, EXPERTS: 128, USED: 8},
    "llama": {N: 4096, H: 32, KV: 8, ROT: 128, "rope.scaling.type": "none"},
    "gemma3": {N: 1152, H: 4, KV: 1, K: 256, V: 256, WINDOW: 512},
    "phi2": {N: 2560, H: 32, ROT: 32},
    "chatglm": {N: 4096, H: 32, KV: 2, ROT: 64},
    "glm4": {N: 4096, H: 32, KV: 2, ROT: 64, SECTIONS: [8, 12, 12, 0]},
    "glm4moe": {N: 4096, H: 96, KV: 8, K: 128, V: 128, ROT: 64, SECTIONS: [0, 0, 0, 0]},
    "qwen2vl": {N: 3584, H: 28, KV: 4, SECTIONS: [16, 24, 24, 0]},
    "minimax-m2": {N: 3072, H: 48, KV: 8, K: 128, V: 128, ROT: 64, EXPERTS: 256, USED: 8},
    "nemotron": {N: 6144, H: 48, KV: 8, ROT: 64},
    "stablelm": {N: 2048, H: 32, KV: 4, ROT: 16},
    "deepseek2": {
        N: 7168, H: 128, KV: 1, K: 576, V: 512, ROT: 64, "attention.key_length_mla": 192, "attention.kv_lora_rank": 512,
        "attention.value_length_mla": 128, EXPERTS: 256, USED: 8, GROUPS: 8, CHOSEN: 4, "expert_gating_func": 2,
    },
    "deepseek": {N: 2048, H: 16, KV: 16, ROT: 128, EXPERTS: 64, USED: 6},
    "gpt-oss": {N: 2880, H: 64, KV: 8, K: 64, V: 64, EXPERTS: 32, USED: 4, WINDOW: 128, "rope.scaling.type": "yarn"},
    "lfm2": {N: 2048, H: [32, 32], KV: [0, 8]},
    "deci": {N: 8192, H: [64, 0], KV: [8, 0], "feed_forward_length": [28672, 0]},
    "mamba": {N: 768, "ssm.conv_kernel": 4, "ssm.inner_size": 1536, "ssm.state_size": 16, "ssm.time_step_rank": 48},
    "granitehybrid": {N: 1536, H: [0, 12], KV: [0, 4], "ssm.group_count": 1, "ssm.inner_size": 3072, EXPERTS: 0, USED: 0},
    "rwkv7": {N: 768, H: 0},
    "gpt2": {N: 768, H: 12, KV: 12},
}  # fmt: skip


@pytest.mark.parametrize("arch", PUBLISHED)
def test_what_people_have_is_not_refused(arch: str, tmp_path: Path) -> None:
    """Sizes as the published files have them, of which some look odd; the tensors are of a toy."""
    given = {f"{arch}.{key}": value for key, value in PUBLISHED[arch].items()}
    sound = tiny_gguf.main_keys(arch=arch) | given
    opened(tiny_gguf.write(tmp_path / "main.gguf", arch, sound, tiny_gguf.main_tensors()), "main")


@pytest.mark.parametrize("name", ["R", "T", "mimo2-joined", "deepseek4-plain"])
def test_a_head_of_no_numbers_drafts_nothing_that_stands(
    name: str, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    """Graphs that crop hidden rows to the outputs (mimo2, deepseek4) and those that do not, in a process that may end.

    Logits of such models are near ties, and llama.cpp's attention sums several rows otherwise than one on some processors:
    `exact` decodes where that changes no bit.
    """
    head = gguf_edit.read(sound(f"{name} sidecar"))
    norm = next(tensor for tensor in head.tensors if tensor.endswith("nextn.hnorm.weight"))
    broken = head.apply(["fill", norm, 0xFFFFFFFF]).write(tmp_path / "mtp-broken.gguf")
    code = f"""
from llama_sidecar.runtime import load
options = dict(ctx=64, threads=1, kernels="stock", draft_vocab="full", exact=True)
texts, drafting = [], []
for sidecar, spec in ((None, "none"), ({str(broken)!r}, "auto")):
    with load({str(sound(name))!r}, sidecar, spec_type=spec, depth=2, **options) as model:
        generation = model.generate("Hello", max_tokens=8, temperature=0, ignore_eos=True)
        texts.append(generation.read())
        drafting.append(sum(generation.stats.rounds_per_depth[1:]) > 0)
print(texts[0] == texts[1], *drafting)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True False True\n"), done.stderr[-500:]


@pytest.mark.parametrize("name", ["R", "R sidecar", "T", "T sidecar", "llama", "qwen3"])
def test_written_again_without_edits_it_is_opened(
    name: str, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    opened(gguf_edit.read(sound(name)).write(tmp_path / "main.gguf"), name)


@pytest.mark.parametrize(
    "name", ["blk.2znextn.enorm.weight", "blk.", "blk.x.y", "blk.-1.a", f"blk.{'9' * 40}.a", "blk"]
)
def test_a_tensor_of_no_block_is_no_reason_to_stop(
    name: str, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    """What a model takes is counted before llama.cpp sees it, and says that it does not know the tensor. Found by readers.py."""
    path = tmp_path / "x.gguf"
    gguf_edit.read(sound("R")).apply(["copy", "output_norm.weight", name]).write(path)
    main = open_main(path)
    options: dict[str, Any] = {"free_bytes": 1 << 30, "n_ctx": 64, "cache_bits": 16, "n_slots": 2}
    options["drafter_bytes"] = 0
    assert n_gpu_layers(main.header, **options) == n_gpu_layers(open_main(sound("R")).header, **options)
    contents = Contents.of(main.header)
    assert memory(contents, Context(64)).main == contents.n_bytes and compute_bytes(contents, Context(64)) > 0
