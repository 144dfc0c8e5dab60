"""`llama-sidecar inspect` says what a file is and what beside it fits, to people and to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from checkpoints import make_checkpoint, tiny_tensors
from click.testing import CliRunner

from llama_sidecar.converter import convert, graft, merge, requant
from llama_sidecar.scripts.inspect import command
from llama_sidecar.sidecars import errors, open_main
from llama_sidecar.sidecars.keys import FINGERPRINT_ROWS, FINGERPRINT_TRUNK, NAME

ROWS = "1" * 64


def inspect_json(path: Path) -> Any:
    result = CliRunner().invoke(command, [str(path), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.output)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A main model, its sidecar, a sidecar of another trunk, a broken one, and another main model."""
    main = tiny_gguf.main(
        tmp_path / "NAME-Q8_0.gguf", type="Q8_0", keys={FINGERPRINT_ROWS: ROWS, NAME: "[b]N\x1b[31m"}
    )
    prints = {FINGERPRINT_TRUNK: open_main(main).trunk, FINGERPRINT_ROWS: ROWS}
    tiny_gguf.sidecar(tmp_path / "mtp-NAME-Q8_0.gguf", keys=prints, type="Q8_0")
    tiny_gguf.sidecar(tmp_path / "MTP" / "other.gguf", keys={FINGERPRINT_TRUNK: "0" * 64})
    tiny_gguf.main(tmp_path / "OTHER-F32.gguf", seed=1)
    (tmp_path / "dflash-cut.gguf").write_bytes(main.read_bytes()[:99])
    return tmp_path


def test_a_main_model_as_json(folder: Path) -> None:
    report = inspect_json(folder / "NAME-Q8_0.gguf")
    assert report["schema"] == 1
    assert (report["role"], report["kind"], report["arch"]) == ("main", None, "qwen35")
    assert (report["width"], report["n_layers"], report["n_vocab"]) == (32, 2, 16)
    assert report["file_bytes"] == (folder / "NAME-Q8_0.gguf").stat().st_size
    assert report["n_parameters"] == sum(value.size for value in tiny_gguf.main_tensors().values())
    assert {use["type"]: use["n_tensors"] for use in report["types"]} == {"Q8_0": 2, "F32": 4}
    assert len(report["fingerprint"]["trunk"]) == 64 and report["fingerprint"]["rows"] == ROWS
    (fits,) = report["fits"]
    assert (fits["path"], fits["kind"], fits["status"]) == (
        str(folder / "mtp-NAME-Q8_0.gguf"),
        "mtp",
        "verified",
    )
    assert fits["choice"] == "chosen: no other fits" and not report["passed_over"][0]["choice"]
    reasons = {Path(other["path"]).name: other["detail"] for other in report["passed_over"]}
    assert (
        "fingerprint" in reasons["other.gguf"]
        and "99 bytes" in reasons["dflash-cut.gguf"]
        and len(reasons) == 2
    )


def test_a_sidecar_as_json(folder: Path) -> None:
    report = inspect_json(folder / "mtp-NAME-Q8_0.gguf")
    assert (report["role"], report["kind"]) == ("sidecar", "mtp")
    assert [(Path(m["path"]).name, m["status"]) for m in report["fits"]] == [("NAME-Q8_0.gguf", "verified")]
    reasons = {Path(other["path"]).name: other["detail"] for other in report["passed_over"]}
    assert (
        reasons.keys() == {"OTHER-F32.gguf", "dflash-cut.gguf"} and "fingerprint" in reasons["OTHER-F32.gguf"]
    )


def test_a_sidecar_in_a_folder_of_its_kind_and_a_sharded_main_model_in_its_own(folder: Path) -> None:
    one = {"split.count": 1, "split.no": 0}
    tiny_gguf.main(folder / "shards" / "NAME-00001-of-00001.gguf", keys=one)
    tiny_gguf.sidecar(folder / "MTP" / "free.gguf")
    fits = {Path(m["path"]).name for m in inspect_json(folder / "MTP" / "free.gguf")["fits"]}
    assert fits == {"NAME-Q8_0.gguf", "OTHER-F32.gguf", "NAME-00001-of-00001.gguf"}


def test_an_embedded_head_as_json(tmp_path: Path) -> None:
    report = inspect_json(tiny_gguf.main(tmp_path / "NAME.gguf", head=True))
    assert (report["role"], report["kind"], report["fits"]) == ("main+head", "mtp", [])


@pytest.mark.parametrize("name", tiny_gguf.SIDECARS)
def test_every_kind_is_shown_to_people(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        command, [str(tiny_gguf.sidecar(tmp_path / "x.gguf", name))], catch_exceptions=False
    )
    assert (
        f"draft-{tiny_gguf.SIDECARS[name][0]}" in result.output
        and "no main models beside it" in result.output
    )


def test_tables_name_what_fits_and_what_does_not_and_escape_what_the_file_says(folder: Path) -> None:
    result = CliRunner().invoke(command, [str(folder / "NAME-Q8_0.gguf")], catch_exceptions=False)
    for text in ("a main model", "Q8_0", "verified", "mtp-NAME", "dflash-cut", "chosen", "[b]N\\x1b"):
        assert text in result.output
    assert "\x1b" not in result.output


def test_names_of_files_are_escaped_too(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "NAME.gguf")
    odd = tiny_gguf.sidecar(tmp_path / "mtp-\x1b[31m[bold]\n.gguf")
    for path in (main, odd):
        result = CliRunner().invoke(command, [str(path)], catch_exceptions=False, env={"COLUMNS": "200"})
        assert "\x1b" not in result.output and "mtp-\\x1b[31m[bold]\\n.gguf" in result.output


@pytest.mark.parametrize("columns", ["0", "1", "20", "-3", "many"])
def test_a_width_that_cannot_be_still_shows_everything(columns: str, folder: Path) -> None:
    result = CliRunner().invoke(command, [str(folder / "NAME-Q8_0.gguf")], env={"COLUMNS": columns})
    for text in ("a main model", "verified", "qwen35"):
        assert text in result.output


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"PK\3\4"])
def test_a_file_that_is_no_gguf_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(command, [str(path)])
    assert isinstance(result.exception, errors.LlamaSidecarError) and "\n" not in str(result.exception)
    assert result.exit_code != 0 and result.output == ""


def test_a_head_of_another_checkpoint_names_it(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, name="Base-1B")
    trunk = {n: t for n, t in tiny_tensors("qwen35", "tied").items() if not n.startswith("mtp.")}
    lost = make_checkpoint(tmp_path, name="lost", tensors=trunk)
    sidecar = convert(lost, tmp_path / "out", mtp_from=base).sidecar
    assert sidecar and inspect_json(sidecar)["origin"]["taken_from"] == "Base-1B"
    assert "Base-1B" in CliRunner().invoke(command, [str(sidecar)]).output


def test_where_a_head_comes_from_is_told(tmp_path: Path) -> None:
    """As converted, requantised, grafted, and inside a main file: each says what became of the head, and how sure the match is."""
    base = convert(make_checkpoint(tmp_path, name="base"), tmp_path / "base-gguf")
    tensors = tiny_tensors("qwen35", "tied")
    tuned = {n: -t if "mlp" in n and not n.startswith("mtp.") else t for n, t in tensors.items()}
    other = convert(make_checkpoint(tmp_path, name="tuned", tensors=tuned), tmp_path / "tuned-gguf")
    assert base.main and base.sidecar and other.main
    narrow = requant(base.sidecar, tmp_path / "narrow", "Q4_0").sidecar
    grafted = graft(narrow, other.main, tmp_path / "grafted").sidecar if narrow else None
    assert narrow and grafted
    inside = merge(other.main, grafted, tmp_path / "inside.gguf").main
    whole = merge(base.main, base.sidecar, tmp_path / "whole.gguf").main
    assert inside and whole

    trunk = inspect_json(base.sidecar)["fingerprint"]["trunk"]
    found = [
        inspect_json(path)["origin"] for path in (base.sidecar, narrow, grafted, inside, whole, base.main)
    ]
    steps = ["Q8_0 -> Q4_0"]
    assert found == [
        {"grafted_from": None, "taken_from": None, "requantised": [], "match": None},
        {"grafted_from": None, "taken_from": None, "requantised": steps, "match": None},
        {"grafted_from": trunk, "taken_from": None, "requantised": steps, "match": None},
        {"grafted_from": trunk, "taken_from": None, "requantised": steps, "match": "same family, unverified"},
        {"grafted_from": None, "taken_from": None, "requantised": [], "match": "verified"},
        None,
    ]
    shown = CliRunner().invoke(command, [str(inside)], env={"COLUMNS": "200"}).output
    for text in (trunk[:16], "same family, unverified", "head grafted", "head requantised  Q8_0 -> Q4_0"):
        assert text in shown
