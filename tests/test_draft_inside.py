"""A drafter in its model's own checkpoint: one conversion writes both files, which belong together and draft losslessly.

That the files are those of llama.cpp's converter, test_convert_peer.py says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import LOGITS_PROMPT
from draft_checkpoints import INSIDE, inside_tensors, make_inside

from llama_sidecar.converter import convert, dry_run
from llama_sidecar.converter.errors import BadConfig, BadDraftVocab, HeadMismatch, TensorMismatch
from llama_sidecar.runtime import load, reference
from llama_sidecar.sidecars import check_pair, open_main, open_sidecar, read_header

N = 24


@pytest.fixture(params=INSIDE)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_pair_belongs_together_and_drafts_losslessly(name: str, tmp_path: Path) -> None:
    result = convert(make_inside(tmp_path, name), tmp_path / "out", "F32", "F32")
    assert result.main and result.sidecar and result.kind == "dspark" and not result.warnings
    assert result.sidecar.name == f"dspark-{result.main.name}"
    assert result.n_head_tensors == len(open_sidecar(result.sidecar).header.tensors)
    assert check_pair(open_main(result.main), open_sidecar(result.sidecar)).status == "verified"
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    with load(result.main, result.sidecar, ctx=128, threads=1, depth=3, **exact) as model:  # type: ignore[arg-type]
        expected, expected_drafts = reference.generate(model, LOGITS_PROMPT, N, 3)
        with model.session(spec_type="none") as plain, model.session() as session:
            texts = []
            for one in (plain, session):
                generation = one.generate(LOGITS_PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
                generation.read()
                texts.append(generation.tokens)
        assert generation.stats.n_drafted > 0
    assert texts[0] == texts[1] == expected
    assert any(expected_drafts)


def test_either_file_alone(name: str, tmp_path: Path) -> None:
    folder = make_inside(tmp_path, name)
    both = convert(folder, tmp_path / "both", "Q8_0")
    alone = convert(folder, tmp_path / "alone", None)
    assert alone.main is None and both.sidecar and alone.sidecar
    assert alone.sidecar.read_bytes() == both.sidecar.read_bytes()
    assert alone.read_bytes < both.read_bytes


def test_a_dry_run_says_what_is_then_written(name: str, tmp_path: Path) -> None:
    folder = make_inside(tmp_path, name)
    said, made = dry_run(folder, tmp_path / "out"), convert(folder, tmp_path / "out")
    assert made.main and made.sidecar and not said.mismatch
    assert [(file.path, file.n_bytes) for file in said.files] == [
        (path, path.stat().st_size) for path in (made.main, made.sidecar)
    ]
    for role, path in (("main", made.main), ("sidecar", made.sidecar)):
        types = {t.name: t.files[role] for t in said.tensors if role in t.files}
        assert types == {info.name: info.type_name for info in read_header(path).tensors.values()}
    alone = dry_run(folder / "config.json", tmp_path / "out")
    assert [file.role for file in alone.files] == ["main"] and "drafter is left out" in alone.warnings[-1]


def test_nothing_is_written_where_a_tensor_of_the_drafter_is_missing_or_left_over(
    name: str, tmp_path: Path
) -> None:
    tensors = inside_tensors(name)
    del tensors["mtp.1.markov_head.markov_w1.weight"]
    tensors["mtp.0.attn.wq_c.weight"] = np.zeros(3, np.float32)
    with pytest.raises(
        TensorMismatch, match=r"missing: markov_head\.markov_w1\.weight; no place for: mtp\.0\.attn\.wq_c"
    ):
        convert(make_inside(tmp_path, name, tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_config_json_promises_and_that_is_not_there(name: str, tmp_path: Path) -> None:
    trunk = {key: tensor for key, tensor in inside_tensors(name).items() if not key.startswith("mtp.")}
    with pytest.raises(TensorMismatch, match=r"no tensor is called mtp\.\*: there is no drafter"):
        convert(make_inside(tmp_path, name, trunk), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dspark_noise_token_id": 320}, "dspark_noise_token_id = 320; expected a token id below 320"),
        (
            {"dspark_target_layer_ids": [1, 4]},
            r"dspark_target_layer_ids = \[1, 4\]; expected layers below the 4",
        ),
        ({"dspark_block_size": 1000}, "dspark_block_size = 1000; expected a positive integer of at most 64"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank = 0; expected a positive integer"),
    ],
)
def test_values_that_cannot_be(changes: dict[str, object], match: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=match):
        convert(make_inside(tmp_path, "deepseek4_dspark", **changes), tmp_path / "out")


def test_options_that_are_of_heads_alone(name: str, tmp_path: Path) -> None:
    folder = make_inside(tmp_path, name)
    with pytest.raises(BadDraftVocab, match=r"holds DSpark, of which no compact sidecar"):
        convert(folder, tmp_path / "out", draft_vocab=64)
    with pytest.raises(HeadMismatch, match=r"holds a drafter \(DSpark\): leave --mtp-from out"):
        convert(folder, tmp_path / "out", mtp_from=folder)
    assert not (tmp_path / "out").exists()
