"""`llama_sidecar.runtime.Llama` beside llama_cpp.Llama, on the same file: the same results and the same chunks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_server
import llama_cpp
import pytest
from conftest import PairOf

from llama_sidecar.converter import convert
from llama_sidecar.runtime import ArgumentError, Llama, LoadError, PromptError
from llama_sidecar.runtime.completion_text import chunks, text_before

DEMO = Path(__file__).resolve().parents[1] / "sidecars" / "demo"
PROMPTS = ["class Foo:\n    def __init__(self", "# héllo 日本語 — ", "import os\n"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open a socket."}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "get", "description": "x", "parameters": SCHEMA}}
CALL = {"type": "function", "function": {"name": "get"}}
COMPLETIONS: list[dict[str, Any]] = [
    {"max_tokens": 48},
    {"max_tokens": 48, "stop": ["\n\n", "return"]},
    {"max_tokens": 48, "stop": "e"},
    {"max_tokens": 24, "temperature": 0.8, "seed": 7},
    {"max_tokens": 24, "temperature": 0.8, "seed": 7, "repeat_penalty": 1.1, "frequency_penalty": 0.3},
    {"max_tokens": 24, "repeat_penalty": 1.3},
    {"max_tokens": 24, "logit_bias": {"300": 5.0, "301": -3}, "model": "mine"},
    {"max_tokens": 24, "grammar": llama_cpp.LlamaGrammar.from_string('root ::= [a-z ]+ ";"')},
]
CHATS: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 24, "temperature": 0.7, "seed": 3},
    {"max_tokens": 24, "tools": [TOOL]},
    {"max_tokens": 64, "tools": [TOOL], "tool_choice": CALL},
    {"max_tokens": 64, "functions": [TOOL["function"]], "function_call": {"name": "get"}},
    {"max_tokens": 64, "response_format": {"type": "json_object", "schema": SCHEMA}},
    {"max_tokens": 40, "response_format": {"type": "json_object"}},
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    main = convert(DEMO, tmp_path_factory.mktemp("demo"), main_type="F32", sidecar_type="F32").main
    assert main is not None
    return main


@pytest.fixture(scope="module")
def theirs(demo: Path) -> Iterator[Any]:
    llm = llama_cpp.Llama(str(demo), n_ctx=512, n_threads=1, logits_all=True, verbose=False)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def ours(demo: Path) -> Iterator[Llama]:
    with Llama(
        demo, n_ctx=300, n_threads=1, verbose=False, depth=3, kernels="stock"
    ) as llm:  # rounded up to 512
        assert llm.speculation.kind == "mtp"
        yield llm


def same(found: Any, expected: Any) -> bool:
    """Equal but for ids and times, and for rounding in numbers that are not whole."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(found) != list(expected):
            return False
        return all(
            same(found[name], value) for name, value in expected.items() if name not in ("id", "created")
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, (str, int)) or expected is None:
        return bool(found == expected)
    return math.isclose(found, expected, abs_tol=0.02)


def without_tool_ids(found: Any) -> Any:
    """A call's id has the completion's in it."""
    if isinstance(found, dict):
        return {name: without_tool_ids(value) for name, value in found.items() if name != "id"}
    return [without_tool_ids(value) for value in found] if isinstance(found, list) else found


@pytest.mark.parametrize("options", COMPLETIONS, ids=" ".join)
def test_completions_and_their_chunks_are_llama_cpp_s(
    theirs: Any, ours: Llama, options: dict[str, Any]
) -> None:
    options = {"temperature": 0, **options}
    for prompt in PROMPTS:
        assert same(ours(prompt, **options), theirs(prompt, **options))
        assert same(list(ours(prompt, stream=True, **options)), list(theirs(prompt, stream=True, **options)))


def test_the_prompt_may_be_token_ids_and_come_back(theirs: Any, ours: Llama) -> None:
    tokens = theirs.tokenize(b"import os\n")
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    assert same(ours(tokens, **options), theirs(tokens, **options))
    assert same(ours("import os\n", echo=True, **options), theirs("import os\n", echo=True, **options))


def test_log_probabilities(theirs: Any, ours: Llama) -> None:
    """With a prompt whose text has no comma: the demo's file names no first token, llama.cpp takes that of the comma for it,
    and llama-cpp-python leaves it out."""
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 3}
    found, expected = ours("import os\n", **options), theirs("import os\n", **options)
    assert "," not in expected["choices"][0]["text"]
    assert same(found, expected)
    stream = {"stream": True, **options}
    assert same(list(ours("import os\n", **stream)), list(theirs("import os\n", **stream)))
    chat: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    assert same(
        ours.create_chat_completion(MESSAGES, **chat), theirs.create_chat_completion(MESSAGES, **chat)
    )
    alone = ours.create_chat_completion(MESSAGES, **(chat | {"top_logprobs": None}))
    assert len(alone["choices"][0]["logprobs"]["content"]) == 6


def test_seeds_of_texts_that_are_given_none_come_in_the_same_order(theirs: Any, ours: Llama) -> None:
    for llm in (theirs, ours):
        llm.set_seed(5)
    for _ in range(3):
        assert same(ours("x", temperature=1.0), theirs("x", temperature=1.0))


@pytest.mark.parametrize("options", CHATS, ids=" ".join)
def test_chats_and_their_chunks_are_llama_cpp_s(theirs: Any, ours: Llama, options: dict[str, Any]) -> None:
    options = {"temperature": 0, **options}
    found, expected = (llm.create_chat_completion(MESSAGES, **options) for llm in (ours, theirs))
    assert same(without_tool_ids(found), without_tool_ids(expected))
    found, expected = (
        list(llm.create_chat_completion(MESSAGES, stream=True, **options)) for llm in (ours, theirs)
    )
    assert same(without_tool_ids(found), without_tool_ids(expected))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-2", {}),
        ("chatml-function-calling", {"tools": [TOOL]}),
        ("chatml-function-calling", {"tools": [TOOL], "tool_choice": "auto"}),
        ("chatml-function-calling", {"tools": [TOOL], "tool_choice": CALL}),
    ],
    ids=["llama-2", "tools", "auto", "call"],
)
def test_named_chat_formats_are_llama_cpp_s(
    theirs: Any, ours: Llama, name: str, options: dict[str, Any]
) -> None:
    usual = theirs.chat_format
    assert ours.chat_format == usual
    try:
        ours.chat_format = theirs.chat_format = name
        found, expected = (
            llm.create_chat_completion(MESSAGES, max_tokens=32, temperature=0, **options)
            for llm in (ours, theirs)
        )
    finally:
        ours.chat_format = theirs.chat_format = usual
    assert same(without_tool_ids(found), without_tool_ids(expected))


def test_a_schema_and_a_required_call_that_llama_cpp_would_ignore_are_kept_to(ours: Llama) -> None:
    expected = ours.create_chat_completion(
        MESSAGES, temperature=0, tools=[TOOL], tool_choice=CALL, max_tokens=64
    )
    found = ours.create_chat_completion(
        MESSAGES, temperature=0, tools=[TOOL], tool_choice="required", max_tokens=64
    )
    assert same(without_tool_ids(found), without_tool_ids(expected))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = ours.create_chat_completion(MESSAGES, temperature=0, response_format=form, max_tokens=64)
    form = {"type": "json_object", "schema": SCHEMA}
    expected = ours.create_chat_completion(MESSAGES, temperature=0, response_format=form, max_tokens=64)
    assert same(found, expected)


def test_tokens_and_facts(theirs: Any, ours: Llama) -> None:
    text = "a <|im_end|> b é".encode()
    for special in (False, True):
        for add_bos in (False, True):
            tokens = theirs.tokenize(text, add_bos, special)
            assert ours.tokenize(text, add_bos, special) == tokens
            assert ours.detokenize(tokens, special=special) == theirs.detokenize(tokens, special=special)
    for name in ("n_ctx", "n_vocab", "n_embd", "token_bos", "token_eos", "token_nl"):
        assert getattr(ours, name)() == getattr(theirs, name)(), name
    assert ours.chat_format == theirs.chat_format
    assert ours.metadata == theirs.metadata


def test_the_context_ends_where_llama_cpp_s_does(theirs: Any, ours: Llama) -> None:
    prompt = "x = 1\n" * 60
    n = len(theirs.tokenize(prompt.encode()))
    assert 200 < n < 512
    for options in ({"max_tokens": None}, {"max_tokens": 10_000}, {"max_tokens": -1}):
        found, expected = (llm(prompt, temperature=0, **options) for llm in (ours, theirs))
        assert same(found, expected)
    for llm in (ours, theirs):
        with pytest.raises(ValueError, match=r"Requested tokens \(\d+\) exceed context window of 512"):
            llm(prompt * 4)


def test_speculation_is_inside(ours: Llama) -> None:
    ours("import os\n", max_tokens=24, temperature=0)
    assert ours.stats is not None and ours.stats.n_accepted > 0 and ours.stats.depth == 3


def test_a_stream_may_be_left_and_reset_forgets(ours: Llama) -> None:
    for _ in ours("import os\n", stream=True, max_tokens=100, temperature=0):
        break
    first = ours("import os\n", max_tokens=8, temperature=0)
    ours.reset()
    assert same(ours("import os\n", max_tokens=8, temperature=0), first)
    assert ours.stats is not None and ours.stats.n_reused == 0


def test_all_arguments_of_llama_cpp_are_taken_at_their_defaults(demo: Path) -> None:
    parameters = inspect.signature(llama_cpp.Llama.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    with Llama(str(demo), **(defaults | {"verbose": False, "f16_kv": True, "n_parts": -1})) as llm:
        assert llm.n_ctx() == llm.context_params.n_ctx == 512
    for name in ("create_completion", "create_chat_completion", "from_pretrained"):
        known = inspect.signature(getattr(Llama, name)).parameters
        expected = inspect.signature(getattr(llama_cpp.Llama, name)).parameters
        assert (
            list(known)[: len(expected) - 2] == list(expected)[: len(expected) - 2]
            or name == "from_pretrained"
        )
        for p in known.values():
            if p.name in expected and p.default not in (p.empty, ()):
                assert p.default == expected[p.name].default, p.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": "a drafter"}, "draft_model=.* cannot be had here, None alone: the sidecar"),
        ({"embedding": True}, "embeddings are llama_cpp.Llama's"),
        ({"n_threads_batch": 2}, "n_threads is for prompts, too"),
        ({"lora_path": "x.gguf"}, "lora_path='x.gguf' cannot be had here, None alone"),
        ({"f16_kv": False}, "f16_kv=False cannot be had here, True alone"),
        ({"ctx": 300}, "ctx is called n_ctx here"),
        ({"n_gpu_layer": 1}, "n_gpu_layer is neither an argument of llama_cpp.Llama nor of load"),
        ({"type_k": 12}, "type_k=12 is no type of a KV cache"),
        ({"n_batch": 0}, "batch 0 is not a whole number"),
        ({"n_ctx": "auto"}, "n_ctx 'auto' is not a whole number"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_had_are_one_line(demo: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, LoadError), match=message):
        Llama(demo, verbose=False, **options)


def test_a_file_that_is_not_there_is_a_value_error_as_llama_cpp_s(tmp_path: Path) -> None:
    for llm in (Llama, llama_cpp.Llama):
        with pytest.raises(ValueError, match=r"no such file|does not exist"):
            llm(str(tmp_path / "none.gguf"), verbose=False)


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("create_completion", {"prompt": "a", "suffix": "b"}, "fill-in-the-middle"),
        ("create_completion", {"prompt": "a", "stopping_criteria": [len]}, "use stop"),
        ("create_completion", {"prompt": "a", "logits_processor": [len]}, "use logit_bias"),
        ("create_completion", {"prompt": "a", "mirostat_mode": 2}, "use temperature"),
        ("create_completion", {"prompt": [1], "echo": True}, "echo is for a prompt that is text"),
        ("create_completion", {"prompt": ""}, "the prompt is empty"),
        ("create_completion", {"prompt": "a", "top_p": 2.0}, "top_p 2.0"),
        ("create_chat_completion", {"messages": MESSAGES, "tfs_z": 0.5}, "tfs_z=0.5 cannot be had here"),
        (
            "create_chat_completion",
            {"messages": [{"role": "user", "content": IMAGE}]},
            "only text can be had here",
        ),
        ("create_chat_completion", {"messages": MESSAGES, "tool_choice": "required"}, "with 0 tools"),
        (
            "create_chat_completion",
            {"messages": MESSAGES, "tools": [TOOL], "function_call": {"name": "put"}},
            "'put'",
        ),
        (
            "create_chat_completion",
            {"messages": MESSAGES, "response_format": {"type": "xml"}},
            "'xml' is none of",
        ),
        (
            "create_chat_completion",
            {"messages": MESSAGES, "response_format": {"type": "json_object", "schema": {"type": "odd"}}},
            "JSON schema cannot be used",
        ),
    ],
    ids=str,
)
def test_requests_that_cannot_be_kept_to_are_one_line(
    ours: Llama, method: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        getattr(ours, method)(**options)
    assert "\n" not in str(caught.value)


def test_what_is_missing_says_what_there_is(ours: Llama) -> None:
    public = {name for name in vars(llama_cpp.Llama) if not name.startswith("_")}
    for name in public - set(vars(Llama)):
        with pytest.raises(
            AttributeError, match=rf"llama_cpp.Llama's {name} cannot be had .* create_completion"
        ):
            getattr(ours, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ours.nonsense  # noqa: B018


def test_a_template_that_fails_is_one_line(pair_of: PairOf, tmp_path: Path) -> None:
    import models

    template = "{{ raise_exception('no system prompt here') }}"
    pair = models.write_pair(tmp_path, template=template)
    with (
        Llama(pair.main, verbose=False, spec_type="none") as llm,
        pytest.raises(PromptError, match=r"the file's chat template failed: no system prompt here"),
    ):
        llm.create_chat_completion(MESSAGES)


def test_from_pretrained_fetches_the_sidecar_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import models

    repository, cache = tmp_path / "repository", tmp_path / "cache"
    pair = models.write_pair(repository)
    pair.main.rename(repository / "tiny-Q8_0.gguf")
    pair.sidecar.rename(repository / "mtp-tiny-Q8_0.gguf")
    with hub_server.hub(repository, monkeypatch, cache):
        with Llama.from_pretrained(
            hub_server.REPOSITORY, "tiny-*.gguf", cache_dir=cache, verbose=False, depth=2
        ) as llm:
            assert llm.speculation.kind == "mtp"
            assert llm("ab", max_tokens=4, temperature=0)["usage"]["completion_tokens"] == 4
        with pytest.raises(ArgumentError, match=r"2 files of .* match '\*', one is expected"):
            Llama.from_pretrained(hub_server.REPOSITORY, "*", cache_dir=cache)
        with pytest.raises(LoadError, match="cannot be had from the Hugging Face Hub"):
            Llama.from_pretrained("org/other", "*", cache_dir=cache)


# The pure part


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        ([b"a", b"b"], [], ["a", "b"]),
        ([b"a", b"\xc3", b"\xa4b"], [], ["a", "äb"]),  # tokens of one character are one chunk
        ([b"a", b"\xc3"], [], ["a", ""]),  # the end cuts a character
        (
            [b"x", b"E", b"x", b"EN", b"D!"],
            [b"END"],
            ["x", "E", "x", ""],
        ),  # held back until it is no stop string
        ([b"one E", b"ND"], [b"END"], ["one "]),
        ([b"E", b"N"], [b"END"], ["E", "N"]),  # the text ends in what might have become one
        ([b"aEND", b"b"], [b"END"], ["a"]),
        ([], [b"END"], []),
    ],
    ids=str,
)
def test_chunks(pieces: list[bytes], stops: list[bytes], expected: list[str]) -> None:
    found = list(chunks(pieces, stops))
    assert [text for _, text in found] == expected
    assert "".join(expected) == text_before(b"".join(pieces), stops)
    assert [i for i, _ in found] == sorted({i for i, _ in found})


def test_chunks_with_log_probabilities_are_a_token_each() -> None:
    assert list(chunks([b"a", b"\xc3", b"\xa4"], [], join=False)) == [(0, "a"), (1, ""), (2, "")]
