"""Loads llama_cpp and binds the native loop to its llama.cpp library, once, at the first load.

Knows which release the loop was tested with. Importing this module imports nothing heavy; importing the package never
fails for the library's sake: whatever is wrong is a `LibraryError` when a model is loaded.
"""

from __future__ import annotations

import ctypes
import re
import threading
from types import ModuleType
from typing import cast

from . import _native
from .errors import LibraryError
from .openmp import bounded_spin

TESTED_VERSIONS = ("0.3.36",)
_lock = threading.Lock()
_bound: ModuleType | None = None


def llama() -> ModuleType:
    """Returns the `llama_cpp.llama_cpp` module, with the native loop bound to its library.

    Raises:
        LibraryError: llama-cpp-python is missing or cannot be loaded, lacks a symbol, or lays its structs out otherwise.

    Example:
        >>> llama().llama_max_devices() > 0
        True
    """
    global _bound
    with _lock:
        if _bound is None:
            _bound = _bind()
        return _bound


def _bind() -> ModuleType:
    with bounded_spin():
        return _load()


def _load() -> ModuleType:
    tested = "tested: llama-cpp-python " + ", ".join(TESTED_VERSIONS)
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as module
    except ImportError as error:
        raise LibraryError(
            f"llama-cpp-python is not installed ({error}); pip install llama-cpp-python ({tested})"
        ) from error
    except (OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(f"llama-cpp-python does not load: {error} ({tested})") from error
    found = f"found llama-cpp-python {llama_cpp.__version__}, {tested}"
    try:
        _native.bind(module._lib._handle, LibraryError)
    except LibraryError as error:
        raise LibraryError(f"{error}; {found}") from None
    problem = _layout_problem(module)
    if problem:
        raise LibraryError(f"{problem}; {found}")
    module.llama_backend_init()
    _native.use_huge_pages(module._lib._handle)  # with a ggml of another build it stays as it is
    return cast(ModuleType, module)


def _layout_problem(module: ModuleType) -> str | None:
    """Compares a struct made by the library with what its documented defaults are, field by field.

    A release whose C struct has moved while the Python one has not shows as defaults in the wrong place.
    """
    try:
        model = module.llama_model_default_params()
        context = module.llama_context_default_params()
        facts = {
            "llama_model_params.use_extra_bufts": (model.use_extra_bufts, True),
            "llama_model_params.load_mtp": (model.load_mtp, False),
            "llama_context_params.n_ctx": (context.n_ctx, 512),
            "llama_context_params.n_seq_max": (context.n_seq_max, 1),
            "llama_context_params.n_rs_seq": (context.n_rs_seq, 0),
            "llama_context_params.ctx_type": (context.ctx_type, 0),
            "llama_context_params.type_k": (context.type_k, module.GGML_TYPE_F16),
            "llama_context_params.ctx_other": (bool(context.ctx_other), False),
            "the size of llama_token_data": (ctypes.sizeof(module.llama_token_data), 12),
            "llama_token_data_array.selected's place": (module.llama_token_data_array.selected.offset, 16),
        }
    except AttributeError as error:
        return f"llama-cpp-python's structs lack a field: {error}"
    wrong = [
        f"{name} is {found!r} instead of {expected!r}"
        for name, (found, expected) in facts.items()
        if found != expected
    ]
    return "llama.cpp's structs are laid out otherwise: " + ", ".join(wrong) if wrong else None


def set_verbose(verbose: bool) -> None:
    """Sends llama.cpp's log to stderr, or keeps it quiet and only its errors for `last_error`."""
    module = llama()
    address = () if verbose else (_native.log_callback(),)
    module.llama_log_set(module.llama_log_callback(*address), None)


def forget_errors() -> None:
    """Makes `last_error` speak of this thread's calls from now on."""
    _native.take_errors()


def last_error() -> str:
    """The last thing that llama.cpp complained of in this thread, without its function-name prefix."""
    lines = _native.take_errors().decode("utf-8", "replace").splitlines()
    specific = [line for line in lines if "failed to load model" not in line]
    return re.sub(r"^\w+: ", "", (specific or lines or ["it gave no reason"])[-1].strip())
