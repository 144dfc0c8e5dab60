"""Rows become the bytes that llama.cpp's tools write."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
from checkpoints import random_values
from gguf import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import MissingDependency
from llama_sidecar.converter.quantize import encode, row_bytes, uses_importance


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_bytes_equal_those_of_the_published_package(name: str) -> None:
    rows = random_values("rows", (8, 256), 3)
    rows[0, :4] = [0, -0.0, 1e-40, 65504]
    expected = gguf.quants.quantize(rows, GGMLType[name])
    got = encode(rows, GGMLType[name])
    np.testing.assert_array_equal(got, expected.view(np.uint8))
    assert got.shape == (8, row_bytes(GGMLType[name], 256))


def test_bfloat16_keeps_infinities_and_nans() -> None:
    rows = np.array([[np.inf, -np.inf, np.nan, 3.4e38]], np.float32)
    wide = (encode(rows, GGMLType.BF16).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert wide[0, 0] == np.inf and wide[0, 1] == -np.inf and np.isnan(wide[0, 2]) and wide[0, 3] > 3e38


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q2_K", "IQ4_XS"])
def test_values_that_no_block_can_hold_are_refused(name: str, value: float) -> None:
    """libggml writes zeros, infinities or whatever, by type, and says nothing."""
    rows = random_values("rows", (2, 256), 3)
    rows[1, 7] = value
    with pytest.raises(FloatingPointError):
        encode(rows, GGMLType[name])


@pytest.mark.parametrize("name", ["Q6_K", "Q5_1", "Q4_K", "Q4_0", "IQ4_XS", "IQ4_NL", "Q3_K", "Q2_K"])
def test_importance_moves_the_error_away_from_what_counts(name: str) -> None:
    rows = random_values("rows", (64, 256), 3)
    importance = np.full(256, 1e-3, np.float32)
    importance[::16] = 1

    def error(data: np.ndarray) -> float:
        return float(np.square(gguf.quants.dequantize(data, GGMLType[name]) - rows)[:, ::16].sum())

    plain, weighed = (encode(rows, GGMLType[name], weights) for weights in (None, importance))
    assert uses_importance(GGMLType[name])
    assert error(weighed) < 0.9 * error(plain)


def test_importance_says_nothing_to_types_that_are_not_fitted() -> None:
    rows, importance = random_values("rows", (4, 256), 3), random_values("importance", (256,)) ** 2
    for kind in (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0):
        assert not uses_importance(kind)
        np.testing.assert_array_equal(encode(rows, kind, importance), encode(rows, kind))


def test_without_llama_cpp_block_types_say_what_to_install() -> None:
    """In a process where llama_cpp is not to be found: BF16 is written, Q8_0 is a clear error."""
    program = (
        "import importlib.util; importlib.util.find_spec = lambda name: None\n"
        "import numpy as np\n"
        "from gguf import GGMLQuantizationType as GGMLType\n"
        "from llama_sidecar.converter.quantize import encode\n"
        "assert encode(np.ones((1, 32), np.float32), GGMLType.BF16).shape == (1, 64)\n"
        "encode(np.ones((1, 32), np.float32), GGMLType.Q8_0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert MissingDependency.__name__ in run.stderr and "pip install llama-cpp-python" in run.stderr
