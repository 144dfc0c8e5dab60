"""Loading: what is chosen and why, what is refused and how, and that nothing of it ends the process."""

from __future__ import annotations

import ctypes
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
from conftest import PairOf

from llama_sidecar.runtime import LibraryError, LoadError, _native, load, placement
from llama_sidecar.runtime import library as library_module
from llama_sidecar.sidecars.errors import LlamaSidecarError
from llama_sidecar.sidecars.memory import layer_cache_bytes


def test_a_sidecar_beside_the_main_file_is_found(pair_of: PairOf) -> None:
    pair = pair_of("R")
    with load(pair.main, ctx=64, threads=1, depth=3) as model:
        assert model.kind == "mtp"
        assert model.speculation.path == pair.sidecar
        assert model.generate("x", max_tokens=2, temperature=0).stats.speculation == "on"


def test_without_a_sidecar_it_runs_plain_and_says_why(pair_of: PairOf, tmp_path: Path) -> None:
    alone = shutil.copy(pair_of("R").main, tmp_path / "alone.gguf")
    with load(alone, ctx=64, threads=1, depth=3) as model:
        generation = model.generate("x", max_tokens=2, temperature=0)
        generation.read()
        assert (model.kind, generation.stats.speculation) == (None, "off")
        assert "alone.gguf" in generation.stats.why


@pytest.mark.parametrize("spec_type", ["none", "mtp", "draft-mtp", "auto"])
def test_spec_type(pair_of: PairOf, spec_type: str) -> None:
    with load(pair_of("T").main, ctx=64, threads=1, depth=3, spec_type=spec_type) as model:
        assert model.kind == (None if spec_type == "none" else "mtp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec_type": "eagle3"}, "eagle3"),
        ({"spec_type": "turbo"}, "turbo"),
        ({"depth": 0}, "depth"),
        ({"depth": 65}, "depth"),
        ({"threads": 0}, "threads"),
        ({"ctx": 0}, "context"),
        ({"batch": 0}, "batch"),
        ({"flash_attn": "maybe"}, "maybe"),
        ({"cache_type_k": "q9"}, "q9"),
        ({"gpu_layers": -2}, "gpu layers"),
        ({"gpu_layers": "some"}, "gpu layers"),
        ({"device": "CUDA7"}, "CUDA7"),
    ],
)
def test_bad_options_are_one_line(pair_of: PairOf, options: dict[str, object], words: str) -> None:
    with pytest.raises(LlamaSidecarError, match=words) as error:
        load(pair_of("R").main, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_quantised_value_cache_without_flash_attention_is_refused_in_llama_cpp_s_words(
    pair_of: PairOf,
) -> None:
    with (
        load(pair_of("R").main, ctx=64, threads=1, depth=3, cache_type_v="q4_0", flash_attn="off") as model,
        pytest.raises(LoadError, match="target context"),
    ):
        model.session()


def test_bad_files_are_one_line(pair_of: PairOf, tmp_path: Path) -> None:
    pair = pair_of("R")
    data = pair.main.read_bytes()
    cases: dict[str, bytes | None] = {
        "missing": None,
        "empty": b"",
        "text": b"hello, I am a text file\n" * 40,
        "header cut": data[:2000],
        "data cut": data[: len(data) - 5000],
    }
    for name, content in cases.items():
        path = tmp_path / f"{name}.gguf"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(LlamaSidecarError) as error:
            load(path)
        assert "\n" not in str(error.value), name
        assert name in str(error.value), name
    with pytest.raises(LlamaSidecarError):
        load(tmp_path)
    with pytest.raises(LlamaSidecarError, match="sidecar"):
        load(pair.sidecar)
    with pytest.raises(LlamaSidecarError):
        load(pair.main, sidecar=pair.main)


def test_a_sidecar_of_another_model_is_refused(pair_of: PairOf) -> None:
    with pytest.raises(LlamaSidecarError, match="architecture"):
        load(pair_of("R").main, sidecar=pair_of("T").sidecar)


def test_a_file_that_llama_cpp_refuses_is_an_error_with_its_reason(tmp_path: Path) -> None:
    def drop(tensors: dict[str, object]) -> None:
        tensors["blk.1.ffn_up.weight"] = tensors["blk.1.attn_norm.weight"]

    pair = models.write_pair(tmp_path, edit=drop)
    with pytest.raises(LoadError, match="ffn_up"):
        load(pair.main)


# Placement


def test_auto_gpu_layers_counts_whole_layers_from_the_end(pair_of: PairOf) -> None:
    from llama_sidecar.sidecars import read_header

    header = read_header(pair_of("R").main)

    def fit(free: int) -> int:
        return placement.n_gpu_layers(
            header,
            free_bytes=placement.GPU_RESERVE_BYTES + free,
            n_ctx=256,
            cache_bits=16,
            n_slots=3,
            drafter_bytes=0,
        )

    assert fit(1 << 30) == placement.ALL_LAYERS
    assert fit(-1) == 0
    state = layer_cache_bytes(header.arch, header.keys, header.tensors, n_ctx=256, n_slots=3)
    last = state[3] + sum(t.n_bytes for name, t in header.tensors.items() if name.startswith("blk.3."))
    assert (fit(last - 1), fit(last)) == (0, 1)
    assert state[3] == 256 * models.N_KV * 2 * models.HEAD_DIM * 2  # F16 K and V
    assert state[0] > 0 and state[0] != state[3]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what is mapped")
@pytest.mark.parametrize("use_mlock", [False, True])
@pytest.mark.parametrize("use_mmap", [True, False])
def test_files_are_mapped_or_read_and_locked_as_asked(
    pair_of: PairOf, use_mmap: bool, use_mlock: bool
) -> None:
    pair = pair_of("T", "Q8_0")
    files = [pair.main, pair.sidecar]
    with load(
        pair.main, ctx=64, threads=1, depth=2, draft_vocab="full", use_mmap=use_mmap, use_mlock=use_mlock
    ) as model:
        maps, status = (Path(f"/proc/self/{name}").read_text() for name in ("maps", "status"))
        mapped = [path for path in files if f"{path}\n" in maps]
        locked_kb = int(re.findall(r"VmLck:\s*(\d+) kB", status)[0])
        text = model.generate([1, 2, 3], max_tokens=8, ignore_eos=True).read()
    with load(pair.main, ctx=64, threads=1, depth=2, draft_vocab="full") as model:
        usual = model.generate([1, 2, 3], max_tokens=8, ignore_eos=True).read()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    may_lock = limit == resource.RLIM_INFINITY or limit > sum(path.stat().st_size for path in files)
    assert mapped == (files if use_mmap else [])
    assert locked_kb > 0 if use_mlock and may_lock else use_mlock or locked_kb == 0
    assert text == usual


def test_default_context_is_the_smaller_of_the_model_s_and_8192(pair_of: PairOf) -> None:
    assert placement.default_ctx({"a.context_length": 262144}, "a") == 8192
    assert placement.default_ctx({"a.context_length": 2048}, "a") == 2048
    assert placement.default_threads() >= 1


# The library


def test_a_missing_symbol_is_one_line_that_names_it_and_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import llama_cpp

    libc = ctypes.CDLL(None)  # has none of llama.cpp's functions
    monkeypatch.setattr(llama_cpp.llama_cpp, "_lib", libc)
    with pytest.raises(
        LibraryError, match=r"lacks llama_batch_ext_init, .*llama_process.*tested: llama-cpp-python 0\.3\.36"
    ):
        library_module._bind()


def test_a_struct_laid_out_otherwise_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_cpp import llama_cpp as module

    params = module.llama_context_default_params()
    params.n_ctx, params.n_rs_seq = 0, 512
    monkeypatch.setattr(module, "llama_context_default_params", lambda: params)
    problem = library_module._layout_problem(module)
    assert problem is not None and "n_ctx is 0 instead of 512" in problem and "n_rs_seq is 512" in problem
    assert "lack a field" in str(library_module._layout_problem(SimpleNamespace()))  # type: ignore[arg-type]


def test_the_native_module_imports_alone_and_says_that_nothing_is_bound() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_native', {_native.__file__!r})\n"
        "native = importlib.util.module_from_spec(spec); spec.loader.exec_module(native)\n"
        "assert 'llama_cpp' not in sys.modules\n"
        "try: native.Session(1)\n"
        "except RuntimeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no llama.cpp library is bound" in done.stdout, done.stderr


def test_unknown_drafters_and_null_contexts_are_errors(pair_of: PairOf) -> None:
    with load(pair_of("R").main, ctx=64, threads=1, depth=3) as model, model.session() as session:
        from llama_sidecar.runtime.sampling import address

        assert address(None) == 0
        assert "mtp" in _native.drafter_kinds()
        with pytest.raises(ValueError, match="null"):
            _native.Session(0)
        assert not session.closed
