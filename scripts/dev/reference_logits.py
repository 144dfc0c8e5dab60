"""Stores transformers' logits for tiny checkpoints, for the tests to hold a converted file's logits against.

    scripts/dev/reference_logits.py [--only deepseek2] [--out tests/data/listings]

Needs torch and a transformers that knows the families (5.24 or newer: it runs MTP blocks too). For each variant: the first
eight logits after `LOGITS_PROMPT` in reference_logits.json, and in reference_head_logits.json those of the head after
the prompt and `DRAFT_TOKEN`, all in float32 on the CPU. The head's first cell is that of the prompt's second token: there
is no hidden row before the first.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import DRAFT_TOKEN, LOGITS_PROMPT, VARIANTS, make_checkpoint  # noqa: E402
from draft_checkpoints import make_draft, make_target  # noqa: E402

from llama_sidecar.converter.drafts import drafts  # noqa: E402


@dataclass(frozen=True)
class Head:
    """How a head is computed that transformers has only the block's code for.

    `norm` is its last norm, `is_windowed` its block's attention, `is_before_norm` whether it takes the hidden row before
    the trunk's last norm, as llama.cpp's graph does, `shift` what is added to its norms' weights.
    """

    norm: str = "shared_head.norm"
    output: str = "shared_head.head"
    is_windowed: bool = False
    is_before_norm: bool = False
    shift: float = 0.0


ASSISTANT, N_IN_WINDOW = "gemma4_assistant", 3
BLOCKS = {
    "bailingmoe3": Head("final_layernorm"),
    "cohere2moe": Head(),  # llama.cpp rotates in the head's block, which in the trunk only layers with a window do
    "deepseek32": Head(),
    "glm4moelite": Head(),
    "glm_dsa": Head(),
    "hy_v3": Head("final_layernorm"),
    "mimo2": Head("final_layernorm", is_windowed=True, is_before_norm=True),
    "qwen35": Head(shift=1.0),
    "qwen35moe": Head(shift=1.0),
    "qwen3next": Head(shift=1.0),
    "step35": Head(output="shared_head.output", is_windowed=True, is_before_norm=True, shift=1.0),
}


@click.command()
@click.option("--only", help="One family's module.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "tests/data/listings")
def main(only: str | None, out: Path) -> None:
    trunk, head = _Stored(out / "reference_logits.json"), _Stored(out / "reference_head_logits.json")
    for arch, variant in VARIANTS:
        if only not in (None, arch):
            continue
        name = f"{arch}-{variant}"
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            checkpoint = make_checkpoint(Path(folder), arch, variant)
            try:
                model = _load(checkpoint)
            except (
                RuntimeError,
                ValueError,
            ) as error:  # another spelling of the same weights: the peer's bytes vouch for it
                print(f"{name}: transformers does not read it: {str(error).splitlines()[0]}")
                continue
            found = model(torch.tensor([LOGITS_PROMPT]), output_hidden_states=True)
            trunk.add(name, found.logits[0, -1])
            if arch == "nemotron_h_moe":
                head.add(name, _nemotron_logits(model, checkpoint))
            elif arch == "deepseek4":
                head.add(name, _deepseek4_logits(model, checkpoint))
            elif arch in BLOCKS:
                if "text_config" not in json.loads((checkpoint / "config.json").read_text(encoding="utf-8")):
                    head.add(name, _block_logits(model, checkpoint, BLOCKS[arch]))
            elif getattr(model.config.get_text_config(), "num_mtp_layers", None):
                head.add(name, _head_logits(model, found.hidden_states[-1]))
    for variant in drafts()[ASSISTANT].TINY if only in (None, ASSISTANT) else ():
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            for step, logits in zip(
                ("first", "second"), _assistant_logits(Path(folder), variant), strict=True
            ):
                head.add(f"{ASSISTANT}-{variant}-{step}", logits)
    trunk.write()
    head.write()


def _load(checkpoint: Path) -> Any:
    kind = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"]
    if kind == "step3p5":
        return _StepText(checkpoint).eval()
    if kind == "bailing_moe_v3":
        _respell_ling(checkpoint / "config.json")
    model, found = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if found["missing_keys"]:
        raise ValueError(f"no values for {', '.join(sorted(found['missing_keys']))}")
    return model.eval()


def _respell_ling(file: Path) -> None:
    """transformers' spelling of a Ling 3 configuration, with the kind of each layer as llama.cpp's graph has it."""
    config = json.loads(file.read_text(encoding="utf-8"))
    n_layers, group = config["num_hidden_layers"], config["layer_group_size"]
    n_whole = (n_layers - config["num_nextn_predict_layers"] * ("longer" in file.parts)) // group * group
    config["layer_types"] = [
        "full_attention" if (i + 1) % group == 0 or i >= n_whole else "linear_attention"
        for i in range(n_layers)
    ]
    # transformers has no size of their own for the shared experts
    config["num_shared_experts"] = (
        config["moe_shared_expert_intermediate_size"] // config["moe_intermediate_size"]
    )
    config |= {"model_type": "bailing_hybrid", "pad_token_id": None, "eos_token_id": None}
    file.write_text(json.dumps(config), encoding="utf-8")


def _assistant_logits(folder: Path, variant: str) -> Iterator[torch.Tensor]:
    """The logits of two drafts of Gemma 4's assistant after a few tokens and DRAFT_TOKEN, as transformers' generation asks for them.

    All tokens are within the window, whose end llama.cpp's and transformers' masks do not agree on for the assistant.
    """
    checkpoint = make_target(folder, ASSISTANT)
    draft = make_draft(folder, ASSISTANT, variant, checkpoint)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]  # which transformers wants to say it all
    text |= {"vocab_size_per_layer_input": 0, "num_kv_shared_layers": text["num_hidden_layers"]}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, assistant = _load(checkpoint), _load(draft)
    tokens = torch.tensor([LOGITS_PROMPT[:N_IN_WINDOW]])
    found = model(tokens, output_hidden_states=True, return_shared_kv_states=True)
    token, hidden = torch.tensor([[DRAFT_TOKEN]]), found.hidden_states[-1][:, -1:]
    for _ in range(2):
        drafted = assistant(
            inputs_embeds=torch.cat([model.get_input_embeddings()(token), hidden], -1),
            position_ids=torch.tensor([[N_IN_WINDOW]]),
            shared_kv_states=found.shared_kv_states,
        )
        token, hidden = drafted.logits.argmax(-1), drafted.last_hidden_state
        yield drafted.logits[0, -1]


def _head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of the head as transformers itself runs it, from the trunk's hidden rows."""
    n_layers = model.config.get_text_config().num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [
        rf"layers\.{n_layers}\.",
        r"^mtp\.",
    ]  # not the published models' numbers
    head = MtpModel.from_pretrained(model).eval()
    with safe_open(Path(model.config.name_or_path) / "model.safetensors", "pt") as stored:
        for part, name in {"embed_tokens": "embed_tokens", "shared_head": "shared_head.head"}.items():
            own = f"model.layers.{n_layers}.{name}.weight"  # published ones repeat the trunk's, ours do not
            if own in stored.keys():  # noqa: SIM118 - no dict
                module = copy.deepcopy(getattr(head, part))
                module.weight.copy_(stored.get_tensor(own))
                setattr(head, part, module)
    cache = MtpCache(config=model.config.get_mtp_config())
    tokens = torch.tensor([[*LOGITS_PROMPT[1:], DRAFT_TOKEN]])
    positions = torch.arange(1, len(LOGITS_PROMPT) + 1)[None]
    rows = head.forward_layer(0, hidden, positions, cache, input_ids=tokens)
    logits: torch.Tensor = head._project_to_logits(rows)[0, -1]
    return logits


def _block_logits(model: Any, checkpoint: Path, kind: Head) -> torch.Tensor:
    """The logits of the first head's block, run as one more layer of the trunk, with the head's own parts around it."""
    n_layers = model.config.num_hidden_layers
    weights = load_file(checkpoint / "model.safetensors")
    head = f"model.layers.{n_layers}."
    renamed = {
        "model.mtp.layers.0.": head, "mtp.layers.0.": head, "pre_mlp_layernorm": "post_attention_layernorm",
        "mtp.fc.": f"{head}eh_proj.", "mtp.norm.": f"{head}shared_head.norm.",
        "mtp.pre_fc_norm_embedding.": f"{head}enorm.", "mtp.pre_fc_norm_hidden.": f"{head}hnorm.",
    }  # fmt: skip
    for stored, own in renamed.items():
        weights = {name.replace(stored, own): t for name, t in weights.items()}
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = n_layers + 1
    config["index_topk"] = config["max_position_embeddings"]  # llama.cpp's heads attend to all positions
    if "indexer_types" in config:
        config["indexer_types"].append("full")
    if len(config.get("layer_types", [])) == n_layers:
        is_mixed = "sliding_attention" in config["layer_types"]
        config["layer_types"].append("sliding_attention" if is_mixed else "full_attention")
        if hasattr(model.config, "mlp_layer_types"):
            config["mlp_layer_types"] = [
                *model.config.mlp_layer_types,
                "dense" if kind.is_windowed else "sparse",
            ]
    elif kind.is_windowed:  # the lists go on for the head
        config["num_nextn_predict_layers"] -= 1
    longer = checkpoint.with_name("longer")
    longer.mkdir()
    (longer / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, longer / "model.safetensors", {"format": "pt"})
    trunk = _load(longer).model
    block, weights = trunk.layers[n_layers], {name: t.float() for name, t in weights.items()}

    tokens, n = torch.tensor([LOGITS_PROMPT]), len(LOGITS_PROMPT)
    found = {}
    handle = model.model.layers[-1].register_forward_hook(lambda _, __, out: found.update(hidden=out))
    hidden = model.model(tokens).last_hidden_state
    handle.remove()
    hidden = found["hidden"] if kind.is_before_norm else hidden

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        eps = model.config.rms_norm_eps
        if eps is None:  # Cohere's norms with a mean
            eps, x = model.config.layer_norm_eps, x - x.mean(-1, keepdim=True)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return normed * (weights[f"{head}{name}.weight"] + kind.shift)

    embedded = weights.get(f"{head}embed_tokens.weight", model.get_input_embeddings().weight)
    x = embedded[torch.tensor([[*LOGITS_PROMPT[1:], DRAFT_TOKEN]])]
    x = torch.cat([rms(x, "enorm"), rms(hidden, "hnorm")], -1) @ weights[f"{head}eh_proj.weight"].T
    positions = torch.arange(1, n + 1)[None]
    windowed = {"layer_type": "sliding_attention"} if kind.is_windowed else {}
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    seen = (distance >= 0) & (distance < (model.config.sliding_window if kind.is_windowed else n))
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    rotary = trunk.rotary_emb(x, positions, **windowed)
    x = block(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    x = x[0] if isinstance(x, tuple) else x
    output = weights.get(f"{head}{kind.output}.weight", model.get_output_embeddings().weight)
    logits: torch.Tensor = (rms(x, kind.norm) @ output.T)[0, -1]
    return logits * getattr(model.config, "logit_scale", 1.0)


def _nemotron_logits(model: Any, checkpoint: Path) -> torch.Tensor:
    """The logits of Nemotron's head: an attention and a mixture layer of the trunk's kinds, and a last norm with a mean."""
    n_layers, n = model.config.num_hidden_layers, len(LOGITS_PROMPT)
    weights = load_file(checkpoint / "model.safetensors")
    head = {name: t.float() for name, t in weights.items() if name.startswith("mtp.")}
    for name, tensor in head.items():
        part, rest = name.removeprefix("mtp.layers.").split(".", 1)
        if rest.startswith(("norm.", "mixer.")):
            weights[f"backbone.layers.{n_layers + int(part)}.{rest}"] = tensor
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["hybrid_override_pattern"] += "*E"
    longer = checkpoint.with_name("longer")
    longer.mkdir()
    (longer / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, longer / "model.safetensors", {"format": "pt"})
    trunk, eps = _load(longer).model, model.config.layer_norm_epsilon

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * head[f"mtp.layers.0.{name}.weight"]

    hidden = model.model(torch.tensor([LOGITS_PROMPT])).last_hidden_state
    x = trunk.embeddings(torch.tensor([[*LOGITS_PROMPT[1:], DRAFT_TOKEN]]))
    x = torch.cat([rms(x, "enorm"), rms(hidden, "hnorm")], -1) @ head["mtp.layers.0.eh_proj.weight"].T
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    for layer in trunk.layers[n_layers:]:
        x = layer(x, attention_mask=mask)
    x = torch.nn.functional.layer_norm(x, x.shape[-1:], head["mtp.layers.1.final_layernorm.weight"], eps=eps)
    logits: torch.Tensor = model.lm_head(x)[0, -1]
    return logits


def _deepseek4_logits(model: Any, checkpoint: Path) -> torch.Tensor:
    """The logits of DeepSeek-V4's head: all streams projected beside the embedding, a block, and an output mix of its own."""
    n_layers, n = model.config.num_hidden_layers, len(LOGITS_PROMPT)
    weights = load_file(checkpoint / "model.safetensors")
    head = {
        name.removeprefix("mtp.0."): weights.pop(name).float() for name in list(weights) if "mtp." in name
    }
    weights |= {
        f"layers.{n_layers}.{name}": tensor
        for name, tensor in head.items()
        if name.startswith(("attn", "ffn", "hc_attn", "hc_ffn"))
    }
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = n_layers + 1
    longer = checkpoint.with_name("longer")
    longer.mkdir()
    (longer / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: t.contiguous() for name, t in weights.items()}, longer / "model.safetensors", {"format": "pt"}
    )
    trunk = _load(longer).model

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * head[name]

    found = {}
    handle = model.model.layers[-1].register_forward_hook(lambda _, __, out: found.update(streams=out))
    model.model(torch.tensor([LOGITS_PROMPT]))
    handle.remove()
    tokens = torch.tensor([[*LOGITS_PROMPT[1:], DRAFT_TOKEN]])
    embedded = rms(trunk.embed_tokens(tokens), "enorm.weight") @ head["e_proj.weight"].T
    x = embedded[:, :, None] + rms(found["streams"], "hnorm.weight") @ head["h_proj.weight"].T
    positions = torch.arange(1, n + 1)[None]
    rotary = {
        kind: trunk.rotary_emb(embedded, position_ids=positions, layer_type=kind)
        for kind in ("main", "compress")
    }
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    seen = (distance >= 0) & (distance < model.config.sliding_window)
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    x = trunk.layers[n_layers](
        x, position_embeddings=rotary, position_ids=positions, attention_mask=mask, input_ids=tokens
    )
    mix = trunk.hc_head
    for part in ("fn", "base", "scale"):
        getattr(mix, f"hc_{part}").copy_(head[f"hc_head_{part}"])
    logits: torch.Tensor = model.lm_head(rms(mix(x), "norm.weight"))[0, -1]
    return logits


class _StepText(torch.nn.Module):
    """The text model of Step-3.7, which transformers only offers together with its vision tower."""

    def __init__(self, checkpoint: Path):
        super().__init__()
        self.config = Step3p7TextConfig(
            **json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        )
        self.config._attn_implementation = "eager"
        self.model = Step3p7TextModel(self.config)
        weights = {name: t.float() for name, t in load_file(checkpoint / "model.safetensors").items()}
        self.output = weights.pop("lm_head.weight")
        renamed = {
            "moe.gate.weight": "mlp.gate.weight", "moe.router_bias": "mlp.gate.e_score_correction_bias",
            "moe.down_proj.weight": "mlp.experts.down_proj", "share_expert.": "mlp.shared_experts.",
        }  # fmt: skip
        state = {}
        for name, tensor in weights.items():
            if name.endswith("moe.gate_proj.weight"):
                both = [tensor, weights[name.replace("gate_proj", "up_proj")]]
                name, tensor = (
                    name.replace("moe.gate_proj.weight", "mlp.experts.gate_up_proj"),
                    torch.cat(both, 1),
                )
            for stored, own in renamed.items():
                name = name.replace(stored, own)
            state[name.removeprefix("model.")] = tensor
        wanted = self.model.state_dict().keys()
        self.model.load_state_dict({name: tensor for name, tensor in state.items() if name in wanted})

    def forward(self, tokens: torch.Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.model(tokens).last_hidden_state
        return SimpleNamespace(logits=hidden @ self.output.T, hidden_states=[hidden])

    def get_output_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.output)


class _Stored:
    """A JSON file of the first eight logits by variant; entries that are not made anew stay."""

    def __init__(self, path: Path):
        self._path = path
        self._logits = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def add(self, name: str, logits: torch.Tensor) -> None:
        self._logits[name] = [round(value, 5) for value in logits[:8].tolist()]
        print(self._path.name, name, self._logits[name])

    def write(self) -> None:
        entries = sorted(self._logits.items())
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in entries)
        self._path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
