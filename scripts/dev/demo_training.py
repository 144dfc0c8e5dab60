"""What the trainings of the demo's trunk and heads share: budget, learning rate, optimizer, log, and states to go on from.

`run_training` is the loop. It knows neither the models nor the text: it is given the losses of a step and a line on held-out text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WARM_UNTIL = 0.1  # part of the budget in which the learning rate rises
DECAY_FROM = 0.78  # and after which it falls
LOG_STEPS, HELD_OUT_STEPS, SAVE_SECONDS = 20, 200, 180


@dataclass
class Progress:
    step: int = 0
    seconds: float = 0.0  # spent training, over all resumptions


def run_training(
    args: argparse.Namespace,
    run: Path,
    model: torch.nn.Module,
    losses: Callable[[int], Tensor],
    weights: Tensor,
    held_out_line: Callable[[], str],
) -> None:
    """Trains `model` until the budget is spent, from the state in the folder `run` if there is one.

    `losses(step)` are several (n), the sum of which, with `weights` (n), is minimised. `args` has lr, steps, minutes and
    step_tokens, the tokens in a step.
    """
    optimizer = make_optimizer(model, args.lr)
    progress = load_state(run, model, optimizer)
    log(run, f"# from step {progress.step}: {args.step_tokens} tokens a step")
    last_save = last_log = time.monotonic()
    while (part := spent(progress, args)) < 1.0:
        started = time.monotonic()
        set_rate(optimizer, args.lr * schedule(part))
        found = losses(progress.step)
        (found * weights).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        now = time.monotonic()
        if progress.step > 1:  # the first one compiles
            progress.seconds += min(now - started, 10.0)
        if progress.step % LOG_STEPS == 0:
            rate = optimizer.param_groups[0]["lr"]
            done = f"step {progress.step:5d}  {progress.step * args.step_tokens / 1e6:6.2f} M tokens"
            speed = f"{LOG_STEPS * args.step_tokens / (now - last_log):.0f} tok/s"
            state = f"lr {rate:.2e}  loss {numbers(found)}  norm {norm:.2f}"
            log(run, f"{done}  {progress.seconds / 60:5.1f} min  {state}  {speed}")
            last_log = now
        if progress.step % HELD_OUT_STEPS == 0:
            log(run, held_out_line())
        if now - last_save > SAVE_SECONDS:
            save_state(run, model, optimizer, progress)
            last_save = time.monotonic()
    log(run, held_out_line())
    save_state(run, model, optimizer, progress)


def make_optimizer(model: torch.nn.Module, rate: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def spent(progress: Progress, args: argparse.Namespace) -> float:
    """Part of the budget used up, 0 to 1: of the steps if they were given, else of the minutes."""
    return progress.step / args.steps if args.steps else progress.seconds / (60.0 * args.minutes)


def schedule(part: float) -> float:
    """Warm-up, constant, then 1 - sqrt(part of the decay) (Hägele et al. 2024, arXiv:2405.18392)."""
    warm = min(1.0, part / WARM_UNTIL)
    return warm * (1.0 if part < DECAY_FROM else 1.0 - ((part - DECAY_FROM) / (1.0 - DECAY_FROM)) ** 0.5)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def numbers(values: Tensor) -> str:
    return " ".join(f"{v:.3f}" for v in values.tolist())


def n_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def log(run: Path, line: str) -> None:
    print(line, flush=True)
    with open(run / "training.log", "a") as f:
        f.write(line + "\n")


def save_state(
    run: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    torch.save(state, run / "state.tmp")
    os.replace(run / "state.tmp", run / "state.pt")


def load_state(run: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    if not (run / "state.pt").exists():
        return Progress()
    state = torch.load(run / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer:
        optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def load_rounded(run: Path, model: torch.nn.Module) -> Progress:
    """Loads the state of a run with its weights rounded to BF16, as they are exported, in F32."""
    progress = load_state(run, model)
    if progress.step == 0:
        raise SystemExit(f"error: no state.pt in {run}: train first")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    model.eval()
    return progress


def write_json(path: Path, value: dict) -> None:  # type: ignore[type-arg]
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_weights(folder: Path, model: torch.nn.Module) -> int:
    """Writes model.safetensors in BF16; returns how many tensors there are."""
    file = folder / "model.safetensors"
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, f"{file}.tmp", metadata={"format": "pt"})
    os.replace(f"{file}.tmp", file)
    os.chmod(file, 0o644)
    return len(tensors)
