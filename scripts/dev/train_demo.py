"""Trains the checkpoint of sidecars/demo: a small Qwen3.5 model with an MTP head, on the standard library.

    train_demo.py train --run RUN --minutes 100    trains; the same command goes on where it was stopped
    train_demo.py evaluate --run RUN               acceptance on the held-out prompts
    train_demo.py export --run RUN OUT [--references tests/data/demo_logits.npz]
    train_demo.py check                            compares the model with transformers' Qwen3_5ForCausalLM
    train_demo.py train --kind KIND --run RUN --minutes 12    a head of another kind for the checkpoint as it is
    train_demo.py export --kind KIND --run RUN OUT            (eagle3, dflash, dspark: train_heads.py)

Trunk and head are trained together: next-token loss plus `--head-weight` times the head's losses at depths 1,
2 and 3, weighted 1, 0.6, 0.4, on the text's tokens and the head's own hidden rows (demo_model.py). The head's
target is half the text's next token, half the trunk's own distribution: a draft is accepted when it agrees
with the trunk. The learning rate is constant, then falls over the last fifth of the budget.

References (`--references`) are logits in F32 arithmetic on the exported BF16 weights:
    tokens (n)               of a held-out prompt
    trunk  (4, vocab)        the trunk's logits at positions n - 4 .. n - 1
    drafts (4, 3)            greedy drafts from each of those positions p
    head   (4, 3, vocab)     the head's logits at depths 1, 2, 3, the first choices of which are the drafts
When drafting from p, the head's cells 0..p hold (hidden row of i - 1, token of i), with zeros for the row
before the first; cell p gives draft 1. Cell p + 1 holds (the head's own hidden row of cell p, draft 1) and
gives draft 2, cell p + 2 likewise draft 3.

Needs torch, safetensors, tokenizers, numpy and a C++ compiler for torch.compile; `check` needs transformers.
On a busy machine set OMP_WAIT_POLICY=passive; with glibc, MALLOC_MMAP_THRESHOLD_=4294967296 and
MALLOC_TRIM_THRESHOLD_=8589934592 keep the large buffers from being returned and cleared at every step.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import CHAT_TEMPLATE, SPECIAL, documents, encode, held_out_prompts, train_tokenizer, windows
from demo_heads import HEADS
from demo_model import Config, DemoModel
from demo_training import (
    Progress,
    load_rounded,
    log,
    n_parameters,
    numbers,
    run_training,
    write_json,
    write_weights,
)
from tokenizers import Tokenizer
from torch import Tensor
from train_heads import export_head, train_head

KINDS = ("mtp", *HEADS)
LENGTH = 256  # tokens of a training row
DEPTH = 3
DEPTH_WEIGHTS = (1.0, 0.6, 0.4)


# --- training -----------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    args.run.mkdir(parents=True, exist_ok=True)
    args.step_tokens = args.batch * LENGTH
    rows_of, held_out = prepare(args)
    torch.manual_seed(args.seed)
    model = DemoModel(Config())
    losses = torch.compile(training_losses, dynamic=False)
    weights = torch.tensor([1.0, *(args.head_weight * w for w in DEPTH_WEIGHTS)])
    log(args.run, f"# {n_parameters(model.model)} trunk + {n_parameters(model.mtp)} head parameters")
    log(args.run, f"# rows of {LENGTH} tokens, head weight {args.head_weight}")
    run_training(
        args,
        args.run,
        model,
        lambda step: losses(model, rows_of(step)),
        weights,
        lambda: held_out_line(model, held_out),
    )


def prepare(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """A function from step to batch (batch, LENGTH + 1), and held-out rows; trains the tokenizer first."""
    docs = documents(held_out=False)
    file = args.run / "tokenizer.json"
    if not file.exists():
        train_tokenizer((d.text for d in docs), Config().vocab_size).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    encoded = encode(tokenizer, docs)
    held_out = windows(
        encode(tokenizer, [d for d in documents(held_out=True) if d.kind == "code"]), LENGTH, args.seed
    )
    epochs: dict[int, np.ndarray] = {}

    def rows_of(step: int) -> Tensor:
        per_epoch = sum(map(len, encoded)) // LENGTH - 1
        first, batch = step * args.batch, []
        for i in range(first, first + args.batch):
            epoch, row = divmod(i, per_epoch)
            if epoch not in epochs:
                epochs[epoch] = windows(encoded, LENGTH, args.seed + epoch)
                epochs.pop(epoch - 2, None)
            batch.append(epochs[epoch][row % len(epochs[epoch])])
        return torch.from_numpy(np.stack(batch))

    return rows_of, torch.from_numpy(held_out[:64].copy())


def training_losses(model: DemoModel, rows: Tensor) -> Tensor:
    """Mean losses (1 + DEPTH) of the trunk and of the head at each depth on rows (batch, T + 1)."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trunk, *heads = model(rows[:, :-1], DEPTH)
    target = rows[:, 1:]
    found = [F.cross_entropy(trunk.float().flatten(0, 1), target.flatten())]
    trunk_p = trunk.detach().float().softmax(-1)
    for depth, logits in enumerate(heads, 1):
        logits, p, t = logits[:, depth:].float(), trunk_p[:, depth:], target[:, depth:, None]
        own = 0.5 * logits.gather(-1, t)[..., 0] + 0.5 * (p * logits).sum(-1)
        found.append((logits.logsumexp(-1) - own).mean())
    return torch.stack(found)


@torch.no_grad()
def held_out_line(model: DemoModel, rows: Tensor) -> str:
    """Held-out losses of trunk and depths, and how often the head's first choice is the trunk's."""
    losses, agreement = [], []
    for part in rows.split(16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            trunk, *heads = model(part[:, :-1], DEPTH)
        losses.append(
            [
                F.cross_entropy(x[:, d:].float().flatten(0, 1), part[:, d + 1 :].flatten())
                for d, x in enumerate((trunk, *heads))
            ]
        )
        agreement.append(
            [(x.argmax(-1) == trunk.argmax(-1))[:, d:].float().mean() for d, x in enumerate(heads, 1)]
        )
    mean_loss, mean_agreement = torch.tensor(losses).mean(0), torch.tensor(agreement).mean(0)
    return f"held-out  loss {numbers(mean_loss)}  acceptance {numbers(mean_agreement)}"


# --- evaluation ---------------------------------------------------------------------------------------------


def evaluate(args: argparse.Namespace) -> None:
    model, tokenizer, progress = load_trained(args.run)
    prompts = held_out_prompts(tokenizer)
    for kind in ("code", "prose"):
        chosen = [tokenizer.encode(p["prompt"]).ids for p in prompts if p["kind"] == kind]
        found = acceptance(model, chosen, args.tokens)
        log(args.run, f"greedy at step {progress.step}, {len(chosen)} held-out {kind} prompts: {found}")


def load_trained(run: Path) -> tuple[DemoModel, Tokenizer, Progress]:
    """The model of a run, as it is exported."""
    model = DemoModel(Config())
    progress = load_rounded(run, model)
    return model, Tokenizer.from_file(str(run / "tokenizer.json")), progress


@torch.no_grad()
def generate(model: DemoModel, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    """Greedy continuations, prompts included; in BF16 arithmetic, which is faster and tips near-ties only."""
    rows = [list(p) for p in prompts]
    for _ in range(n_tokens):  # padded on the right, which a causal model does not see
        batch = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for i, row in enumerate(rows):
            batch[i, : len(row)] = torch.tensor(row)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (hidden,) = model.hidden(batch, 0)
            last = hidden[range(len(rows)), [len(row) - 1 for row in rows]]
            choices = model.logits(last).argmax(-1).tolist()
        for row, token in zip(rows, choices, strict=True):
            row.append(token)
    return rows


@torch.no_grad()
def acceptance(model: DemoModel, prompts: list[list[int]], n_tokens: int) -> str:
    """Accepted drafts per position and tokens per round of greedy speculative decoding at depth DEPTH.

    The text is that of plain greedy decoding. A draft counts only while all before it were right, so the
    head's choices along that text, which the model gives for all positions at once, are the drafts.
    """
    n_rounds, n_out, accepted = 0, 0, [0] * DEPTH
    for prompt, row in zip(prompts, generate(model, prompts, n_tokens), strict=True):
        right = [
            (x[0, :-1].argmax(-1) == torch.tensor(row[1:])).tolist()
            for x in model(torch.tensor([row]), DEPTH)[1:]
        ]
        last = len(prompt)  # the trunk's own first token, not yet decoded
        while last + DEPTH < len(row) - 1:
            n_right = 0
            while n_right < DEPTH and right[n_right][last + n_right]:
                accepted[n_right] += 1
                n_right += 1
            n_rounds, n_out, last = n_rounds + 1, n_out + 1 + n_right, last + 1 + n_right
    shares = " ".join(f"{n / n_rounds:.3f}" for n in accepted)
    return f"accepted per position {shares}  tokens per round {n_out / n_rounds:.2f}"


# --- export -------------------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> None:
    model, tokenizer, progress = load_trained(args.run)
    args.out.mkdir(parents=True, exist_ok=True)
    n_tensors = write_weights(args.out, model)
    write_json(args.out / "config.json", hf_config(model.c, tokenizer))
    write_json(args.out / "generation_config.json", generation_config(tokenizer))
    write_json(args.out / "tokenizer_config.json", tokenizer_config(tokenizer))
    tokenizer.save(str(args.out / "tokenizer.json"))
    prompts = held_out_prompts(tokenizer)
    (args.out / "heldout.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    shutil.copy(args.run / "training.log", args.out / "training.log")
    if args.references:
        write_references(args.references, model, tokenizer.encode(prompts[0]["prompt"]).ids[:24])
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"{args.out}: step {progress.step}, {n_tensors} tensors, {size / 1e6:.1f} MB")


def hf_config(c: Config, tokenizer: Tokenizer) -> dict:  # type: ignore[type-arg]
    fields = asdict(c)
    rope = {
        "rope_type": "default",
        "rope_theta": fields.pop("rope_theta"),
        "partial_rotary_factor": fields.pop("partial_rotary_factor"),
        "mrope_interleaved": True,
        "mrope_section": list(fields.pop("mrope_section")),
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **fields,
        "layer_types": c.layer_types,
        "rope_parameters": rope,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


def generation_config(tokenizer: Tokenizer) -> dict:  # type: ignore[type-arg]
    ends = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    return {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": ends,
        "pad_token_id": ends[-1],
    }


def tokenizer_config(tokenizer: Tokenizer) -> dict:  # type: ignore[type-arg]
    special = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for t in SPECIAL
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": special,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": Config().max_position_embeddings,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "unk_token": None,
    }


@torch.no_grad()
def write_references(path: Path, model: DemoModel, tokens: list[int]) -> None:
    """Writes the logits that the module docstring describes."""
    n = len(tokens)
    trunk = model(torch.tensor([tokens]))[0][0, n - 4 :]
    drafts, head = [], []
    for p in range(n - 4, n):
        row, logits = tokens[: p + 1], []
        for depth in range(1, DEPTH + 1):
            logits.append(model(torch.tensor([row]), depth)[depth][0, -1])
            row = [*row, int(logits[-1].argmax())]
        drafts.append(row[p + 1 :])
        head.append(torch.stack(logits))
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        tokens=np.array(tokens, np.int32),
        trunk=trunk.numpy(),
        drafts=np.array(drafts, np.int32),
        head=torch.stack(head).numpy(),
    )


# --- check --------------------------------------------------------------------------------------------------


@torch.no_grad()
def check(args: argparse.Namespace) -> None:
    """Compares the trunk's logits with transformers', on random weights; also with n_k != n_v heads."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    for n_key_heads in (6, 3):
        torch.manual_seed(args.seed)
        c = Config(linear_num_key_heads=n_key_heads)
        model = DemoModel(c)
        for p in model.parameters():
            p.copy_(p + 0.2 * torch.randn_like(p) if p.dim() == 1 else 3 * p)
        fields = asdict(c) | {"layer_types": c.layer_types, "tie_word_embeddings": True}
        rope = {k: fields.pop(k) for k in ("rope_theta", "partial_rotary_factor", "mrope_section")}
        fields["rope_parameters"] = {"rope_type": "default", "mrope_interleaved": True, **rope}
        reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).eval()
        reference.load_state_dict(model.state_dict(), strict=False)
        tokens = torch.randint(c.vocab_size, (2, 150))
        difference = (reference(tokens).logits - model(tokens)[0]).abs().max().item()
        print(
            f"{n_key_heads} key heads, {c.linear_num_value_heads} value heads: logits within {difference:.1e}"
        )
        if difference > 1e-4:
            raise SystemExit("error: the model is not transformers' Qwen3_5ForCausalLM")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("train", help="train, or go on training")
    p.add_argument("--run", type=Path, required=True, help="folder of the training state")
    p.add_argument(
        "--minutes", type=float, default=100.0, help="budget of training time, resumptions included"
    )
    p.add_argument(
        "--steps", type=int, help="budget in steps instead (the same weights on any machine's clock)"
    )
    p.add_argument("--batch", type=int, default=12, help=f"rows of {LENGTH} tokens in a step")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--head-weight", type=float, default=0.3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--kind", choices=KINDS, default="mtp", help="the head to train; mtp: with the trunk")
    p.add_argument(
        "--start", choices=tuple(HEADS), help="begin a head with the weights of a run of that kind"
    )
    p.set_defaults(call=lambda args: (train if args.kind == "mtp" else train_head)(args))
    p = commands.add_parser(
        "evaluate", help="acceptance of greedy speculative decoding on the held-out prompts"
    )
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--tokens", type=int, default=128)
    p.set_defaults(call=evaluate)
    p = commands.add_parser("export", help="write the checkpoint in Hugging Face form")
    p.add_argument("out", type=Path)
    p.add_argument("--run", type=Path, required=True)
    p.add_argument("--references", type=Path, metavar="NPZ", help="also write reference logits there")
    p.add_argument("--kind", choices=KINDS, default="mtp")
    p.set_defaults(call=lambda args: (export if args.kind == "mtp" else export_head)(args))
    p = commands.add_parser("check", help="compare the model with transformers'")
    p.add_argument("--seed", type=int, default=0)
    p.set_defaults(call=check)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
