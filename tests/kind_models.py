"""A tiny target with a drafter of every kind: what must hold for all of them is tested for all of them.

W, the target with a sliding window (of 5), is MiMo-V2 in shape; its head is a chain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafts
import models
import numpy as np
from checkpoints import make_checkpoint
from draft_checkpoints import make_draft, make_target

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Model, load

PROMPT = list(range(20, 60))
OF_LAYERS = ("qwen3", "llama", "qwen35")  # the targets of kinds that read the target's layers
OF_ANY = ("glm4moe", "qwen35", "qwen3", "llama")
# Kind -> the architectures of its targets here, first the one that it has unless another is asked for. A family's own drafter
# has that family's; MTP heads of all families are in test_families.py.
TARGETS = {
    "mtp, T": ("glm4moe",),
    "mtp, R": ("qwen35",),
    "mtp, W": ("mimo2",),
    "mtp, compact": ("glm4moe", "qwen35"),
    "eagle3": OF_LAYERS,
    "dflash": OF_LAYERS,
    "dflash2": OF_LAYERS,
    "dspark": OF_LAYERS,
    "assistant": ("gemma4",),
    "model": OF_ANY,
    "ngram": OF_ANY,
}
KINDS = tuple(TARGETS)
ON_TARGETS = tuple((kind, target) for kind, targets in TARGETS.items() for target in targets)
HYBRID = tuple(kind for kind, target in ON_TARGETS if target == "qwen35")  # draft for hybrid targets, too
ALWAYS = tuple(kind for kind in KINDS if kind != "ngram")  # draft in every round, whatever the text is
_LAYERS = (1, 2, 3)


def write_kind(kind: str, folder: Path, target: str | None = None) -> tuple[Path, dict[str, Any]]:
    """The main file, with its drafter beside it or named in the options of `load`; `target` is one of the kind's TARGETS."""
    target = target or TARGETS[kind][0]
    if kind == "mtp, W":
        result = convert(make_checkpoint(folder, "mimo2", "joined"), folder / "out", "Q8_0", "Q8_0")
        assert result.main
        return result.main, {"draft_vocab": "full"}
    if kind in ("mtp, T", "mtp, R", "mtp, compact"):
        return write_main(folder, target), {"draft_vocab": 100 if kind == "mtp, compact" else "full"}
    if kind == "assistant":
        checkpoint = make_target(folder, "gemma4_assistant")
        draft = make_draft(folder, "gemma4_assistant", "plain", checkpoint)
        whole = convert(checkpoint, folder / "out", "Q8_0").main
        assert whole
        return whole, {"sidecar": convert(draft, folder / "out", None, "Q8_0", target=checkpoint).sidecar}
    main = write_main(folder, target)
    if kind == "ngram":
        return main, {"spec_type": "ngram"}
    if kind == "model":
        if target in ("glm4moe", "qwen35"):
            return main, {"sidecar": write_near(folder / "draft", recurrent=target == "qwen35")}
        return main, {"sidecar": drafts.write_target(folder / "draft", target, drafts.T.Q4_0)}
    for head in folder.glob("mtp-*"):  # it would come first
        head.unlink()
    if kind == "eagle3":
        fc = drafts.fitted_fc(main, PROMPT, _LAYERS, ahead=2)
        drafts.write_eagle3(folder, layers=_LAYERS, scale=0.2, fc=fc)
    elif kind == "dspark":
        text = drafts.greedy_text(main, PROMPT, 80)
        drafts.write_dflash(folder, markov=True, text=text)
    else:
        drafts.write_dflash(folder, selector=kind == "dflash2")
    return main, {}


def write_main(folder: Path, target: str) -> Path:
    """A target of OF_ANY."""
    if target == "glm4moe":
        return models.write_pair(folder, recurrent=False, type=drafts.T.Q8_0).main
    return drafts.write_target(folder, target)


def write_near(folder: Path, *, recurrent: bool) -> Path:
    """A draft model that is the target of models.py but for noise, so that most of what it drafts stands."""
    rng = np.random.default_rng(7)

    def edit(tensors: dict[str, np.ndarray]) -> None:
        for name, data in tensors.items():
            if data.ndim == 2:
                noise = 0.05 * np.abs(data).mean() * rng.standard_normal(data.shape)
                tensors[name] = (data + noise).astype(np.float32)

    return models.write_pair(folder, recurrent=recurrent, edit=edit, type=drafts.T.Q8_0).main


def open_kind(main: Path, options: dict[str, Any], **more: Any) -> Model:
    """Loads it on one thread, where Q8_0 rows are equal to the bit at every width."""
    return load(main, **{"ctx": 256, "threads": 1, "depth": 4, "learn": False, **options, **more})
