"""The small-batch device inside llama.cpp: equal logits at every width, and nobody else's model sees it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from llama_sidecar.runtime import _native, kernels, load
from llama_sidecar.runtime.library import llama, set_verbose
from llama_sidecar.runtime.weights import Settings, Weights, free_context, make_target_context
from llama_sidecar.sidecars import read_header

pytestmark = pytest.mark.skipif(kernels.problem() is not None, reason=str(kernels.problem()))

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}
FILE_TYPES |= {"IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32}
SETS = [name for name in _native.smallbatch_sets() if name != "avx512-bf16"]  # which has BF16 alone
TOKENS = np.random.default_rng(0).integers(0, 256, 2304).tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> models.Pair:
    """A recurrent pair in F32 whose rows are 256 values, as K-quants need."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"N_EMBD": 256, "N_FF": 256, "HEAD_DIM": 64, "SSM_STATE": 64}.items():
            patch.setattr(models, name, value)
        return models.write_pair(tmp_path_factory.mktemp("wide"), recurrent=True)


@pytest.fixture(scope="module")
def file_of(pair: models.Pair) -> Any:
    """`file_of("Q4_K")`: the main file with all its matrices in one type, made once."""
    set_verbose(False)

    def make(type: str) -> Path:
        path = pair.main.with_name(f"{type}.gguf")
        if not path.exists():
            params = llama().llama_model_quantize_default_params()
            params.ftype, params.pure, params.nthread = FILE_TYPES[type], True, 1
            code = llama().llama_model_quantize(
                str(pair.main).encode(), str(path).encode(), ctypes.byref(params)
            )
            assert code == 0
        return path

    return make


def open_weights(path: Path, types: Sequence[T] | None = None) -> Weights:
    ours = kernels.types() if types is None else types
    return Weights(path, with_head=False, n_gpu_layers=0, device=None, ours=ours)


EXACT = {  # settings of attention whose rows do not depend on how many are computed at once, whatever the length
    "flash off": Settings(flash_attn="off", threads=2),
    "bf16 cache": Settings(flash_attn="on", cache_type_k="bf16", cache_type_v="bf16", threads=2),
    "q8_0 cache": Settings(flash_attn="on", cache_type_k="q8_0", cache_type_v="q8_0", threads=2),
}


class Reader:
    """A context that reads TOKENS: a prompt once, and what follows it again and again in blocks of any widths."""

    def __init__(self, weights: Weights, settings: Settings = EXACT["flash off"]) -> None:
        self.context = make_target_context(weights, settings, n_ctx=2304, depth=31, n_slots=0)
        self.n_prompt = 0
        self.state: Any = None

    def read_prompt(self, n_prompt: int) -> None:
        """Reads on, from the prompt before this one to `n_prompt` tokens."""
        lib = llama()
        self._restore()
        for pos in range(self.n_prompt, n_prompt, 256):
            decode(self.context, TOKENS[pos : min(pos + 256, n_prompt)], pos, 1)
        self.n_prompt = n_prompt
        self.state = (ctypes.c_uint8 * lib.llama_state_seq_get_size(self.context, 0))()
        assert lib.llama_state_seq_get_data(self.context, self.state, len(self.state), 0) == len(self.state)

    def logits(self, widths: Sequence[int], n: int) -> np.ndarray:
        """Of the n positions after the prompt, decoded in blocks of these widths in turn."""
        self._restore()
        rows, pos, turn = [], self.n_prompt, 0
        while pos < self.n_prompt + n:
            width = min(widths[turn % len(widths)], self.n_prompt + n - pos)
            rows.append(decode(self.context, TOKENS[pos : pos + width], pos, width))
            pos += width
            turn += 1
        return np.concatenate(rows)

    def _restore(self) -> None:
        lib = llama()
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        if self.n_prompt:
            assert lib.llama_state_seq_set_data(self.context, self.state, len(self.state), 0)

    def close(self) -> None:
        free_context(self.context)


def logits(weights: Weights, widths: Sequence[int], *, n_prompt: int = 0, n: int = 24) -> np.ndarray:
    """Logits of positions n_prompt .. n_prompt+n-1, decoded in blocks of these widths in turn, flash attention off."""
    reader = Reader(weights)
    reader.read_prompt(n_prompt)
    found = reader.logits(widths, n)
    reader.close()
    return found


def decode(context: Any, tokens: Sequence[int], pos: int, n_outputs: int) -> np.ndarray:
    lib = llama()
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos + i, 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = i >= len(tokens) - n_outputs
    assert lib.llama_decode(context, batch) == 0
    outputs = range(len(tokens) - n_outputs, len(tokens))
    rows = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (256,)).copy() for i in outputs]
    lib.llama_batch_free(batch)
    return np.stack(rows)


@pytest.mark.parametrize(
    "type, exact", [(t, "flash off") for t in FILE_TYPES] + [("Q4_K", "bf16 cache"), ("Q4_K", "q8_0 cache")]
)
def test_every_split_gives_the_logits_of_single_rows(type: str, exact: str, file_of: Any) -> None:
    """At 8 cells, where llama.cpp's attention gets another block of 256, and where it would split the cells."""
    weights = open_weights(file_of(type))
    check_widths(Reader(weights, EXACT[exact]), ((0, 16), (247, 24), (592, 16), (1992, 16)))
    weights.close()


def check_widths(reader: Reader, places: Sequence[tuple[int, int]]) -> None:
    """After so many tokens, the logits of the next n are the same to the bit in blocks of any widths."""
    for n_prompt, n in places:
        reader.read_prompt(n_prompt)
        alone = reader.logits([1], n)
        assert np.isfinite(alone).all()
        for widths in ([2], [3], [4], [5], [6], [7], [8], [1, 4, 2, 8, 3])[:: 1 if n_prompt < 300 else 3]:
            assert (reader.logits(widths, n) == alone).all(), (widths, n_prompt)
    reader.close()


@pytest.mark.parametrize(
    "name, type",
    [(s, t) for s in SETS[1:] for t in FILE_TYPES if s != "portable" or t in ("Q8_0", "Q4_K", "BF16")],
)
def test_every_kernel_set_in_a_context(name: str, type: str, file_of: Any) -> None:
    weights, stock = open_weights(file_of(type)), open_weights(file_of(type), [])
    _native.smallbatch_use_set(name)
    try:
        alone = logits(weights, [1])  # random weights amplify what rounds otherwise
        assert np.abs(alone - logits(stock, [1])).max() < 1.5
        check_widths(Reader(weights), ((0, 8), (247, 16), (592, 8), (1992, 8)))
    finally:
        _native.smallbatch_use_set("")
    weights.close()
    stock.close()


def test_attention_only_model_and_its_head(pair_of: Any) -> None:
    made = pair_of("T", "Q8_0")
    weights = open_weights(made.main)
    check_widths(Reader(weights), ((0, 8), (240, 32), (1992, 8)))
    weights.close()


def write_experts(path: Path, type: T, *, n_expert: int = 6, n_used: int = 3) -> Path:
    """A two-layer Qwen3-MoE of random weights: 64 values wide, over the 256 bytes."""
    rng = np.random.default_rng(0)
    out = gguf.GGUFWriter(path, "qwen3moe")
    numbers = {"block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 64}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32}
    numbers |= {"attention.value_length": 32, "expert_count": n_expert, "expert_used_count": n_used}
    for key, value in (numbers | {"expert_feed_forward_length": 32}).items():
        out.add_uint32(f"qwen3moe.{key}", value)
    out.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(models.byte_tokens())
    out.add_token_types([1] * 256)
    out.add_token_merges(["Ġ Ġ"])
    shapes = {"token_embd": (256, 64), "output_norm": (64,)}
    for i in (0, 1):
        shapes |= {f"blk.{i}.{n}": (64,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{n}": (32,) for n in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"blk.{i}.attn_{n}": (64, 64) for n in "kv"} | {f"blk.{i}.attn_q": (128, 64)}
        shapes |= {f"blk.{i}.attn_output": (64, 128), f"blk.{i}.ffn_gate_inp": (n_expert, 64)}
        shapes |= {f"blk.{i}.ffn_{n}_exps": (n_expert, 32, 64) for n in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down_exps": (n_expert, 64, 32)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) * (
            1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        )
        if len(shape) == 1 or "gate_inp" in name:
            out.add_tensor(f"{name}.weight", values)
        else:
            out.add_tensor(f"{name}.weight", gguf.quants.quantize(values, type), raw_dtype=type)
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return path


@pytest.mark.parametrize("type", [T.F32, T.Q8_0])
def test_experts(type: T, tmp_path: Path) -> None:
    path = write_experts(tmp_path / "experts.gguf", type)
    weights, stock = open_weights(path), open_weights(path, [])
    alone = logits(weights, [1])
    for widths in ([2], [3], [4], [8], [5, 1, 7]):
        assert (logits(weights, widths) == alone).all()
    assert np.abs(alone - logits(stock, [1])).max() < (0.01 if type == T.F32 else 0.5)
    weights.close()
    stock.close()


def test_longer_prompts_are_the_cpu_backend_s(file_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_sidecar.runtime.weights.repacks", lambda: False)
    ours, stock = open_weights(file_of("Q8_0")), open_weights(file_of("Q8_0"), [])
    assert (logits(ours, [24]) == logits(stock, [24])).all()
    assert not (logits(ours, [1]) == logits(stock, [1])).all()
    ours.close()
    stock.close()


def test_a_type_that_is_not_wanted_is_not_placed(file_of: Any) -> None:
    stock, other = open_weights(file_of("Q4_0"), []), open_weights(file_of("Q4_0"), [T.Q8_0])
    assert (logits(stock, [1]) == logits(other, [1])).all()
    stock.close()
    other.close()


def test_types_of_which_one_is_repacked(pair: models.Pair) -> None:
    """Products with what llama.cpp has repacked stay its own, wherever their rows come from."""
    path = pair.main.with_name("mixed.gguf")
    params = llama().llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES["Q8_0"], 1
    params.output_tensor_type = params.token_embedding_type = int(T.Q4_0)
    assert (
        llama().llama_model_quantize(str(pair.main).encode(), str(path).encode(), ctypes.byref(params)) == 0
    )
    assert {t.type for t in read_header(path).tensors.values()} >= {T.Q8_0, T.Q4_0}
    ours, stock = open_weights(path, [T.Q8_0]), open_weights(path, [])
    for widths in ([1], [4]):
        found, wanted = logits(ours, widths).ravel(), logits(stock, widths).ravel()
        assert np.corrcoef(found, wanted)[0, 1] > 0.99
    ours.close()
    stock.close()


def test_what_another_thread_loads_meanwhile_is_not_placed(file_of: Any) -> None:
    path = file_of("Q8_0")
    with kernels.placing(), ThreadPoolExecutor(1) as pool:
        beside = pool.submit(open_weights, path, []).result()
    ours, stock = open_weights(path), open_weights(path, [])
    found, wanted = logits(beside, [1]), logits(stock, [1])
    assert (found == wanted).all() and not (found == logits(ours, [1])).all()
    for weights in (beside, ours, stock):
        weights.close()


def test_plain_and_speculative_text_are_equal(pair_of: Any) -> None:
    made = pair_of("R", "Q8_0")
    assert T.Q8_0 in kernels.types()
    with load(made.main, made.sidecar, kernels="ours", flash_attn="off", threads=2) as model:
        texts = []
        for depth in (0, 1, 3, 7):
            with model.session(ctx=512, depth=depth) as session:
                generation = session.generate("The quick brown fox", max_tokens=48, temperature=0.0)
                generation.read()
                texts.append(generation.tokens)
        assert texts[0] == texts[1] == texts[2] == texts[3]


def test_a_trial_times_both() -> None:
    set_verbose(False)
    trial = kernels.try_out(T.Q4_K, n_rows=(1, 4), threads=2, repeats=2, shape=(512, 96), n_bytes=1 << 20)
    assert len(trial.ours_s) == len(trial.stock_s) == 2
    assert trial.ours_gains > 0
    with pytest.raises(ValueError, match="Q2_K has no small-batch kernels"):
        kernels.try_out(T.Q2_K, n_rows=(1,), threads=1)
    with pytest.raises(ValueError, match="100 values are no blocks of Q8_0"):
        kernels.try_out(T.Q8_0, n_rows=(1,), threads=1, shape=(100, 8))


BESIDE = """
import hashlib, sys, llama_cpp
main, ours = sys.argv[1], sys.argv[2] == "with"
if ours:
    from pathlib import Path
    from llama_sidecar.runtime import kernels
    from llama_sidecar.runtime.weights import Settings, Weights, make_target_context
    assert kernels.types()
    weights = Weights(Path(main), with_head=False, n_gpu_layers=0, device=None, ours=kernels.types())
    context = make_target_context(weights, Settings(threads=2), n_ctx=64, depth=0, n_slots=0)
llm = llama_cpp.Llama(main, n_ctx=128, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False)
for block in ([1, 2, 3], [4], [5, 6, 7, 8], [9], list(range(10, 40))):
    llm.eval(block)
print(hashlib.sha256(llm.scores[:39].tobytes()).hexdigest())
"""


@pytest.mark.parametrize("type", ["Q4_K", "Q8_0"])
def test_another_model_in_the_process_gives_the_same_logits(type: str, file_of: Any) -> None:
    def run(mode: str) -> str:
        command = [sys.executable, "-c", BESIDE, str(file_of(type)), mode]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert run("without") == run("with")


TAKEN = """
import sys
from pathlib import Path
from llama_sidecar.runtime import kernels
from llama_sidecar.runtime.weights import Weights
def anonymous_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
found = []
for name in sys.argv[1:]:
    before = anonymous_bytes()
    weights = Weights(Path(name), with_head=False, n_gpu_layers=0, device=None, ours=kernels.types())
    found.append(anonymous_bytes() - before)
print(found[-1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_placed_weights_stay_in_the_mapped_file(pair: models.Pair, file_of: Any) -> None:
    """In a process of its own, whose memory nobody has used before; the first model takes what is made once."""
    command = [sys.executable, "-c", TAKEN, str(file_of("Q4_0")), str(pair.main)]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert taken < sum(t.n_bytes for t in read_header(pair.main).tensors.values()) / 4


def refusal(library: Path | None) -> str:
    """What a process says in which the device is registered with this library."""
    name = None if library is None else str(library)
    code = f"import ctypes\nfrom llama_sidecar.runtime import _native\nlibrary = ctypes.CDLL({name!r})\n"
    code += "print(_native.smallbatch_register(library._handle))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_library_without_ggml_is_refused_with_a_reason() -> None:
    assert refusal(None).startswith("the loaded ggml lacks ggml_version, ")


@pytest.mark.parametrize(
    "function, reason",
    [
        ("int unused", "None"),
        ('const char * ggml_version(void) { return "9.9.9"; }', "ggml is 9.9.9, tested with "),
        (
            "void * ggml_backend_dev_backend_reg(void * device) { static int version = 3; return &version; }",
            "ggml's backend interface is version 3, not ",
        ),
        (
            "unsigned long ggml_tensor_overhead(void) { return 400; }",
            "ggml lays these out otherwise: tensor",
        ),
        (
            "unsigned long ggml_backend_buffer_get_size(void * buffer) { return 1; }",
            "ggml lays these out otherwise: buffer",
        ),
        (
            'const char * ggml_backend_dev_name(void * device) { return "CPU"; }',
            "ggml lays these out otherwise: device",
        ),
        (
            "void * ggml_backend_get_device(void * backend) { return 0; }",
            "ggml lays these out otherwise: backend",
        ),
    ],
    ids=["the same", "version", "interface", "tensor", "buffer", "device", "backend"],
)
def test_a_ggml_that_differs_is_refused_with_a_reason(function: str, reason: str, tmp_path: Path) -> None:
    """The loaded ggml, behind a library that answers one question otherwise."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("Linux, and a C compiler")
    import llama_cpp

    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(f"{function};\n")
    folder = Path(llama_cpp.__file__).parent / "lib"
    command = [compiler, "-shared", "-fPIC", "-o", library, source, "-Wl,--no-as-needed", f"-L{folder}"]
    names = ("llama", "ggml", "ggml-cpu", "ggml-base")
    subprocess.run([*command, *(f"-l{name}" for name in names), f"-Wl,-rpath,{folder}"], check=True)
    assert refusal(library).startswith(reason)
