"""A head out of the base checkpoint, for one that lost it: the same tensors, checked, and said in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    Array,
    listing,
    make_checkpoint,
    tiny_config,
    tiny_tensors,
    write_safetensors,
    write_tokenizer,
)
from quantized import METHODS, make_quantized, quantize_trunk

from llama_sidecar.converter import convert
from llama_sidecar.converter.checkpoint import read_object
from llama_sidecar.converter.errors import HeadMismatch, NoHead, TensorMismatch
from llama_sidecar.sidecars import check_pair, keys, open_main, open_sidecar


def without_head(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: tensor for name, tensor in tensors.items() if "mtp." not in name}


def fine_tuned(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name: (tensor * np.float32(1.5)).astype(tensor.dtype) for name, tensor in tensors.items()}


def test_a_fine_tune_gets_the_head_of_its_base(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, name="Base-1B")
    tuned = make_checkpoint(
        tmp_path, tensors=fine_tuned(without_head(tiny_tensors("qwen35", "tied"))), name="tuned"
    )
    expected = convert(base, tmp_path / "base", "F32", "F32")
    result = convert(tuned, tmp_path / "tuned-out", "F32", "F32", mtp_from=base)
    assert result.main and result.sidecar and expected.sidecar and expected.main
    ours, theirs = listing(result.sidecar), listing(expected.sidecar)
    head = {name for name in theirs["tensors"] if name.startswith("blk.")}
    assert {n: ours["tensors"][n] for n in head} == {n: theirs["tensors"][n] for n in head}
    assert ours["tensors"]["token_embd.weight"] != theirs["tensors"]["token_embd.weight"]  # the fine-tune's
    assert ours["keys"][keys.MTP_FROM] == 'STRING "Base-1B"'
    match = check_pair(open_main(result.main), open_sidecar(result.sidecar))
    assert match.status == "same family, unverified"
    assert keys.MTP_FROM not in listing(result.main)["keys"]
    assert keys.MTP_FROM not in theirs["keys"]


def test_a_quantised_checkpoint_gets_the_head_of_its_base(tmp_path: Path) -> None:
    quantized, base = make_quantized(tmp_path, "gptq-4")
    config = read_object(quantized / "config.json")
    stored, _ = quantize_trunk(
        without_head(tiny_tensors("qwen35", "tied", config=config)), METHODS["gptq-4"][0], 4
    )
    write_safetensors(quantized / "model.safetensors", stored)
    assert convert(quantized, tmp_path / "none").sidecar is None
    result = convert(quantized, tmp_path / "out", mtp_from=base)
    assert result.main and result.sidecar
    match = check_pair(open_main(result.main), open_sidecar(result.sidecar))
    assert (
        match.status == "same family, unverified"
    )  # what was quantised, nobody can tell from what was trained on


def test_a_base_with_the_same_trunk_is_verified(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, name="base")
    lost = make_checkpoint(tmp_path, tensors=without_head(tiny_tensors("qwen35", "tied")), name="lost")
    result = convert(lost, tmp_path / "out", mtp_from=base)
    assert result.main and result.sidecar
    assert check_pair(open_main(result.main), open_sidecar(result.sidecar)).status == "verified"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, name="base")
    lost = make_checkpoint(tmp_path, tensors=without_head(tiny_tensors("qwen35", "tied")), name="lost")
    config = tiny_config("qwen35", "tied") | {"hidden_size": 32, "num_hidden_layers": 8, "layer_types": None}
    small = make_checkpoint(
        tmp_path, tensors=tiny_tensors("qwen35", "tied", config=config), config=config, name="small"
    )
    other = make_checkpoint(tmp_path, "deepseek2", "plain")
    renamed = make_checkpoint(tmp_path, name="renamed")
    write_tokenizer(renamed, n_more=1)
    wide = tiny_config("qwen35", "tied") | {"intermediate_size": 160}
    wider = make_checkpoint(
        tmp_path, tensors=tiny_tensors("qwen35", "tied", config=wide), config=wide, name="wider"
    )
    for folder, head, error, match in [
        (base, base, HeadMismatch, r"base has a head of its own \(mtp\.\*\): leave --mtp-from out"),
        (lost, lost, NoHead, "lost holds no draft head either"),
        (lost, other, HeadMismatch, "is DeepseekV3ForCausalLM, .*lost Qwen3_5ForCausalLM"),
        (lost, small, HeadMismatch, "hidden_size is 32 there, 64 here, num_hidden_layers is 8 there, 4 here"),
        (lost, renamed, HeadMismatch, r"token 264 is '.+' in .*renamed and '\[PAD264\]' here"),
        (lost, wider, TensorMismatch, "other shapes"),
    ]:
        with pytest.raises(error, match=match):
            convert(folder, tmp_path / "out", mtp_from=head)
    assert not (tmp_path / "out").exists()
