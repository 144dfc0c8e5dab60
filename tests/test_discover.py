"""Which sidecar is found beside a main model, for every layout of case 11, and why the others are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf

from llama_sidecar.sidecars import (
    KINDS,
    LlamaSidecarError,
    discover,
    errors,
    kind_from_name,
    open_main,
    open_sidecar,
    survey,
)
from llama_sidecar.sidecars.discover import base_name, explain, main_paths
from llama_sidecar.sidecars.keys import FINGERPRINT_ROWS, FINGERPRINT_TRUNK


def found(main: Path, spec_type: str = "auto") -> str | None:
    """What is found, as a path relative to the main model's folder."""
    result = discover(main, spec_type)
    return None if result is None else result.path.relative_to(main.parent).as_posix()


@pytest.fixture
def main(tmp_path: Path) -> Path:
    return tiny_gguf.main(tmp_path / "NAME-Q8_0.gguf", type="Q8_0")


def test_nothing_beside_it(main: Path) -> None:
    assert discover(main) is None


def test_none_opens_no_file(tmp_path: Path) -> None:
    assert discover(tmp_path / "absent.gguf", "none") is None


def test_the_best_kind_wins(main: Path) -> None:
    for name in reversed(KINDS):
        tiny_gguf.sidecar(main.with_name(f"{name}-NAME.gguf"), name)
        result = discover(main)
        assert result is not None and (result.path.name, result.kind) == (f"{name}-NAME.gguf", name)
        assert result.reason.startswith("unverified: ")


def test_a_named_kind_is_taken_by_our_name_and_by_llama_cpps(main: Path) -> None:
    for name in KINDS:
        tiny_gguf.sidecar(main.with_name(f"{name}-NAME.gguf"), name)
    for name, kind in KINDS.items():
        assert found(main, name) == found(main, kind.llama_name) == f"{name}-NAME.gguf"


def test_a_named_kind_that_is_absent_is_an_error_that_lists_what_is_there(main: Path) -> None:
    tiny_gguf.sidecar(main.with_name("dflash-NAME.gguf"), "dflash")
    main.with_name("mtp-broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        errors.NoSuchSidecar, match=r"no mtp .*dflash-NAME\.gguf \(dflash\).*mtp-broken\.gguf .*ends"
    ):
        discover(main, "draft-mtp")


def test_an_unknown_kind_is_an_error_that_lists_the_names(main: Path) -> None:
    with pytest.raises(errors.UnknownKind, match=r"'turbo'.*mtp \(draft-mtp\), dspark"):
        discover(main, "turbo")
    assert [kind_from_name(name) for name in ("auto", "mtp", "draft-eagle3")] == [None, "mtp", "eagle3"]


def test_two_equal_candidates_are_an_error_that_lists_both(main: Path) -> None:
    tiny_gguf.sidecar(main.with_name("mtp-a-Q8_0.gguf"), type="Q8_0")
    tiny_gguf.sidecar(main.with_name("mtp-b-F32.gguf"))
    with pytest.raises(errors.AmbiguousSidecar, match=r"mtp-a-Q8_0\.gguf.*mtp-b-F32\.gguf"):
        discover(main)
    tiny_gguf.sidecar(main.with_name("mtp-NAME-F32.gguf"))
    assert found(main) == "mtp-NAME-F32.gguf"  # the name settles it
    tiny_gguf.sidecar(main.parent / "MTP" / "mtp-NAME-F32.gguf")
    assert found(main) == "mtp-NAME-F32.gguf"  # and then the folder


@pytest.mark.parametrize("folder", ["MTP", "mtp", "DSpark"])
def test_a_sub_folder_called_as_a_kind_is(folder: str, main: Path) -> None:
    name = folder.lower()
    tiny_gguf.sidecar(main.parent / folder / "NAME-Q8_0.gguf", name)
    tiny_gguf.sidecar(main.parent / "other" / "mtp-NAME.gguf")
    assert found(main) == f"{folder}/NAME-Q8_0.gguf"


@pytest.mark.parametrize(
    ("main_type", "nearest"),
    [("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_1", "Q4_0"), ("Q5_1", "Q4_0")],
)
def test_of_two_quantisations_the_one_nearest_the_main_models(
    main_type: str, nearest: str, tmp_path: Path
) -> None:
    main = tiny_gguf.main(tmp_path / f"NAME-{main_type}.gguf", type=main_type)
    for type in ("F32", "F16", "Q8_0", "Q4_0"):
        tiny_gguf.sidecar(tmp_path / f"mtp-NAME-{type}.gguf", type=type)
    assert found(main) == f"mtp-NAME-{nearest}.gguf"


def test_of_equal_sizes_the_same_type(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "NAME-BF16.gguf", type="BF16")
    for type in ("F16", "BF16"):
        tiny_gguf.sidecar(tmp_path / f"mtp-NAME-{type}.gguf", type=type)
    assert found(main) == "mtp-NAME-BF16.gguf"


def test_an_embedded_head_wins_over_a_stray_sidecar(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "NAME.gguf", head=True)
    tiny_gguf.sidecar(tmp_path / "mtp-NAME.gguf")
    tiny_gguf.sidecar(tmp_path / "eagle3-NAME.gguf", "eagle3")
    for spec_type in ("auto", "mtp"):
        result = discover(main, spec_type)
        assert (
            result is not None and (result.path, result.kind) == (main, "mtp") and "embedded" in result.reason
        )
    assert found(main, "eagle3") == "eagle3-NAME.gguf"
    with pytest.raises(errors.NoSuchSidecar, match=r"mtp \(inside the main model\)"):
        discover(main, "dflash")


def test_a_sharded_main_model_in_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Q8_0"
    one = {"split.count": 1, "split.no": 0}
    main = tiny_gguf.main(folder / "NAME-Q8_0-00001-of-00001.gguf", keys=one)
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-NAME-Q8_0.gguf")
    result = discover(main)
    assert result is not None and result.path == sidecar
    tiny_gguf.sidecar(tmp_path / "MTP" / "NAME-BF16.gguf", type="BF16")
    assert discover(main) == result  # nearest type
    tiny_gguf.sidecar(folder / "eagle3-NAME.gguf", "eagle3")
    assert discover(main) == result  # best kind


def test_a_surer_match_wins_over_the_name(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "tuned.gguf", keys={FINGERPRINT_ROWS: "1" * 64})
    prints = {FINGERPRINT_TRUNK: open_main(main).trunk, FINGERPRINT_ROWS: "1" * 64}
    tiny_gguf.sidecar(tmp_path / "mtp-tuned.gguf")
    tiny_gguf.sidecar(tmp_path / "mtp-other.gguf", keys=prints)
    result = discover(main)
    assert (
        result is not None and result.path.name == "mtp-other.gguf" and result.reason.startswith("verified")
    )


def test_beside_the_main_model_comes_before_a_folder_below(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "NAME-Q8_0.gguf", type="Q8_0")
    tiny_gguf.sidecar(tmp_path / "MTP" / "mtp-NAME-Q8_0.gguf", type="Q8_0")
    assert found(main) == "MTP/mtp-NAME-Q8_0.gguf"
    tiny_gguf.sidecar(tmp_path / "mtp-NAME-F16.gguf", type="F16")
    assert found(main) == "mtp-NAME-F16.gguf"


def explained(main: Path) -> dict[str, str]:
    opened = open_main(main)
    return {path.name: why for path, why in explain(opened, survey(opened)).items()}


def test_every_choice_is_explained(tmp_path: Path) -> None:
    """Each by the rule that decided; what does not fit says so itself."""
    main = tiny_gguf.main(tmp_path / "NAME-Q8_0.gguf", type="Q8_0", keys={FINGERPRINT_ROWS: "1" * 64})
    assert explained(main) == {}
    tiny_gguf.sidecar(tmp_path / "eagle3-NAME.gguf", "eagle3")
    (tmp_path / "dflash-cut.gguf").write_bytes(b"GGUF")
    assert explained(main) == {"eagle3-NAME.gguf": "chosen: no other fits"}
    tiny_gguf.sidecar(tmp_path / "MTP" / "mtp-free.gguf")
    why = "MTP comes before EAGLE3"
    assert explained(main) == {"mtp-free.gguf": f"chosen: {why}", "eagle3-NAME.gguf": f"passed over: {why}"}
    tiny_gguf.sidecar(tmp_path / "mtp-other.gguf")
    beside = "mtp-other.gguf lies beside the main model, mtp-free.gguf in a folder below"
    assert explained(main)["mtp-free.gguf"] == f"passed over: {beside}"
    assert explained(main)["mtp-other.gguf"] == f"chosen: {beside}; {why}"
    tiny_gguf.sidecar(tmp_path / "mtp-NAME-F16.gguf", type="F16")
    assert "called as the main model is" in explained(main)["mtp-other.gguf"]
    tiny_gguf.sidecar(tmp_path / "mtp-NAME-Q8_0.gguf", type="Q8_0")
    assert (
        explained(main)["mtp-NAME-F16.gguf"] == "passed over: Q8_0 is nearer the main model's Q8_0 than F16"
    )
    prints = {FINGERPRINT_TRUNK: open_main(main).trunk, FINGERPRINT_ROWS: "1" * 64}
    tiny_gguf.sidecar(tmp_path / "mtp-sure.gguf", keys=prints)
    assert explained(main)["mtp-NAME-Q8_0.gguf"] == "passed over: 'verified' is surer than 'unverified'"
    tiny_gguf.sidecar(tmp_path / "mtp-sure-too.gguf", keys=prints)
    assert all("name one with --sidecar" in why for why in explained(main).values())
    whole = tiny_gguf.main(tmp_path / "whole.gguf", head=True)
    assert set(explained(whole).values()) == {"passed over: the main model has a head inside"}


def test_what_does_not_fit_is_passed_over_with_its_reason(main: Path) -> None:
    misfits: dict[str, dict[str, Any]] = {
        "mtp-arch.gguf": {"name": "assistant"},
        "mtp-print.gguf": {"keys": {FINGERPRINT_TRUNK: "0" * 64}},
        "mtp-layers.gguf": {"name": "eagle3", "keys": {"eagle3.target_layers": [0, 1, 9]}},
        "mtp-empty.gguf": {"tensors": {"output_norm.weight": None}},
    }
    for name, how in misfits.items():
        tiny_gguf.sidecar(main.with_name(name), **how)
    main.with_name("mtp-cut.gguf").write_bytes(main.read_bytes()[:100])
    tiny_gguf.main(main.with_name("OTHER-mtp.gguf"), head=True)
    assert discover(main) is None
    reasons = {c.path.name: c.reason for c in survey(open_main(main)) if c.sidecar is None}
    expected = {
        "mtp-arch.gguf": "architecture is gemma4",
        "mtp-print.gguf": "fingerprint is 000000000000",
        "mtp-layers.gguf": "deepest layer is 9",
        "mtp-empty.gguf": "missing: output_norm.weight",
        "mtp-cut.gguf": "the file has 100 bytes",
        "OTHER-mtp.gguf": "main model with its MTP head inside",
    }
    assert reasons.keys() == expected.keys()
    assert all(expected[name] in reason for name, reason in reasons.items())
    tiny_gguf.sidecar(main.with_name("mtp-fits.gguf"))
    assert found(main) == "mtp-fits.gguf"


def test_a_folder_that_may_not_be_entered_holds_no_candidate(
    main: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf.sidecar(main.with_name("mtp-NAME.gguf"))
    tiny_gguf.sidecar(main.parent / "MTP" / "mtp-other.gguf")
    tiny_gguf.sidecar(main.parent / "DSpark" / "x.gguf", "dspark")
    stat = os.stat

    def refuse(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "MTP/" in str(path) or str(path).endswith("DSpark"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert found(main) == "mtp-NAME.gguf"
    assert main_paths(main.with_name("mtp-NAME.gguf")) == [main]


def test_only_names_with_a_kind_in_them_are_opened(main: Path) -> None:
    for name in (
        "smtp-server.gguf",
        "mtpx.gguf",
        "mtp-NAME.gguf.part",
        "plain.gguf",
        "mtp-NAME-00002-of-00002.gguf",
    ):
        main.with_name(name).write_bytes(b"not a GGUF")
    main.with_name("mtp-folder.gguf").mkdir()
    assert survey(open_main(main)) == []


def test_a_sidecar_or_a_broken_file_as_main_model_is_refused(tmp_path: Path) -> None:
    sidecar = tiny_gguf.sidecar(tmp_path / "mtp-NAME.gguf")
    with pytest.raises(errors.NotAMain, match="MTP"):
        discover(sidecar)
    with pytest.raises(LlamaSidecarError):
        discover(tmp_path / "absent.gguf")


def test_relative_paths_stay_relative(main: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf.sidecar(main.with_name("mtp-NAME.gguf"))
    monkeypatch.chdir(main.parent)
    result = discover(main.name)
    assert result is not None and result.path == Path("mtp-NAME.gguf")


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3.5-0.8B-Q8_0",
        "mtp-Qwen3.5-0.8B-BF16",
        "Qwen3.5-0.8B-UD-Q4_K_XL-00001-of-00003",
        "eagle3-Qwen3.5-0.8B.IQ2_XXS",
    ],
)
def test_base_names(name: str) -> None:
    assert base_name(Path(f"{name}.gguf")) == "qwen3.5-0.8b"


def test_a_head_of_a_foreign_form_is_refused_by_name_and_passed_over(main: Path) -> None:
    """Rows for 32k tokens alone, or matrices borrowed from the main model: what it is, and what to take in its place."""
    rows = {"output.weight": tiny_gguf.floats(8, tiny_gguf.WIDTH), "d2t": np.arange(8, dtype=np.int64)}
    path = tiny_gguf.sidecar(main.parent / "mtp-NAME-FastMTP-32K-Q8_0.gguf", tensors=rows)
    with pytest.raises(
        errors.ForeignHead, match=r"output of 8 rows of its own, whose tokens d2t names.*--sidecar-only"
    ):
        open_sidecar(path)
    assert discover(main) is None
    [candidate] = survey(open_main(main))
    assert candidate.sidecar is None and "FastMTP-32K" in candidate.reason
