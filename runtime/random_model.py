"""Qwen3.5 in shape, random in weights: a main file and its sidecar, to measure speed with where no model is yet.

Every matrix is random bytes with usable scales put in, which takes a second a gigabyte, so the text is noise and what a
decode costs is real. One pair at a time lies in a folder, and none is left there. Knows shapes, types and block
layouts (facts: the checkpoints' config.json; llama.cpp's src/models/qwen35.cpp, ggml-common.h and llama-quant.cpp), not
what the files are for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GGMLType

from llama_sidecar.sidecars import keys

from .cache_folder import VARIABLE
from .errors import CacheError

ARCH = "qwen35"
MARK = "-random-"  # in the names of the files written here, and only these are ever removed
SLICE_BYTES = 16 << 20
ELSEWHERE = f"name another folder ({VARIABLE} sets that of predictions)"
FREE_RESERVE_BYTES = 1 << 30  # never fill a disk to the brim for a measurement

Announce = Callable[[int], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense Qwen3.5 model with one MTP block; every fourth layer is attention, the others gated-delta.

    `tied`: the output matrix is the embeddings. `state`: values of a gated-delta head, key and value alike.
    """

    name: str
    n_embd: int
    n_layers: int
    n_ff: int
    n_head: int
    n_kv: int
    n_value_heads: int
    tied: bool
    n_key_heads: int = 16
    head_dim: int = 256
    state: int = 128
    n_vocab: int = 248_320


SHAPES = {  # Qwen/Qwen3.5-*, config.json: text_config
    "0.8B": Shape("Qwen3.5-0.8B", 1024, 24, 3584, n_head=8, n_kv=2, n_value_heads=16, tied=True),
    "2B": Shape("Qwen3.5-2B", 2048, 24, 6144, n_head=8, n_kv=2, n_value_heads=16, tied=True),
    "4B": Shape("Qwen3.5-4B", 2560, 32, 9216, n_head=16, n_kv=4, n_value_heads=32, tied=True),
    "9B": Shape("Qwen3.5-9B", 4096, 32, 12288, n_head=16, n_kv=4, n_value_heads=32, tied=False),
}

# Bytes of a block that are half-precision scales, and what they are set to: weights then have a deviation near 0.02, as
# trained ones have. All other bytes may be anything.
SCALES: dict[GGMLType, dict[int, float]] = {
    GGMLType.Q8_0: {0: 2.7e-4},
    GGMLType.Q4_0: {0: 4.3e-3},
    GGMLType.Q4_K: {0: 7.8e-5, 2: 5.8e-4},
    GGMLType.Q6_K: {208: 1.5e-5},
}
# Of a 16-bit float: the bits that stay random (sign, mantissa), and the exponent of 2^-6.
FLOATS = {GGMLType.F16: (0x83FF, 9 << 10), GGMLType.BF16: (0x807F, 121 << 7)}
CONSTANTS = {"ssm_conv1d.weight": 0.25, "ssm_a": -0.5}  # of what is F32; everything else there is 1

TYPES = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "BF16", "F16")


def main_type(type: str, name: str, shape: Shape) -> GGMLType:
    """The type of a matrix of a main file of this type, as llama-quantize chooses it."""
    is_output = name == keys.OUTPUT or (name == keys.TOKEN_EMBD and shape.tied)
    if type == "Q4_0":
        return GGMLType.Q6_K if is_output else GGMLType.Q4_0
    if type != "Q4_K_M":
        return GGMLType[type]
    part = name.split(".")
    finer = part[-2] in ("attn_qkv", "attn_v", "ffn_down") and _has_more_bits(int(part[1]), shape.n_layers)
    return GGMLType.Q6_K if is_output or finer else GGMLType.Q4_K


def _has_more_bits(layer: int, n_layers: int) -> bool:
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def sidecar_type(name: str) -> GGMLType:
    """The type of a matrix of a sidecar, as `convert` writes it by default."""
    return GGMLType.Q4_0 if name in (keys.TOKEN_EMBD, keys.OUTPUT) else GGMLType.Q8_0


def random_blocks(type: GGMLType, n_bytes: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random weights as the bytes of a type; `n_bytes` is a whole number of its blocks.

    >>> values = gguf.quants.dequantize(random_blocks(GGMLType.Q8_0, 340, np.random.default_rng(0)), GGMLType.Q8_0)
    >>> values.shape, bool(np.isfinite(values).all())
    ((320,), True)
    """
    words: npt.NDArray[np.uint64] = rng.integers(0, 1 << 64, -(-n_bytes // 8), np.uint64)
    data = words.view(np.uint8)[:n_bytes]
    if type in FLOATS:
        random_bits, exponent = FLOATS[type]
        floats = data.view(np.uint16)
        floats &= random_bits
        floats |= exponent
        return data
    blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[type][1])
    for at, scale in SCALES[type].items():
        blocks[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    return data


@dataclass(frozen=True)
class RandomPair:
    """A main file and its sidecar, and their sizes."""

    main: Path
    sidecar: Path
    main_bytes: int
    sidecar_bytes: int


@contextlib.contextmanager
def random_pair(
    shape: Shape,
    type: str,
    folder: Path,
    *,
    keep: bool = False,
    announce: Announce = lambda n_bytes: None,
    progress: Progress = lambda done, total: None,
) -> Iterator[RandomPair]:
    """Writes a random pair into `folder` and removes it afterwards, whatever happens. What an earlier run left goes first.

    Args:
        shape: of which model; `type`: of the main file's matrices, one of TYPES.
        folder: one process at a time uses it.
        keep: leave the pair there when the `with` block ends well.
        announce: called with the bytes to be written, before they are; may raise.
        progress: called with the bytes written and the bytes in all.

    Raises:
        CacheError: the disk is too small or cannot be written, or another process uses the folder.

    Example:
        >>> with random_pair(SHAPES["0.8B"], "Q8_0", Path("scratch")) as pair:        # doctest: +SKIP
        ...     load(pair.main, pair.sidecar)
    """
    finished = False
    with _alone_in(folder):
        try:
            with _one_line(folder):
                _clear(folder)
                files = _plan(shape, type, folder)
                n_bytes = sum(file.n_bytes for file in files)
                _check_space(folder, n_bytes)
            announce(n_bytes)
            with _one_line(folder):
                _fill(files, n_bytes, progress)
            main, sidecar = files
            yield RandomPair(main.path, sidecar.path, main.n_bytes, sidecar.n_bytes)
            finished = True
        finally:
            if not (finished and keep):
                _clear(folder)
                with contextlib.suppress(OSError):  # others' files are in it
                    folder.rmdir()


# What is in the files


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # slowest first
    type: GGMLType

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape) // block * size)


def _block(shape: Shape, i: int) -> dict[str, tuple[int, ...]]:
    """The tensors of block `i`, by name; the block after the trunk's last is the MTP block."""
    n, is_head = shape.n_embd, i == shape.n_layers
    tensors: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n,),
        "post_attention_norm.weight": (n,),
        "ffn_gate.weight": (shape.n_ff, n),
        "ffn_up.weight": (shape.n_ff, n),
        "ffn_down.weight": (n, shape.n_ff),
    }
    if is_head or (i + 1) % 4 == 0:
        tensors |= {
            "attn_q.weight": (2 * shape.n_head * shape.head_dim, n),  # a gate beside each query
            "attn_k.weight": (shape.n_kv * shape.head_dim, n),
            "attn_v.weight": (shape.n_kv * shape.head_dim, n),
            "attn_output.weight": (n, shape.n_head * shape.head_dim),
            "attn_q_norm.weight": (shape.head_dim,),
            "attn_k_norm.weight": (shape.head_dim,),
        }
    else:
        inner = shape.n_value_heads * shape.state
        channels = inner + 2 * shape.n_key_heads * shape.state
        tensors |= {
            "attn_qkv.weight": (channels, n),
            "attn_gate.weight": (inner, n),
            "ssm_alpha.weight": (shape.n_value_heads, n),
            "ssm_beta.weight": (shape.n_value_heads, n),
            "ssm_conv1d.weight": (channels, 4),
            "ssm_a": (shape.n_value_heads,),
            "ssm_dt.bias": (shape.n_value_heads,),
            "ssm_norm.weight": (shape.state,),
            "ssm_out.weight": (n, inner),
        }
    if is_head:
        tensors |= {"nextn.eh_proj.weight": (n, 2 * n)}
        tensors |= {f"nextn.{name}.weight": (n,) for name in ("enorm", "hnorm", "shared_head_norm")}
    return {f"blk.{i}.{name}": size for name, size in tensors.items()}


def _tensors(shape: Shape, blocks: range, type_of: Callable[[str], GGMLType]) -> list[_Tensor]:
    vocabulary = (shape.n_vocab, shape.n_embd)
    named: dict[str, tuple[int, ...]] = {keys.TOKEN_EMBD: vocabulary}
    if not shape.tied:
        named[keys.OUTPUT] = vocabulary
    named[keys.OUTPUT_NORM] = (shape.n_embd,)
    for i in blocks:
        named |= _block(shape, i)
    return [
        _Tensor(name, size, GGMLType.F32 if len(size) == 1 or "conv1d" in name else type_of(name))
        for name, size in named.items()
    ]


def _header(shape: Shape, n_blocks: int, tensors: list[_Tensor]) -> gguf.GGUFWriter:
    header = gguf.GGUFWriter(None, ARCH)
    for tensor in tensors:
        header.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type
        )
    header.add_name(f"{shape.name} with random weights")
    numbers = {
        "block_count": n_blocks,
        "context_length": 32768,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim // 4,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": shape.state,
        "ssm.group_count": shape.n_key_heads,
        "ssm.time_step_rank": shape.n_value_heads,
        "ssm.inner_size": shape.n_value_heads * shape.state,
    }
    if n_blocks > shape.n_layers:
        numbers["nextn_predict_layers"] = n_blocks - shape.n_layers
    for key, number in numbers.items():
        header.add_uint32(f"{ARCH}.{key}", number)
    header.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", 1e-6)
    header.add_float32(f"{ARCH}.rope.freq_base", 1e7)
    header.add_array(f"{ARCH}.rope.dimension_sections", [11, 11, 10, 0])
    header.add_tokenizer_model("gpt2")
    header.add_tokenizer_pre("qwen35")
    header.add_token_list(_vocabulary(shape.n_vocab))
    header.add_token_types([gguf.TokenType.NORMAL] * shape.n_vocab)
    header.add_token_merges(["Ġ Ġ"])
    header.add_eos_token_id(shape.n_vocab - 1)
    header.add_add_bos_token(False)
    return header


def _vocabulary(n_vocab: int) -> list[str]:
    """The 256 byte tokens in GPT-2's printable spelling, so that any text tokenizes, and made-up ones."""
    printable = [chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))]
    others = [chr(256 + i) for i in range(256 - len(printable))]
    return [*printable, *others, *(f"token{i}" for i in range(256, n_vocab))]


# Writing


@dataclass(frozen=True)
class _File:
    """A file whose header is written; its tensors' data follows from `data_at` on. `n_bytes` is the whole file's size."""

    path: Path
    tensors: list[_Tensor]
    data_at: int
    n_bytes: int


def _plan(shape: Shape, type: str, folder: Path) -> list[_File]:
    """The main file and its sidecar, headers written."""
    name = shape.name + MARK
    trunk = _tensors(shape, range(shape.n_layers), lambda tensor: main_type(type, tensor, shape))
    head = _tensors(shape, range(shape.n_layers, shape.n_layers + 1), sidecar_type)
    return [
        _begin(folder / f"{name}{type}.gguf", trunk, _header(shape, shape.n_layers, trunk)),
        _begin(folder / f"mtp-{name}Q8_0.gguf", head, _header(shape, shape.n_layers + 1, head)),
    ]


def _begin(path: Path, tensors: list[_Tensor], header: gguf.GGUFWriter) -> _File:
    header.write_header_to_file(path)
    header.write_kv_data_to_file()
    header.write_ti_data_to_file()
    header.close()
    data_at = _aligned(path.stat().st_size)
    return _File(path, tensors, data_at, data_at + sum(_aligned(tensor.n_bytes) for tensor in tensors))


def _fill(files: list[_File], n_bytes: int, progress: Progress) -> None:
    rng = np.random.Generator(np.random.SFC64(0))
    done = 0
    for planned in files:
        with planned.path.open("r+b") as file:
            at = planned.data_at
            for tensor in planned.tensors:
                file.seek(at)
                for data in _data(tensor, rng):
                    file.write(data)
                    done += len(data)
                    progress(done, n_bytes)
                at += _aligned(tensor.n_bytes)
            file.truncate(planned.n_bytes)


def _data(tensor: _Tensor, rng: np.random.Generator) -> Iterator[memoryview]:
    """A tensor's bytes, in slices of whole rows."""
    if tensor.type == GGMLType.F32:
        value = next((v for end, v in CONSTANTS.items() if tensor.name.endswith(end)), 1.0)
        yield np.full(tensor.shape, value, "<f4").reshape(-1).view(np.uint8).data
        return
    row_bytes = tensor.n_bytes // tensor.shape[0]
    step = max(1, SLICE_BYTES // row_bytes) * row_bytes
    for start in range(0, tensor.n_bytes, step):
        yield random_blocks(tensor.type, min(step, tensor.n_bytes - start), rng).data


def _aligned(n_bytes: int) -> int:
    return int(gguf.GGUFWriter.ggml_pad(n_bytes, gguf.GGUF_DEFAULT_ALIGNMENT))


# The folder


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other processes out of it."""
    with _one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheError(
                f"another prediction is running in {folder}: one at a time, or their times mean nothing"
            ) from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turns the system's refusals into our error."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CacheError(f"the disk of {folder} filled up: free some space, or {ELSEWHERE}") from error
        raise CacheError(f"{folder} cannot be written ({error.strerror or error}): {ELSEWHERE}") from error


def _check_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if n_bytes + FREE_RESERVE_BYTES > free:
        raise CacheError(
            f"{folder} has {free / 1e9:.2f} GB free; {n_bytes / 1e9:.2f} GB of random weights and a reserve of "
            f"{FREE_RESERVE_BYTES / 1e9:.2f} GB are needed: free some space, choose a smaller size, or {ELSEWHERE}"
        )


def _clear(folder: Path) -> None:
    for path in folder.glob(f"*{MARK}*.gguf"):
        path.unlink()
