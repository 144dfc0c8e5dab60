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
KINDS = (
    "mtp, T",
    "mtp, R",
    "mtp, W",
    "mtp, compact",
    "eagle3",
    "dflash",
    "dflash2",
    "dspark",
    "assistant",
    "model",
    "ngram",
)
HYBRID = (
    "mtp, R",
    "eagle3",
    "dflash",
    "dflash2",
    "dspark",
    "model",
    "ngram",
)  # draft for hybrid targets, too
ALWAYS = tuple(kind for kind in KINDS if kind != "ngram")  # draft in every round, whatever the text is
_LAYERS = (1, 2, 3)


def write_kind(kind: str, folder: Path, *, hybrid: bool = False) -> tuple[Path, dict[str, Any]]:
    """The main file, with its drafter beside it or named in the options of `load`; `hybrid`, of a kind in HYBRID, is R's target."""
    if kind == "mtp, W":
        result = convert(make_checkpoint(folder, "mimo2", "joined"), folder / "out", "Q8_0", "Q8_0")
        assert result.main
        return result.main, {"draft_vocab": "full"}
    if kind in ("mtp, T", "mtp, R", "mtp, compact"):
        main = models.write_pair(folder, recurrent=kind == "mtp, R", type=drafts.T.Q8_0).main
        return main, {"draft_vocab": 100 if kind == "mtp, compact" else "full"}
    if kind == "assistant":
        checkpoint = make_target(folder, "gemma4_assistant")
        draft = make_draft(folder, "gemma4_assistant", "plain", checkpoint)
        whole = convert(checkpoint, folder / "out", "Q8_0").main
        assert whole
        return whole, {"sidecar": convert(draft, folder / "out", None, "Q8_0", target=checkpoint).sidecar}
    if kind == "ngram":
        return models.write_pair(folder, recurrent=hybrid, type=drafts.T.Q8_0).main, {"spec_type": "ngram"}
    if kind == "model":
        main = models.write_pair(folder, recurrent=hybrid, type=drafts.T.Q8_0).main
        return main, {"sidecar": write_near(folder / "draft", recurrent=hybrid)}
    main = drafts.write_target(folder, "qwen35" if hybrid else "qwen3")
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
