"""A dry run says what a conversion then does, to the byte; reads no weights; and knows a head from a configuration alone."""

from __future__ import annotations

import json
from math import nan, prod
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    WITH_HEAD,
    has_head,
    make_checkpoint,
    tiny_config,
    tiny_tensors,
    write_json,
    write_tokenizer,
)
from click.testing import CliRunner
from hub_server import REPOSITORY, hub
from sparse import WIDTHS_27B, write_sparse

from llama_sidecar.converter import convert, dry_run
from llama_sidecar.converter.errors import BadConfig, ConversionError, NotACheckpoint, UnsupportedModel
from llama_sidecar.converter.families import families
from llama_sidecar.scripts.convert import command
from llama_sidecar.sidecars import read_header

# config.json of deepseek-ai/DeepSeek-V3, what of it says how large it is.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
DENSE_8192 = {
    "hidden_size": 8192, "intermediate_size": 23808, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "layer_types": None,
    "full_attention_interval": 1,
}  # fmt: skip


def config_only(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", config)
    return folder / "config.json"


@pytest.mark.parametrize(("arch", "variant"), WITH_HEAD)
@pytest.mark.parametrize("types", [("Q8_0", None), ("Q4_K_M", "Q6_K"), ("BF16", "F32")], ids=str)
def test_sizes_are_those_of_the_files(
    types: tuple[str, str | None], arch: str, variant: str, tmp_path: Path
) -> None:
    folder, out = make_checkpoint(tmp_path, arch, variant), tmp_path / "out"
    said = dry_run(folder, out, *types)
    assert not out.exists() and not said.mismatch and said.checkpoint_bytes > said.read_bytes
    result = convert(folder, out, *types)
    assert [(file.path, file.n_bytes) for file in said.files] == [
        (result.main, result.main_bytes),
        (result.sidecar, result.sidecar_bytes),
    ]
    for file in said.files:
        header = read_header(file.path)
        assert file.n_tensors == len(header.tensors) and sum(file.types.values()) == sum(
            t.n_bytes for t in header.tensors.values()
        )
        told = {t.name: t.files[file.role] for t in said.tensors if file.role in t.files}
        assert told == {t.name: t.type_name for t in header.tensors.values()}
    assert said.dropped == [n for n in tiny_tensors(arch, variant) if n.startswith("model.visual.")]


def test_a_compact_sidecar_is_within_a_percent(tmp_path: Path) -> None:
    config = tiny_config("qwen35", "tied") | {"vocab_size": 20000}
    folder = make_checkpoint(tmp_path, config=config, tensors=tiny_tensors("qwen35", "tied", config=config))
    write_tokenizer(folder, n_more=19000)
    said = dry_run(folder, tmp_path / "out", draft_vocab=8000)
    result = convert(folder, tmp_path / "out", draft_vocab=8000)
    assert said.files[2].path == result.compact
    assert said.files[2].n_bytes == pytest.approx(result.compact_bytes, rel=0.01)


def test_a_head_from_another_checkpoint(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, name="Base-1B")
    tuned = {n: t * 2 for n, t in tiny_tensors("qwen35", "tied").items() if not n.startswith("mtp.")}
    folder = make_checkpoint(tmp_path, tensors=tuned, name="tuned")
    assert [file.role for file in dry_run(folder, tmp_path).files] == ["main"]
    said = dry_run(folder, tmp_path / "out", mtp_from=base)
    result = convert(folder, tmp_path / "out", mtp_from=base)
    assert [file.n_bytes for file in said.files] == [result.main_bytes, result.sidecar_bytes]
    assert said.checkpoint_bytes == result.checkpoint_bytes > sum(said.files[i].n_bytes for i in (0, 1))


@pytest.mark.parametrize("arch", families())
def test_a_configuration_alone_tells_the_same(arch: str, tmp_path: Path) -> None:
    (variant, *others) = families()[arch].TINY
    folder = make_checkpoint(tmp_path, arch, variant)
    whole = dry_run(folder, tmp_path)
    (folder / "model.safetensors").unlink()
    for given in (folder, folder / "config.json"):
        told = dry_run(given, tmp_path)
        assert told.from_config and not told.mismatch and told.read_bytes == 0
        assert told.files == whole.files and told.head == whole.head and told.memory == whole.memory
        assert [(t.name, t.how, t.files) for t in told.tensors] == [
            (t.name, t.how, t.files) for t in whole.tensors
        ]
    for other in others:
        said = dry_run(config_only(tmp_path / other, tiny_config(arch, other)), tmp_path)
        assert bool(said.head) == has_head(arch, other)


def test_deepseek_v3_has_14_billion_beside_671(tmp_path: Path) -> None:
    said = dry_run(config_only(tmp_path / "DeepSeek-V3", DEEPSEEK_V3), tmp_path, acceptance=0.85, n_ctx=32768)
    head = said.head
    assert head and head.n_blocks == 1
    assert head.trunk == pytest.approx(671e9, rel=0.001)
    assert head.total == pytest.approx(13.5e9, rel=0.01)  # "about 14 B", as its README rounds it
    assert head.experts == 256 * 3 * 7168 * 2048
    assert head.own_vocabulary == 2 * 129280 * 7168  # which its checkpoint holds once more
    assert head.projection == pytest.approx(2 * 7168**2, rel=0.001)
    assert 0.019 < head.share < 0.021
    assert said.memory.main_cache == 61 * 32768 * 576 * 2  # latents alone
    assert said.drafting and 0.02 < said.drafting.share < 0.06 and said.drafting.row_costs[1] > 1.2
    assert sum(file.n_bytes for file in said.files) == pytest.approx((671e9 + 13.5e9) * 8.5 / 8, rel=0.01)


def test_a_dense_trunk_of_width_8192_has_a_head_of_nearly_a_billion(tmp_path: Path) -> None:
    config = tiny_config("qwen35", "untied") | DENSE_8192
    said = dry_run(config_only(tmp_path / "dense", config), tmp_path)
    head = said.head
    assert head and head.total == pytest.approx(0.94e9, rel=0.005)
    assert (
        head.projection == pytest.approx(2 * 8192**2, rel=0.001) and head.own_vocabulary == head.experts == 0
    )
    assert said.drafting and said.drafting.row_costs == [1] * 5
    assert said.drafting.speedups[0] == 1 and said.drafting.depth == 4
    never = dry_run(tmp_path / "dense", tmp_path, acceptance=0.0).drafting
    assert never and never.depth == 0 and never.speedups[1] < 1


def test_no_weights_are_read_of_a_27b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Large-27B"
    folder.mkdir()
    config = tiny_config("qwen35", "untied") | WIDTHS_27B | {"num_hidden_layers": 64, "layer_types": None}
    sources = write_sparse(folder, config, n_shards=11)
    write_json(folder / "config.json", config | {"tie_word_embeddings": True})
    write_tokenizer(folder, n_more=1000)
    headers = sum(8 + int.from_bytes(f.open("rb").read(8), "little") for f in folder.glob("*.safetensors"))
    with hub(folder, monkeypatch, tmp_path / "cache") as server:
        near, far = dry_run(folder, tmp_path), dry_run(f"hf://{REPOSITORY}", tmp_path, name="Large-27B")
        assert server.n_sent() == headers
    assert near.read_bytes == far.read_bytes == headers
    assert near.checkpoint_bytes == headers + 2 * sum(prod(s.shape) for s in sources.values()) > 50e9
    assert near.files[0].n_bytes == pytest.approx(25.6e9 * 8.5 / 8, rel=0.01)
    assert far.files[0].n_bytes == pytest.approx(near.files[0].n_bytes, abs=1000)  # the names in it differ


def test_what_would_be_refused_is_listed(tmp_path: Path) -> None:
    tensors = tiny_tensors("qwen35", "tied")
    tensors["mtp.strange.weight"] = tensors["mtp.fc.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32]
    del tensors["model.layers.2.mlp.up_proj.weight"]
    folder = make_checkpoint(tmp_path, tensors=tensors)
    said = dry_run(folder, tmp_path)
    assert said.mismatch.missing == ["layers.2.mlp.up_proj.weight"]
    assert said.mismatch.unplaced == ["mtp.strange.weight (model.safetensors)"]
    assert said.mismatch.misshapen == {"norm.weight": "model.norm.weight [32] instead of [64]"}
    run = CliRunner().invoke(command, [str(folder), "--dry-run"])
    assert run.exit_code == 1 and "unplaced" in run.output and "missing: layers.2" in str(run.exception)


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    said = dry_run(make_checkpoint(tmp_path, "deepseek2", "plain"), tmp_path)
    kinds = {how: len(tensors) for how, tensors in said.kinds().items()}
    assert kinds["split, transposed"] == 4 and kinds["split"] == 4 and kinds["stacked"] == 9
    sources = {name for tensor in said.tensors for name in tensor.sources}
    assert sources == set(tiny_tensors("deepseek2", "plain"))
    said = dry_run(make_checkpoint(tmp_path, "qwen35", "tied"), tmp_path)
    assert {"transformed (plus_one)", "reordered, transformed (minus_exp)", "renamed"} <= set(said.kinds())


def test_the_command_shows_it_and_gives_all_as_json(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    run = CliRunner().invoke(command, [str(folder), "--dry-run", "--ctx", "512", "--sidecar-only"])
    assert run.exit_code == 0 and "memory with 512 tokens of context" in run.output
    run = CliRunner().invoke(command, [str(folder), "--dry-run", "--json", "-o", str(tmp_path / "out")])
    found = json.loads(run.stdout)
    assert found["schema"] == 1 and len(found["tensors"]) == len({t["name"] for t in found["tensors"]}) == 70
    assert found["files"][1]["path"] == str(tmp_path / "out" / "mtp-tiny-qwen35-tied-Q8_0.gguf")
    assert set(found["drafting"]) >= {"share", "speedups", "depth", "step_bytes", "pass_bytes"}
    assert found["head"]["own_vocabulary"] == 0 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '-o'"),
        (["-o", "x", "--ctx", "5"], "--dry-run"),
        (["--dry-run", "--sidecar-only", "--main-type", "F16"], "contradict"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(command, [str(tmp_path), *arguments])
    assert run.exit_code == 2 and message in run.output


def test_what_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("GGUF")
    with pytest.raises(NotACheckpoint, match="expected a checkpoint's folder, or its"):
        dry_run(tmp_path / "x.gguf", tmp_path)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        dry_run(config_only(tmp_path / "a", {"architectures": ["LlamaForCausalLM"]}), tmp_path)
    lacking = {name: value for name, value in DEEPSEEK_V3.items() if name != "kv_lora_rank"}
    with pytest.raises(BadConfig, match="kv_lora_rank"):
        dry_run(config_only(tmp_path / "b", lacking), tmp_path)
    with pytest.raises(NotACheckpoint, match="no config"):
        dry_run(tmp_path, tmp_path)


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, nan])
def test_a_chance_is_between_0_and_1(acceptance: float, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="not between 0 and 1"):
        dry_run(make_checkpoint(tmp_path), tmp_path, acceptance=acceptance)
