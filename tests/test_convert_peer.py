"""Our files are those of llama.cpp's converter: names, shapes, types, bytes and keys (tests/data/listings).

The listings were stored by scripts/dev/peer_listings.py from the same tiny checkpoints. Every difference that is kept on
purpose is a row of sidecars/FORMAT.md's table, and is spelled out here.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import LOGITS_PROMPT, VARIANTS, has_head, listing, make_checkpoint
from draft_checkpoints import INSIDE, inside_config, inside_tensors
from quantized import PUBLISHED, make_published

from llama_sidecar.converter import convert
from llama_sidecar.sidecars import read_header

LISTINGS = Path(__file__).parent / "data" / "listings"
KINDS = ("F32", "BF16", "Q8_0")


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    arch, name = request.param
    return f"{arch}-{name}", make_checkpoint(tmp_path_factory.mktemp("peer"), arch, name)


AS_PUBLISHED = [f"{arch}-{name}" for arch, name in VARIANTS if arch in PUBLISHED]


@pytest.mark.parametrize("name", [*AS_PUBLISHED, *INSIDE])
def test_files_equal_the_peers_of_what_it_reads_as_published_alone(name: str, tmp_path: Path) -> None:
    """The peer gives every tensor the type nearest to the stored one: ours is the same where it has that type."""
    if name in INSIDE:
        published, values = make_published(tmp_path, *INSIDE[name], inside_tensors(name), inside_config(name))
    else:
        published, values = make_published(tmp_path, *name.split("-", 1))
    listed = json.loads((LISTINGS / f"{name}-published.json").read_text(encoding="utf-8"))
    made = {kind: convert(published, tmp_path / kind, kind, kind) for kind in (*KINDS, "MXFP4")}
    plain = convert(values, tmp_path / "plain", "F32", "F32")
    for role, theirs in listed.items():
        ours = {kind: listing(getattr(result, role)) for kind, result in made.items()}
        assert ours["MXFP4"]["keys"] == with_our_differences(theirs["keys"], ours["MXFP4"]["keys"])
        assert all(found["tensors"].keys() == theirs["tensors"].keys() for found in ours.values())
        for tensor, line in theirs["tensors"].items():
            kind = line.split()[0].replace("I32", "F32")
            found = ours[kind]["tensors"][tensor]
            if kind == "BF16" and found.startswith("F32"):  # what we keep in F32 holds the same numbers
                wide = read_header(getattr(made["F32"], role)).tensor_bytes(tensor).view(np.float32)
                digest = sha256(wide.astype(ml_dtypes.bfloat16).tobytes()).hexdigest()[:16]
                found = " ".join(["BF16", found.split()[1], digest])
            assert found == line, tensor
        assert ours["F32"]["tensors"] == listing(getattr(plain, role))["tensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_equal_the_peers(variant: tuple[str, Path], kind: str, tmp_path: Path) -> None:
    name, folder = variant
    if name.split("-")[0] in PUBLISHED:
        pytest.skip("the peer reads this family as published alone")
    result = convert(folder, tmp_path, kind, kind if has_head(*name.split("-", 1)) else None)
    assert result.main
    peer = json.loads((LISTINGS / f"{name}-{kind}.json").read_text(encoding="utf-8"))
    found = {
        role: listing(path) for role, path in {"main": result.main, "sidecar": result.sidecar}.items() if path
    }
    if any(
        "nextn" in tensor for tensor in peer["main"]["tensors"]
    ):  # it always puts this family's head inside
        found["main"] = {part: found["main"][part] | found["sidecar"][part] for part in ("tensors", "keys")}
        found["main"]["keys"]["general.size_label"] = peer["main"]["keys"][
            "general.size_label"
        ]  # of all together
    for role, ours in found.items():
        theirs = peer[role]
        if theirs is None:  # the peer drops this family's head: test_families.py computes with ours
            continue
        assert_equal_tensors(*comparable(ours["tensors"], theirs["tensors"]))
        assert ours["keys"] == with_our_differences(theirs["keys"], ours["keys"])


def test_logits_equal_those_of_transformers(variant: tuple[str, Path], tmp_path: Path) -> None:
    """Stock llama.cpp computes with our file what the checkpoint's own code computes (scripts/dev/reference_logits.py)."""
    llama_cpp = pytest.importorskip("llama_cpp")
    name, folder = variant
    expected = json.loads((LISTINGS / "reference_logits.json").read_text(encoding="utf-8")).get(name)
    if expected is None:
        pytest.skip("transformers does not read this spelling: its bytes are the peer's")
    main = convert(folder, tmp_path, "F32").main
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(str(main), n_ctx=32, n_threads=1, logits_all=True, verbose=False, **exact)
    model.eval(LOGITS_PROMPT)
    np.testing.assert_allclose(model.scores[len(LOGITS_PROMPT) - 1][: len(expected)], expected, atol=1e-3)
    model.close()


def comparable(*files: dict[str, str]) -> list[dict[str, str]]:
    """Our and the peer's tensors without those that differ on purpose.

    We join what the peer leaves apart, the queries, keys and values of MiMo's heads; and the router of Nemotron's head is
    F32 like the trunk's, which the peer narrows.
    """
    ours, theirs = files
    joined = [name.removesuffix("qkv.weight") for name in ours if "attn_qkv." in name and name not in theirs]
    dropped = {f"{stem}{part}.weight" for stem in joined for part in ("q", "k", "v", "qkv")}
    dropped |= {
        name for name in ours if "ffn_gate_inp." in name and not theirs.get(name, "F32").startswith("F32")
    }
    return [{name: value for name, value in file.items() if name not in dropped} for file in files]


def assert_equal_tensors(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Byte for byte; -exp(A_log) within one unit in the last place, since numpy's and torch's exp differ."""
    rounded = {name for name in theirs if name.endswith("ssm_a")}
    assert ours.keys() == theirs.keys()
    assert {n: v for n, v in ours.items() if n not in rounded} == {
        n: v for n, v in theirs.items() if n not in rounded
    }
    for name in rounded:
        (mine, other) = (
            [np.float32(value) for value in listed[name].split()[2:]] for listed in (ours, theirs)
        )
        np.testing.assert_array_max_ulp(np.array(mine), np.array(other), maxulp=1)


# GLM-4.7-Flash is gated by a sigmoid, as the model's own code does; the peer leaves the loader to guess.
OURS_ALONE = ("sidecar.", "deepseek2.expert_gating_func")


def with_our_differences(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    """The peer's keys, with ours added and without a list of recurrent layers that says what the interval says."""
    expected = theirs | {name: value for name, value in ours.items() if name.startswith(OURS_ALONE)}
    if "full_attention_interval" not in str(theirs.keys()):
        return expected

    def value(name: str, default: Any = None) -> Any:
        return (
            json.loads(theirs[name].split(" ", 1)[1].removeprefix("of BOOL ")) if name in theirs else default
        )

    arch = value("general.architecture")
    n_layers = value(f"{arch}.block_count") - value(f"{arch}.nextn_predict_layers", 0)
    regular = [(i + 1) % value(f"{arch}.full_attention_interval") != 0 for i in range(n_layers)]
    if value(f"{arch}.attention.recurrent_layers", [])[:n_layers] == regular:
        del expected[f"{arch}.attention.recurrent_layers"]
    return expected
