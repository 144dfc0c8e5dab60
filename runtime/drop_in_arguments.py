"""Which arguments of `llama_cpp.Llama` its drop-in takes, and one line for each that it does not.

Nothing is ignored: what cannot be had is refused unless it is left at its default, which is read from llama_cpp.Llama itself.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from llama_sidecar.sidecars import KINDS
from llama_sidecar.sidecars.discover import TYPE_WORD

from . import placement
from .errors import ArgumentError
from .grammar import schema_grammar
from .library import llama
from .llm import load

_RENAMED = {  # arguments of `load` that go by llama_cpp.Llama's names
    "main": "model_path",
    "gpu_layers": "n_gpu_layers",
    "ctx": "n_ctx",
    "batch": "n_batch",
    "threads": "n_threads",
    "cache_type_k": "type_k",
    "cache_type_v": "type_v",
}
_WITHOUT_EFFECT = {"f16_kv": True, "n_parts": -1}  # llama_cpp.Llama ignores them, and frameworks give them
_DEFAULTS_ALONE = (
    *("suffix", "tfs_z", "mirostat_mode", "mirostat_tau", "mirostat_eta"),
    *("stopping_criteria", "logits_processor"),
)
_INSTEAD = {
    "draft_model": "the sidecar beside the model drafts",
    "embedding": "embeddings are llama_cpp.Llama's",
    "logits_processor": "use logit_bias, a grammar or penalties",
    "mirostat_mode": "use temperature, top_p, min_p or typical_p",
    "n_threads_batch": "n_threads is for prompts, too",
    "n_ubatch": "n_batch is both",
    "stopping_criteria": "use stop",
    "suffix": "write the model's own fill-in-the-middle tokens into the prompt",
}


def theirs() -> Any:
    """The class llama_cpp.Llama."""
    llama()  # first: it sees to how threads wait
    import llama_cpp

    return llama_cpp.Llama


def load_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `load`, out of arguments that the drop-in has no parameter for.

    Raises:
        ArgumentError: an unknown argument, or one of llama_cpp.Llama's that is not at its default.

    >>> load_options({"depth": 3, "use_mmap": True})
    {'depth': 3}
    """
    ours = inspect.signature(load).parameters.keys() - _RENAMED.keys()
    defaults = {p.name: p.default for p in inspect.signature(theirs().__init__).parameters.values()}
    defaults |= _WITHOUT_EFFECT
    for name in given.keys() - ours:
        if name in _RENAMED:
            raise ArgumentError(f"{name} is called {_RENAMED[name]} here, as llama_cpp.Llama calls it")
        if name not in defaults:
            raise ArgumentError(
                f"{name} is neither an argument of llama_cpp.Llama nor of load(), whose {', '.join(sorted(ours))} there are"
            )
        _check(name, given[name], defaults[name])
    return {name: value for name, value in given.items() if name in ours}


def check_defaults(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses arguments of a completion that are there for their defaults alone."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _DEFAULTS_ALONE:
            _check(name, given[name], parameter.default)


def _check(name: str, value: Any, default: Any) -> None:
    if value is not default and value != default:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise ArgumentError(f"{name}={value!r} cannot be had here, {default!r} alone{instead}")


def cache_type(name: str, number: int | None) -> str:
    """The name of a KV cache's type, by ggml's number (None: F16)."""
    names = {number: name for name, number in placement.CACHE_TYPES.items()}
    if number is not None and number not in names:
        raise ArgumentError(f"{name}={number!r} is no type of a KV cache (there are: {names})")
    return "f16" if number is None else names[number]


def chat_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat format is to be given in place of some arguments, so that it ignores none of them.

    Raises:
        ArgumentError: content that is no text, a schema or choice that cannot be kept to.
    """
    tools = given["tools"] or [{"function": function} for function in given["functions"] or ()]
    found: dict[str, Any] = {
        "messages": [_text_alone(message) for message in given["messages"]],
        "stop": [given["stop"]] if isinstance(given["stop"], str) else list(given["stop"] or ()),
        "tool_choice": _choice(given["tool_choice"], tools),
    }
    _check_called(found["tool_choice"], given["function_call"], tools)
    if given["logprobs"] and given["top_logprobs"] is None:
        found["top_logprobs"] = 0
    if given["response_format"] is not None:
        found |= _form(given["response_format"], given["grammar"])
    return found


def _text_alone(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else "text" for part in parts]
    if other := next((kind for kind in kinds if kind != "text"), None):
        raise ArgumentError(f"a message has content of type {other!r}: only text can be had here")
    return dict(message)


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """The tool to call, in the one form that formats keep to."""
    if choice is None or choice in ("auto", "none") or not isinstance(choice, str):
        return choice
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and len(names) != 1:
        raise ArgumentError(
            f"tool_choice 'required' with {len(names)} tools: give the name of the one to call"
        )
    return {"type": "function", "function": {"name": names[0] if choice == "required" else choice}}


def _check_called(choice: Any, function_call: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """A format takes any JSON where it cannot read a schema: that is found out before."""
    called = choice["function"] if isinstance(choice, dict) else function_call
    if not isinstance(called, dict):
        return
    found = [tool["function"] for tool in tools if tool["function"]["name"] == called["name"]]
    if not found:
        raise ArgumentError(f"tool {called['name']!r} is to be called and is not among the tools")
    schema_grammar(found[0].setdefault("parameters", {"type": "object", "properties": {}}))


def _form(form: Mapping[str, Any], grammar: Any) -> dict[str, Any]:
    """A grammar for a response_format, of which formats know `json_object` alone."""
    from llama_cpp import LlamaGrammar

    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ArgumentError(f"response_format {kind!r} is none of text, json_object and json_schema")
    if kind == "text":
        return {"response_format": None}
    if grammar is not None:
        raise ArgumentError("grammar and response_format are both given: which is meant?")
    schema = form.get("schema") if kind == "json_object" else form.get("json_schema", {}).get("schema")
    if schema is None and kind == "json_schema":
        raise ArgumentError(
            'response_format json_schema without a schema: {"json_schema": {"schema": ...}} is expected'
        )
    if schema is None:
        return {}
    return {"response_format": None, "grammar": LlamaGrammar.from_string(schema_grammar(schema))}


def why_no_attribute(ours: type, name: str) -> str:
    """The line for an attribute that the drop-in lacks."""
    if name.startswith("_") or not hasattr(theirs(), name):
        return f"{ours.__name__!r} object has no attribute {name!r}"
    here = ", ".join(sorted(known for known in vars(ours) if not known.startswith("_")))
    return f"llama_cpp.Llama's {name} cannot be had with speculation inside (there are: {here})"


def only_match(names: Sequence[str], pattern: str, where: str) -> str:
    """The one name that a pattern matches. Raises ArgumentError for none or several.

    >>> only_match(["a-Q4_0.gguf", "a-Q8_0.gguf"], "*Q8_0.gguf", "org/a")
    'a-Q8_0.gguf'
    """
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if len(found) != 1:
        listed = ", ".join(found or names) or "none"
        raise ArgumentError(
            f"{len(found)} files of {where} match {pattern!r}, one is expected: there are {listed}"
        )
    return found[0]


def sidecar_of(main: str, names: Sequence[str]) -> str | None:
    """The sidecar of a main file among the files of a repository, by its name; one of the same type where there are several.

    >>> sidecar_of("a-Q4_K_M.gguf", ["a-Q4_K_M.gguf", "mtp-a-Q8_0.gguf", "mtp-b-Q8_0.gguf"])
    'mtp-a-Q8_0.gguf'
    """

    def bare(path: PurePosixPath) -> str:
        return TYPE_WORD.sub("", path.stem)

    path = PurePosixPath(main)
    for kind in sorted(KINDS.values(), key=lambda kind: kind.rank):
        same = str(path.with_name(kind.prefix + path.name))
        paths = [PurePosixPath(name) for name in names]
        found = [p for p in paths if p.parent == path.parent and bare(p) == kind.prefix + bare(path)]
        if found:
            return same if same in names else str(found[-1])
    return None
