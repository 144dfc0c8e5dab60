"""Gemma 4's assistant: the same file as the peer's, of the main model that it is converted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import listing
from draft_checkpoints import make_draft, make_target
from test_convert_peer import LISTINGS, assert_equal_tensors

from llama_sidecar.converter import convert
from llama_sidecar.converter.drafts import drafts
from llama_sidecar.converter.errors import BadConfig
from llama_sidecar.runtime import load
from llama_sidecar.runtime.errors import LoadError
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


def test_it_fits_its_main_file_which_runs_without_it(tmp_path: Path) -> None:
    """Nothing here reads the target's own cache yet: a user is told so, and gets plain text."""
    pytest.importorskip("llama_cpp")
    target = make_target(tmp_path, NAME)
    draft = make_draft(tmp_path, NAME, "plain", target)
    main = convert(target, tmp_path / "out", "F32").main
    sidecar = convert(draft, tmp_path / "out", None, "F32", target=target, name="tiny-gemma4-dense").sidecar
    assert main and sidecar
    check_pair(open_main(main), open_sidecar(sidecar))
    with load(main, ctx=128, threads=1) as model:
        assert model.speculation.kind is None
        assert "has no gemma4-assistant drafter" in model.speculation.why
    with pytest.raises(LoadError, match="has no gemma4-assistant drafter"):
        load(main, sidecar)


def test_of_another_width_it_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path, NAME)
    draft = make_draft(tmp_path, NAME, "plain", target, backbone_hidden_size=128)
    with pytest.raises(BadConfig, match=r"backbone_hidden_size = 128, the target .* is 64 wide"):
        convert(draft, tmp_path / "out", None, target=target)
