"""The small-batch kernels as ggml calls them: graphs of products, with planes of rows as attention has them and with experts.

Every output must have the bits that the kernel alone gives its row; that those are right is test_smallbatch.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from blocks import TYPES, n_values, random_weights
from gguf import GGMLQuantizationType as T
from test_smallbatch import each_kernel, multiply

from llama_sidecar.runtime import _native, kernels
from llama_sidecar.runtime.library import llama

pytestmark = pytest.mark.skipif(kernels.problem() is not None, reason=str(kernels.problem()))

N_OUTPUTS = (1, 19, 1500, 6000)  # by one thread, by each its share, dealt as threads are free
P, N = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, Any] = {
    "ggml_backend_dev_by_name": (P, ctypes.c_char_p),
    "ggml_backend_dev_init": (P, P, ctypes.c_char_p),
    "ggml_backend_dev_buffer_type": (P, P),
    "ggml_backend_cpu_buffer_type": (P,),
    "ggml_backend_cpu_set_n_threads": (None, P, ctypes.c_int),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_tensor_set": (None, P, P, ctypes.c_size_t, ctypes.c_size_t),
    "ggml_backend_tensor_get": (None, P, P, ctypes.c_size_t, ctypes.c_size_t),
    "ggml_backend_graph_compute": (ctypes.c_int, P, P),
    "ggml_backend_free": (None, P),
    "ggml_new_tensor_3d": (P, P, ctypes.c_int, N, N, N),
    "ggml_permute": (P, P, P, *[ctypes.c_int] * 4),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_mul_mat_set_hint": (None, P, ctypes.c_int),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_new_graph": (P, P),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_free": (None, P),
}


class InitParams(ctypes.Structure):
    _fields_ = (("n_bytes", ctypes.c_size_t), ("memory", P), ("no_alloc", ctypes.c_bool))


class Device:
    """ggml's CPU backend on two threads, and where weights for the kernels lie."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(None, handle=llama()._lib._handle)
        self.lib.ggml_init.restype, self.lib.ggml_init.argtypes = P, (InitParams,)
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        self.backend = self.lib.ggml_backend_dev_init(self.lib.ggml_backend_dev_by_name(b"CPU"), None)
        self.lib.ggml_backend_cpu_set_n_threads(self.backend, 2)
        with kernels.placing():
            self.weights_type = self.lib.ggml_backend_dev_buffer_type(
                self.lib.ggml_backend_dev_by_name(b"SMALLBATCH")
            )
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
        """weights (n_matrices, n_out, row_bytes) times x (n_planes, n_rows, n_in); None where the kernels do not take it.

        With ids (n_tokens, n_used): of matrix ids[t, u] with x[t, u], or with x[t, 0]. `swapped`: x lies in memory as
        (n_rows, n_planes, n_in).
        """
        graph = Graph(self)
        a = graph.weights(type, weights, x.shape[2])
        if swapped:
            b = graph.op("permute", graph.values(np.ascontiguousarray(x.transpose(1, 0, 2))), 0, 2, 1, 3)
        else:
            b = graph.values(x)
        if ids is None:
            node, shape = graph.op("mul_mat", a, b), (*x.shape[:2], weights.shape[1])
        else:
            node = graph.op("mul_mat_id", a, b, graph.values(ids[None]))
            shape = (*ids.shape, weights.shape[1])
        found = graph.compute({node: shape})
        return None if found is None else found[0]

    def close(self) -> None:
        self.lib.ggml_backend_free(self.backend)


class Graph:
    """Tensors, and one computation of them: weights lie where the kernels' do, all else in the CPU's memory."""

    def __init__(self, device: Device) -> None:
        self.lib, self._device = device.lib, device
        self._placed, self._made = (self.lib.ggml_init(InitParams(1 << 20, None, True)) for _ in range(2))
        self._contents: dict[int, np.ndarray] = {}

    def weights(self, type: T, values: np.ndarray, n_in: int) -> int:
        """values (n_matrices, n_out, row_bytes)."""
        return self._tensor(self._placed, type, (*values.shape[:2], n_in), values)

    def values(self, values: np.ndarray) -> int:
        """F32 or I32, of three dimensions."""
        return self._tensor(self._made, T.I32 if values.dtype == np.int32 else T.F32, values.shape, values)

    def op(self, name: str, *arguments: Any) -> int:
        node: int = getattr(self.lib, f"ggml_{name}")(self._made, *arguments)
        return node

    def is_taken(self, node: int) -> bool:
        with self._allocated():
            return self._takes(node)

    def compute(self, nodes: dict[int, tuple[int, ...]]) -> list[np.ndarray] | None:
        """The values of all nodes that are computed, with their shapes and in their order; None where the kernels do not take one."""
        lib, found = self.lib, [np.full(shape, np.nan, np.float32) for shape in nodes.values()]
        graph = lib.ggml_new_graph(self._made)
        for node in nodes:
            lib.ggml_build_forward_expand(graph, node)
        with self._allocated():
            for tensor, values in (*self._contents.items(), *zip(nodes, found, strict=True)):
                assert values.flags.c_contiguous
                lib.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
            if not all(map(self._takes, nodes)):
                return None
            assert lib.ggml_backend_graph_compute(self._device.backend, graph) == 0
            for node, values in zip(nodes, found, strict=True):
                lib.ggml_backend_tensor_get(node, values.ctypes.data, 0, values.nbytes)
        return found

    @contextmanager
    def _allocated(self) -> Iterator[None]:
        """Memory for all tensors; they are gone afterwards."""
        places = ((self._placed, self._device.weights_type), (self._made, self._device.cpu_type))
        buffers = [
            self.lib.ggml_backend_alloc_ctx_tensors_from_buft(context, type) for context, type in places
        ]
        yield
        for buffer in buffers:
            self.lib.ggml_backend_buffer_free(buffer)
        for context, _ in places:
            self.lib.ggml_free(context)

    def _takes(self, node: int) -> bool:
        taken: bool = _native.smallbatch_takes(node)
        return taken

    def _tensor(self, context: int, type: T, shape: tuple[int, ...], values: np.ndarray) -> int:
        made: int = self.lib.ggml_new_tensor_3d(context, int(type), *reversed(shape))
        self._contents[made] = values
        return made


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


@pytest.mark.parametrize("kernels", _native.smallbatch_sets())
@pytest.mark.parametrize("n_rows", [1, 3, 8])
def test_products_of_one_input_and_of_several(kernels: str, n_rows: int, device: Device) -> None:
    """In one graph, as q, k and v are, of every type: rows prepared for one type of weights are not another's, nor x's y's."""
    rng, n_in = np.random.default_rng(n_rows), 256
    types = [t for t in TYPES if _native.smallbatch_has_kernel(t, kernels)]
    inputs = rng.standard_normal((3, n_rows, n_in)).astype(np.float32)
    _native.smallbatch_use_set(kernels)
    for _ in range(2):  # the next graph's tensors have these addresses again
        graph, wanted, nodes = Graph(device), [], {}
        rows = [graph.values(x[None]) for x in inputs]
        for i in rng.integers(0, len(inputs), 4 * len(types)):
            type = types[rng.integers(len(types))]
            weights = random_weights(rng, type, 19, n_in)
            nodes[graph.op("mul_mat", graph.weights(type, weights[None], n_in), rows[i])] = (n_rows, 19)
            wanted.append(multiply(kernels, type, weights, inputs[i]))
        found = graph.compute(nodes)
        assert found is not None and all(map(np.array_equal, found, wanted))
        inputs = inputs[::-1] * np.float32(0.5)
    _native.smallbatch_use_set("")


N_IN = 64


def rows(graph: Graph, n_rows: int, n_planes: int = 1, n: int = N_IN) -> int:
    return graph.values(np.ones((n_planes, n_rows, n), np.float32))


def matrices(graph: Graph, n_matrices: int = 1) -> int:
    weights = random_weights(np.random.default_rng(0), T.F32, n_matrices * N_IN, N_IN)
    return graph.weights(T.F32, weights.reshape(n_matrices, N_IN, -1), N_IN)


def product(graph: Graph, n_rows: int = 4, n_planes: int = 1) -> int:
    return graph.op("mul_mat", matrices(graph), rows(graph, n_rows, n_planes))


def experts(graph: Graph, n_tokens: int) -> int:
    ids = graph.values(np.zeros((1, n_tokens, 2), np.int32))
    return graph.op("mul_mat_id", matrices(graph, 3), rows(graph, 1, n_tokens), ids)


def hadamard(graph: Graph) -> int:
    node = product(graph)
    graph.lib.ggml_mul_mat_set_hint(node, 1)
    return node


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(product, id="a product"),
        pytest.param(lambda g: experts(g, 8), id="experts of eight tokens"),
        pytest.param(
            lambda g: g.op("mul_mat", rows(g, N_IN), product(g)), id="rows of a product times a cache"
        ),
    ],
)
def test_what_the_kernels_take(build: Callable[[Graph], int], device: Device) -> None:
    graph = Graph(device)
    assert graph.is_taken(build(graph))


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda g: product(g, 9), id="nine rows"),
        pytest.param(lambda g: experts(g, 9), id="experts of nine tokens"),
        pytest.param(hadamard, id="a Hadamard matrix"),
        pytest.param(lambda g: g.op("mul_mat", rows(g, N_IN), rows(g, 4)), id="no weights of theirs"),
    ],
)
def test_what_the_kernels_leave_to_llama_cpp_s(build: Callable[[Graph], int], device: Device) -> None:
    graph = Graph(device)
    assert not graph.is_taken(build(graph))
