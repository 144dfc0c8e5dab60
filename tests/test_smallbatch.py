"""The small-batch kernels: right against float64, equal to the bit at every width, and never outside their buffers."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blocks import TYPES, exact, extreme_rows, extreme_weights, n_values, random_weights
from gguf import GGMLQuantizationType as T

from llama_sidecar.runtime import _native

PAIRS = [
    (kernels, type)
    for kernels in _native.smallbatch_sets()
    for type in TYPES
    if _native.smallbatch_has_kernel(type, kernels)
]
each_kernel = pytest.mark.parametrize("kernels, type", PAIRS, ids=lambda v: getattr(v, "name", v))


def multiply(kernels: str, type: T, weights: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    out = np.full((len(x), len(weights)), np.nan, np.float32)
    _native.smallbatch_multiply(int(type), weights, x, out, kernels, threads)
    return out


@each_kernel
@pytest.mark.parametrize("n_blocks", [1, 2, 3, 5, 7, 12])
def test_every_width_gives_the_bits_of_one_row_and_the_right_values(
    kernels: str, type: T, n_blocks: int
) -> None:
    rng = np.random.default_rng(n_blocks)
    weights = random_weights(rng, type, 37, n_values(type, n_blocks))
    x = rng.standard_normal((8, n_values(type, n_blocks))).astype(np.float32)
    alone = np.concatenate([multiply(kernels, type, weights, x[r : r + 1]) for r in range(8)])
    expected, bound = exact(type, weights, x)
    assert (np.abs(alone - expected) <= bound).all()
    for n_rows in range(2, 9):
        assert (multiply(kernels, type, weights, x[:n_rows]) == alone[:n_rows]).all()


@each_kernel
def test_threads_and_numbers_of_outputs_change_no_bit(kernels: str, type: T) -> None:
    """At every width: outputs are computed several at a time, and dealt to threads in parts."""
    rng = np.random.default_rng(1)
    n_in = n_values(type, 2 if type in (T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS) else 9)
    weights = random_weights(rng, type, 4097, n_in)
    x = rng.standard_normal((8, n_in)).astype(np.float32)
    alone = np.concatenate([multiply(kernels, type, weights, x[r : r + 1]) for r in range(8)])
    for n in range(1, 9):
        assert (multiply(kernels, type, weights, x[:n], threads=3) == alone[:n]).all()
        for n_out in (1, 2, 3, 5, 15, 16, 17, 31, 1000):
            assert (multiply(kernels, type, weights[:n_out], x[:n]) == alone[:n, :n_out]).all()


@each_kernel
@pytest.mark.parametrize("n_blocks", [1, 4])
def test_extreme_blocks_and_rows(kernels: str, type: T, n_blocks: int) -> None:
    rng = np.random.default_rng(2)
    weights = extreme_weights(rng, type, n_values(type, n_blocks))
    x = extreme_rows(rng, n_values(type, n_blocks))
    alone = np.concatenate([multiply(kernels, type, weights, x[r : r + 1]) for r in range(8)])
    expected, bound = exact(type, weights, x)
    assert (np.abs(alone - expected) <= bound).all()
    assert (alone[0] == 0).all()
    for n in range(2, 9):
        assert (multiply(kernels, type, weights, x[:n]) == alone[:n]).all()


@each_kernel
def test_values_that_are_not_finite_stay_visible(kernels: str, type: T) -> None:
    n_in = n_values(type, 2)
    weights = random_weights(np.random.default_rng(3), type, 4, n_in)
    for value in (np.inf, -np.inf, np.nan):
        x = np.ones((1, n_in), np.float32)
        x[0, n_in // 2] = value
        assert not np.isfinite(multiply(kernels, type, weights, x)).any()


@each_kernel
def test_weights_are_not_read_beyond_their_end(kernels: str, type: T) -> None:
    for n_blocks in (1, 2, 3, 4, 5, 6, 7):
        n_in = n_values(type, n_blocks)
        data = random_weights(np.random.default_rng(4), type, 3, n_in)
        x = np.ones((4, n_in), np.float32)
        weights = before_a_guard_page(data)
        assert (multiply(kernels, type, weights, x) == multiply(kernels, type, data, x)).all()


def before_a_guard_page(data: np.ndarray) -> np.ndarray:
    """A copy of `data` that ends where memory that may not be read begins."""
    libc = ctypes.CDLL(None, use_errno=True)
    n_pages = -(-data.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (n_pages + 1) * mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    guard = ctypes.c_void_p(whole.ctypes.data + n_pages * mmap.PAGESIZE)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = whole[n_pages * mmap.PAGESIZE - data.nbytes : n_pages * mmap.PAGESIZE].reshape(data.shape)
    copy[:] = data
    return copy


@each_kernel
@pytest.mark.parametrize("n_blocks", [1, 3, 5, 9, 12])
def test_what_follows_a_row_does_not_show_in_it(kernels: str, type: T, n_blocks: int) -> None:
    """Blocks of the next row may be read along, whatever they hold; behind the last row nothing is. Its bits are the same."""
    rng, n_in = np.random.default_rng(n_blocks), n_values(type, n_blocks)
    weights = random_weights(rng, type, 9, n_in)
    x = rng.standard_normal((8, n_in)).astype(np.float32)
    among = multiply(kernels, type, weights, x)
    for i in range(len(weights)):
        assert (multiply(kernels, type, weights[: i + 1], x)[:, i] == among[:, i]).all()
    weights[1::2] = 0xFF  # no numbers, in every type but those of codes alone
    assert (multiply(kernels, type, weights, x)[:, ::2] == among[:, ::2]).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    weights = random_weights(np.random.default_rng(5), T.Q8_0, 4, 64)
    for x, out in (
        ((1, 32), (1, 4)),
        ((9, 64), (9, 4)),
        ((0, 64), (0, 4)),
        ((1, 64), (1, 5)),
        ((1, 64), (2, 4)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            _native.smallbatch_multiply(
                int(T.Q8_0), weights, np.ones(x, np.float32), np.ones(out, np.float32)
            )
    with pytest.raises(ValueError, match="no kernel"):
        _native.smallbatch_multiply(
            int(T.Q8_0), weights, np.ones((1, 64), np.float32), np.ones((1, 4), np.float32), "none"
        )


class Stock:
    """Products by ggml's CPU backend, through ctypes."""

    def __init__(self) -> None:
        import llama_cpp

        folder = Path(llama_cpp.__file__).parent / "lib"
        names = ("libggml-base", "libggml-cpu")
        self.base, self.cpu = (
            ctypes.CDLL(str(next(p for p in folder.glob(f"{name}.*") if p.suffix in (".so", ".dylib"))))
            for name in names
        )
        for name in (
            "ggml_init",
            "ggml_new_tensor_2d",
            "ggml_mul_mat",
            "ggml_new_graph",
            "ggml_get_data",
        ):
            getattr(self.base, name).restype = ctypes.c_void_p
        self.cpu.ggml_cpu_init()

    def multiply(self, type: T, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        class Params(ctypes.Structure):
            _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

        base, p = self.base, ctypes.c_void_p
        context = p(base.ggml_init(Params(weights.nbytes + 8 * x.nbytes + (4 << 20), None, False)))
        n_out, (n_rows, n_in) = len(weights), x.shape
        a = p(base.ggml_new_tensor_2d(context, int(type), ctypes.c_int64(n_in), ctypes.c_int64(n_out)))
        b = p(base.ggml_new_tensor_2d(context, int(T.F32), ctypes.c_int64(n_in), ctypes.c_int64(n_rows)))
        ctypes.memmove(base.ggml_get_data(a), weights.ctypes.data, weights.nbytes)
        ctypes.memmove(base.ggml_get_data(b), x.ctypes.data, x.nbytes)
        product = p(base.ggml_mul_mat(context, a, b))
        graph = p(base.ggml_new_graph(context))
        base.ggml_build_forward_expand(graph, product)
        self.cpu.ggml_graph_compute_with_ctx(context, graph, 1)
        out = np.empty((n_rows, n_out), np.float32)
        ctypes.memmove(out.ctypes.data, base.ggml_get_data(product), out.nbytes)
        base.ggml_free(context)
        return out


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    pytest.importorskip("llama_cpp")
    yield Stock()


@each_kernel
def test_no_less_accurate_than_the_stock_kernel(kernels: str, type: T, stock: Stock) -> None:
    rng = np.random.default_rng(6)
    n_in = 1024
    weights = random_weights(rng, type, 200, n_in)
    x = rng.standard_normal((1, n_in)).astype(np.float32)
    expected, _ = exact(type, weights, x)
    error = np.sqrt(np.mean((multiply(kernels, type, weights, x) - expected) ** 2))
    stock_error = np.sqrt(np.mean((stock.multiply(type, weights, x) - expected) ** 2))
    rounding = 2.0**-22 * np.sqrt(np.mean(expected**2))
    assert error <= 1.05 * stock_error + rounding  # the same grid rounds a little otherwise
