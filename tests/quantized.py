"""Quantised tiny checkpoints: the trunk's matrices stored as published methods store them, the head left as it is.

Codes and scales are random bits decided by the names, so that no library's rounding is in them. Beside each weight's parts
stands what it is worth, worked out with other means than the converter's.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import Array, make_checkpoint, random_values, tiny_config, tiny_tensors

Parts = dict[str, Array]
Method = Callable[[str, tuple[int, int]], tuple[Parts, Array]]  # (name, shape) -> parts, float32 values


def bits(name: str, shape: tuple[int, ...], n_bits: int) -> Array:
    """Random integers below 2**n_bits, decided by the name."""
    random = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return (random >> np.uint64(64 - n_bits)).astype(np.uint32).reshape(shape)


def fp8_codes(name: str, shape: tuple[int, ...]) -> Array:
    codes = bits(name, shape, 8).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
    return codes.view(ml_dtypes.float8_e4m3fn)


def scales(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return (np.abs(random_values(name, shape, 0.01)) + np.float32(0.001)).astype(dtype)


def times_blocks(values: Array, factors: Array, rows: int, cols: int) -> Array:
    out = values.astype(np.float32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] *= np.float32(factors[i // rows, j // cols])
    return out


def fp8_block(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes, factors = fp8_codes(name, shape), scales(f"{name} s", (-(-shape[0] // 32), -(-shape[1] // 48)))
    return {name: codes, f"{name}_scale_inv": factors}, times_blocks(codes, factors, 32, 48)


def fp8_channel(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes, factors = fp8_codes(name, shape), scales(f"{name} s", (shape[0], 1), ml_dtypes.bfloat16)
    return {name: codes, f"{name}_scale": factors}, codes.astype(np.float32) * factors.astype(np.float32)


def fp8_tensor(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes, factor = fp8_codes(name, shape), scales(f"{name} s", ())
    more = {f"{name.removesuffix('weight')}input_scale": scales(f"{name} i", ())}
    return {name: codes, f"{name}_scale": factor, **more}, codes.astype(np.float32) * factor


def int8_channel(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes = bits(name, shape, 8).astype(np.uint8).view(np.int8)
    factors = scales(f"{name} s", (shape[0], 1))
    return {name: codes, f"{name}_scale": factors}, codes.astype(np.float32) * factors


def pack_rows(codes: Array, n_bits: int) -> Array:
    """Codes (n, m) -> words (n, ceil(m / (32 // n_bits))), the first lowest."""
    per_word = 32 // n_bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // per_word] |= codes[:, column] << np.uint32(n_bits * (column % per_word))
    return words.view(np.int32)


def packed(n_bits: int, group: int, is_symmetric: bool = True) -> Method:
    def method(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
        codes = bits(name, shape, n_bits)
        n_groups = shape[1] // group
        factors = scales(f"{name} s", (shape[0], n_groups), ml_dtypes.bfloat16)
        parts = {
            f"{name}_packed": pack_rows(codes, n_bits),
            f"{name}_scale": factors,
            f"{name}_shape": np.array(shape, np.int64),
        }
        zeros = np.full((shape[0], n_groups), 1 << (n_bits - 1), np.int64)
        if not is_symmetric:
            zeros = bits(f"{name} z", (shape[0], n_groups), n_bits).astype(np.int64)
            parts[f"{name}_zero_point"] = np.ascontiguousarray(pack_rows(zeros.T.astype(np.uint32), n_bits).T)
        steps = codes.astype(np.int64) - np.repeat(zeros, group, axis=1)
        return parts, steps.astype(np.float32) * np.repeat(factors.astype(np.float32), group, axis=1)

    return method


def gptq(n_bits: int, group: int, in_order: bool = True, offset: int = 1) -> Method:
    def method(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
        layer, (n_rows, n_cols) = name.removesuffix("weight"), shape
        codes = bits(name, shape, n_bits)
        stored_zeros = bits(f"{name} z", (n_cols // group, n_rows), n_bits) % ((1 << n_bits) - 1)
        factors = scales(f"{name} s", (n_cols // group, n_rows), np.float16)
        groups = (
            np.arange(n_cols) // group if in_order else np.argsort(bits(f"{name} g", (n_cols,), 32)) // group
        )
        values = np.zeros(shape, np.float32)
        for column, g in enumerate(groups):
            steps = codes[:, column].astype(np.int64) - (stored_zeros[g].astype(np.int64) + offset)
            values[:, column] = steps.astype(np.float32) * factors[g].astype(np.float32)
        parts = {
            f"{layer}qweight": np.ascontiguousarray(pack_rows(codes, n_bits).T),
            f"{layer}qzeros": pack_rows(stored_zeros, n_bits),
            f"{layer}scales": factors,
            f"{layer}g_idx": groups.astype(np.int32),
        }
        return parts, values

    return method


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight values a word has from its lowest bits on


def pack_awq(codes: Array) -> Array:
    """Codes (n, m) of 4 bits -> words (n, m / 8)."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, value in enumerate(AWQ_ORDER):
            words[:, word] |= codes[:, 8 * word + value] << np.uint32(4 * place)
    return words.view(np.int32)


def awq(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    layer, (n_rows, n_cols), group = name.removesuffix("weight"), shape, 32
    codes, zeros = bits(name, (n_cols, n_rows), 4), bits(f"{name} z", (n_cols // group, n_rows), 4)
    factors = scales(f"{name} s", (n_cols // group, n_rows), np.float16)
    values = np.zeros(shape, np.float32)
    for column in range(n_cols):
        steps = codes[column].astype(np.int64) - zeros[column // group].astype(np.int64)
        values[:, column] = steps.astype(np.float32) * factors[column // group].astype(np.float32)
    parts = {f"{layer}qweight": pack_awq(codes), f"{layer}qzeros": pack_awq(zeros), f"{layer}scales": factors}
    return parts, values


def fp4_codes(name: str, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Packed codes and their values."""
    codes = bits(name, shape, 4).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def nvfp4(is_inverse: bool) -> Method:
    def method(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
        codes, values = fp4_codes(name, shape)
        factors = (
            (bits(f"{name} s", (shape[0], shape[1] // 16), 6) + 0x20)
            .astype(np.uint8)
            .view(ml_dtypes.float8_e4m3fn)
        )
        whole = scales(f"{name} w", (1,) if is_inverse else ())
        layer = name.removesuffix(".weight")
        if is_inverse:
            parts = {
                f"{name}_packed": codes, f"{name}_scale": factors, f"{name}_global_scale": 1 / whole,
                f"{layer}.input_global_scale": scales(f"{name} i", (1,)),
            }  # fmt: skip
            factor = np.float32(1) / (1 / whole)
        else:
            parts = {
                name: codes, f"{name}_scale": factors, f"{name}_scale_2": whole,
                f"{layer}.input_scale": scales(f"{name} i", ()),
            }  # fmt: skip
            factor = whole
        return parts, times_blocks(values, factors.astype(np.float32), 1, 16) * factor

    return method


def mxfp4(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes, values = fp4_codes(name, shape)
    exponents = (bits(f"{name} s", (shape[0], shape[1] // 32), 3) + 116).astype(np.uint8)
    factors = 2.0 ** (exponents.astype(np.float32) - 127)
    return {f"{name}_packed": codes, f"{name}_scale": exponents}, times_blocks(values, factors, 1, 32)


def mxfp4_blocks(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    parts, values = mxfp4(name, shape)
    codes = parts[f"{name}_packed"].reshape(shape[0], -1, 16)
    return {f"{name}_blocks": codes, f"{name}_scales": parts[f"{name}_scale"]}, values


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


# Name -> how it stores a matrix, and config.json's quantization_config.
METHODS: Mapping[str, tuple[Method, dict[str, Any]]] = {
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [32, 48]}),
    "fp8-tensor": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "float-quantized": (
        fp8_channel,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "int-quantized": (int8_channel, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "pack-quantized-4": (
        packed(4, 32), compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    ),
    "pack-quantized-4-zeros": (
        packed(4, 16, is_symmetric=False),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False),
    ),
    "pack-quantized-8": (
        packed(8, 64), compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=64),
    ),
    "gptq-4": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "gptq-4-act-order": (
        gptq(4, 16, in_order=False), {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    ),
    "gptq-8-v2": (
        gptq(8, 64, offset=0), {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "nvfp4-modelopt": (nvfp4(is_inverse=False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4-pack-quantized": (
        nvfp4(is_inverse=True), compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
    ),
    "mxfp4-pack-quantized": (
        mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
    ),
    "mxfp4-blocks": (mxfp4_blocks, {"quant_method": "mxfp4"}),
}  # fmt: skip


def quantize_trunk(tensors: Mapping[str, Array], method: Method, n_layers: int | None) -> tuple[Parts, Parts]:
    """A checkpoint's tensors with the trunk's projections stored by a method, and those with their values in BF16's place.

    Left as they are: what is no `*_proj.weight` matrix with rows of whole groups, and the head (`n_layers` None: not the head).
    """
    stored: Parts = {}
    plain: Parts = {}
    for name, tensor in tensors.items():
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "x"
        is_stored = n_layers is None or (layer.isdigit() and int(layer) < n_layers and "mtp." not in name)
        if is_stored and name.endswith("_proj.weight") and tensor.ndim == 2 and tensor.shape[1] % 64 == 0:
            parts, values = method(name, tensor.shape)
            stored |= parts
            plain[name] = values
        else:
            stored[name] = plain[name] = tensor
    return stored, plain


def fp8_powers(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    """DeepSeek-V4's matrices: FP8 in blocks of 128 that share a power of two."""
    exponents = (bits(f"{name} s", (-(-shape[0] // 128), -(-shape[1] // 128)), 2) + 116).astype(np.uint8)
    codes, factors = fp8_codes(name, shape), 2.0 ** (exponents.astype(np.float32) - 127)
    stored = {name: codes, f"{name.removesuffix('.weight')}.scale": exponents.view(ml_dtypes.float8_e8m0fnu)}
    return stored, times_blocks(codes, factors, 128, 128)


def fp4_powers(name: str, shape: tuple[int, int]) -> tuple[Parts, Array]:
    """DeepSeek-V4's experts: MXFP4, called int8."""
    parts, values = mxfp4(name, shape)
    scale = parts[f"{name}_scale"].view(ml_dtypes.float8_e8m0fnu)
    return {
        name: parts[f"{name}_packed"].view(np.int8),
        f"{name.removesuffix('.weight')}.scale": scale,
    }, values


# Families that are published quantised throughout, which is all that llama.cpp's converter reads of them.
_FP8 = re.compile(
    r"attn\.(w[qo]_[ab]|wkv|indexer\.wq_b)\.weight$|shared_experts\.w[123]\.weight$|\.[eh]_proj\.weight$|\.main_proj\.weight$"
)
PUBLISHED: Mapping[str, dict[re.Pattern[str], Method]] = {
    "deepseek4": {re.compile(r"\.experts\.\d+\.w[123]\.weight$"): fp4_powers, _FP8: fp8_powers}
}


def make_published(
    parent: Path,
    arch: str,
    variant: str,
    tensors: Mapping[str, Array] | None = None,
    config: dict[str, Any] | None = None,
) -> tuple[Path, Path]:
    """A variant's folder as its family is published, with other tensors or another config if given, and one with its values in F32."""
    stored: Parts = {}
    plain: Parts = {}
    for name, tensor in (tensors or tiny_tensors(arch, variant)).items():
        method = next((method for names, method in PUBLISHED[arch].items() if names.search(name)), None)
        parts, values = method(name, tensor.shape) if method else ({name: tensor}, tensor)
        stored |= parts
        plain[name] = values
    config = config or tiny_config(arch, variant)
    said = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    published = make_checkpoint(parent / "published", arch, variant, tensors=stored, config=config | said)
    return published, make_checkpoint(parent / "values", arch, variant, tensors=plain, config=config)


# Rows of whole blocks in every matrix, also of ggml's NVFP4.
SIZES = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
    "shared_expert_intermediate_size": 64,
}


def make_quantized(
    parent: Path, name: str, arch: str = "qwen35", variant: str = "tied", *, with_head: bool = False
) -> tuple[Path, Path]:
    """A variant's folder with its trunk (and its head) stored by a method, and one with the same values in F32."""
    method, quantization = METHODS[name]
    config = tiny_config(arch, variant)
    text = config.get("text_config", config)
    text |= {key: size for key, size in SIZES.items() if text.get(key)}
    n_layers = None if with_head else text["num_hidden_layers"]
    stored, plain = quantize_trunk(tiny_tensors(arch, variant, config=config), method, n_layers)
    quantized = make_checkpoint(
        parent / name, arch, variant, tensors=stored, config=config | {"quantization_config": quantization}
    )
    return quantized, make_checkpoint(parent / f"{name}-values", arch, variant, tensors=plain, config=config)
