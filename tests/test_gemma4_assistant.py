"""Gemma 4's assistant: the same file as the peer's, of the main model that it is converted for."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from checkpoints import DRAFT_TOKEN, LOGITS_PROMPT, listing
from draft_checkpoints import make_draft, make_target
from native_rounds import drafts_at_depths, native_run
from test_convert_peer import LISTINGS, assert_equal_tensors

from llama_sidecar.converter import convert
from llama_sidecar.converter.drafts import drafts
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.runtime import LoadError, Model, _native, load, reference
from llama_sidecar.sidecars import check_pair, open_main, open_sidecar

NAME = "gemma4_assistant"


@pytest.mark.parametrize("variant", drafts()[NAME].TINY)
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_its_file_equals_the_peers(kind: str, variant: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, NAME)
    draft = make_draft(tmp_path, NAME, variant, target)
    sidecar = convert(draft, tmp_path / "out", None, kind, target=target).sidecar
    assert sidecar and sidecar.name.startswith("mtp-")
    ours = listing(sidecar)
    theirs = json.loads((LISTINGS / f"{NAME}-{variant}-{kind}.json").read_text(encoding="utf-8"))["sidecar"]
    assert_equal_tensors(ours["tensors"], theirs["tensors"])
    differing = {
        name
        for name in ours["keys"].keys() | theirs["keys"].keys()
        if ours["keys"].get(name) != theirs["keys"].get(name)
        and not name.startswith(("sidecar.", "general."))
    }
    assert differing == set()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("llama_cpp")
    folder = tmp_path_factory.mktemp("gemma4")
    target = make_target(folder, NAME)
    draft = make_draft(folder, NAME, "plain", target)
    main = convert(target, folder / "out", "F32").main
    sidecar = convert(draft, folder / "out", None, "F32", target=target, name="tiny-gemma4-dense").sidecar
    assert main and sidecar
    return main, sidecar


PROMPT = [5, 9, 30, 31, 5, 9, 77, 100, 101, 200, 5, 9]
N = 32


def test_its_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a draft and of the one after it (scripts/dev/reference_logits.py)."""
    pytest.importorskip("llama_cpp")
    target = make_target(tmp_path, NAME)
    main = convert(target, tmp_path / "out", "F32").main
    expected = json.loads((LISTINGS / "reference_head_logits.json").read_text(encoding="utf-8"))
    assert main
    for variant in drafts()[NAME].TINY:
        draft = make_draft(tmp_path, NAME, variant, target)
        sidecar = convert(draft, tmp_path / variant, None, "F32", target=target).sidecar
        exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
        with load(main, sidecar, ctx=64, threads=1, **exact) as model:  # type: ignore[arg-type]
            rows, head = reference.contexts(model, 1)
            n = 3  # within the window, on whose end transformers' mask and llama.cpp's do not agree
            rows.decode(LOGITS_PROMPT[:n], 0, [n - 1])
            token, hidden = DRAFT_TOKEN, rows.hidden(n - 1)
            for step in ("first", "second"):
                head.decode([token], n, [0], [hidden])
                found = head.logits(0)[:8]
                np.testing.assert_allclose(found, expected[f"{NAME}-{variant}-{step}"], atol=1e-3)
                token, hidden = head.greedy(0), head.hidden(0)
            head.close()
            rows.close()


def test_it_drafts_as_the_reference_does_on_the_targets_own_cache(pair: tuple[Path, Path]) -> None:
    main, sidecar = pair
    check_pair(open_main(main), open_sidecar(sidecar))
    with load(main, ctx=256, threads=1, depth=4) as model:
        assert (model.kind, model.drafter, model.speculation.path) == ("mtp", "gemma4-assistant", sidecar)
        with model.session(spec_type="none") as session:
            plain = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
            plain.read()
        for depth in (1, 2, 4):
            expected, expected_drafts = reference.generate(model, PROMPT, N, depth)
            found, found_drafts, _ = native_run(model, PROMPT, N, depth)
            assert found == expected == plain.tokens
            assert found_drafts == expected_drafts
            assert len({tuple(drafts) for drafts in found_drafts}) > 1


def test_rounds_of_any_depth_and_two_texts_leave_the_targets_cache_as_plain_decoding_does(
    pair: tuple[Path, Path],
) -> None:
    with load(pair[0], ctx=256, threads=1, depth=4, exact=True) as model:  # F32 widths differ
        depths = [3, 0, 0, 2, 1, 0, 3, 4, 4, 1]
        runs = [
            drafts_at_depths(model, PROMPT, depths, catches_up=catches_up) for catches_up in (True, False)
        ]
        assert runs[0] == runs[1] and list(map(len, runs[0])) == depths
        with model.session() as session, model.session(spec_type="none") as plain:
            for prompt in (PROMPT, PROMPT[:5], PROMPT * 3):
                texts = []
                for one in (session, plain):
                    generation = one.generate(prompt, max_tokens=N, temperature=0, ignore_eos=True)
                    generation.read()
                    texts.append(generation.tokens)
                assert texts[0] == texts[1]
                assert session._native.state() == plain._native.state()


def text_as_drafted(model: Model, n: int) -> list[int]:
    """What the assistant itself says: each token is its first draft behind those before."""
    with model.session() as session:
        native = session._native
        native.feed(PROMPT, True)
        text = [native.first(_native.greedy_chooser())]
        while len(text) < n:
            pos = native.n_past
            drafted = native.step(_native.greedy_chooser(), 1, True).drafts[0]
            assert native.go_back(pos) == pos
            native.feed(text[-1:], True)
            text.append(native.first(_native.forced_chooser([drafted])))
        return text


def acceptance(model: Model, prompt: list[int], text: list[int]) -> float:
    """The share of first drafts that stand where the target says `text`."""
    n_drafted = n_accepted = 0
    with model.session() as session:
        native, chooser = session._native, _native.forced_chooser(text)
        native.feed(prompt, True)
        native.first(chooser)
        while native.n_past < len(prompt) + len(text) - 3:
            step = native.step(chooser, 1, True)
            n_drafted += step.n_drafted
            n_accepted += step.n_accepted
    return n_accepted / n_drafted


def test_on_a_q8_0_cache_it_drafts_as_on_f16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 22: of a text in which each draft stands at F16, nine in ten stand at Q8_0; they depend on what the cache holds."""
    config = checkpoints.tiny_config("gemma4", "dense") | {"head_dim": 32}
    tensors = checkpoints.tiny_tensors("gemma4", "dense", config=config)
    target = checkpoints.make_checkpoint(tmp_path, "gemma4", "dense", tensors=tensors, config=config)
    monkeypatch.setitem(drafts()[NAME].TINY["plain"][0]["text_config"], "head_dim", 32)
    draft = make_draft(tmp_path, NAME, "plain", target)
    main = convert(target, tmp_path / "out", "F32").main
    assert main and convert(draft, tmp_path / "out", None, "F32", target=target).sidecar
    with load(main, ctx=256, threads=1, depth=1) as model:
        assert model.drafter == "gemma4-assistant"
        text = text_as_drafted(model, 64)
        assert acceptance(model, PROMPT, text) == 1.0
        assert acceptance(model, [*reversed(PROMPT[:-2]), *PROMPT[-2:]], text) < 0.5
    with load(main, ctx=256, threads=1, depth=1, cache_type_k="q8_0", cache_type_v="q8_0") as model:
        assert acceptance(model, PROMPT, text) > 0.9


def test_heads_of_no_whole_blocks_are_refused_on_a_q8_0_cache(pair: tuple[Path, Path]) -> None:
    with (
        load(pair[0], ctx=256, threads=1, cache_type_k="q8_0", cache_type_v="q8_0", depth=1) as model,
        pytest.raises(LoadError, match="q8_0 with block size 32"),
    ):
        model.session()


def test_with_pace_and_beside_another_session(pair: tuple[Path, Path]) -> None:
    with load(pair[0], ctx=256, threads=1) as model, model.session() as one, model.session() as other:
        texts = [s.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True) for s in (one, other)]
        for _ in zip(*texts, strict=False):  # in turns
            pass
        assert texts[0].tokens[: N // 2] == texts[1].tokens[: N // 2]


def test_a_cache_that_llama_cpp_cannot_share_is_refused_with_both_files_names(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """It would end the process, or read another layer's cells."""
    main, sidecar = pair
    for edited, key, words in (
        ("main", "gemma4.attention.key_length", "their heads differ"),
        ("main", "gemma4.attention.sliding_window_pattern", "last two layers"),
    ):
        data = main.read_bytes()
        name = key.encode()
        at = data.index(name + (4 if "length" in key else 9).to_bytes(4, "little"))
        broken = bytearray(data)
        if "length" in key:
            broken[at + len(name) + 4] ^= 0x60
            value = b"gemma4.attention.value_length" + (4).to_bytes(4, "little")  # which is the same here
            broken[data.index(value) + len(value)] ^= 0x60
        else:
            n = int.from_bytes(data[at + len(name) + 8 : at + len(name) + 16], "little")
            first = at + len(name) + 16
            broken[first : first + n] = bytes(1 - b for b in data[first : first + n])
        path = tmp_path / f"{edited}-{len(key)}.gguf"
        path.write_bytes(broken)
        with pytest.raises(LoadError, match=words) as error:
            load(path, sidecar)
        assert str(path) in str(error.value) and str(sidecar) in str(error.value)


def test_for_a_model_of_another_family_it_is_refused(tmp_path: Path) -> None:
    draft = make_draft(tmp_path, NAME, "plain", make_target(tmp_path, NAME))
    with pytest.raises(BadConfig, match="tiny-qwen35-tied is qwen35; expected gemma4"):
        convert(draft, tmp_path / "out", None, target=make_target(tmp_path))


def test_of_another_width_it_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path, NAME)
    draft = make_draft(tmp_path, NAME, "plain", target, backbone_hidden_size=128)
    with pytest.raises(BadConfig, match=r"backbone_hidden_size = 128, the target .* is 64 wide"):
        convert(draft, tmp_path / "out", None, target=target)
