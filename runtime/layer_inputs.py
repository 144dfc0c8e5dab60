"""Which models hand out what drafters read of them: inputs of layers (EAGLE3, DFlash, DSpark), or their cache (an assistant).

llama.cpp ends the process when it is asked for a layer that a model's graph does not hand out, and has no function that tells.
So the architectures are listed here, from its sources (src/models/*.cpp of the version that llama-cpp-python 0.3.36 carries).
"""

from __future__ import annotations

from typing import Any

from llama_sidecar.sidecars import GGUFHeader, MainFile, Sidecar
from llama_sidecar.sidecars.compact import Compact
from llama_sidecar.sidecars.kinds import KINDS

from .errors import LoadError

# `t_layer_inp[il]` is set for every layer.
LAYER_INPUTS = frozenset(
    [
        "bailingmoe3",
        "deepseek4",
        "gemma4",
        "gpt-oss",
        "hunyuan-dense",
        "hunyuan_vl",
        "lfm2",
        "lfm2moe",
        "llama",
        "mimo2",
        "minimax-01",
        "minimax-m2",
        "muse-glimmer",
        "nanbeige",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3",
        "qwen3moe",
        "qwen3next",
        "qwen4exp",
    ]
)
# What follows the last layer: `t_layer_inp[n_layer]`, and `t_h_nextn`, which EAGLE3 takes for it.
LAST_INPUT = frozenset(["deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"])
LAST_HIDDEN = frozenset(
    [
        "bailingmoe3",
        "cohere2moe",
        "deepseek2",
        "deepseek32",
        "deepseek4",
        "gemma4",
        "glm-dsa",
        "glm4moe",
        "gpt-oss",
        "hy_v3",
        "mimo2",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "step35",
    ]
)


def check_layer_inputs(main: MainFile, sidecar: Sidecar | Compact) -> None:
    """Checks that llama.cpp hands out what the sidecar's drafter reads of the main model.

    Raises:
        LoadError: it does not; both files are named.

    Example:
        >>> check_layer_inputs(open_main("NAME.gguf"), open_sidecar("eagle3-NAME.gguf"))    # doctest: +SKIP
    """
    layers = sidecar.target.layers
    if not layers:
        return
    kind = KINDS[sidecar.kind]
    last = LAST_HIDDEN if kind.last_is_hidden_row else LAST_INPUT
    missing = [
        layer for layer in layers if main.arch not in (LAYER_INPUTS if layer < main.n_layers else last)
    ]
    if missing:
        raise LoadError(
            f"{sidecar.path} drafts from the inputs of layers {', '.join(map(str, layers))}, and llama.cpp does not hand out "
            f"{'those' if missing == list(layers) else f'that of layer {missing[0]}'} of {main.path} ({main.arch}): "
            f"use a sidecar of another kind"
        )


WINDOWS = "attention.sliding_window_pattern"


def check_shared_cache(main: MainFile, sidecar: Sidecar | Compact) -> None:
    """Checks that an assistant's layers can attend to the main model's cache, as llama.cpp maps them: those with a window to its
    last layer but one, the others to its last. It ends the process where their heads differ.

    Raises:
        LoadError: they cannot; both files are named.

    Example:
        >>> check_shared_cache(open_main("gemma-4.gguf"), open_sidecar("mtp-gemma-4.gguf"))    # doctest: +SKIP
    """
    last = {True: main.n_layers - 2, False: main.n_layers - 1}
    for is_windowed, layer in last.items():
        if layer < 0 or bool(_of_layer(main.header, WINDOWS, layer)) != is_windowed:
            raise LoadError(
                f"{sidecar.path} attends to the cache of {main.path}, whose last two layers are not one with a window and one "
                f"without: llama.cpp shares no others; leave the sidecar out"
            )
    for layer in range(sidecar.header.uint("{arch}.block_count")):
        is_windowed = bool(_of_layer(sidecar.header, WINDOWS, layer))
        for name in ("head_count_kv", *(f"{part}_length{'_swa' * is_windowed}" for part in ("key", "value"))):
            ours = _of_layer(main.header, f"attention.{name}", last[is_windowed])
            theirs = _of_layer(sidecar.header, f"attention.{name}", layer)
            if ours != theirs:
                raise LoadError(
                    f"{sidecar.path} attends to the cache of {main.path}, and their heads differ: attention.{name} is {theirs} "
                    f"there and {ours} here; use the assistant that was made for this model"
                )


def _of_layer(header: GGUFHeader, name: str, layer: int) -> Any:
    """A key that is one value for all layers, or one for each; None where it is absent."""
    value: Any = header.keys.get(f"{header.arch}.{name}")
    if not hasattr(value, "__len__"):
        return value
    return value[layer] if layer < len(value) else None
