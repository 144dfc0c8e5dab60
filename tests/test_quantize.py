"""Which tensor gets which type, and that rows become the bytes llama.cpp's tools write."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
from checkpoints import random_values
from gguf import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import MissingDependency, UnknownType
from llama_sidecar.converter.quantize import encode, main_recipe, row_bytes, sidecar_recipe

MATRIX = (64, 256)


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


def test_small_tensors_stay_f32() -> None:
    recipe = main_recipe("Q8_0")
    for name, shape in {
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ssm_a": (4,),
        "blk.0.ssm_dt.bias": (4,),
        "blk.0.ssm_conv1d.weight": MATRIX,
        "blk.0.ffn_gate_inp.weight": MATRIX,
        "blk.0.ffn_gate_inp_shexp.weight": (1, 256),
    }.items():
        assert recipe.type_of(name, shape, tied=False) == GGMLType.F32
    assert recipe.type_of("blk.0.ffn_gate_exps.weight", (4, *MATRIX), tied=False) == GGMLType.Q8_0


def test_rows_that_blocks_do_not_fill_become_f16() -> None:
    assert main_recipe("Q8_0").type_of("blk.0.ffn_down.weight", (64, 48), tied=False) == GGMLType.F16
    assert main_recipe("BF16").type_of("blk.0.ffn_down.weight", (64, 48), tied=False) == GGMLType.BF16


def test_q4_0_keeps_the_output_at_q6_k() -> None:
    recipe = main_recipe("Q4_0")
    assert recipe.type_of("output.weight", MATRIX, tied=False) == GGMLType.Q6_K
    assert recipe.type_of("token_embd.weight", MATRIX, tied=True) == GGMLType.Q6_K
    assert recipe.type_of("token_embd.weight", MATRIX, tied=False) == GGMLType.Q4_0
    assert recipe.type_of("output.weight", (64, 96), tied=False) == GGMLType.Q8_0


def test_default_sidecar_is_q8_0_with_a_q4_0_vocabulary() -> None:
    recipe = sidecar_recipe(None)
    assert recipe.type_of("blk.4.attn_q.weight", MATRIX, tied=True) == GGMLType.Q8_0
    assert recipe.type_of("token_embd.weight", MATRIX, tied=True) == GGMLType.Q4_0
    assert recipe.type_of("output.weight", MATRIX, tied=False) == GGMLType.Q4_0
    named = sidecar_recipe("BF16")
    assert named.type_of("token_embd.weight", MATRIX, tied=False) == GGMLType.BF16


def test_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownType, match=r"'Q9_9'; expected one of F32, F16, BF16, Q8_0, Q4_0"):
        main_recipe("Q9_9")


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
