"""The fingerprints: the same for every type of one trunk, other for another; and what a pair's status follows from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import N_LAYERS, N_VOCAB, TOKENS

from llama_sidecar.sidecars import check_pair, errors, open_main, open_sidecar
from llama_sidecar.sidecars.fingerprint import (
    N_SAMPLED_ROWS,
    N_SAMPLED_TENSORS,
    is_trunk_norm,
    rows_fingerprint,
    sample_rows,
    sample_tensors,
    trunk_fingerprint,
)
from llama_sidecar.sidecars.keys import FINGERPRINT_ROWS, FINGERPRINT_TRUNK

ROWS, OTHER_ROWS = "1" * 64, "2" * 64


def trunk_of(folder: Path, **how: Any) -> str:
    trunk = open_main(tiny_gguf.main(folder / "m.gguf", **how)).trunk
    assert trunk is not None
    return trunk


def test_the_trunk_is_recomputed_from_any_type_and_with_or_without_a_head(tmp_path: Path) -> None:
    norms = {
        name: value
        for name, value in tiny_gguf.main_tensors(head=True).items()
        if is_trunk_norm(name, value.ndim, N_LAYERS)
    }
    assert sorted(norms) == ["blk.0.attn_norm.weight", "blk.1.attn_norm.weight", "output_norm.weight"]
    expected = trunk_fingerprint(TOKENS, norms)
    for head in (False, True):
        for type in ("F32", "F16", "BF16", "Q8_0", "Q4_0"):
            assert trunk_of(tmp_path, head=head, type=type) == expected


def test_another_trunk_or_vocabulary_has_another_fingerprint(tmp_path: Path) -> None:
    prints = {
        trunk_of(tmp_path),
        trunk_of(tmp_path, seed=1),
        trunk_of(tmp_path, tokens=[*TOKENS[:-1], "other"]),
    }
    assert len(prints) == 3


def test_padding_of_the_vocabulary_does_not_count() -> None:
    norms = {"output_norm.weight": np.ones(4, np.float32)}
    padded = [*TOKENS, f"[PAD{N_VOCAB}]", f"[PAD{N_VOCAB + 1}]"]
    assert trunk_fingerprint(padded, norms) == trunk_fingerprint(TOKENS, norms)
    assert trunk_fingerprint([*TOKENS, "[PAD3]"], norms) != trunk_fingerprint(TOKENS, norms)


def test_a_trunk_stays_what_it_was_when_published() -> None:
    norms = {
        "output_norm.weight": np.array([1, 0.5], np.float32),
        "blk.0.attn_norm.weight": np.array([2], np.float32),
    }
    assert trunk_fingerprint(["a", "Ġb"], norms) == trunk_fingerprint([b"a", "Ġb".encode()], norms)
    assert trunk_fingerprint(["a", "Ġb"], norms)[:16] == "476b326f06f5b3fd"
    assert rows_fingerprint([("w", 1, b"ab"), ("w", 0, b"cd")])[:16] == "30ee7bd16e2d168c"
    assert sample_rows("model.layers.0.mlp.down_proj.weight", 4096) == [2017, 2289, 3078, 3727]


def test_unusable_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="no norms"):
        trunk_fingerprint(TOKENS, {})
    with pytest.raises(ValueError, match="float64"):
        trunk_fingerprint(TOKENS, {"output_norm.weight": np.ones(4)})  # type: ignore[dict-item]


def test_a_main_model_whose_norms_are_no_weights_is_refused(tmp_path: Path) -> None:
    tensors = tiny_gguf.main_tensors() | {"output_norm.weight": np.ones(32, np.int32)}
    with pytest.raises(errors.BadTensorType, match=r"output_norm\.weight is I32"):
        open_main(tiny_gguf.write(tmp_path / "m.gguf", "qwen35", tiny_gguf.main_keys(), tensors))


def test_rows_are_sampled_alike_in_every_run_and_within_bounds() -> None:
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(300)]
    chosen = sample_tensors(names)
    assert chosen == sample_tensors(reversed(names)) and len(chosen) == N_SAMPLED_TENSORS < len(set(names))
    for n_rows in (1, 2, 5, 1 << 20):
        rows = sample_rows(names[0], n_rows)
        assert rows == sorted(set(rows)) and 1 <= len(rows) <= N_SAMPLED_ROWS and max(rows) < n_rows


def test_the_order_of_rows_does_not_matter_and_their_content_does() -> None:
    rows = [("a", 0, b"x"), ("b", 1, b"y")]
    assert (
        rows_fingerprint(rows)
        == rows_fingerprint(reversed(rows))
        != rows_fingerprint([("a", 0, b"x"), ("b", 1, b"z")])
    )
    with pytest.raises(ValueError, match="no rows"):
        rows_fingerprint([])


def status(folder: Path, main_rows: str | None, trunk: str | None, sidecar_rows: str | None) -> str:
    main_keys = {FINGERPRINT_ROWS: main_rows} if main_rows else {}
    sidecar_keys = {FINGERPRINT_TRUNK: trunk, FINGERPRINT_ROWS: sidecar_rows}
    main = open_main(tiny_gguf.main(folder / "m.gguf", type="Q8_0", keys=main_keys))
    return check_pair(main, open_sidecar(tiny_gguf.sidecar(folder / "mtp-m.gguf", keys=sidecar_keys))).status


def test_the_status_of_a_pair_follows_from_its_fingerprints(tmp_path: Path) -> None:
    trunk = trunk_of(tmp_path)
    assert status(tmp_path, ROWS, trunk, ROWS) == "verified"
    assert status(tmp_path, None, trunk, ROWS) == "same trunk, unverified"
    assert status(tmp_path, ROWS, trunk, None) == "same trunk, unverified"
    assert status(tmp_path, ROWS, None, None) == "unverified"
    assert status(tmp_path, ROWS, None, ROWS) == "unverified"


def test_different_fingerprints_are_a_mismatch(tmp_path: Path) -> None:
    with pytest.raises(errors.PairMismatch, match="trunk's fingerprint"):
        status(tmp_path, ROWS, trunk_of(tmp_path, seed=1), ROWS)
    with pytest.raises(errors.PairMismatch, match="source rows"):
        status(tmp_path, ROWS, trunk_of(tmp_path), OTHER_ROWS)


def test_force_accepts_other_fingerprints_and_nothing_else(tmp_path: Path) -> None:
    main = open_main(tiny_gguf.main(tmp_path / "m.gguf"))
    other = open_sidecar(tiny_gguf.sidecar(tmp_path / "mtp-a.gguf", keys={FINGERPRINT_TRUNK: "0" * 64}))
    match = check_pair(main, other, force=True)
    assert match.status == "unverified" and match.detail.startswith("forced: ")
    keys = {"tokenizer.ggml.tokens": ["other", *TOKENS[1:]]}
    with pytest.raises(errors.PairMismatch, match="token 0"):
        check_pair(main, open_sidecar(tiny_gguf.sidecar(tmp_path / "mtp-b.gguf", keys=keys)), force=True)
