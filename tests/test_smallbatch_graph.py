"""The small-batch device as ggml calls it: graphs of one product, with planes of rows as attention has them and with experts.

Every output must have the bits that the kernel alone gives its row; that those are right is test_smallbatch.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from blocks import n_values, random_weights
from gguf import GGMLQuantizationType as T
from test_smallbatch import each_kernel, multiply

from llama_sidecar.runtime import _native, kernels
from llama_sidecar.runtime.library import llama

pytestmark = pytest.mark.skipif(kernels.problem() is not None, reason=str(kernels.problem()))

N_OUTPUTS = (1, 19, 700)  # of which the last are shared among threads
P, N = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, Any] = {
    "ggml_backend_dev_by_name": (P, ctypes.c_char_p),
    "ggml_backend_dev_init": (P, P, ctypes.c_char_p),
    "ggml_backend_dev_buffer_type": (P, P),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, P, P),
    "ggml_backend_cpu_buffer_type": (P,),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_tensor_set": (None, P, P, ctypes.c_size_t, ctypes.c_size_t),
    "ggml_backend_tensor_get": (None, P, P, ctypes.c_size_t, ctypes.c_size_t),
    "ggml_backend_graph_compute": (ctypes.c_int, P, P),
    "ggml_backend_free": (None, P),
    "ggml_new_tensor_3d": (P, P, ctypes.c_int, N, N, N),
    "ggml_permute": (P, P, P, *[ctypes.c_int] * 4),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_new_graph": (P, P),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_free": (None, P),
}


class InitParams(ctypes.Structure):
    _fields_ = (("n_bytes", ctypes.c_size_t), ("memory", P), ("no_alloc", ctypes.c_bool))


class Device:
    """One backend of the device; a product is a graph of its own."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(None, handle=llama()._lib._handle)
        self.lib.ggml_init.restype, self.lib.ggml_init.argtypes = P, (InitParams,)
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        self.device = self.lib.ggml_backend_dev_by_name(b"SMALLBATCH")
        self.backend = self.lib.ggml_backend_dev_init(self.device, None)
        with kernels.placing():
            self.weights_type = self.lib.ggml_backend_dev_buffer_type(self.device)
        self.cpu_type = self.lib.ggml_backend_cpu_buffer_type()
        assert self.weights_type != self.cpu_type

    def product(
        self,
        type: T,
        weights: np.ndarray,
        x: np.ndarray,
        ids: np.ndarray | None = None,
        *,
        swapped: bool = False,
    ) -> np.ndarray | None:
        """weights (n_matrices, n_out, row_bytes) times x (n_planes, n_rows, n_in); None where the device does not take it.

        With ids (n_tokens, n_used): of matrix ids[t, u] with x[t, u], or with x[t, 0]. `swapped`: x lies in memory as
        (n_rows, n_planes, n_in).
        """
        lib = self.lib
        places, graphs = (lib.ggml_init(InitParams(1 << 20, None, True)) for _ in range(2))
        a = self._tensor(places, type, (len(weights), weights.shape[1], x.shape[2]))
        in_memory = np.ascontiguousarray(x.transpose(1, 0, 2)) if swapped else x
        stored = b = self._tensor(graphs, T.F32, in_memory.shape)
        if swapped:
            b = lib.ggml_permute(graphs, stored, 0, 2, 1, 3)
        if ids is None:
            product, shape = lib.ggml_mul_mat(graphs, a, b), (*x.shape[:2], weights.shape[1])
        else:
            c = self._tensor(graphs, T.I32, (1, *ids.shape))
            product, shape = lib.ggml_mul_mat_id(graphs, a, b, c), (*ids.shape, weights.shape[1])
        graph = lib.ggml_new_graph(graphs)
        lib.ggml_build_forward_expand(graph, product)
        buffers = [
            lib.ggml_backend_alloc_ctx_tensors_from_buft(places, self.weights_type),
            lib.ggml_backend_alloc_ctx_tensors_from_buft(graphs, self.cpu_type),
        ]
        self._set(a, weights)
        self._set(stored, in_memory)
        if ids is not None:
            self._set(c, ids)
        out = np.full(shape, np.nan, np.float32)
        self._set(product, out)
        taken = lib.ggml_backend_dev_supports_op(self.device, product)
        if taken:
            assert lib.ggml_backend_graph_compute(self.backend, graph) == 0
            lib.ggml_backend_tensor_get(product, out.ctypes.data, 0, out.nbytes)
        for buffer in buffers:
            lib.ggml_backend_buffer_free(buffer)
        for context in (places, graphs):
            lib.ggml_free(context)
        return out if taken else None

    def close(self) -> None:
        self.lib.ggml_backend_free(self.backend)

    def _tensor(self, context: int, type: T, shape: tuple[int, ...]) -> int:
        made: int = self.lib.ggml_new_tensor_3d(context, int(type), *reversed(shape))
        return made

    def _set(self, tensor: int, values: np.ndarray) -> None:
        assert values.flags.c_contiguous
        self.lib.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


@pytest.fixture
def case(kernels: str, type: T) -> Iterator[tuple[np.random.Generator, int]]:
    """Products run on the set `kernels`; a random generator, and how long rows are."""
    _native.smallbatch_use_set(kernels)
    yield (
        np.random.default_rng(int(type)),
        n_values(type, 1 if type in (T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS) else 3),
    )
    _native.smallbatch_use_set("")


def each_alone(kernels: str, type: T, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(n_matrices, n_rows, n_out): every row times every matrix, by itself."""
    rows = range(len(x))
    return np.stack(
        [np.concatenate([multiply(kernels, type, w, x[r : r + 1]) for r in rows]) for w in weights]
    )


@each_kernel
@pytest.mark.parametrize("n_out", N_OUTPUTS)
def test_rows_of_experts(
    kernels: str, type: T, n_out: int, device: Device, case: tuple[np.random.Generator, int]
) -> None:
    """1 to 8 tokens that use 1 or 3 of 5 experts, with a row of x for all of a token's experts or one for each."""
    (rng, n_in), n_experts = case, 5
    weights = np.stack([random_weights(rng, type, n_out, n_in) for _ in range(n_experts)])
    for n_used, n_x in ((1, 1), (3, 1), (3, 3)):
        x = rng.standard_normal((8, n_x, n_in)).astype(np.float32)
        alone = each_alone(kernels, type, weights, x.reshape(-1, n_in)).reshape(n_experts, 8, n_x, n_out)
        choices = [np.stack([rng.permutation(n_experts)[:n_used] for _ in range(8)]), np.full((8, n_used), 2)]
        for ids in np.int32(choices):
            wanted = alone[ids, np.arange(8)[:, None], np.arange(n_used) % n_x]
            for n in range(1, 9):
                found = device.product(type, weights, x[:n], ids[:n])
                assert found is not None and (found == wanted[:n]).all()


@each_kernel
@pytest.mark.parametrize("n_out", N_OUTPUTS)
def test_planes_of_rows(
    kernels: str, type: T, n_out: int, device: Device, case: tuple[np.random.Generator, int]
) -> None:
    """6 planes on 3 matrices, as query heads share keys and values; rows that lie one after another and rows that do not."""
    (rng, n_in), planes = case, np.arange(6)
    weights = np.stack([random_weights(rng, type, n_out, n_in) for _ in range(3)])
    x = rng.standard_normal((6, 9, n_in)).astype(np.float32)
    wanted = each_alone(kernels, type, weights, x.reshape(-1, n_in)).reshape(3, 6, 9, n_out)[
        planes // 2, planes
    ]
    for n in range(1, 9):
        for swapped in (False, True):
            found = device.product(type, weights, x[:, :n].copy(), swapped=swapped)
            assert found is not None and (found == wanted[:, :n]).all()
    assert device.product(type, weights, x) is None
