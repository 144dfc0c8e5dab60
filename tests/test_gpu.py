"""GPUs as llama.cpp lists them: which count, and where a drafter goes. No GPU is needed: the device list is a stand-in."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from llama_sidecar.runtime import placement

GPU, INTEGRATED, CPU = placement.DISCRETE_GPU, placement.INTEGRATED_GPU, 0


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Devices of llama.cpp: name, kind, free bytes; the test fills it."""
    found: list[tuple[str, int, int]] = []

    def memory(device: int, free: object, total: object) -> None:
        ctypes.cast(free, ctypes.POINTER(ctypes.c_size_t))[0] = found[device][2]  # type: ignore[arg-type]

    ggml = SimpleNamespace(
        ggml_backend_dev_count=lambda: len(found),
        ggml_backend_dev_get=lambda i: i,
        ggml_backend_dev_name=lambda device: found[device][0].encode(),
        ggml_backend_dev_type=lambda device: found[device][1],
        ggml_backend_dev_memory=memory,
    )
    monkeypatch.setattr(placement, "_ggml", lambda: ggml)
    monkeypatch.setattr(
        placement, "llama", lambda: SimpleNamespace(llama_supports_gpu_offload=lambda: any(found))
    )
    return found


def test_an_integrated_gpu_counts_where_there_is_no_other(listed: list[tuple[str, int, int]]) -> None:
    listed += [("CUDA0", INTEGRATED, 100 << 30), ("CPU", CPU, 1 << 30)]  # a Jetson, a DGX Spark
    assert [(gpu.name, gpu.free_bytes) for gpu in placement.gpus()] == [("CUDA0", 100 << 30)]
    listed.insert(1, ("CUDA1", GPU, 8 << 30))
    assert [gpu.name for gpu in placement.gpus()] == ["CUDA1"]


def test_without_a_gpu_there_is_none(listed: list[tuple[str, int, int]]) -> None:
    assert placement.gpus() == []
    listed.append(("CPU", CPU, 1 << 30))
    assert placement.gpus() == []


def test_a_drafter_goes_where_the_target_s_output_is(listed: list[tuple[str, int, int]]) -> None:
    """llama.cpp would spread its few layers over all devices, and each draft would go from one to the next."""
    listed.append(("CUDA0", GPU, 8 << 30))
    assert placement.output_device(None) is None
    listed.append(("CUDA1", GPU, 8 << 30))
    assert placement.output_device(None) == "CUDA1"
    assert placement.output_device("CUDA1, CUDA0") == "CUDA0"
    assert placement.output_device("CUDA0") is None and placement.output_device("none") is None
