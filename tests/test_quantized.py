"""Checkpoints quantised by others are read per tensor by what is stored: values equal to a plain reading of the formats.

The references are worked out in tests/quantized.py; scripts/dev/peer_listings.py has stored what llama.cpp's converter makes of
the same checkpoints where it reads the method.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import LOGITS_PROMPT, listing, write_json, write_safetensors
from quantized import METHODS, PUBLISHED, bits, fp8_codes, make_published, make_quantized, scales
from test_convert_peer import LISTINGS, assert_equal_tensors

from llama_sidecar.converter import convert
from llama_sidecar.converter.checkpoint import open_checkpoint
from llama_sidecar.converter.errors import BadShard, MissingShard, UnknownType, UnsupportedModel
from llama_sidecar.converter.families import families
from llama_sidecar.converter.kept import SCALED
from llama_sidecar.converter.quantized import methods

MATRIX = "model.layers.0.mlp.down_proj.weight"
BOUNDS = [(0, 40), (0, 1), (3, 4), (7, 26), (39, 40)]


def folder(path: Path, tensors: dict[str, np.ndarray], quantization: dict[str, object] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / "model.safetensors", tensors)
    write_json(path / "config.json", {"quantization_config": quantization} if quantization else {})
    return path


@pytest.mark.parametrize("name", METHODS)
def test_values_in_any_slice(name: str, tmp_path: Path) -> None:
    method, quantization = METHODS[name]
    parts, values = method(MATRIX, (40, 192))
    bias = np.arange(3, dtype=np.float32)
    with open_checkpoint(folder(tmp_path / "c", parts | {"bias": bias}, quantization)) as checkpoint:
        assert checkpoint.tensors.keys() == {MATRIX, "bias"}
        weight = checkpoint.tensors[MATRIX]
        weight.check_type()
        assert weight.shape == (40, 192)
        for start, stop in BOUNDS:
            found = weight.rows(start, stop)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, values[start:stop], rtol=2e-7)
            assert len(weight.raw_rows(start, stop)) == stop - start  # for the fingerprint


@pytest.mark.parametrize(("arch", "variant"), [("qwen35", "tied"), ("deepseek2", "plain")])
@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_trunk_with_its_head_as_it_was(
    name: str, arch: str, variant: str, tmp_path: Path
) -> None:
    """The pair equals that of the same values in F32; the head's tensors are those of the unquantised checkpoint."""
    quantized, values = make_quantized(tmp_path, name, arch, variant)
    found = convert(quantized, tmp_path / "found", "F32", "F32")
    expected = convert(values, tmp_path / "expected", "F32", "F32")
    assert found.main and found.sidecar and expected.main and expected.sidecar
    assert not found.warnings
    assert listing(found.sidecar)["tensors"] == listing(expected.sidecar)["tensors"]
    ours, theirs = listing(found.main)["tensors"], listing(expected.main)["tensors"]
    assert ours.keys() == theirs.keys()
    if name != "nvfp4-pack-quantized":  # an inverse rounds
        assert ours == theirs


@pytest.mark.parametrize(
    ("arch", "variant"), [("deepseek2", "plain"), ("glm4moe", "air"), ("qwen35", "tied")], ids="-".join
)
@pytest.mark.parametrize("name", ["fp8-block", "pack-quantized-4", "gptq-4"])
def test_a_head_that_is_quantised_like_its_trunk(name: str, arch: str, variant: str, tmp_path: Path) -> None:
    """As DeepSeek-V3's is, whose checkpoint is FP8 throughout."""
    quantized, values = make_quantized(tmp_path, name, arch, variant, with_head=True)
    found, expected = (
        convert(folder, tmp_path / out, "F32", "F32") for folder, out in ((quantized, "a"), (values, "b"))
    )
    for role in ("main", "sidecar"):
        ours, theirs = (listing(getattr(result, role))["tensors"] for result in (found, expected))
        assert ours == theirs
    as_it_was = convert(make_quantized(tmp_path / "c", name, arch, variant)[0], tmp_path / "c", None, "F32")
    theirs = listing(as_it_was.sidecar)["tensors"]
    differing = {tensor for tensor in ours if ours[tensor] != theirs[tensor]}
    assert len(differing) >= 5 and all(tensor.startswith("blk.") for tensor in differing)


@pytest.mark.parametrize("name", METHODS)
def test_values_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Byte for byte; where the peer keeps NVFP4 whatever type is asked for, ours keeps it when asked for it."""
    path = LISTINGS / f"quantized-{name}.json"
    if not path.is_file():
        pytest.skip("llama.cpp's converter does not read this method here")
    quantized, _ = make_quantized(tmp_path, name)
    theirs = json.loads(path.read_text(encoding="utf-8"))
    main = convert(quantized, tmp_path / "out", "F32").main
    assert main
    ours = listing(main)["tensors"]
    if not name.startswith("nvfp4"):
        assert_equal_tensors(ours, theirs)
        return
    kept = convert(quantized, tmp_path / "kept", "NVFP4").main
    assert kept
    found = listing(kept)["tensors"]
    assert found.keys() == theirs.keys()
    n_kept = 0
    for tensor, listed in theirs.items():
        if listed.startswith("NVFP4") or tensor.endswith("scale"):
            assert found[tensor] == listed
            n_kept += listed.startswith("NVFP4")
    assert n_kept == 4 * 3 + 4 + 3  # with those whose columns are in another order


FIRST = [(arch, next(iter(family.TINY))) for arch, family in families().items()]


@pytest.mark.parametrize(("arch", "variant"), FIRST, ids="-".join)
@pytest.mark.parametrize(("name", "kind"), [("nvfp4-modelopt", "NVFP4"), ("mxfp4-blocks", "MXFP4")])
def test_llama_cpp_computes_with_what_is_kept(
    name: str, kind: str, arch: str, variant: str, tmp_path: Path
) -> None:
    """The same logits as with the same values at Q8_0: every factor that is written is applied."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if arch in PUBLISHED:
        quantized, values = make_published(tmp_path, arch, variant)
    else:
        quantized, values = make_quantized(tmp_path, name, arch, variant)
    if kind == "NVFP4" and families()[arch].ARCH not in SCALED:
        with pytest.raises(UnknownType, match="nothing of this file"):
            convert(quantized, tmp_path, kind)
        return
    logits = []
    for checkpoint, type_name in ((quantized, kind), (values, "Q8_0")):
        main = convert(checkpoint, tmp_path / type_name, type_name).main
        exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        model = llama_cpp.Llama(str(main), n_ctx=32, n_threads=1, logits_all=True, verbose=False, **exact)
        model.eval(LOGITS_PROMPT)
        logits.append(model.scores[len(LOGITS_PROMPT) - 1].copy())
        model.close()
    assert np.corrcoef(*logits)[0, 1] > 0.98, np.corrcoef(*logits)[0, 1]


def test_a_type_in_which_nothing_is_stored(tmp_path: Path) -> None:
    quantized, _ = make_quantized(tmp_path, "fp8-block")
    with pytest.raises(
        UnknownType, match="the type asked for is NVFP4, in which only what a checkpoint stores"
    ):
        convert(quantized, tmp_path / "out", "NVFP4")


def test_experts_and_stacked_scales(tmp_path: Path) -> None:
    """One factor for each matrix, each row and each block of a stack."""
    codes = fp8_codes("x", (3, 10, 8))
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    for shape, repeats in {
        (): (1, 1, 1), (3,): (1, 10, 8), (3, 1, 1): (1, 10, 8), (3, 10): (1, 1, 8), (3, 10, 1): (1, 1, 8),
        (3, 10, 2): (1, 1, 4), (3, 3, 1): (1, 4, 8),
    }.items():  # fmt: skip
        factors = scales("s", shape)
        whole = factors.reshape(shape + (1,) * (3 - len(shape)))
        for axis, n in enumerate(repeats):
            whole = np.repeat(whole, n, axis=axis)
        expected = (codes.astype(np.float32) * whole[:, :10]).reshape(30, 8)
        with open_checkpoint(
            folder(tmp_path / "c", {"w": codes, "w_scale_inv": factors}, quantization)
        ) as checkpoint:
            for start, stop in [(0, 30), (9, 11), (20, 30)]:
                np.testing.assert_array_equal(checkpoint.tensors["w"].rows(start, stop), expected[start:stop])


def test_powers_of_two_as_scales_and_names_with_dots(tmp_path: Path) -> None:
    """DeepSeek-V4's spelling: `.scale` of E8M0, over FP8 in blocks and over packed FP4."""
    codes, exponents = fp8_codes("x", (8, 8)), (bits("e", (2, 1), 3) + 120).astype(np.uint8)
    packed, groups = bits("p", (4, 32), 8).astype(np.uint8), np.full((4, 2), 126, np.uint8)
    tensors = {
        "a.weight": codes, "a.scale": exponents.view(ml_dtypes.float8_e8m0fnu),
        "b.weight": packed.view(np.int8), "b.scale": groups.view(ml_dtypes.float8_e8m0fnu),
        "router.scale": np.ones(8, np.float32), "router.weight": np.ones((8, 8), np.float32),
    }  # fmt: skip
    with open_checkpoint(
        folder(tmp_path / "c", tensors, {"quant_method": "fp8", "weight_block_size": [4, 8]})
    ) as checkpoint:
        assert checkpoint.tensors.keys() == {"a.weight", "b.weight", "router.scale", "router.weight"}
        factors = np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 4, axis=0)
        np.testing.assert_array_equal(
            checkpoint.tensors["a.weight"].rows(0, 8), codes.astype(np.float32) * factors
        )
        b = checkpoint.tensors["b.weight"]
        assert (b.dtype, b.shape) == ("MXFP4", (4, 64))
        low = (packed & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float32) / 2
        np.testing.assert_array_equal(b.rows(0, 4)[:, ::2], low)


def test_blocks_are_what_ggml_reads(tmp_path: Path) -> None:
    """Codes kept in GGUF's own types are worth the same, but for NVFP4's factor."""
    from gguf import GGMLQuantizationType, dequantize

    for name, kind in {"nvfp4-modelopt": "NVFP4", "mxfp4-blocks": "MXFP4"}.items():
        method, quantization = METHODS[name]
        parts, values = method(MATRIX, (40, 192))
        with open_checkpoint(folder(tmp_path / name, parts, quantization)) as checkpoint:
            weight = checkpoint.tensors[MATRIX]
            assert weight.dtype == kind
            found = dequantize(weight.blocks(5, 40), GGMLQuantizationType[kind])
            factor = parts.get(f"{MATRIX}_scale_2", np.float32(1))
            np.testing.assert_allclose(found * factor, values[5:], rtol=2e-7)


def test_columns_whose_groups_are_not_in_order_and_one_scale_for_all(tmp_path: Path) -> None:
    method, quantization = METHODS["pack-quantized-4"]
    parts, values = method(MATRIX, (8, 64))
    order = np.array([1, 0] * 32, np.int32)
    factors = parts[f"{MATRIX}_scale"].astype(np.float32)
    steps = np.round(values / np.repeat(factors, 32, axis=1))
    with open_checkpoint(
        folder(tmp_path / "a", parts | {f"{MATRIX}_g_idx": order}, quantization)
    ) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[MATRIX].rows(0, 8), steps * factors[:, order])
    none = {f"{MATRIX}_g_idx": np.full(64, -1, np.int32)}
    with open_checkpoint(folder(tmp_path / "b", parts | none, quantization)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[MATRIX].rows(0, 8), values)
    beyond = {f"{MATRIX}_g_idx": np.full(64, 2, np.int32)}
    with (
        open_checkpoint(folder(tmp_path / "d", parts | beyond, quantization)) as checkpoint,
        pytest.raises(BadShard, match="names group 2"),
    ):
        checkpoint.tensors[MATRIX].rows(0, 8)
    one = parts | {f"{MATRIX}_scale": np.full((1,), 0.5, np.float32)}
    with open_checkpoint(folder(tmp_path / "c", one, quantization)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[MATRIX].rows(2, 8), steps[2:] / 2)


def test_rows_that_are_no_whole_number_of_words(tmp_path: Path) -> None:
    method, quantization = METHODS["pack-quantized-4-zeros"]
    parts, values = method(MATRIX, (5, 48))
    parts = {
        **parts,
        f"{MATRIX}_shape": np.array((5, 44), np.int64),
        f"{MATRIX}_packed": parts[f"{MATRIX}_packed"],
    }
    with open_checkpoint(folder(tmp_path / "c", parts, quantization)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[MATRIX].rows(0, 5), values[:, :44])


def test_a_method_that_is_not_known(tmp_path: Path) -> None:
    known = {name for method in methods().values() for name in method.METHODS}
    assert known >= {"fp8", "compressed-tensors", "gptq", "modelopt", "mxfp4"}
    path = folder(tmp_path / "c", {"a": np.ones(2, np.float32)}, {"quant_method": "bitsandbytes"})
    with pytest.raises(
        UnsupportedModel, match=r"quantized by 'bitsandbytes'; expected none or one of .*gptq"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "changes", "error", "match"),
    [
        ("fp8-block", {"_scale_inv": np.ones((9, 9), np.float32)}, BadShard, "expected for blocks of 32x48"),
        ("float-quantized", {"_scale": np.ones((9, 9), np.float32)}, BadShard, "one for all, for each row"),
        ("pack-quantized-4", {"_scale": None}, BadShard, "has no .*_scale"),
        ("pack-quantized-4", {"_shape": np.array([8, 500])}, UnsupportedModel, "8 words for 500 columns"),
        ("pack-quantized-4", {"_shape": np.array([9, 64])}, BadShard, "expected two sizes"),
        ("pack-quantized-4", {"_scale": np.ones((8, 5), np.float32)}, BadShard, "of whole groups"),
        (
            "pack-quantized-4",
            {"_zero_point": np.ones((8, 5), np.int32)},
            BadShard,
            r"expected I32 of \(1, 2\)",
        ),
        ("nvfp4-modelopt", {"_scale_2": np.ones(3, np.float32)}, BadShard, "expected one value"),
        (
            "mxfp4-blocks",
            {"_scales": np.ones((8, 3), np.uint8)},
            BadShard,
            "a scale for each 32 values of MXFP4",
        ),
    ],
)
def test_parts_that_do_not_fit(
    name: str,
    changes: dict[str, np.ndarray | None],
    error: type[Exception],
    match: str,
    tmp_path: Path,
) -> None:
    method, quantization = METHODS[name]
    parts, _ = method(MATRIX, (8, 64))
    changed = parts | {f"{MATRIX}{suffix}": part for suffix, part in changes.items()}
    kept = {n: part for n, part in changed.items() if part is not None}
    with pytest.raises(error, match=match):
        open_checkpoint(folder(tmp_path / "c", kept, quantization))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"qzeros": None}, BadShard, "has no .*qzeros"),
        ({"scales": np.ones((3, 8), np.float16)}, BadShard, "qzeros is I32 of shape"),
        ({"g_idx": np.zeros(85, np.int32)}, UnsupportedModel, "expected 2, 4, 8"),
    ],
)
def test_gptq_layers_that_do_not_fit(
    changes: dict[str, np.ndarray | None], error: type[Exception], match: str, tmp_path: Path
) -> None:
    method, quantization = METHODS["gptq-4"]
    parts, _ = method(MATRIX, (8, 64))
    changed = parts | {MATRIX.removesuffix("weight") + part: value for part, value in changes.items()}
    with pytest.raises(error, match=match):
        open_checkpoint(
            folder(tmp_path / "c", {n: p for n, p in changed.items() if p is not None}, quantization)
        )


def test_gptq_groups_that_do_not_exist_and_layers_without_an_order(tmp_path: Path) -> None:
    method, quantization = METHODS["gptq-4"]
    parts, values = method(MATRIX, (8, 64))
    g_idx = MATRIX.removesuffix("weight") + "g_idx"
    with (
        open_checkpoint(
            folder(tmp_path / "a", parts | {g_idx: np.full(64, 2, np.int32)}, quantization)
        ) as checkpoint,
        pytest.raises(BadShard, match="beyond the 2"),
    ):
        checkpoint.tensors[MATRIX].rows(0, 8)
    plain = {name: part for name, part in parts.items() if name != g_idx}
    with open_checkpoint(folder(tmp_path / "b", plain, quantization)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensors[MATRIX].rows(0, 8), values)


def test_a_word_of_awq_has_its_rows_in_the_published_order(tmp_path: Path) -> None:
    """One layer written out by hand: codes 0 to 7 for the rows 0 to 7, zero points of 1, scales of 2."""
    tensors = {
        "a.qweight": np.array([[0x75316420]], np.uint32).view(np.int32),
        "a.qzeros": np.array([[0x11111111]], np.uint32).view(np.int32),
        "a.scales": np.full((1, 8), 2, np.float16),
    }
    with open_checkpoint(folder(tmp_path / "c", tensors)) as checkpoint:  # the shapes tell it from GPTQ
        found = checkpoint.tensors["a.weight"].rows(0, 8)
    np.testing.assert_array_equal(found, 2 * (np.arange(8, dtype=np.float32)[:, None] - 1))


@pytest.mark.parametrize(
    ("changes", "settings", "error", "match"),
    [
        ({"qzeros": None}, {}, BadShard, "has no .*qzeros"),
        ({"qzeros": np.zeros((2, 2), np.int32)}, {}, BadShard, r"expected I32 of \(2, 1\)"),
        ({"scales": np.ones((2, 9), np.float16)}, {}, BadShard, r"expected F16 of \(2, 8\)"),
        (
            {"scales": np.ones((3, 8), np.float16)},
            {},
            BadShard,
            "for 64 columns; expected whole groups",
        ),
        ({}, {"version": "gemv"}, UnsupportedModel, "AWQ's version is 'gemv'"),
        ({}, {"bits": 8}, UnsupportedModel, "its codes have 8 bits; expected 'gemm' and 4"),
    ],
)
def test_awq_layers_that_do_not_fit(
    changes: dict[str, np.ndarray | None],
    settings: dict[str, object],
    error: type[Exception],
    match: str,
    tmp_path: Path,
) -> None:
    method, quantization = METHODS["awq"]
    parts, _ = method(MATRIX, (8, 64))
    changed = parts | {MATRIX.removesuffix("weight") + part: value for part, value in changes.items()}
    kept = {name: part for name, part in changed.items() if part is not None}
    with pytest.raises(error, match=match):
        open_checkpoint(folder(tmp_path / "c", kept, quantization | settings))


@pytest.mark.parametrize(
    ("parts", "method", "match"),
    [
        ({".qweight": (0, 1), ".qzeros": (2, 1), ".scales": (2, 8)}, "awq", "has no values"),
        ({".weight_packed": (), ".weight_scale": (8, 2)}, "mxfp4-pack-quantized", r"has shape \(8, 2\)"),
        ({".weight_packed": (8, 4), ".weight_shape": (2,), ".weight_scale": (8, 0)}, "pack-quantized-4", r"has shape \(8, 0\)"),
        ({".weight_packed": (8, 4), ".weight_shape": (3,), ".weight_scale": (8, 1)}, "pack-quantized-4", "says I32 of"),
    ],
    ids=["awq", "fp4", "packed-scale", "packed-shape"],
)  # fmt: skip
def test_parts_without_values_or_dimensions_are_refused(
    parts: dict[str, tuple[int, ...]], method: str, match: str, tmp_path: Path
) -> None:
    """Found by scripts/dev/fuzz/readers.py, or by reading what is like it."""
    types = {".qweight": np.int32, ".qzeros": np.int32, ".scales": np.float16, ".weight_shape": np.int32}
    types |= {
        ".weight_packed": np.uint8 if "fp4" in method else np.int32,
        ".weight_scale": np.uint8 if "fp4" in method else np.float16,
    }
    tensors = {
        MATRIX.removesuffix(".weight") + part: np.zeros(shape, types[part]) for part, shape in parts.items()
    }
    for name in tensors:
        if name.endswith("_shape"):
            tensors[name][:2] = (8, 32)
    with pytest.raises(BadShard, match=match):
        open_checkpoint(folder(tmp_path / "c", tensors, METHODS[method][1]))


def test_joined_projections_in_fp8_are_refused(tmp_path: Path) -> None:
    """MiMo-V2.5's lie device by device: read as they stand, their rows would be others'."""
    quantized, _ = make_quantized(tmp_path, "fp8-block", "mimo2", "joined")
    with pytest.raises(UnsupportedModel, match=r"qkv_proj\.weight of a quantised .*device by device") as e:
        convert(quantized, tmp_path / "out")
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()


def test_scales_without_their_weight(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", {"w_scale_inv": np.ones((1, 1), np.float32)}, {"quant_method": "fp8"})
    with pytest.raises(MissingShard, match="w_scale_inv scale weights that are not"):
        open_checkpoint(path)
