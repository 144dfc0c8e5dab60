"""Trains a draft head of another kind than MTP for the demo model, which stands still: `train_demo.py train --kind ...`.

The head learns the target's own distributions on the text that the target was trained on, from anchors drawn at random (demo_heads.py).
What the target computes on that text is kept in the run's folder, `states.bin` (2.4 GB, to be deleted when the target is another), and
serves every kind; what belongs to one kind is in a folder of its name. `--start dflash` begins DSpark with what DFlash has learnt. Half
of a block drafter's steps are with blocks of any length, for pace may choose any depth.

`training.log` has, on held-out text: loss, how often each guess is the target's, how often it and all before it are, and L, tokens
a round.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import documents, encode, windows
from demo_heads import HEADS, Head
from demo_model import Config, DemoModel
from demo_training import load_rounded, log, n_parameters, numbers, run_training, write_json, write_weights
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

CHECKPOINT = Path(__file__).parents[2] / "sidecars" / "demo"
LENGTH = 256  # tokens of a training row
N_ROWS, N_HELD_OUT = 4000, 48
STORED = (1, 3, 4)  # layer inputs that are kept, the last after the final norm
FADING = 0.85  # weight of a guess beside that of the guess before it


class Texts:
    """Rows of text (n, LENGTH) and what the target computes there: (n, LENGTH, len(STORED), hidden) in F16."""

    def __init__(self, target: DemoModel, rows: np.ndarray, file: Path) -> None:
        self.rows = torch.from_numpy(np.ascontiguousarray(rows))
        shape = (*rows.shape, len(STORED), target.c.hidden_size)
        if not file.exists():
            self.compute(target, shape, file)
        self.states = np.memmap(file, np.float16, "r", shape=shape)

    @torch.no_grad()
    def compute(self, target: DemoModel, shape: tuple[int, ...], file: Path) -> None:
        part = file.with_suffix(".part")
        states = np.memmap(part, np.float16, "w+", shape=shape)
        for start in range(0, len(self.rows), 16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inputs = target.model.layer_inputs(target.model.embed_tokens(self.rows[start : start + 16]))
            states[start : start + 16] = torch.stack([inputs[i] for i in STORED], 2).half().numpy()
            if start % 256 == 0:
                print(f"# target: {start} of {len(self.rows)} rows", flush=True)
        states.flush()
        os.replace(part, file)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.rows[torch.from_numpy(indices)], torch.from_numpy(self.states[indices]).float()


def train_head(args: argparse.Namespace) -> None:
    run = args.run / args.kind
    run.mkdir(parents=True, exist_ok=True)
    target = frozen_target()
    texts, held_out = prepare(target, args)
    torch.manual_seed(args.seed)
    head = HEADS[args.kind]()
    if args.start:
        begin_with(head, args.run / args.start / "state.pt")
    args.step_tokens = args.batch * LENGTH
    weights = FADING ** torch.arange(head.n_drafts)
    log(
        run,
        f"# {args.kind}: {n_parameters(head)} parameters, layer inputs {head.target_layers}, {head.n_drafts} guesses",
    )

    def losses(step: int) -> Tensor:
        rng = np.random.default_rng((args.seed, step))
        tokens, states = texts.batch(np.sort(rng.choice(len(texts.rows), args.batch, replace=False)))
        n = head.n_drafts if rng.random() < 0.5 else int(rng.integers(head.n_shortest, head.n_drafts + 1))
        anchors = 1 + np.sort(rng.choice(LENGTH - 1 - n, head.n_anchors, replace=False))
        found, confidence, _ = compare(head, target, tokens, states, torch.from_numpy(anchors), n)
        return F.pad(found + confidence, (0, head.n_drafts - n))

    run_training(
        args, run, head, losses, weights / weights.sum(), lambda: held_out_line(head, target, held_out)
    )


def begin_with(head: Head, file: Path) -> None:
    """Takes over the weights of another kind's run; what that kind has not stays as it is."""
    if not file.exists():
        raise SystemExit(f"error: no {file} to start with: train that kind first")
    head.load_state_dict(torch.load(file, weights_only=True)["model"], strict=False)


def frozen_target() -> DemoModel:
    """The demo model as it is kept."""
    target = DemoModel(Config())
    target.load_state_dict(
        {name: p.float() for name, p in load_file(CHECKPOINT / "model.safetensors").items()}
    )
    return target.eval().requires_grad_(False)


def prepare(target: DemoModel, args: argparse.Namespace) -> tuple[Texts, Texts]:
    """The training text and held-out code."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    rows = windows(encode(tokenizer, documents(held_out=False)), LENGTH, args.seed)[:N_ROWS, :LENGTH]
    code = [d for d in documents(held_out=True) if d.kind == "code"]
    held_out = windows(encode(tokenizer, code), LENGTH, args.seed)[:N_HELD_OUT, :LENGTH]
    return (
        Texts(target, rows, args.run / "states.bin"),
        Texts(target, held_out, args.run / "held-out-states.bin"),
    )


def compare(
    head: Head, target: DemoModel, tokens: Tensor, states: Tensor, anchors: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (n) of the guesses and of the confidence in them, and which guesses (batch, A, n) are the target's first choice."""
    inputs = torch.cat([states[:, :, STORED.index(layer)] for layer in head.target_layers], -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, confidence = head.logits(target, tokens, inputs, anchors, n)
        with torch.no_grad():
            wanted = target.logits(states[:, anchors[:, None] + torch.arange(n), -1]).float()
    logits = logits.float()
    right = logits.argmax(-1) == wanted.argmax(-1)
    loss = (logits.logsumexp(-1) - (wanted.softmax(-1) * logits).sum(-1)).mean((0, 1))
    if confidence is None:
        return loss, torch.zeros(n), right
    judged = F.binary_cross_entropy_with_logits(confidence.float(), right.float(), reduction="none")
    return loss, judged.mean((0, 1)), right


@torch.no_grad()
def held_out_line(head: Head, target: DemoModel, texts: Texts) -> str:
    """Held-out loss and acceptance, as the module docstring says."""
    n, found = head.n_drafts, []
    anchors = torch.arange(1, LENGTH - n, 5)
    for indices in np.array_split(np.arange(len(texts.rows)), 6):
        loss, judged, right = compare(head, target, *texts.batch(indices), anchors, n)
        right = right.float()
        found.append(torch.stack((loss, right.mean((0, 1)), right.cumprod(-1).mean((0, 1)), judged)))
    loss, right, accepted, judged = torch.stack(found).mean(0)
    line = f"held-out  loss {numbers(loss)}  right {numbers(right)}  accepted {numbers(accepted)}  L {1 + accepted.sum():.2f}"
    return f"{line}  confidence {numbers(judged)}" if judged.any() else line


def export_head(args: argparse.Namespace) -> None:
    """Writes the head in Hugging Face form, its training.log with it."""
    run, head = args.run / args.kind, HEADS[args.kind]()
    progress = load_rounded(run, head)
    args.out.mkdir(parents=True, exist_ok=True)
    n_tensors = write_weights(args.out, head)
    write_json(args.out / "config.json", head.settings())
    shutil.copy(run / "training.log", args.out / "training.log")
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"{args.out}: step {progress.step}, {n_tensors} tensors, {size / 1e6:.1f} MB")
