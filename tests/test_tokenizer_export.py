"""The exported vocabulary: keys from every file it can come from, and the same ids as the checkpoint's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CALL, END, START, STOP, make_checkpoint, tiny_tensors, write_json
from click.testing import CliRunner
from gguf_edit import read

from llama_sidecar.converter import convert, dry_run
from llama_sidecar.converter.checkpoint import open_checkpoint
from llama_sidecar.converter.errors import BadTokenizer
from llama_sidecar.converter.tokenizer import (
    CONTROL,
    NORMAL,
    PRE_TOKENIZER_NAMES,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
    vocabulary_keys,
)
from llama_sidecar.scripts.convert import command
from llama_sidecar.sidecars import read_header

TEXT = "hello there, don't\n\n  tell: 1234 \u00fcml\u00e4ut \u0e01\u0e33 \U0001f999<|im_start|>x<tool_call> y\t\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path)


def keys(folder: Path) -> dict[str, Any]:
    with open_checkpoint(folder) as checkpoint:
        return vocabulary_keys(checkpoint)


def edit(path: Path, **values: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | values)


def test_tokens_types_and_padding(folder: Path) -> None:
    found = keys(folder)
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 320
    assert (tokens[0], types[0]) == ("!", NORMAL)
    assert (tokens[START], types[START]) == ("<|im_start|>", CONTROL)
    assert (tokens[CALL], types[CALL]) == ("<tool_call>", USER_DEFINED)
    assert (tokens[319], types[319]) == ("[PAD319]", UNUSED)
    assert found["tokenizer.ggml.merges"] == ["h e", "l l", "he ll", "\u0120 t"]
    assert found["tokenizer.ggml.pre"] == "qwen35"


def test_special_ids_come_from_texts_before_numbers(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=START, bos_token_id=END)
    found = keys(folder)
    assert found["tokenizer.ggml.eos_token_id"] == STOP
    assert found["tokenizer.ggml.bos_token_id"] == END
    assert found["tokenizer.ggml.padding_token_id"] == END
    assert found["tokenizer.ggml.add_bos_token"] is False


def test_merges_as_strings_and_with_spaces(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = ["h e", "l l"]
    write_json(path, tokenizer)
    assert keys(folder)["tokenizer.ggml.merges"] == ["h e", "l l"]
    tokenizer["model"]["merges"] = [["h", " e"]]
    write_json(path, tokenizer)
    assert keys(folder)["tokenizer.ggml.merges"] == ["h \u0120e"]


def test_chat_template_from_each_place(folder: Path) -> None:
    assert keys(folder)["tokenizer.chat_template"].startswith("{% for m in messages %}")
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert "tokenizer.chat_template" not in keys(folder)
    write_json(folder / "chat_template.json", {"chat_template": "from json"})
    assert keys(folder)["tokenizer.chat_template"] == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert keys(folder)["tokenizer.chat_template"] == "from jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    found = keys(folder)
    assert found["tokenizer.chat_template"] == "from jinja"
    assert found["tokenizer.chat_template.tool_use"] == "tools"
    assert found["tokenizer.chat_templates"] == ["tool_use"]


def test_two_chat_templates_are_not_chosen_between_in_silence(folder: Path) -> None:
    template = keys(folder)["tokenizer.chat_template"]
    for text, n_warnings in ((template + "\n", 0), ("another", 1)):
        (folder / "chat_template.jinja").write_text(text)
        with open_checkpoint(folder) as checkpoint:
            assert vocabulary_keys(checkpoint)["tokenizer.chat_template"] == template
            assert len([w for w in checkpoint.warnings if "chat_template.jinja" in w]) == n_warnings


def test_what_cannot_be_exported_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))

    def refused(match: str, **values: Any) -> None:
        write_json(path, tokenizer | values)
        with pytest.raises(BadTokenizer, match=match):
            keys(folder)

    refused("holds a Unigram model", model={"type": "Unigram", "vocab": []})
    refused("none of the patterns known", pre_tokenizer={"type": "Split", "pattern": {"Regex": r"\w+"}})
    refused("none of the patterns known", pre_tokenizer={"type": "Whitespace"})
    refused("vocab_size = 320", added_tokens=[{"id": 320, "content": "x"}])
    refused("not in the form expected", added_tokens=[{"id": 3}])
    refused("no list of merges", model={"type": "BPE", "vocab": {"a": 0}})
    path.unlink()
    with pytest.raises(BadTokenizer, match=r"no tokenizer\.json"):
        keys(folder)


@pytest.mark.parametrize(
    ("vocabulary", "added", "match"),
    [
        ({"x": -1}, [], "a token -1"),
        ({"x": 300.0}, [], r"a token 300\.0"),
        ({"x": True}, [], "a token True"),
        ({"x": 5}, [], "several texts one id"),
        ({"\ud800": 300}, [], "surrogates"),
        ({"[PAD319]": 300}, [], r"several ids one text \('\[PAD319\]'\)"),
        ({}, [{"id": 300, "content": "<|im_end|>"}], r"several ids one text \('<\|im_end\|>'\)"),
        ({}, [{"id": 300, "content": "A"}], r"several ids one text \('A'\)"),
        ({}, [{"id": -3, "content": "x"}], "a token -3"),
        ({}, [{"id": 300, "content": 5, "special": True}], "5 is no text"),
    ],
)
def test_every_id_has_one_text_and_every_text_one_id(
    folder: Path, vocabulary: dict[str, Any], added: list[Any], match: str
) -> None:
    """llama.cpp ends the process where two ids have one text."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] |= vocabulary
    tokenizer["added_tokens"] += added
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadTokenizer, match=match) as error:
        keys(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "merges", [[], [5], ["abc"], ["a b c"], [["a"]], [["a", "b", "c"]], [["a", 5]], "a b"]
)
def test_a_merge_has_two_parts(folder: Path, merges: Any) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = merges
    write_json(folder / "tokenizer.json", tokenizer)
    with pytest.raises(BadTokenizer, match=r"list of merges|not in the form expected"):
        keys(folder)


@pytest.mark.parametrize(
    "template",
    ["\ud83d", [{"name": "x"}], [{"name": 5, "template": "x"}], [{"name": "default", "template": 5}], ["x"]],
)
def test_a_chat_template_is_text(folder: Path, template: Any) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": template}
    path.write_text(json.dumps(settings))
    with pytest.raises(BadTokenizer, match="not in the form expected"):
        keys(folder)


def test_a_template_file_that_cannot_be_read(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("x")
    (folder / "additional_chat_templates" / "tool.jinja").mkdir(parents=True)
    with pytest.raises(BadTokenizer, match=r"tool\.jinja cannot be read"):
        keys(folder)


# A pre-tokenizer that is not recognised, and the name that is given for it.


def split_otherwise(folder: Path) -> Path:
    edit(folder / "tokenizer.json", pre_tokenizer={"type": "Split", "pattern": {"Regex": r"\w+|\W"}})
    return folder


def pre_of(path: Path | None) -> str:
    assert path
    return str(read_header(path).keys["tokenizer.ggml.pre"])


def test_a_split_that_is_not_known_says_which_option_names_it(folder: Path, tmp_path: Path) -> None:
    split_otherwise(folder)
    for make in (convert, dry_run):
        with pytest.raises(
            BadTokenizer, match=r"none of the patterns .*give that with --pre-tokenizer$"
        ) as caught:
            make(folder, tmp_path / "out")
        assert "\n" not in str(caught.value)
        with pytest.raises(
            BadTokenizer, match=r"'glm44' is no pre-tokenizer of llama\.cpp's; expected one of .*glm4, "
        ):
            make(folder, tmp_path / "out", pre_tokenizer="glm44")
    assert not (tmp_path / "out").exists()
    said = dry_run(folder, tmp_path / "out", pre_tokenizer="glm4")
    arguments = [str(folder), "-o", str(tmp_path / "out"), "--pre-tokenizer", "glm4"]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert run.exit_code == 0 and not run.stderr
    for file in said.files:
        assert pre_of(file.path) == "glm4" and file.path.stat().st_size == file.n_bytes


def test_a_name_that_contradicts_the_split_is_written_and_remarked_on(folder: Path, tmp_path: Path) -> None:
    result = convert(folder, tmp_path / "out", pre_tokenizer="qwen2")
    assert pre_of(result.main) == pre_of(result.sidecar) == "qwen2"
    assert result.warnings == [
        "tokenizer.json splits text as llama.cpp's qwen35 does; qwen2 is written, as asked for"
    ]
    assert not convert(folder, tmp_path / "same", pre_tokenizer="qwen35").warnings


def test_a_head_of_a_base_that_splits_the_same_unknown_way(folder: Path, tmp_path: Path) -> None:
    trunk = {n: t for n, t in tiny_tensors("qwen35", "tied").items() if not n.startswith("mtp.")}
    lost = split_otherwise(make_checkpoint(tmp_path, tensors=trunk, name="lost"))
    result = convert(lost, tmp_path / "out", mtp_from=split_otherwise(folder), pre_tokenizer="glm4")
    assert pre_of(result.main) == pre_of(result.sidecar) == "glm4"


def test_gemma_4_has_no_name_for_its_split(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match="leave --pre-tokenizer out"):
        convert(make_checkpoint(tmp_path, "gemma4", "dense"), tmp_path / "out", pre_tokenizer="qwen2")


def test_every_name_loads_in_llama_cpp(folder: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    assert {name for names in PRE_TOKENIZERS.values() for name in names} <= set(PRE_TOKENIZER_NAMES)
    main, other = convert(folder, tmp_path / "out").main, tmp_path / "other.gguf"
    assert main
    file = read(main)
    for name in PRE_TOKENIZER_NAMES:
        file.apply(["set", "tokenizer.ggml.pre", "STRING", name]).write(other)
        llama_cpp.Llama(str(other), vocab_only=True, verbose=False).close()
    file.apply(["set", "tokenizer.ggml.pre", "STRING", "glm44"]).write(other)
    with pytest.raises(ValueError):
        llama_cpp.Llama(str(other), vocab_only=True, verbose=False)


@pytest.mark.parametrize("arch", ["qwen35", "qwen3next"])
def test_llama_cpp_makes_the_ids_of_the_checkpoints_tokenizer(arch: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizers = pytest.importorskip("tokenizers")
    folder = make_checkpoint(tmp_path, arch, "tied" if arch == "qwen35" else "tiled")
    main = convert(folder, tmp_path / "out", "F32").main
    model = llama_cpp.Llama(str(main), vocab_only=True, verbose=False)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert model.tokenize(TEXT.encode(), add_bos=False, special=True) == own.encode(TEXT).ids
    model.close()
