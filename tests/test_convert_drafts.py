"""Stand-alone drafters are converted as llama.cpp's own converter does it, run as they are, and refused where they cannot be.

The listings were stored by scripts/dev/peer_listings.py from the same tiny checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DTYPES, listing, write_safetensors
from click.testing import CliRunner
from draft_checkpoints import DRAFTS, make_draft, make_target, tiny_tensors
from hub_server import REPOSITORY, hub

from llama_sidecar.converter import convert, dry_run
from llama_sidecar.converter.drafts import drafts
from llama_sidecar.converter.drafts.target import open_target
from llama_sidecar.converter.errors import BadConfig, NoTarget, NoWeights, TensorMismatch, UnsupportedModel
from llama_sidecar.runtime import load, reference
from llama_sidecar.scripts.convert import command
from llama_sidecar.sidecars import check_pair, open_main, open_sidecar, read_header

LISTINGS = Path(__file__).parent / "data" / "listings"
KINDS = ("F32", "BF16", "Q8_0")
PROMPT = list(range(30, 60))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=DRAFTS, ids="-".join)
def draft(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    name, variant = request.param
    return f"{name}-{variant}", make_draft(tmp_path_factory.mktemp("draft"), name, variant, target)


@pytest.mark.parametrize("kind", KINDS)
def test_files_equal_the_peers(draft: tuple[str, Path], kind: str, target: Path, tmp_path: Path) -> None:
    name, folder = draft
    result = convert(folder, tmp_path, None, kind, target=target)
    assert result.sidecar and result.main is None
    ours, theirs = (
        listing(result.sidecar),
        json.loads((LISTINGS / f"{name}-{kind}.json").read_text(encoding="utf-8"))["sidecar"],
    )
    if kind == "Q8_0":  # a matrix of one row stays F32, as every vector does; the peer's converter narrows it
        for tensors in (ours["tensors"], theirs["tensors"]):
            tensors.pop("conf_proj.weight", None)
    assert ours["tensors"] == theirs["tensors"]
    assert {k: v for k, v in ours["keys"].items() if not k.startswith("sidecar.")} == theirs["keys"]


def test_a_main_file_serves_as_target_as_its_checkpoint_does(
    draft: tuple[str, Path], target: Path, tmp_path: Path
) -> None:
    main = convert(target, tmp_path).main
    files = [
        convert(draft[1], tmp_path / str(i), target=given).sidecar for i, given in enumerate((target, main))
    ]
    of_checkpoint, of_main = (listing(path) for path in files if path)
    of_checkpoint["keys"].pop("tokenizer.ggml.add_space_prefix", None)  # a main file does not say it
    assert of_checkpoint == of_main
    assert files[0] and files[1] and files[0].name == files[1].name


def test_what_is_written_belongs_to_the_target_and_drafts_for_it(
    draft: tuple[str, Path], target: Path, tmp_path: Path
) -> None:
    main, sidecar = (
        convert(target, tmp_path, "Q8_0").main,
        convert(draft[1], tmp_path, target=target).sidecar,
    )
    assert main and sidecar
    assert check_pair(open_main(main), open_sidecar(sidecar)).status == "verified"
    with load(main, sidecar, ctx=256, threads=1, depth=3) as model:
        expected, expected_drafts = reference.generate(model, PROMPT, 24, 3)
        with model.session(spec_type="none") as plain, model.session() as session:
            texts = []
            for one in (plain, session):
                generation = one.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
                generation.read()
                texts.append(generation.tokens)
    assert texts[0] == texts[1] == expected
    assert any(expected_drafts)


def test_the_default_is_narrow_in_the_vocabulary_alone(target: Path, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target)
    result = convert(folder, tmp_path / "out", target=target)
    assert result.sidecar and result.sidecar.name == "eagle3-tiny-qwen35-tied-Q8_0.gguf"
    tensors = read_header(result.sidecar).tensors
    found = {
        name: tensors[name].type_name for name in ("fc.weight", "output.weight", "token_embd.weight", "d2t")
    }
    assert found == {"fc.weight": "Q8_0", "output.weight": "Q4_0", "token_embd.weight": "Q4_0", "d2t": "I64"}


def test_the_command(target: Path, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target)
    arguments = [str(folder), "--target", str(target), "-o", str(tmp_path / "out"), "--name", "My model"]
    ran = CliRunner().invoke(command, arguments)
    assert ran.exit_code == 0, ran.output
    assert "eagle3-My-model-Q8_0.gguf" in ran.output


def test_a_dry_run_says_what_is_then_written(draft: tuple[str, Path], target: Path, tmp_path: Path) -> None:
    said = dry_run(draft[1], tmp_path, None, "Q8_0", target=target)
    made = convert(draft[1], tmp_path, None, "Q8_0", target=target)
    assert made.sidecar and not said.mismatch
    header = read_header(made.sidecar)
    (file,) = said.files
    assert (file.role, file.path, file.n_bytes) == ("sidecar", made.sidecar, made.sidecar.stat().st_size)
    assert {t.name: t.files["sidecar"] for t in said.tensors} == {
        name: info.type_name for name, info in header.tensors.items() if name != "d2t"
    }
    assert said.arch == header.arch and said.head is None and said.memory.main == 0
    assert said.memory.head == sum(n for name, n in file.types.items() if name != "I64")


def test_a_dry_run_names_every_tensor_and_needs_what_the_conversion_needs(
    target: Path, tmp_path: Path
) -> None:
    tensors = tiny_tensors("eagle3", "sglang", open_target(target))
    del tensors["norm.weight"]
    folder = make_draft(tmp_path, "eagle3", "sglang", target)
    write_safetensors(
        folder / "model.safetensors", tensors | {"more.weight": np.zeros(2, np.float32), "t2d": np.zeros(2)}
    )
    said = dry_run(folder, tmp_path, target=target)
    assert (said.mismatch.missing, said.dropped) == (["norm.weight"], ["t2d"])
    assert said.mismatch.unplaced == ["more.weight (model.safetensors)"]
    ran = CliRunner().invoke(command, [str(folder), "--target", str(target), "--dry-run"])
    assert ran.exit_code == 1 and "eagle3-tiny-qwen35-tied-Q8_0.gguf" in ran.output
    with pytest.raises(NoTarget, match="--target"):
        dry_run(folder, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(NoWeights, match="whose headers a drafter's dry run needs"):
        dry_run(folder, tmp_path, target=target)


def test_a_drafter_on_the_hub(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_draft(tmp_path, "dflash", "zlab", target)
    near = convert(folder, tmp_path / "near", target=target, name="Any").sidecar
    with hub(folder, monkeypatch, tmp_path / "cache"):
        far = convert(f"hf://{REPOSITORY}", tmp_path / "far", target=target, name="Any").sidecar
        (folder / "mask_embedding.pt").write_bytes(b"x")
    assert near and far
    ours, theirs = listing(near), listing(far)
    assert ours["tensors"] == theirs["tensors"]
    assert ours["keys"].items() <= theirs["keys"].items()  # which say where they come from besides
    with hub(folder, monkeypatch, tmp_path / "other"), pytest.raises(UnsupportedModel, match="mask token"):
        convert(f"hf://{REPOSITORY}", tmp_path / "more", target=target)


def test_a_drafter_without_its_target_and_a_model_with_one(target: Path, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target)
    with pytest.raises(
        NoTarget, match=r"tiny-eagle3-sglang is EAGLE3 \(LlamaForCausalLMEagle3\), .* --target"
    ):
        convert(folder, tmp_path / "out")
    with pytest.raises(NoTarget, match="Qwen3_5ForCausalLM, which drafts for no other model"):
        convert(target, tmp_path / "out", target=target)
    with pytest.raises(NoTarget, match="no compact sidecar"):
        convert(folder, tmp_path / "out", target=target, draft_vocab=64)
    with pytest.raises(NoTarget, match="convert the target with --pre-tokenizer, and name its main file"):
        convert(folder, tmp_path / "out", target=target, pre_tokenizer="glm4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "exactly 1 block"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "3 layers from 0 to the 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "3 layers from 0 to the 4"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "expected numbers of layers"),
        ({"target_hidden_size": 128}, "is 64 wide"),
        ({"vocab_size": 100}, "has 320 tokens"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    changes: dict[str, object], words: str, target: Path, tmp_path: Path
) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target, **changes)
    with pytest.raises(BadConfig, match=words):
        convert(folder, tmp_path / "out", target=target)


def test_the_layers_that_config_json_does_not_name(target: Path, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target, eagle_aux_hidden_state_layer_ids=None)
    result = convert(folder, tmp_path / "out", target=target)
    assert result.sidecar
    assert list(read_header(result.sidecar).keys["eagle3.target_layers"]) == [2, 2, 1]
    assert any("2, 2, 1" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (None, "missing"),
        (np.zeros(63, np.int64), r"\[63\]; 64 integers"),
        (np.full(64, 300, np.int64), "from 300 to 363"),
        (-np.arange(64), "63 of them twice"),
        (np.zeros(64, np.float32), "F32"),
    ],
    ids=["none", "short", "beyond", "twice", "floats"],
)
def test_tables_of_ids_that_cannot_be(
    table: np.ndarray | None, words: str, target: Path, tmp_path: Path
) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target)
    tensors = tiny_tensors("eagle3", "sglang", open_target(target))
    del tensors["d2t"]
    if table is not None:
        tensors["d2t"] = table
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(TensorMismatch, match=words):
        convert(folder, tmp_path / "out", target=target)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("dflash", {"hidden_size": 32}, "has hidden_size = 32, the target"),
        ("dflash", {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0]}}, "mask_token_id = 320"),
        ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [4]}}, "below the 4"),
        ("dflash", {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids = None"),
        ("dflash", {"block_size": 100}, "block_size = 100"),
        ("dflash", {"use_sliding_window": True, "sliding_window": 8}, "layer_types of 0 layers; 2"),
        ("dspark", {"vocab_size": 64}, "has 320 tokens"),
    ],
)
def test_sizes_of_a_block_drafter_that_cannot_be_are_refused(
    name: str, changes: dict[str, object], words: str, target: Path, tmp_path: Path
) -> None:
    variant = {"dflash": "zlab", "dspark": "own"}[name]
    folder = make_draft(tmp_path, name, variant, target, **changes)
    with pytest.raises(BadConfig, match=words):
        convert(folder, tmp_path / "out", target=target)


def test_what_is_not_converted_is_said(target: Path, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, "dspark", "own", target, markov_head_type="gated")
    with pytest.raises(UnsupportedModel, match="markov_head_type = 'gated'; expected 'vanilla'"):
        convert(folder, tmp_path / "out", target=target)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"mask_embedding\.pt holds an embedding of the mask token"):
        convert(folder, tmp_path / "out", target=target)


def test_a_left_over_tensor_is_named(target: Path, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, "eagle3", "sglang", target)
    tensors = tiny_tensors("eagle3", "sglang", open_target(target))
    tensors["midlayer.extra.weight"] = np.zeros((2, 2), DTYPES["BF16"])
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(TensorMismatch, match=r"no place for: midlayer\.extra\.weight"):
        convert(folder, tmp_path / "out", target=target)


def test_every_module_is_found_and_has_a_kind_of_sidecar() -> None:
    from llama_sidecar.sidecars import KINDS

    assert {draft.KIND for draft in drafts().values()} <= set(KINDS)
    assert len({name for draft in drafts().values() for name in draft.CLASSES}) == sum(
        len(draft.CLASSES) for draft in drafts().values()
    )
