"""Every family's pair, as its users have it: the head computes what the model's own code computes, and drafts losslessly.

References are transformers' (scripts/dev/reference_logits.py); the tiny checkpoints are the families' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    DRAFT_TOKEN,
    LOGITS_PROMPT,
    WITH_HEAD,
    make_checkpoint,
    tiny_config,
    tiny_tensors,
    write_json,
)
from gguf.constants import GGMLQuantizationType

from llama_sidecar.converter import convert
from llama_sidecar.converter.checkpoint import open_checkpoint
from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import BadConfig, BadTokenizer, NoHead, UnsupportedModel
from llama_sidecar.converter.families import families
from llama_sidecar.converter.plan import canonical_tensors, plan
from llama_sidecar.runtime import Generation, Model, Scripted, Session, load, reference
from llama_sidecar.sidecars import read_header

LISTINGS = Path(__file__).parent / "data" / "listings"
HEAD_LOGITS = json.loads((LISTINGS / "reference_head_logits.json").read_text(encoding="utf-8"))
N = 24


@pytest.fixture(scope="module", params=WITH_HEAD, ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Model]]:
    """A variant's name and its pair, loaded to compute in F32: its arithmetic is then the same at every width."""
    pytest.importorskip("llama_cpp")
    arch, name = request.param
    folder = tmp_path_factory.mktemp("family")
    result = convert(make_checkpoint(folder, arch, name), folder / "out", "F32", "F32")
    assert result.main and result.sidecar
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    with load(result.main, result.sidecar, ctx=128, threads=1, depth=3, **exact) as model:  # type: ignore[arg-type]
        yield f"{arch}-{name}", model


def test_head_logits_equal_those_of_transformers(pair: tuple[str, Model]) -> None:
    name, model = pair
    if name not in HEAD_LOGITS:
        pytest.skip("transformers does not run this family's head")
    target, head = reference.contexts(model, 1)
    n = len(LOGITS_PROMPT)
    target.decode(LOGITS_PROMPT, 0, [n - 1])
    hidden = [target.hidden(i) for i in range(n)]
    head.decode([*LOGITS_PROMPT[1:], DRAFT_TOKEN], 1, [n - 1], hidden)
    found = head.logits(n - 1)[: len(HEAD_LOGITS[name])]
    target.close()
    head.close()
    np.testing.assert_allclose(found, HEAD_LOGITS[name], atol=1e-3)


def test_pair_drafts_and_says_what_the_main_file_says_alone(pair: tuple[str, Model]) -> None:
    """With its own drafts and with such as are right for the first j, after which what comes next is the same to 1e-3 (case 13)."""
    _, model = pair
    with model.session(spec_type="none") as session:
        plain = written(session)
        logits = next_logits(session, plain)
    scripts = [Scripted(LOGITS_PROMPT + plain.tokens, n_right) for n_right in range(4)]
    for depth, scripted in [(1, None), (3, None), *((3, script) for script in scripts)]:
        with model.session(depth=depth, scripted=scripted) as session:
            text = written(session)
            assert text.tokens == plain.tokens and text.stats.n_drafted > 0
            np.testing.assert_allclose(next_logits(session, text), logits, atol=1e-3)
            if scripted:
                accepted = text.stats.accepted_per_position
                assert accepted == [float(i < scripted.n_right) for i in range(len(accepted))]


def next_logits(session: Session, text: Generation) -> list[float]:
    """Those behind the last token, which is not decoded yet."""
    session._native.feed(text.tokens[-1:], True)
    return session._native.logits(0)


def written(session: Session) -> Generation:
    text = session.generate(LOGITS_PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
    text.read()
    return text


@pytest.mark.parametrize("tokens", ["all", [320], [-1], [True]])
def test_tokens_that_cannot_be_suppressed(tokens: object, tmp_path: Path) -> None:
    """Gemma 4's unified models name tokens that are never to be written; test_convert_peer.py has the key."""
    folder = make_checkpoint(tmp_path, "gemma4", "unified")
    write_json(folder / "generation_config.json", {"suppress_tokens": tokens})
    with pytest.raises(BadTokenizer, match=r"suppress_tokens are .*; expected token ids below 320"):
        convert(folder, tmp_path / "out")


def test_every_module_is_a_family_that_names_what_it_is() -> None:
    found = families()
    assert len({name for family in found.values() for name in family.CLASSES}) == sum(
        len(family.CLASSES) for family in found.values()
    )
    for family in found.values():
        assert family.CLASSES and family.TINY


def test_transposed_matrices_are_the_same_in_any_slices(tmp_path: Path) -> None:
    """The keys' half of the latent projection: (heads, latent, nope), each head's matrix transposed."""
    config = Config(tiny_config("deepseek2", "plain"))
    n_heads, latent, nope, head_v = 4, 64, 32, 32
    with open_checkpoint(make_checkpoint(tmp_path, "deepseek2", "plain")) as opened:
        family = families()["deepseek2"]
        tensors = canonical_tensors(opened.tensors, family)
        placement = next(p for p in family.layout(config, tensors).trunk if p.name == "blk.0.attn_k_b.weight")
        (one,) = plan([placement], tensors, {placement.name: GGMLQuantizationType.F32})
        whole = one.rows(0, one.n_rows).view(np.float32)
        stored = tensors["layers.0.self_attn.kv_b_proj.weight"]
        per_head = stored.rows(0, stored.n_rows).reshape(n_heads, nope + head_v, latent)
        cuts = [0, 1, 63, 64, 65, 200, one.n_rows]
        sliced = [one.rows(a, b).view(np.float32) for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(whole.reshape(n_heads, latent, nope), per_head[:, :nope].swapaxes(1, 2))
    np.testing.assert_array_equal(np.concatenate(sliced), whole)


def test_a_second_block_where_llama_cpp_runs_one(tmp_path: Path) -> None:
    tensors = tiny_tensors("glm4moe", "air")
    second = {n.replace("layers.3.", "layers.4."): t for n, t in tensors.items() if "layers.3." in n}
    folder = make_checkpoint(tmp_path, "glm4moe", "air", tensors=tensors | second)
    with pytest.raises(
        UnsupportedModel, match=r"2 blocks \(model\.layers\.3\.\*\); llama\.cpp drafts with exactly one"
    ):
        convert(folder, tmp_path / "out")


def test_a_head_that_is_promised_and_not_there(tmp_path: Path) -> None:
    trunk = {n: t for n, t in tiny_tensors("deepseek2", "plain").items() if "layers.3." not in n}
    folder = make_checkpoint(tmp_path, "deepseek2", "plain", tensors=trunk)
    result = convert(folder, tmp_path / "out")
    assert result.sidecar is None
    assert "num_nextn_predict_layers = 1, but no tensor is called model.layers.3.*" in result.warnings[0]
    with pytest.raises(NoHead, match=r"is called model\.layers\.3\.\*"):
        convert(folder, tmp_path / "other", sidecar_type="Q8_0")


def test_a_vocabulary_without_a_token_that_the_family_gives_a_role(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4moe", "air")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text(encoding="utf-8")
        (folder / file).write_text(text.replace("[gMASK]", "[xMASK]"), encoding="utf-8")
    with pytest.raises(BadTokenizer, match=r"no added token '\[gMASK\]'"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "kinds", [[["sliding_attention"]] * 4, ["full_attention"] * 4, ["sliding_attention"]]
)
def test_layers_of_no_known_kind(kinds: object, tmp_path: Path) -> None:
    config = {n: v for n, v in tiny_config("deepseek4", "plain").items() if n != "compress_ratios"}
    folder = make_checkpoint(tmp_path, "deepseek4", "plain", config=config | {"layer_types": kinds})
    with pytest.raises(BadConfig, match=r"compress_ratios = .*; expected at least"):
        convert(folder, tmp_path / "out")


def test_a_configuration_that_transformers_has_written_anew(tmp_path: Path) -> None:
    """DeepSeek-V4's layers and rotations by their kinds: the same files."""
    config, names = tiny_config("deepseek4", "yarn"), ("sliding", "compressed_sparse", "heavily_compressed")
    kinds = dict(zip((0, 4, 128), names, strict=True))
    anew = {n: v for n, v in config.items() if n not in ("num_hash_layers", "qk_rope_head_dim", "rope_theta")}
    del anew["compress_rope_theta"]
    ratios, yarn = anew.pop("compress_ratios"), anew.pop("rope_scaling")
    anew |= {
        "layer_types": [f"{kinds[ratio]}_attention" for ratio in ratios[:4]],
        "mlp_layer_types": ["moe"] * 4,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": yarn | {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
        },
    }
    folders = [
        make_checkpoint(tmp_path, "deepseek4", "yarn", config=c, name=n)
        for n, c in (("a", config), ("b", anew))
    ]
    made = [convert(folder, tmp_path / "out", "F32", "F32") for folder in folders]
    for role in ("main", "sidecar"):
        ours, theirs = (read_header(getattr(result, role)).keys for result in made)
        differing = {name for name in ours if not np.array_equal(ours[name], theirs.get(name))}
        assert differing <= {"general.name", "deepseek4.attention.compress_ratios"}  # whose end no block has
        assert ours.keys() == theirs.keys()


TABLE = "layers.0.ffn.gate.tid2eid"


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (np.full((320, 3), 8), rf"{TABLE} has values beyond 0 to 7: the checkpoint is damaged"),
        (np.full((320, 3), -1), rf"{TABLE} has values beyond 0 to 7"),
        (np.zeros((320, 3), np.float32), rf"{TABLE} in model\.safetensors is F32; expected integers"),
    ],
)
def test_experts_that_a_token_cannot_have(table: np.ndarray, match: str, tmp_path: Path) -> None:
    tensors = tiny_tensors("deepseek4", "plain") | {TABLE: table}
    folder = make_checkpoint(tmp_path, "deepseek4", "plain", tensors=tensors)
    with pytest.raises(UnsupportedModel, match=match):
        convert(folder, tmp_path / "out", "F32")
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_matrices_side_by_side_are_the_same_in_any_slices(tmp_path: Path) -> None:
    """DeepSeek-V4's two projections as one: every row is a row of one and a row of the other."""
    with open_checkpoint(make_checkpoint(tmp_path, "deepseek4", "plain")) as opened:
        family = families()["deepseek4"]
        placement = next(
            p for p in family.layout(opened.config, opened.tensors).head if p.name.endswith("eh_proj.weight")
        )
        halves = [opened.tensors[f"mtp.0.{part}_proj.weight"].rows(0, 64) for part in "eh"]
        for kind in (GGMLQuantizationType.F32, GGMLQuantizationType.BF16):  # which is the stored one
            (one,) = plan([placement], opened.tensors, {placement.name: kind})
            sliced = np.concatenate([one.rows(a, b) for a, b in pairwise([0, 1, 17, 64])])
            found = (
                sliced.view(np.float32)
                if kind == GGMLQuantizationType.F32
                else (sliced.view("<u2").astype(np.uint32) << 16).view(np.float32)
            )
            np.testing.assert_array_equal(found, np.concatenate(halves, axis=1))


@pytest.mark.parametrize(
    ("values", "tensors", "match"),
    [
        ({"scoring_func": "sigmoid"}, {}, "scoring_func = 'sigmoid' and hc_mult = 4"),
        ({"hc_mult": 2}, {}, "runs this architecture with 'sqrtsoftplus' and 4"),
        ({}, {"layers.1.ffn.gate.bias_vl": np.zeros(8, np.float32)}, "a bias for pictures"),
        ({}, {"mtp.1.enorm.weight": np.zeros(64, np.float32)}, r"2 blocks \(mtp\.\*\)"),
    ],
)
def test_variants_of_deepseek_v4_that_llama_cpp_does_not_run(
    values: dict[str, object], tensors: dict[str, np.ndarray], match: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(
        tmp_path,
        "deepseek4",
        tensors=tiny_tensors("deepseek4", "plain") | tensors,
        config=tiny_config("deepseek4", "plain") | values,
    )
    with pytest.raises(UnsupportedModel, match=match):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("arch", "variant", "values", "match"),
    [
        ("deepseek2", "plain", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("mimo2", "apart", {"hybrid_layer_pattern": [0, 1]}, "expected 4 times 0 or 1"),
        ("step35", "plain", {"moe_layers_enum": "1;2"}, "expected numbers with commas"),
        ("step35", "plain", {"layer_types": ["dense"]}, "expected a list of 'full_attention'"),
        ("nemotron_h_moe", "wide", {"hybrid_override_pattern": "M-*EM"}, "has no head"),
        ("glm_dsa", "shared", {"indexer_types": ["full"]}, "expected 3 times 'full' or 'shared'"),
        ("deepseek4", "plain", {"compress_ratios": [0, 4, 8, 4, 0]}, "at least 5 times 0, 4 or 128"),
        ("deepseek4", "plain", {"compress_ratios": [0, 4, 4, 4]}, "at least 5 times 0, 4 or 128"),
        ("deepseek4", "plain", {"compress_ratios": [4] * 5}, "a compress_ratio of 4 for the head's block"),
        ("deepseek4", "plain", {"compress_ratios": [[0]] * 5}, "at least 5 times 0, 4 or 128"),
        (
            "deepseek4",
            "plain",
            {"rope_parameters": {"main": {}, "compress": {}}},
            "rope_theta = None; expected a number",
        ),
        ("deepseek4", "plain", {"num_hash_layers": 5}, "num_hash_layers = 5; expected 0 to 4"),
        ("deepseek4", "plain", {"o_groups": 3}, "4 attention heads in o_groups = 3"),
        ("cohere2moe", "rms", {"expert_selection_fn": "top"}, "expected one of softmax, sigmoid"),
    ],
)
def test_values_that_cannot_be(
    arch: str, variant: str, values: dict[str, object], match: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, arch, variant)
    write_json(folder / "config.json", tiny_config(arch, variant) | values)
    with pytest.raises(BadConfig, match=match):
        convert(folder, tmp_path / "out")
