"""A head grafted onto a fine-tune: it fits and drafts, is never called verified, and takes what it must from the fine-tune."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
import pytest
import tiny_gguf
from checkpoints import make_checkpoint, tiny_tensors
from click.testing import CliRunner
from test_split_merge import content, plain

from llama_sidecar.converter import convert
from llama_sidecar.converter.edit import graft, merge, split
from llama_sidecar.converter.errors import CannotGraft, InputGiven, OutputExists, OutputFailed
from llama_sidecar.runtime import load
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import check_pair, discover, open_main, open_sidecar, read_header
from llama_sidecar.sidecars.compact import open_compact, write_compact
from llama_sidecar.sidecars.errors import NotAMain, NotASidecar, PairMismatch

FAMILY = "same family, unverified"


def tuned(
    by: float, only: Callable[[str], bool] = lambda name: True
) -> Callable[[dict[str, np.ndarray]], None]:
    """Moves the tensors of the trunk, as training does; the head's stay."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        rng = np.random.default_rng(7)
        for name, data in tensors.items():
            if only(name) and not name.startswith("blk.4."):
                tensors[name] = (data + by * data.std() * rng.standard_normal(data.shape)).astype(np.float32)

    return edit


@pytest.fixture(params=[True, False], ids="RT")
def base(request: pytest.FixtureRequest, tmp_path: Path) -> models.Pair:
    return models.write_pair(tmp_path / "base", recurrent=request.param)


def fine_tune(base: models.Pair, folder: Path, by: float = 0.02, **same: Any) -> Path:
    """A fine-tune of the base, which has lost its head."""
    recurrent = read_header(base.main).arch == "qwen35"
    return models.write_pair(folder, recurrent=recurrent, edit=tuned(by), **same).main


def fingerprinted(base: models.Pair, folder: Path) -> Path:
    """The base's sidecar with the fingerprint of the base's trunk."""
    merged = models.write_pair(folder, recurrent=read_header(base.main).arch == "qwen35", embedded=True).main
    sidecar = split(merged, folder / "parts").sidecar
    assert sidecar
    return sidecar


def test_a_grafted_head_fits_its_fine_tune_and_drafts(base: models.Pair, tmp_path: Path) -> None:
    main, sidecar = fine_tune(base, tmp_path / "tuned"), fingerprinted(base, tmp_path / "whole")
    with pytest.raises(PairMismatch, match="fingerprint"):
        check_pair(open_main(main), open_sidecar(sidecar))
    (main.parent / "mtp-main.gguf").unlink()
    result = graft(sidecar, main, main.parent)
    assert result.sidecar == main.parent / "mtp-main-F32.gguf" and result.match == FAMILY
    assert discover(main) and discover(main).path == result.sidecar  # type: ignore[union-attr]

    (alone := tmp_path / "alone").mkdir()
    (alone / "main.gguf").hardlink_to(main)
    texts = []
    for path in (main, alone / "main.gguf"):
        with load(path, ctx=128, threads=1, depth=3) as model:
            assert (model.kind, model.speculation.match) == (
                ("mtp", FAMILY) if path == main else (None, None)
            )
            generation = model.generate("def f(", max_tokens=30, temperature=0)
            generation.read()
            texts.append(generation.tokens)
            assert (generation.stats.n_drafted > 0) == (path == main)
    assert texts[0] == texts[1]


def test_it_keeps_the_heads_block_and_takes_the_tuned_vocabulary(base: models.Pair, tmp_path: Path) -> None:
    main, sidecar = fine_tune(base, tmp_path / "tuned"), fingerprinted(base, tmp_path / "whole")
    result = graft(sidecar, main, tmp_path / "out")
    assert result.sidecar and "main file" in result.notes[0] and "differs by 2 %" in result.notes[0]
    (keys, got), (_, ours), (base_keys, theirs) = map(content, (result.sidecar, main, sidecar))
    head = {name for name in theirs if name.startswith("blk.4.")}
    assert got.keys() == theirs.keys() and {n: got[n] for n in head} == {n: theirs[n] for n in head}
    assert {n: got[n] for n in got.keys() - head} == {n: ours[n] for n in got.keys() - head}
    assert keys["sidecar.graft.trunk"] == base_keys["sidecar.fingerprint.trunk"]
    assert keys["sidecar.fingerprint.trunk"][1] == open_main(main).trunk
    same = keys.keys() - {"sidecar.fingerprint.trunk", "sidecar.graft.trunk"}
    assert {n: keys[n] for n in same} == {n: base_keys[n] for n in same}


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_types_alone_are_no_difference(type: str, tmp_path: Path) -> None:
    """A frozen vocabulary stays the sidecar's, at its own small type."""
    base = models.write_pair(tmp_path / "base", type=gguf.GGMLQuantizationType[type])
    frozen = models.write_pair(tmp_path / "frozen", edit=tuned(0.02, lambda name: name.startswith("blk.")))
    result = graft(base.sidecar, frozen.main, tmp_path / "out")
    assert result.sidecar and result.notes[0].startswith("embeddings and output are those of the sidecar: ")
    assert content(result.sidecar)[1] == content(base.sidecar)[1]
    tuned_much = models.write_pair(tmp_path / "much", edit=tuned(0.5))
    note = graft(base.sidecar, tuned_much.main, tmp_path / "much2").notes[0]
    assert "main file" in note and f"({type})" in note and "of which the types explain" in note


def test_the_vocabulary_can_be_asked_for(base: models.Pair, tmp_path: Path) -> None:
    main = fine_tune(base, tmp_path / "tuned")
    for whose, path in (("main", main), ("sidecar", base.sidecar)):
        result = graft(base.sidecar, main, tmp_path / whose, vocabulary=whose)
        assert result.sidecar and "asked for" in result.notes[0]
        expected = content(path)[1]["token_embd.weight"]
        assert content(result.sidecar)[1]["token_embd.weight"] == expected
    with pytest.raises(CannotGraft, match="'mine'"):
        graft(base.sidecar, main, tmp_path / "out", vocabulary="mine")


def test_an_output_of_its_own_is_a_difference(tmp_path: Path) -> None:
    rows = tiny_gguf.floats(tiny_gguf.N_VOCAB, tiny_gguf.WIDTH)
    untied = tiny_gguf.main_tensors() | {"output.weight": rows}
    main = tiny_gguf.write(tmp_path / "main.gguf", "qwen35", tiny_gguf.main_keys(), untied)
    result = graft(tiny_gguf.sidecar(tmp_path / "mtp-base.gguf"), main, tmp_path / "out")
    assert result.sidecar and "main file has output.weight, the sidecar has none" in result.notes[0]
    assert "output.weight" in read_header(result.sidecar).tensors


def test_a_padded_vocabulary_goes_with_its_tokens(tmp_path: Path) -> None:
    padded = models.write_pair(tmp_path / "base", sidecar_padding=8).sidecar
    main = models.write_pair(tmp_path / "tuned", edit=tuned(0.1)).main
    for whose, n_tokens in (("main", 256), ("sidecar", 264)):
        result = graft(padded, main, tmp_path / whose, vocabulary=whose)
        assert result.sidecar and len(open_sidecar(result.sidecar).tokens) == n_tokens
    note = graft(padded, models.write_pair(tmp_path / "same").main, tmp_path / "out").notes[0]
    assert note.startswith("embeddings and output are those of the sidecar: ")


# What it claims


def test_it_is_never_called_verified_however_it_goes_on(tmp_path: Path) -> None:
    base = convert(make_checkpoint(tmp_path, name="base"), tmp_path / "base-gguf", "BF16", "BF16")
    tensors = tiny_tensors("qwen35", "tied")
    for name in tensors:
        if "mlp" in name and not name.startswith("mtp."):  # the norms stay: so does the trunk's fingerprint
            tensors[name] = -tensors[name]
    other = convert(make_checkpoint(tmp_path, name="tuned", tensors=tensors), tmp_path / "tuned-gguf", "BF16")
    assert base.sidecar and base.main and other.main and other.sidecar
    with pytest.raises(PairMismatch, match="source rows"):
        check_pair(open_main(other.main), open_sidecar(base.sidecar))
    first = graft(base.sidecar, other.main, tmp_path / "first")
    assert first.sidecar and first.match == FAMILY
    again = graft(
        first.sidecar, base.main, tmp_path / "again"
    )  # back onto its own trunk: not provable any more
    assert again.sidecar and again.match == FAMILY
    keys = [read_header(path).keys for path in (base.sidecar, first.sidecar, again.sidecar)]
    trunk = keys[0]["sidecar.fingerprint.trunk"]
    assert keys[1]["sidecar.graft.trunk"] == keys[2]["sidecar.graft.trunk"] == trunk
    merged = merge(other.main, first.sidecar, tmp_path / "merged.gguf")
    assert merged.main and merged.match == FAMILY
    parts = split(merged.main, tmp_path / "parts")
    assert parts.match == FAMILY and parts.main and parts.sidecar
    assert content(parts.sidecar)[0] == content(first.sidecar)[0] and content(parts.main) == content(
        other.main
    )
    for source in (open_sidecar(first.sidecar), open_main(merged.main)):
        write_compact(source, range(64), path := tmp_path / "compact-tuned-BF16-64.gguf")
        assert check_pair(open_main(other.main), open_compact(path)).status == FAMILY


def test_a_head_of_unknown_origin_says_so(tmp_path: Path) -> None:
    main = tiny_gguf.main(tmp_path / "main.gguf")
    result = graft(tiny_gguf.sidecar(tmp_path / "mtp-base.gguf"), main, tmp_path / "out")
    assert result.sidecar and read_header(result.sidecar).keys["sidecar.graft.trunk"] == ""
    assert result.match == FAMILY
    with pytest.raises(PairMismatch, match="fingerprint"):
        check_pair(open_main(tiny_gguf.main(tmp_path / "other.gguf", seed=1)), open_sidecar(result.sidecar))


def test_names_and_keys_in_which_the_two_differ(tmp_path: Path) -> None:
    keys = {"qwen35.rope.freq_base": 1e6, "general.name": "tuned", "qwen35.context_length": 99}
    main = tiny_gguf.main(tmp_path / "TUNED-Q4_K_M.gguf", keys=keys)
    keys = {"qwen35.rope.freq_base": 1e4, "general.name": "base", "qwen35.context_length": 9}
    result = graft(tiny_gguf.sidecar(tmp_path / "mtp-BASE-Q8_0.gguf", keys=keys), main, tmp_path / "out")
    assert result.sidecar and result.sidecar.name == "mtp-TUNED-Q8_0.gguf"
    assert result.warnings == [
        "the head keeps its own values of qwen35.rope.freq_base, in which the main file differs"
    ]
    written = read_header(result.sidecar).keys
    assert (written["general.name"], plain(written["qwen35.rope.freq_base"])) == ("tuned", 1e4)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_drafters_with_a_vocabulary_of_their_own_keep_it(name: str, tmp_path: Path) -> None:
    main, sidecar = (
        tiny_gguf.main(tmp_path / "main.gguf"),
        tiny_gguf.sidecar(tmp_path / f"{name}-b.gguf", name),
    )
    result = graft(sidecar, main, tmp_path / "out")
    assert result.sidecar and result.sidecar.name == f"{name}-main-F32.gguf" and result.match == FAMILY
    assert content(result.sidecar)[1] == content(sidecar)[1]
    with pytest.raises(CannotGraft, match="of its own"):
        graft(sidecar, main, tmp_path / "two", vocabulary="main")


# What is refused


def test_what_does_not_fit_or_needs_no_graft_is_refused(tmp_path: Path) -> None:
    main, sidecar = tiny_gguf.main(tmp_path / "main.gguf"), tiny_gguf.sidecar(tmp_path / "mtp-base.gguf")
    other = [*tiny_gguf.TOKENS[:7], "other", *tiny_gguf.TOKENS[8:]]
    pair = convert(make_checkpoint(tmp_path), tmp_path / "pair")
    assert pair.main and pair.sidecar
    for head, trunk, error, words in (
        (sidecar, tiny_gguf.main(tmp_path / "a.gguf", tokens=other), PairMismatch, "token 7 is 't7'"),
        (sidecar, tiny_gguf.main(tmp_path / "b.gguf", arch="qwen3next"), PairMismatch, "architecture"),
        (sidecar, tiny_gguf.main(tmp_path / "c.gguf", width=64), PairMismatch, "width"),
        (pair.sidecar, pair.main, CannotGraft, "same checkpoint"),
        (main, main, NotASidecar, "not a sidecar"),
        (sidecar, sidecar, NotAMain, "not a main model"),
    ):
        with pytest.raises(error, match=words):
            graft(head, trunk, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_input_is_never_written_over_and_no_file_unasked(tmp_path: Path) -> None:
    main, sidecar = (
        tiny_gguf.main(tmp_path / "main-F32.gguf"),
        tiny_gguf.sidecar(tmp_path / "mtp-main-F32.gguf"),
    )
    with pytest.raises(InputGiven, match=r"mtp-main-F32\.gguf"):
        graft(sidecar, main, tmp_path, force=True)
    graft(sidecar, main, tmp_path / "out")
    with pytest.raises(OutputExists, match="--force"):
        graft(sidecar, main, tmp_path / "out")
    graft(sidecar, main, tmp_path / "out", force=True)
    with pytest.raises(OutputFailed, match="folder"):
        graft(sidecar, main, tmp_path / "out.gguf")


def test_the_command_prints_text_or_one_object(tmp_path: Path) -> None:
    main, sidecar = tiny_gguf.main(tmp_path / "main.gguf"), tiny_gguf.sidecar(tmp_path / "mtp-base.gguf")
    call = ["graft", str(sidecar), str(main), "--out", str(tmp_path / "out")]
    text = CliRunner().invoke(cli, call)
    assert text.exit_code == 0 and [line.split()[0] for line in text.stdout.splitlines()] == [
        "sidecar",
        "match",
        "note",
    ]
    data = json.loads(CliRunner().invoke(cli, [*call, "--vocab", "main", "--force", "--json"]).stdout)
    assert (
        data["schema"] == 1
        and data["match"] == FAMILY
        and data["main"] is None
        and "asked for" in data["notes"][0]
    )
