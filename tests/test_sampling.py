"""Sampling: plain and speculative texts are what llama.cpp's own samplers choose, row by row, with the history of plain decoding.

Cases 23 and 25 of the project's list of what broke other tools.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import PairOf

from llama_sidecar.runtime import (
    LibraryError,
    Model,
    PromptError,
    Sampling,
    Scripted,
    Session,
    _native,
    load,
    reference,
)
from llama_sidecar.runtime.grammar import MAX_NESTING, MAX_RULES, check_gbnf, schema_grammar
from llama_sidecar.runtime.library import llama
from llama_sidecar.runtime.sampling import MAX_SEED, file_defaults
from llama_sidecar.runtime.schema_rules import integer_gbnf
from llama_sidecar.runtime.weights import make_target_context
from llama_sidecar.scripts.run import command

PROMPT = list(b"hello hello world, this is where it starts; hello")
N, SEED = 40, 7
ONLY = '{"a":1}'
GRAMMAR = 'root ::= "{" [a-h]+ "}"'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module", params=["T", "R"])
def model(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Model]:
    """T and R at Q8_0: llama.cpp's rows are then equal to the bit at every width, and so are ids."""
    with load(pair_of(request.param, "Q8_0").main, ctx=256, threads=1, depth=3) as loaded:
        yield loaded


def write(session: Session, n: int = N, **options: Any) -> list[int]:
    generation = session.generate(PROMPT, max_tokens=n, **options)
    generation.read()
    return generation.tokens


# The oracle: one row at a time, llama_sampler_sample, and a chain written out here


def bias(token: int, value: float) -> Any:
    lib = llama()
    return lib.llama_sampler_init_logit_bias(
        256, 1, (lib.llama_logit_bias * 1)(lib.llama_logit_bias(token, value))
    )


def dry(vocab: Any, multiplier: float, length: int, last_n: int, breakers: Sequence[bytes]) -> Any:
    texts = (ctypes.c_char_p * len(breakers))(*breakers)
    return llama().llama_sampler_init_dry(vocab, multiplier, 1.75, length, last_n, texts, len(breakers))


TRUNCATION: dict[str, Any] = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8}

# name: our options, and llama.cpp's samplers before truncation
ADJUSTMENTS: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, lambda lib, vocab: []),
    "bias": (
        {"logit_bias": {101: 2.5}},
        lambda lib, vocab: [bias(101, 2.5)],
    ),
    "penalties": (
        {
            "repeat_penalty": 1.3,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.5,
            "repeat_last_n": 24,
        },
        lambda lib, vocab: [lib.llama_sampler_init_penalties(256, 24, 1.3, 0.3, 0.5)],
    ),
    "penalties over all": (
        {"presence_penalty": 1.5, "repeat_last_n": -1},
        lambda lib, vocab: [lib.llama_sampler_init_penalties(256, 256, 1.0, 0.0, 1.5)],
    ),
    "DRY": (
        {
            "logit_bias": {101: 5.0},  # so that it repeats itself
            "dry_multiplier": 3.0,
            "dry_allowed_length": 1,
            "dry_sequence_breakers": ["w"],
        },
        lambda lib, vocab: [
            bias(101, 5.0),
            lib.llama_sampler_init_penalties(256, 64, 1.0, 0.0, 0.0),
            dry(vocab, 3.0, 1, 256, [b"w"]),
        ],
    ),
    "everything": (
        {
            "logit_bias": {104: 3.0},
            "repeat_penalty": 1.2,
            "dry_multiplier": 1.0,
            "dry_penalty_last_n": 40,
        },
        lambda lib, vocab: [
            bias(104, 3.0),
            lib.llama_sampler_init_penalties(256, 64, 1.2, 0.0, 0.0),
            dry(vocab, 1.0, 2, 40, [b"\n", b":", b'"', b"*"]),
        ],
    ),
}


def oracle(model: Model, adjusting: Any, temperature: float, n: int = N) -> list[int]:
    """What llama.cpp's own loop writes: decode a row, sample, accept."""
    lib = llama()
    pointer = make_target_context(model.weights, model.settings, n_ctx=256, depth=0, n_slots=0)
    target = reference.Context(pointer)
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    parts = adjusting(lib, model.vocab.pointer)
    if temperature:
        parts += [
            lib.llama_sampler_init_top_k(TRUNCATION["top_k"]),
            lib.llama_sampler_init_typical(TRUNCATION["typical_p"], 1),
            lib.llama_sampler_init_top_p(TRUNCATION["top_p"], 1),
            lib.llama_sampler_init_min_p(TRUNCATION["min_p"], 1),
            lib.llama_sampler_init_temp(temperature),
            lib.llama_sampler_init_dist(SEED),
        ]
    else:
        parts.append(lib.llama_sampler_init_greedy())
    for part in parts:
        lib.llama_sampler_chain_add(chain, part)
    for token in PROMPT:
        lib.llama_sampler_accept(chain, token)
    target.decode(PROMPT, 0, [len(PROMPT) - 1])
    text = [int(lib.llama_sampler_sample(chain, pointer, -1))]
    while len(text) < n:
        target.decode(text[-1:], len(PROMPT) + len(text) - 1, [0])
        text.append(int(lib.llama_sampler_sample(chain, pointer, -1)))
    lib.llama_sampler_free(chain)
    target.close()
    return text


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_every_sampler_is_llama_cpps_own_plain_and_speculative(
    model: Model, name: str, temperature: float
) -> None:
    """Also with drafters that are right for the first j tokens: the history of each row is that of plain decoding."""
    options, adjusting = ADJUSTMENTS[name]
    options = {**options, **TRUNCATION, "temperature": temperature, "seed": SEED, "ignore_eos": True}
    expected = oracle(model, adjusting, temperature)
    with model.session(spec_type="none") as session:
        assert write(session, **options) == expected
    with model.session() as session:
        assert write(session, **options) == expected
    for n_right in range(4):
        with model.session(depth=3, scripted=Scripted(PROMPT + expected, n_right)) as session:
            assert write(session, **options) == expected


def test_every_sampler_changes_the_text(model: Model) -> None:
    """So that none of the texts above is equal for want of effect."""
    texts = {
        name: tuple(oracle(model, adjusting, 0.0) + oracle(model, adjusting, 0.9))
        for name, (_, adjusting) in ADJUSTMENTS.items()
    }
    assert len(set(texts.values())) == len(ADJUSTMENTS)


# Grammars


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_of_one_sentence_is_that_sentence_whatever_is_drafted(
    model: Model, temperature: float
) -> None:
    """Case 23."""
    grammar = 'root ::= "{\\"a\\":1}"'
    scripted = [
        Scripted([255] * 256, 0),  # illegal everywhere
        Scripted([*PROMPT, *ONLY.encode(), 0], 3),
        Scripted([*PROMPT, *b'{"a":2}', 0], 3),
    ]
    for drafter in [None, *scripted]:
        with model.session(depth=3, scripted=drafter) as session:
            generation = session.generate(PROMPT, grammar=grammar, temperature=temperature, seed=1)
            assert generation.read() == ONLY
            assert generation.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bound", [{"grammar": GRAMMAR}, {"json_schema": SCHEMA}])
def test_a_bound_text_is_the_plain_one_and_a_sentence(
    model: Model, bound: dict[str, Any], temperature: float
) -> None:
    options = {**bound, "temperature": temperature, "seed": SEED, "repeat_penalty": 1.2}
    texts = []
    for how in ({"spec_type": "none"}, {}, {}):
        with model.session(**how) as session:  # type: ignore[arg-type]
            generation = session.generate(PROMPT, max_tokens=60, **options)
            texts.append((generation.read(), generation.finish_reason))
    assert texts[0] == texts[1] == texts[2]
    text, reason = texts[0]
    if reason == "stop":
        if "grammar" in bound:
            assert text[0] == "{" and text[-1] == "}" and set(text[1:-1]) <= set("abcdefgh")
        else:
            assert isinstance(json.loads(text)["n"], int)
    else:
        assert text.startswith("{")


def test_a_schema_may_be_text_or_an_object() -> None:
    assert schema_grammar(json.dumps(SCHEMA)) == schema_grammar(SCHEMA)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grammar": "root ::= foo"}, "grammar is no GBNF"),
        ({"grammar": 'root ::= root "a"'}, "left recursion"),
        ({"grammar": 'other ::= "a"'}, "root"),
        ({"grammar": " "}, "empty"),
        ({"grammar": 'root ::= "\udcff"'}, "no UTF-8 text"),
        ({"grammar": 'root ::= "a"\0'}, "no UTF-8 text"),
        ({"grammar": 'root ::= "a"{3,1}'}, "at least 3 and at most 1 times"),
        ({"grammar": f"root ::= {'(' * 200_000}"}, "200,000 parentheses"),
        ({"json_schema": "{"}, "JSON schema cannot be used"),
        ({"json_schema": "[1, 2]"}, r"JSON schema is \[1, 2\]: an object is expected"),
        ({"json_schema": False}, "JSON schema is false: an object is expected"),
        ({"json_schema": {"type": "string", "pattern": "^a{1,90000}$"}}, "schema.* parentheses"),
        ({"json_schema": {"type": "string", "maxLength": 10**9}}, "maxLength is above"),
        ({"json_schema": {"items": {"type": "string", "pattern": "^a{1,1000000}$"}}}, "pattern is above"),
        ({"json_schema": {"properties": [1]}}, "converter does not know its form"),
        ({"json_schema": {"enum": []}}, "JSON schema cannot be used: the grammar"),
        ({"json_schema": {"type": "nonsense"}}, "nonsense"),
        ({"json_schema": {"type": "number", "minimum": 0}}, "schema's minimum cannot be followed"),
        (
            {"json_schema": {"properties": {"a": {"type": "array", "minItems": 1}}}},
            "minItems at /properties/a cannot",
        ),
        ({"json_schema": {"type": "array", "items": {}, "uniqueItems": True}}, "uniqueItems cannot"),
        ({"json_schema": {"type": "object", "required": ["a"]}}, "required cannot"),
        ({"json_schema": {"properties": {"a": {}}, "required": ["b"]}}, "requires 'b', which is none"),
        ({"json_schema": {"properties": {"a": {}}, "anyOf": [{"type": "null"}]}}, "properties cannot"),
        (
            {"json_schema": {"allOf": [{"$ref": "#/$defs/E"}], "$defs": {"E": {"enum": [1]}}}},
            "allOf joins other",
        ),
        ({"json_schema": {"not": {"type": "null"}}}, "not cannot"),
        ({"json_schema": {"type": ["string", "null"], "maxLength": 3}}, "maxLength cannot"),
        ({"json_schema": {"type": "string", "pattern": "^a*$", "minLength": 3}}, "minLength cannot"),
        (
            {"json_schema": {"prefixItems": [{"type": "null"}], "maxItems": 0}},
            "not the number of its items, 1",
        ),
        ({"json_schema": {"type": "integer", "multipleOf": 3}}, "multipleOf cannot"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "leave no whole number"),
        ({"json_schema": {"type": "integer", "minimum": 0.5}}, "of a whole number are none"),
        ({"grammar": GRAMMAR, "json_schema": SCHEMA}, "both"),
        ({"logit_bias": {256: 1.0}}, "outside the vocabulary of 256"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "no id"),
        ({"logit_bias": 3}, "mapping"),
        ({"dry_sequence_breakers": "ab"}, "several texts"),
        ({"dry_sequence_breakers": ["\udcff"]}, "several texts"),
        ({"top_k": 1.5}, "whole number"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"tempreature": 1.0}, "unknown: tempreature"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": 5}, "stop strings 5 are not all text"),
    ],
)
def test_bad_settings_are_one_clear_error(model: Model, options: dict[str, Any], words: str) -> None:
    with model.session() as session, pytest.raises(PromptError, match=words):
        session.generate(PROMPT, **options)


def test_only_grammars_that_llama_cpp_does_not_survive_are_refused() -> None:
    for text in (
        'root ::= "a"{1,3} "{3,1}" [{3,1}(] # {3,1} (',
        'root ::= "\\"{3,1}(" [^\\]{3,1}] "a"{2} "a"{2,} "a"{ 02 , 10 }',
        "root ::= " + "(" * MAX_NESTING + '"a"' + ")" * MAX_NESTING,
        "root ::= " + '("a")' * 3 * MAX_NESTING,
    ):
        check_gbnf(text)
    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(MAX_RULES + 1))
    nested = "root ::= " + "(" * (MAX_NESTING + 1)
    for text in (nested, chain, 'root ::= ("a"){10, 9}', f'root ::= "a"{{1{10**4000},{10**4000}}}'):
        with pytest.raises(PromptError):
            check_gbnf(text)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 0),
        (0, 9),
        (0, 12),
        (7, 7),
        (3, 1234),
        (10, 99),
        (99, 100),
        (5, 5000),
        (-3, 1),
        (-120, -7),
        (-10, 250),
        (1000, 1099),
    ],
)
def test_bounds_of_a_whole_number_leave_these_numbers_and_no_others(low: int, high: int) -> None:
    parts = integer_gbnf(low, high).split(" | ")
    pattern = "|".join(part.replace('"', "").replace(" ", "") for part in parts)
    found = [n for n in range(-6000, 6000) if re.fullmatch(pattern, str(n))]
    assert found == list(range(low, high + 1))
    assert not re.fullmatch(pattern, "00") and not re.fullmatch(pattern, "-0")


@pytest.mark.parametrize(
    ("bounds", "low", "high"), [({"minimum": 0}, 0, 10**15), ({"exclusiveMinimum": 4, "maximum": 17}, 5, 17)]
)
def test_a_bounded_number_of_a_schema_is_within_its_bounds(
    model: Model, bounds: dict[str, int], low: int, high: int
) -> None:
    schema = {"properties": {"n": {"type": "integer", **bounds}}, "required": ["n"]}
    with model.session() as session:
        for seed in range(8):
            text = session.generate(PROMPT, max_tokens=60, json_schema=schema, temperature=1.5, seed=seed)
            text.read()
            assert text.finish_reason == "stop" and low <= json.loads(text.text)["n"] <= high


def test_what_a_schema_holds_as_a_value_repeats_nothing() -> None:
    schema = {"properties": {"maxLength": {"const": {"maxLength": 10**9}}, "n": {"enum": ["a{1000000}"]}}}
    assert "1000000" in schema_grammar(schema)
    assert schema_grammar(True) == schema_grammar({})


def test_nothing_left_to_choose_is_an_error_and_the_session_goes_on(model: Model) -> None:
    nothing = dict.fromkeys(range(256), -math.inf)
    with model.session() as session:
        for options in (
            {"logit_bias": nothing},
            {"logit_bias": nothing, "temperature": 1.0},
            {"logit_bias": {ord("{"): -math.inf}, "grammar": GRAMMAR},
        ):
            with pytest.raises(LibraryError, match="no token is left to choose"):
                session.generate(PROMPT, **options).read()
        assert len(write(session, 4, ignore_eos=True)) == 4


# Settings


def test_a_files_settings_are_the_defaults_and_its_nonsense_is_not() -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.penalty_repeat": 1.05}
    assert file_defaults(keys) == Sampling(temperature=0.6, repeat_penalty=1.05)
    assert file_defaults({**keys, "general.sampling.top_p": "x"}) == Sampling()


def test_settings_as_an_object_are_the_settings_one_by_one(model: Model) -> None:
    sampling = Sampling(temperature=0.9, repeat_penalty=1.2, seed=SEED)
    with model.session() as session:
        one = write(session, sampling=sampling, ignore_eos=True)
        assert one == write(session, temperature=0.9, repeat_penalty=1.2, seed=SEED, ignore_eos=True)
        assert one != write(session, sampling=sampling, seed=SEED + 1, ignore_eos=True)


def test_plain_greedy_takes_no_sampler() -> None:
    assert not Sampling(repeat_last_n=0, repeat_penalty=1.3).adjusts
    assert not Sampling(dry_penalty_last_n=0, dry_multiplier=1).adjusts
    assert Sampling(presence_penalty=0.1).adjusts and Sampling(logit_bias={1: 1}).adjusts


# Log-probabilities


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"logit_bias": {65: 9.0}}])
def test_log_probabilities_are_the_targets_own_row_by_row(model: Model, options: dict[str, Any]) -> None:
    with model.session() as session:
        generation = session.generate(PROMPT, max_tokens=20, ignore_eos=True, logprobs=3, **options)
        generation.read()
        found, text = generation.logprobs, generation.tokens
    assert [one.token for one in found] == text
    with model.session(spec_type="none") as session:
        native = session._native
        native.feed(PROMPT, True)
        row = np.array(native.logits(len(PROMPT) - 1))
        for i, one in enumerate(found):
            expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
            best = np.argsort(-expected, kind="stable")[:3]
            assert one.logprob == pytest.approx(expected[one.token], abs=1e-4)
            assert [token for token, _ in one.top] == best.tolist()
            assert [p for _, p in one.top] == pytest.approx(expected[best].tolist(), abs=1e-4)
            native.feed([text[i]], True)
            row = np.array(native.logits(0))


def test_a_text_cut_inside_a_block_has_log_probabilities_for_its_tokens_only(model: Model) -> None:
    with model.session(spec_type="none") as session:
        plain = write(session, ignore_eos=True)
    with model.session(depth=3, scripted=Scripted(PROMPT + plain, 3)) as session:
        for n in (1, 2, 3, 6):
            generation = session.generate(PROMPT, max_tokens=n, ignore_eos=True, logprobs=0)
            generation.read()
            assert [one.token for one in generation.logprobs] == generation.tokens == plain[:n]
            assert all(one.top == [] for one in generation.logprobs)
        quiet = session.generate(PROMPT, max_tokens=2)
        quiet.read()
        assert quiet.logprobs == []


# The command line


def run(pair_of: PairOf, *arguments: str) -> Any:
    return CliRunner().invoke(
        command, [str(pair_of("T", "Q8_0").main), "-p", "hello", "-t", "1", "-c", "256", *arguments]
    )


def test_the_options_reach_the_samplers(pair_of: PairOf, tmp_path: Path) -> None:
    (tmp_path / "g.gbnf").write_text(f"root ::= {json.dumps(ONLY)}")
    done = run(pair_of, "--grammar-file", str(tmp_path / "g.gbnf"), "--json")
    assert json.loads(done.stdout)["text"] == ONLY
    done = run(pair_of, "-l", "65+99", "-n", "4", "--json", "--temp", "0.5")
    assert json.loads(done.stdout)["text"] == "AAAA"
    done = run(pair_of, "-l", "65+50", "-l", "66+40", "--frequency-penalty", "30", "-n", "6", "--json")
    assert json.loads(done.stdout)["text"][:3] == "ABA"
    (tmp_path / "s.json").write_text('{"const": 5}')
    done = run(pair_of, "-jf", str(tmp_path / "s.json"), "--json")
    assert json.loads(done.stdout)["text"].strip() == "5"


def test_an_options_nonsense_is_a_usage_error(pair_of: PairOf, tmp_path: Path) -> None:
    assert "not a token id and a bias" in run(pair_of, "-l", "65").output
    both = run(pair_of, "--grammar", GRAMMAR, "--grammar-file", str(tmp_path / "g.gbnf"))
    assert "the option and the file" in both.output
    missing = run(pair_of, "-jf", str(tmp_path / "none.json"))
    assert isinstance(missing.exception, PromptError) and "No such file" in str(missing.exception)


def test_every_setting_has_an_option_and_a_section() -> None:
    names = {param.name for param in command.params}
    settings = set(Sampling.__dataclass_fields__)
    assert settings <= names
    text = CliRunner().invoke(command, ["--help"]).output
    assert [line for line in text.splitlines() if line in ("Options:", "Sampling:", "Model:")] == [
        "Options:",
        "Sampling:",
        "Model:",
    ]
    assert isinstance(command, click.Command)


# By hand


def test_a_chooser_by_hand_takes_the_best_of_a_row() -> None:
    assert _native.greedy_chooser().choose([0.0, 2.0, 1.0]) == 1
    with pytest.raises(ValueError, match="no logits"):
        _native.greedy_chooser().choose([])
