"""Converting: cases that broke other tools (shared cases 1 to 9), names, keys, bad input, and that nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    Array,
    make_checkpoint,
    tiny_config,
    tiny_tensors,
    write_json,
    write_safetensors,
)
from click.testing import CliRunner

from llama_sidecar.converter import ConvertResult, convert, writer
from llama_sidecar.converter.errors import (
    BadConfig,
    BadDraftVocab,
    BadShard,
    MissingShard,
    NoHead,
    NotACheckpoint,
    NotEnoughSpace,
    OutputExists,
    OutputFailed,
    TensorMismatch,
    UnknownType,
    UnsupportedModel,
)
from llama_sidecar.converter.places import DISK
from llama_sidecar.scripts.convert import command
from llama_sidecar.sidecars import (
    GGUFHeader,
    check_pair,
    compact,
    identify,
    open_main,
    open_sidecar,
    read_header,
)

DEMO = Path(__file__).parents[1] / "sidecars" / "demo"


def f32(path: Path | None, name: str) -> Array:
    assert path
    header = read_header(path)
    return np.frombuffer(header.tensor_bytes(name).tobytes(), np.float32).reshape(
        header.tensors[name].shape[::-1]
    )


def header_of(path: Path | None) -> GGUFHeader:
    assert path
    return read_header(path)


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*")) if folder.exists() else []


def shards(folder: Path, parts: dict[str, dict[str, Array]], listed: dict[str, str] | None = None) -> None:
    """Replaces the single file by these, with an index of `listed`, or of everything."""
    (folder / "model.safetensors").unlink()
    for file, tensors in parts.items():
        write_safetensors(folder / file, tensors)
    everything = {name: file for file, tensors in parts.items() for name in tensors}
    write_json(folder / "model.safetensors.index.json", {"weight_map": listed or everything})


def split(tensors: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The trunk's tensors and the head's."""
    head = {name: t for name, t in tensors.items() if name.startswith("mtp.")}
    return {name: t for name, t in tensors.items() if name not in head}, head


def assert_loads(path: Path | None, load_mtp: bool = False) -> None:
    """Stock llama.cpp reads the file with all its tensors."""
    llama_cpp = pytest.importorskip("llama_cpp")
    params = llama_cpp.llama_model_default_params()
    params.load_mtp = load_mtp
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model
    llama_cpp.llama_model_free(model)


# The cases.


def test_1_head_is_found_where_the_config_says_nothing(tmp_path: Path) -> None:
    config = tiny_config("qwen35", "tied")
    del config["mtp_num_hidden_layers"]
    result = convert(make_checkpoint(tmp_path, config=config), tmp_path / "out")
    assert result.sidecar and result.warnings == []
    assert result.n_head_tensors == 15 == len(split(tiny_tensors("qwen35", "tied"))[1])
    assert header_of(result.sidecar).keys["qwen35.nextn_predict_layers"] == 1


def test_2_config_promises_a_head_that_is_not_there(tmp_path: Path) -> None:
    trunk, _ = split(tiny_tensors("qwen35", "tied"))
    folder = make_checkpoint(tmp_path, tensors=trunk)
    result = convert(folder, tmp_path / "out")
    header = header_of(result.main)
    assert result.sidecar is None and result.kind is None and result.n_head_tensors == 0
    assert "mtp_num_hidden_layers = 1" in result.warnings[0]
    assert header.keys["qwen35.block_count"] == 4 and "qwen35.nextn_predict_layers" not in header.keys
    assert_loads(result.main)
    for types in ({"sidecar_type": "Q8_0"}, {"main_type": None}):
        with pytest.raises(NoHead, match=r"no tensor in any of its files is called mtp\.\*"):
            convert(folder, tmp_path / "other", **types)
    run = CliRunner().invoke(
        command, [str(folder), "--out", str(tmp_path / "other"), "--sidecar-type", "Q8_0"]
    )
    assert run.exit_code != 0 and not (tmp_path / "other").exists()


def test_3_head_in_a_shard_that_the_index_does_not_list(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    trunk, head = split(tiny_tensors("qwen35", "tied"))
    parts = {"model-00001-of-00001.safetensors": trunk, "model-mtp-of-00005.safetensors": head}
    shards(folder, parts, listed=dict.fromkeys(trunk, "model-00001-of-00001.safetensors"))
    result = convert(folder, tmp_path / "out")
    assert result.n_head_tensors == 15
    assert [w for w in result.warnings if "model-mtp-of-00005.safetensors" in w]


def test_4_head_in_a_file_of_another_name_that_the_index_lists(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    trunk, head = split(tiny_tensors("qwen35", "tied"))
    shards(folder, {"model-00001-of-00001.safetensors": trunk, "mtp.safetensors": head})
    result = convert(folder, tmp_path / "out")
    assert result.n_head_tensors == 15 and result.warnings == []


def test_5_stray_single_file_beside_indexed_shards(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    tensors = tiny_tensors("qwen35", "tied")
    shards(folder, {"model-00001-of-00001.safetensors": tensors})
    write_safetensors(folder / "model.safetensors", {name: t[:1] for name, t in tensors.items()})
    result = convert(folder, tmp_path / "out", "F32")
    assert [w for w in result.warnings if w.startswith("model.safetensors is ignored")]
    assert header_of(result.main).tensors["token_embd.weight"].shape == (64, 320)


@pytest.mark.parametrize(
    ("arch", "variant"), [("qwen35", "tied"), ("qwen35moe", "single"), ("qwen3next", "tiled")]
)
def test_6_zero_centred_norms_become_ones(arch: str, variant: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(arch, variant)
    for name, tensor in tensors.items():
        if (name.endswith("norm.weight") and "linear_attn" not in name) or "pre_fc_norm" in name:
            tensors[name] = np.zeros_like(tensor)
    result = convert(
        make_checkpoint(tmp_path, arch, variant, tensors=tensors), tmp_path / "out", "F32", "F32"
    )
    names = []
    for path in (result.main, result.sidecar):
        for name in header_of(path).tensors:
            if re.search(r"(norm|enorm|hnorm)\.weight$", name) and "ssm_norm" not in name:
                names.append(name)
                assert (f32(path, name) == 1).all(), name
    assert {n.split(".", 2)[2] for n in names if n.startswith("blk.4.")} == {
        "attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight",
        "nextn.enorm.weight", "nextn.hnorm.weight", "nextn.shared_head_norm.weight",
    }  # fmt: skip
    kept = tensors["model.layers.0.linear_attn.norm.weight"]
    np.testing.assert_array_equal(f32(result.main, "blk.0.ssm_norm.weight"), kept)


def test_7_fp8_trunk_with_a_bf16_head(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {}
    for name, tensor in tiny_tensors("qwen35", "tied").items():
        if name.startswith("mtp.") or tensor.ndim != 2 or "embed_tokens" in name:
            tensors[name] = tensor
        else:
            blocks = (-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16))
            tensors[name] = (tensor.astype(np.float32) * 400).astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = np.full(blocks, 2**-9, np.float32)
    config = tiny_config("qwen35", "tied") | {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [16, 16],
            "modules_to_not_convert": ["mtp.fc"],
        }
    }
    folder = make_checkpoint(tmp_path, tensors=tensors, config=config)
    result = convert(folder, tmp_path / "out", "F32", "BF16")
    assert result.n_head_tensors == 15
    for name, source in {"nextn.eh_proj": "mtp.fc", "attn_q": "mtp.layers.0.self_attn.q_proj"}.items():
        stored = header_of(result.sidecar).tensor_bytes(f"blk.4.{name}.weight").tobytes()
        assert stored == tensors[f"{source}.weight"].tobytes()
    up = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float32) * np.float32(2**-9)
    np.testing.assert_array_equal(f32(result.main, "blk.0.ffn_up.weight"), up)


def test_8_tied_embeddings_and_an_output_that_is_missing(tmp_path: Path) -> None:
    for tie, n_warnings in ((True, 0), (False, 1)):
        config = tiny_config("qwen35", "tied") | {"tie_word_embeddings": tie}
        folder = make_checkpoint(tmp_path, config=config, name=f"tie-{tie}")
        result = convert(folder, tmp_path / "out", "F32")
        assert len([w for w in result.warnings if "lm_head.weight" in w]) == n_warnings
        for path in (result.main, result.sidecar):
            assert "output.weight" not in header_of(path).tensors
        logits = _logits(result.main)
        assert np.isfinite(logits).all() and np.ptp(logits) > 0
    both = make_checkpoint(tmp_path, variant="untied")
    assert "output.weight" in header_of(convert(both, tmp_path / "out", "F32").sidecar).tensors


def _logits(path: Path | None) -> Array:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), n_ctx=32, n_threads=1, verbose=False, logits_all=True)
    model.eval([1, 2, 3])
    logits = np.array(model.scores[:3])
    model.close()
    return logits


def test_9_every_unplaced_missing_and_misshapen_tensor_is_listed_first(tmp_path: Path) -> None:
    tensors = tiny_tensors("qwen35", "tied")
    tensors |= {
        "mtp.strange.weight": tensors["mtp.fc.weight"],
        "mtp.layers.0.odd.bias": tensors["mtp.norm.weight"],
    }
    del tensors["mtp.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32]
    folder = make_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(TensorMismatch) as error:
        convert(folder, tmp_path / "out")
    for part in (
        "missing: layers.2.mlp.up_proj.weight, mtp.norm.weight",
        "mtp.strange.weight (model.safetensors), mtp.layers.0.odd.bias (model.safetensors)",
        "model.norm.weight [32] instead of [64]",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_bin_shards_give_the_same_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = make_checkpoint(tmp_path / "bin")
    state = {
        name: torch.from_numpy(tensor.astype(np.float32)).to(
            torch.bfloat16 if tensor.itemsize == 2 else torch.float32
        )
        for name, tensor in tiny_tensors("qwen35", "tied").items()
    }
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    got = convert(folder, tmp_path / "out")
    expected = convert(make_checkpoint(tmp_path), tmp_path / "expected")
    for one, other in ((got.main, expected.main), (got.sidecar, expected.sidecar)):
        assert one and other and one.read_bytes() == other.read_bytes()


# Names and keys.


def test_both_files_load_in_stock_llama_cpp_and_belong_together(tmp_path: Path) -> None:
    result = convert(make_checkpoint(tmp_path), tmp_path / "out")
    assert result.main and result.sidecar
    assert_loads(result.main)
    assert_loads(result.sidecar, load_mtp=True)
    assert check_pair(open_main(result.main), open_sidecar(result.sidecar)).status == "verified"
    assert identify(read_header(result.main)).role == "main"
    assert (
        result.main_bytes == result.main.stat().st_size
        and result.sidecar_bytes == result.sidecar.stat().st_size
    )


def test_fingerprints_do_not_depend_on_types_and_differ_between_models(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    main = open_main(str(convert(folder, tmp_path / "a", "BF16").main))
    sidecar = open_sidecar(str(convert(folder, tmp_path / "b", "Q4_0", "F16").sidecar))
    assert check_pair(main, sidecar).status == "verified"
    tuned = tiny_tensors("qwen35", "tied")
    name = "model.embed_tokens.weight"
    tuned[name] = tuned[name] + ml_dtypes.bfloat16(0.125)
    other = open_main(str(convert(make_checkpoint(tmp_path, tensors=tuned, name="t"), tmp_path / "c").main))
    assert other.trunk == main.trunk and other.rows != main.rows


def test_names_come_from_the_folder_the_cache_or_the_option(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "models--org--Tiny-0.1B" / "snapshots", name="6ec57f84c680d3a3778b")
    result = convert(folder, tmp_path / "out", "F16")
    assert files_in(tmp_path / "out") == ["Tiny-0.1B-F16.gguf", "mtp-Tiny-0.1B-Q8_0.gguf"]
    assert header_of(result.main).keys["general.name"] == "Tiny 0.1B"
    named = convert(folder, tmp_path / "named", name="My mtp-model/2", main_type="F16")
    assert files_in(tmp_path / "named") == ["My-mtp_model-2-F16.gguf", "mtp-My-mtp_model-2-Q8_0.gguf"]
    assert header_of(named.main).keys["general.name"] == "My mtp-model/2"


def test_model_card_describes_whatever_it_holds(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    card = "---\nlicense: mit\nversion: 2024-01-31\nlanguage: [en, no, 1]\ntags:\n- a\n-\nbase_model: org/Base-1B\n---\ntext"
    (folder / "README.md").write_text(card)
    keys = header_of(convert(folder, tmp_path / "out").main).keys
    assert keys["general.license"] == "mit" and keys["general.version"] == "2024-01-31"
    assert list(keys["general.tags"]) == ["a"] and keys["general.base_model.0.organization"] == "Org"
    (folder / "README.md").write_text("---\n{[\n---\n")
    assert "general.license" not in header_of(convert(folder, tmp_path / "out", force=True).main).keys


BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz")
)


@pytest.mark.parametrize(
    "card",
    [
        *(
            "name: [x]",
            "model_name: {a: b}",
            "license: {a: b}",
            "license: [[mit]]",
            "base_model: [{name: [x]}]",
        ),
        *(
            "base_model: [[x]]",
            "tags: [{a: b}]",
            "tags: [[a]]",
            "tags: &a [x, *a]",
            'license: "\\ud83d"',
            BOMB,
        ),
        *(
            "language: !!set {a}",
            "tags: !!omap [a: b]",
            "license: !!binary aGk=",
            "1: 2",
            "datasets: [null, 1]",
        ),
        "author: 0x" + "f" * 5000,
    ],
    ids=lambda card: card[:20],
)
def test_model_card_of_any_shape_is_no_reason_to_stop(card: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    assert header_of(convert(folder, tmp_path / "out").main).keys["general.type"] == "model"


def test_the_configs_own_name_is_used_if_it_is_one(tmp_path: Path) -> None:
    for i, (given, found) in enumerate({"org/Some-Model": "Some Model", 5: "T", "a\ud800": "A?"}.items()):
        config = tiny_config("qwen35", "tied") | {"_name_or_path": given}
        folder = make_checkpoint(tmp_path / str(i), config={}, name="T")
        (folder / "config.json").write_text(json.dumps(config))
        assert header_of(convert(folder, tmp_path / f"out{i}").main).keys["general.name"] == found


def test_generation_config_becomes_sampling_keys(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    write_json(
        folder / "generation_config.json",
        {
            "temperature": 1,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": None,
            "repetition_penalty": 1.5,
            "do_sample": True,
        },
    )
    header = header_of(convert(folder, tmp_path / "out").main)
    found = {name: value for name, value in header.keys.items() if name.startswith("general.sampling.")}
    assert found == {
        "general.sampling.temp": 1.0,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": pytest.approx(0.95),
        "general.sampling.penalty_repeat": 1.5,
    }
    kinds = [header.key_types[name][0].name for name in ("general.sampling.temp", "general.sampling.top_k")]
    assert kinds == ["FLOAT32", "INT32"]


def test_sampling_settings_that_no_key_can_hold_say_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    odd = {
        "temperature": 1e300,
        "top_k": 2**40,
        "top_p": float("nan"),
        "min_p": 10**400,
        "mirostat": -(2**40),
    }
    (folder / "generation_config.json").write_text(json.dumps(odd | {"repetition_penalty": float("inf")}))
    header = header_of(convert(folder, tmp_path / "out").main)
    assert not [name for name in header.keys if name.startswith("general.sampling.")]


def test_sidecar_alone_and_default_types(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, variant="untied")
    result = convert(folder, tmp_path / "out", None)
    assert (
        result.main is None
        and result.main_bytes == 0
        and files_in(tmp_path / "out") == ["mtp-tiny-qwen35-untied-Q8_0.gguf"]
    )
    types = {name: info.type_name for name, info in header_of(result.sidecar).tensors.items()}
    assert types["token_embd.weight"] == types["output.weight"] == "Q4_0"
    assert types["blk.4.attn_q.weight"] == "Q8_0" and types["blk.4.nextn.enorm.weight"] == "F32"


def test_a_compact_sidecar_beside_the_pair(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path, variant="untied"), tmp_path / "out"
    result = convert(folder, out, draft_vocab=128)
    assert result.compact == out / "compact-tiny-qwen35-untied-Q8_0-128.gguf"
    assert files_in(out) == sorted(p.name for p in (result.main, result.sidecar, result.compact) if p)
    assert (result.draft_vocab, result.compact_bytes) == (128, result.compact.stat().st_size)
    source, small = open_sidecar(str(result.sidecar)), compact.open_compact(result.compact)
    assert small.source == compact.content_hash(source) and small.trunk == source.trunk
    rows = compact.choose_rows(source.tokens, compact.token_types(source), 128)
    assert np.array_equal(small.target_ids, rows)
    assert small.types == {info.name: info.type for info in source.header.tensors.values()}  # copied
    assert check_pair(open_main(str(result.main)), small).status == "verified"
    alone = convert(folder, tmp_path / "alone", None, draft_vocab=128)
    assert alone.compact and alone.compact.read_bytes() == result.compact.read_bytes()


@pytest.mark.parametrize("n_rows", [-1, 0, 320, 10**9])
def test_a_draft_vocabulary_of_no_rows_or_of_all_is_refused(n_rows: int, tmp_path: Path) -> None:
    with pytest.raises(BadDraftVocab, match=r"1 to 319 are expected, of the 320") as error:
        convert(make_checkpoint(tmp_path), tmp_path / "out", draft_vocab=n_rows)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_without_a_head_there_is_nothing_to_cut(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tensors=split(tiny_tensors("qwen35", "tied"))[0])
    with pytest.raises(NoHead):
        convert(folder, tmp_path / "out", draft_vocab=128)


def test_an_existing_compact_sidecar_is_refused_without_force(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"
    out.mkdir()
    target = out / "compact-tiny-qwen35-tied-Q8_0-128.gguf"
    target.write_text("mine")
    with pytest.raises(OutputExists, match=r"compact-tiny-qwen35-tied-Q8_0-128\.gguf"):
        convert(folder, out, draft_vocab=128)
    assert files_in(out) == [target.name] and target.read_text() == "mine"
    assert convert(folder, out, draft_vocab=128, force=True).compact == target and target.stat().st_size > 4


@pytest.mark.parametrize("n_replaced", [0, 1])
def test_all_three_are_put_in_place_or_none(
    n_replaced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = _fail_after(n_replaced, OSError(errno.EACCES, "no"), os.replace)
    monkeypatch.setattr(writer.os, "replace", refuse)
    with pytest.raises(OutputFailed):
        convert(make_checkpoint(tmp_path), tmp_path / "out", draft_vocab=128)
    assert not (tmp_path / "out").exists()


def test_a_compact_sidecar_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compact, "write_data", full)
    with pytest.raises(OutputFailed, match=r"compact-.*No space left") as error:
        convert(make_checkpoint(tmp_path), tmp_path / "new" / "out", draft_vocab=128)
    assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


def test_same_input_same_bytes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    first, second = convert(folder, tmp_path / "a"), convert(folder, tmp_path / "b")
    assert first.main and second.main and first.main.read_bytes() == second.main.read_bytes()


# Bad input and bad luck: one clear line, and nothing left behind.


def test_broken_checkpoints(tmp_path: Path) -> None:
    def refused(kind: type[Exception], match: str, folder: Path, **options: Any) -> None:
        with pytest.raises(kind, match=match) as error:
            convert(folder, tmp_path / "out", **options)
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()

    refused(NotACheckpoint, "does not exist", tmp_path / "nowhere")
    good = make_checkpoint(tmp_path)
    refused(UnknownType, "'Q3_K'", good, main_type="Q3_K")
    config = tiny_config("qwen35", "tied")
    for name, (edit, kind, match) in {
        "arch": (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedModel,
            "expected one of .*Qwen3_5ForCausalLM",
        ),
        "no-arch": ({"architectures": []}, BadConfig, "names no architecture"),
        "layers": ({"num_hidden_layers": 5, "layer_types": None}, TensorMismatch, "hold 4 layers"),
        "types": ({"layer_types": ["full_attention"] * 4}, TensorMismatch, "layers 0, 1, 2"),
        "text": ({"hidden_size": "64"}, BadConfig, "hidden_size = '64'"),
        "quip": ({"quantization_config": {"quant_method": "quip"}}, UnsupportedModel, "quantized by 'quip'"),
    }.items():
        refused(kind, match, make_checkpoint(tmp_path, config=config | edit, name=name))
    del config["linear_num_key_heads"]
    refused(BadConfig, "no 'linear_num_key_heads'", make_checkpoint(tmp_path, config=config, name="absent"))

    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    write_json(good / "model.safetensors.index.json", index)
    refused(MissingShard, "model-00002-of-00002.safetensors", good)
    (good / "model.safetensors.index.json").unlink()
    os.truncate(good / "model.safetensors", (good / "model.safetensors").stat().st_size - 1)
    refused(BadShard, "is truncated", good)


ROPE = tiny_config("qwen35", "tied")["rope_parameters"]
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "edit",
    [
        *({"rms_norm_eps": value} for value in (-1, 10**400, 1e300, float("nan"), float("inf"), True)),
        *({"rope_parameters": ROPE | {"rope_theta": value}} for value in (1e39, "1e6", -1)),
        *(
            {"rope_parameters": ROPE | {"mrope_section": value}}
            for value in (5, [2**40], [True], [-1], [1] * 5)
        ),
        *(
            {"rope_parameters": ROPE | {"partial_rotary_factor": v}}
            for v in ("0.25", float("nan"), -4, 1e30, 0)
        ),
        *(
            {"rope_parameters": YARN | {"original_max_position_embeddings": value}}
            for value in ("x", -4, 0, None)
        ),
        *({"rope_parameters": YARN | {"factor": value}} for value in (None, "4")),
        {"rope_parameters": ROPE | {"rope_type": ["yarn"]}},
        {"rope_parameters": ["yarn"]},
        {"layer_types": [["linear_attention"]] * 4},
        {"num_hidden_layers": 2**31 - 1, "layer_types": None},
        {"linear_num_value_heads": 2**30},
        {"linear_num_key_heads": 3},
        {"quantization_config": "fp8"},
        {"text_config": {"architectures": []}},
    ],
    ids=lambda edit: str(edit)[:60],
)
def test_a_value_that_cannot_be_is_named(edit: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, config=tiny_config("qwen35", "tied") | edit)
    with pytest.raises(BadConfig, match=r"^config\.json ") as error:
        convert(folder, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("edit", [{"num_experts": 2**30}, {"num_experts_per_tok": 5}], ids=str)
def test_a_number_of_experts_that_cannot_be_is_named(edit: dict[str, Any], tmp_path: Path) -> None:
    for variant in ("single", "fused"):
        config = tiny_config("qwen35moe", variant) | edit
        folder = make_checkpoint(tmp_path, "qwen35moe", variant, config=config)
        with pytest.raises(BadConfig, match="num_experts"):
            convert(folder, tmp_path / "out")


def test_values_that_are_null_are_not_there(tmp_path: Path) -> None:
    rope = dict.fromkeys(("rope_theta", "mrope_section", "partial_rotary_factor"), None)
    config = tiny_config("qwen35", "tied") | {"rope_parameters": rope, "rope_theta": 5000.0}
    result = convert(make_checkpoint(tmp_path, config=config), tmp_path / "out")
    keys = header_of(result.main).keys
    assert keys["qwen35.rope.freq_base"] == 5000 and keys["qwen35.rope.dimension_count"] == 8
    assert list(keys["qwen35.rope.dimension_sections"]) == [11, 11, 10, 0]


def test_a_second_spelling_of_the_rope_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    config = tiny_config("qwen35", "tied") | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    result = convert(make_checkpoint(tmp_path, config=config), tmp_path / "out")
    assert "rope_scaling" in result.warnings[0] and "rope_parameters is used" in result.warnings[0]


@pytest.mark.parametrize("index", ["1", "999", "1000000000", "9" * 5000, "\u0663", "x"])
def test_a_block_that_no_head_has_is_refused(index: str, tmp_path: Path) -> None:
    for prefix in ("mtp.", "model."):
        tensors = tiny_tensors("qwen35", "tied")
        tensors[f"{prefix}layers.{index}.strange"] = tensors["mtp.norm.weight"]
        folder = make_checkpoint(tmp_path, tensors=tensors, name=f"{prefix}x")
        with pytest.raises(
            (TensorMismatch, UnsupportedModel), match=r"no place for|blocks|hold \d+ layers|missing"
        ):
            convert(folder, tmp_path / "out")
        shutil.rmtree(folder)


def test_values_beyond_a_types_range_are_an_error(tmp_path: Path) -> None:
    tensors = tiny_tensors("qwen35", "tied")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (tensors[name].astype(np.float32) * 1e6).astype(ml_dtypes.bfloat16)
    folder = make_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(UnsupportedModel, match=f"{re.escape(name)} has values beyond the range of F16"):
        convert(folder, tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()
    assert convert(folder, tmp_path / "out", "BF16").main


def test_existing_files_are_refused_and_kept_without_force(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"
    out.mkdir()
    target = out / "mtp-tiny-qwen35-tied-Q8_0.gguf"
    target.write_text("mine")
    with pytest.raises(OutputExists, match=r"mtp-tiny-qwen35-tied-Q8_0\.gguf"):
        convert(folder, out)
    assert files_in(out) == [target.name] and target.read_text() == "mine"
    assert convert(folder, out, force=True).sidecar == target and target.stat().st_size > 4


def test_a_folder_in_a_files_place_is_refused_with_force_too(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"
    (out / "mtp-tiny-qwen35-tied-Q8_0.gguf").mkdir(parents=True)
    with pytest.raises(OutputExists, match="as a folder"):
        convert(folder, out, force=True)
    assert files_in(out) == ["mtp-tiny-qwen35-tied-Q8_0.gguf"]


def test_a_conversion_that_was_faster_is_not_overwritten(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"

    def other(done: int, total: int, name: str) -> None:
        if done == total:
            (out / "tiny-qwen35-tied-Q8_0.gguf").write_text("the other's")

    with pytest.raises(OutputExists):
        convert(folder, out, progress=other)
    assert files_in(out) == ["tiny-qwen35-tied-Q8_0.gguf"]
    assert (out / "tiny-qwen35-tied-Q8_0.gguf").read_text() == "the other's"


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), KeyboardInterrupt()], ids=repr)
def test_a_pair_is_put_in_place_whole_or_not_at_all(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.os, "replace", _fail_after(1, error, os.replace))
    with pytest.raises((OutputFailed, KeyboardInterrupt)):
        convert(make_checkpoint(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_conversion_left_is_removed_and_what_a_running_one_writes_is_not(
    tmp_path: Path,
) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"
    out.mkdir()
    dead, alive = (out / f".tiny-qwen35-tied-Q8_0.gguf.{tag}.part" for tag in ("1", "2"))
    dead.write_text("a lot")
    with alive.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        convert(folder, out)
        assert alive.exists() and not dead.exists()
    assert len(files_in(out)) == 3


def test_two_conversions_at_once_into_one_folder(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"
    inner: list[ConvertResult] = []

    def once(done: int, total: int, name: str) -> None:
        if not inner:
            inner.append(convert(folder, out))

    with pytest.raises(OutputExists):
        convert(folder, out, progress=once)
    assert files_in(out) == ["mtp-tiny-qwen35-tied-Q8_0.gguf", "tiny-qwen35-tied-Q8_0.gguf"]
    assert (
        check_pair(open_main(out / files_in(out)[1]), open_sidecar(out / files_in(out)[0])).status
        == "verified"
    )


def test_a_name_that_is_too_long_or_no_utf8(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    for out, name in ((tmp_path / "out", "n" * 300), (tmp_path / ("n" * 5000), "n")):
        with pytest.raises(OutputFailed, match="File name too long"):
            convert(folder, out, name=name)
    assert header_of(convert(folder, tmp_path / "out", name="a\udcffb").main).keys["general.name"] == "a?b"


def test_too_small_a_disk_is_noticed_before_any_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    monkeypatch.setattr(writer, "_write_data", lambda *_: pytest.fail("data was written"))
    with pytest.raises(NotEnoughSpace, match="the files need"):
        convert(make_checkpoint(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk(tmp_path: Path) -> None:
    """A real one, where this may be mounted: found before writing if it is known, and while writing if not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("no tmpfs can be mounted here")
    folder = make_checkpoint(tmp_path)
    try:
        with pytest.raises(NotEnoughSpace, match="the files need"):
            convert(folder, disk / "out")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NotEnoughSpace, match="filled up"):
            patch.setattr(writer, "_check_space", lambda started: None)
            convert(folder, disk / "out")
        assert files_in(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.ENOSPC, NotEnoughSpace), (errno.EIO, OutputFailed)], ids=["full", "broken"]
)
def test_disk_that_fills_up_leaves_nothing(
    code: int, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.os, "pwrite", _fail_after(20, OSError(code, os.strerror(code)), os.pwrite))
    with pytest.raises(expected) as error:
        convert(make_checkpoint(tmp_path), tmp_path / "new" / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems map files as they like")
def test_a_file_comes_into_the_page_cache_in_whole_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, firsts = os.pwrite, {}

    def pwrite(fd: int, data: Any, at: int) -> int:
        written = write(fd, data, at)
        for page in range(at // writer.HUGE_PAGE, (at + written - 1) // writer.HUGE_PAGE + 1):
            firsts.setdefault((fd, page), (at, written))
        return written

    monkeypatch.setattr(writer.os, "pwrite", pwrite)
    main = convert(DEMO, tmp_path / "huge", main_type="F32").main
    fd = max(firsts, key=lambda key: key[1])[0]  # the main file has more pages than the sidecar
    header = read_header(main)
    first_page = -(-min(info.offset for info in header.tensors.values()) // writer.HUGE_PAGE)
    pages = range(first_page, main.stat().st_size // writer.HUGE_PAGE)
    assert len(pages) > 10
    assert {firsts[fd, page] for page in pages} == {
        (page * writer.HUGE_PAGE, writer.HUGE_PAGE) for page in pages
    }
    monkeypatch.setattr(writer.sys, "platform", "another")
    assert main.read_bytes() == convert(DEMO, tmp_path / "small", main_type="F32").main.read_bytes()


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(make_checkpoint(tmp_path), out, progress=interrupt)
    assert files_in(out) == []


def test_an_interrupt_does_not_wait_for_what_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = writer._write_slice, []

    def slow(*part: Any) -> None:
        written.append(part)
        time.sleep(0.01)
        write(*part)

    def interrupted(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_slice", slow)
    with pytest.raises(KeyboardInterrupt):
        convert(make_checkpoint(tmp_path), tmp_path / "out", progress=interrupted)
    assert len(written) <= 2 * DISK.n_threads and not (tmp_path / "out").exists()


def test_output_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = make_checkpoint(tmp_path)
    with pytest.raises(OutputFailed, match="cannot be written"):
        convert(folder, tmp_path / "file")
    with pytest.raises(OutputFailed, match="expected a folder"):
        convert(folder, tmp_path / "model.gguf")


def _fail_after(n: int, error: BaseException, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(n))

    def call(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return function(*arguments)

    return call


# The command, and what it must not import.


def test_command_ends_with_the_line_to_paste(tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "my models"
    run = CliRunner().invoke(command, [str(folder), "--out", str(out)], catch_exceptions=False)
    assert run.exit_code == 0
    assert run.output.splitlines()[-1] == f"llama-sidecar chat '{out}/tiny-qwen35-tied-Q8_0.gguf'"
    run = CliRunner().invoke(
        command, [str(folder), "--out", str(out), "--force", "--json"], catch_exceptions=False
    )
    found = json.loads(run.stdout)
    assert (found["compact"], found["compact_bytes"], found["draft_vocab"]) == (None, 0, None)
    run = CliRunner().invoke(
        command, [str(folder), "--out", str(out), "--force", "--draft-vocab", "128"], catch_exceptions=False
    )
    assert "compact-tiny-qwen35-tied-Q8_0-128.gguf  (128 rows," in run.output
    assert (
        found["schema"] == 1
        and found["kind"] == "mtp"
        and found["sidecar"].endswith("mtp-tiny-qwen35-tied-Q8_0.gguf")
    )
    assert found.keys() == {"schema", *ConvertResult.__dataclass_fields__}


def test_warnings_of_the_command_are_one_printable_line_each(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path, config=tiny_config("qwen35", "tied") | {"mtp_num_hidden_layers": "\x1b[31m\n"}
    )
    tensors = {"mtp.norm.weight": tiny_tensors("qwen35", "tied")["mtp.norm.weight"]}
    write_safetensors(folder / "\x1b[2J\n.safetensors", tensors)
    run = CliRunner().invoke(command, [str(folder), "--out", str(tmp_path / "out")], catch_exceptions=False)
    lines = run.stderr.splitlines()
    assert (
        len(lines) == 2 and all(line.startswith("warning: ") for line in lines) and "\x1b" not in run.stderr
    )


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    convert(make_checkpoint(tmp_path), tmp_path / "out", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1] and len({call[1] for call in calls}) == 1


def test_converting_imports_neither_torch_nor_the_runtime_nor_llama_cpp(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    program = (
        "import sys\n"
        "from llama_sidecar.converter import convert\n"
        f"convert({str(folder)!r}, {str(tmp_path / 'out')!r})\n"
        "print(sorted({'torch', 'llama_cpp', 'llama_sidecar.runtime'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_values_that_move_are_where_they_should_be(tmp_path: Path) -> None:
    """One value head of each tensor that is regrouped, checked by hand rather than against the peer."""
    tensors = tiny_tensors(
        "qwen35", "tied"
    )  # 2 key heads, 4 value heads of 16: stored 00 01 10 11, written 00 10 01 11
    result = convert(make_checkpoint(tmp_path, tensors=tensors), tmp_path / "out", "F32")
    stored = {
        n.split("linear_attn.")[1]: t.astype(np.float32) for n, t in tensors.items() if "layers.1.linear" in n
    }
    qkv = f32(result.main, "blk.1.attn_qkv.weight")
    np.testing.assert_array_equal(qkv[:64], stored["in_proj_qkv.weight"][:64])
    np.testing.assert_array_equal(qkv[80:96], stored["in_proj_qkv.weight"][96:112])
    np.testing.assert_array_equal(
        f32(result.main, "blk.1.ssm_out.weight")[:, 16:32], stored["out_proj.weight"][:, 32:48]
    )
    np.testing.assert_allclose(
        f32(result.main, "blk.1.ssm_a"), -np.exp(stored["A_log"][[0, 2, 1, 3]]), rtol=1e-6
    )
