"""Which tensor of a file gets which type: the choices of llama-quantize, as a table.

Facts: llama.cpp's src/llama-quant.cpp, whose function is named at each rule. Knows GGUF's names and keys; neither a
checkpoint nor bytes. Left out is what upstream does for models no family here converts (Falcon, GLM5-next, Llama of 80
layers, RWKV, encoders) and for types below Q2_K.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, LlamaFileType
from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.errors import UnknownType
from llama_sidecar.sidecars import keys

F16, F32, Q8_0 = GGMLType.F16, GGMLType.F32, GGMLType.Q8_0
Q4_0, Q4_1, Q5_0, Q5_1 = GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K
IQ4_NL, IQ4_XS = GGMLType.IQ4_NL, GGMLType.IQ4_XS


@dataclass(frozen=True)
class Model:
    """What of a model the choice of types depends on; `n_gqa` query heads share a key-value head in the first layer."""

    n_layers: int
    n_experts: int
    n_gqa: int


@dataclass(frozen=True)
class Site:
    """Where a tensor stands: the `i`-th of `n` with its role, in what model, with or without an importance matrix."""

    i: int
    n: int
    model: Model
    has_imatrix: bool


Where = Callable[[Site], bool]


def everywhere(site: Site) -> bool:
    return True


def first(count: int) -> Where:
    return lambda site: site.i < count


def first_part(parts: int) -> Where:
    return lambda site: site.i < site.n // parts


def ends_and_thirds(site: Site) -> bool:
    """The first and the last eighth and every third between: `use_more_bits`."""
    eighth = site.n // 8
    return site.i < eighth or site.i >= 7 * site.n // 8 or (site.i - eighth) % 3 == 2


def shared_four_times(site: Site) -> bool:
    return site.model.n_gqa >= 4


def of_eight_experts(site: Site) -> bool:
    return site.model.n_experts == 8


def with_imatrix(where: Where) -> Where:
    return lambda site: site.has_imatrix and where(site)


def without_imatrix(where: Where) -> Where:
    return lambda site: not site.has_imatrix and where(site)


# `tensor_get_category`: a tensor's role is the first whose pattern its name holds.
ROLES = {
    "output": re.compile(r"^output\.weight$"),
    "embeddings": re.compile(r"^(per_layer_)?token_embd\.weight$"),
    "head's vocabulary": re.compile(
        r"\.nextn\.(embed_tokens|shared_head_head)\.weight$"
    ),  # upstream: any matrix
    "value": re.compile(r"attn_(qkv|kv_b|v)\.weight"),
    "key": re.compile(r"attn_k\.weight"),
    "mixed": re.compile(r"attn_output\.weight"),
    "down": re.compile(r"ffn_down"),
}
Rules = tuple[tuple[GGMLType, Where], ...]  # the first that holds decides; else the type is the base


@dataclass(frozen=True)
class Mix:
    """A named type: the type of most matrices, and the rules for roles that suffer more from few bits.

    Matrices that the checkpoint stores in the type `keeps` are written as they are.
    """

    base: GGMLType
    file_type: LlamaFileType
    rules: Mapping[str, Rules] = field(default_factory=dict)
    keeps: GGMLType | None = None


# Rules of every type made of blocks, tried first.
ALWAYS: Mapping[str, Rules] = {"value": ((Q8_0, of_eight_experts),), "key": ((Q8_0, of_eight_experts),)}

# `llama_ftype_get_default_type`, and `llama_tensor_get_type_impl` for the rules.
_M = dict.fromkeys(("value", "down"), ((Q6_K, ends_and_thirds),))
_IQ4: dict[str, Rules] = {
    "value": ((Q5_K, shared_four_times),),
    "down": ((Q5_K, without_imatrix(first_part(8))),),
    "mixed": ((Q5_K, of_eight_experts),),
}
MIXES: Mapping[str, Mix] = {
    "F32": Mix(F32, LlamaFileType.ALL_F32),
    "F16": Mix(F16, LlamaFileType.MOSTLY_F16),
    "BF16": Mix(GGMLType.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": Mix(Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q6_K": Mix(Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "Q5_K_M": Mix(Q5_K, LlamaFileType.MOSTLY_Q5_K_M, _M),
    "Q5_K_S": Mix(Q5_K, LlamaFileType.MOSTLY_Q5_K_S),
    "Q4_K_M": Mix(Q4_K, LlamaFileType.MOSTLY_Q4_K_M, _M | {"mixed": ((Q5_K, of_eight_experts),)}),
    "Q4_K_S": Mix(
        Q4_K,
        LlamaFileType.MOSTLY_Q4_K_S,
        {
            "value": ((Q5_K, first(4)),),
            "down": ((Q5_K, first_part(8)),),
            "mixed": ((Q5_K, of_eight_experts),),
        },
    ),
    "Q5_0": Mix(Q5_0, LlamaFileType.MOSTLY_Q5_0, {"down": ((Q5_1, with_imatrix(first_part(8))),)}),
    "Q4_0": Mix(Q4_0, LlamaFileType.MOSTLY_Q4_0, {"down": ((Q4_1, with_imatrix(first_part(8))),)}),
    "IQ4_XS": Mix(IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS, _IQ4),
    "IQ4_NL": Mix(IQ4_NL, LlamaFileType.MOSTLY_IQ4_NL, _IQ4),
    "Q3_K_M": Mix(
        Q3_K,
        LlamaFileType.MOSTLY_Q3_K_M,
        {
            "value": ((Q5_K, first(2)), (Q4_K, everywhere)),
            "down": ((Q5_K, first_part(16)), (Q4_K, everywhere)),
            "mixed": ((Q5_K, of_eight_experts), (Q4_K, everywhere)),
        },
    ),
    "Q2_K": Mix(
        Q2_K,
        LlamaFileType.MOSTLY_Q2_K,
        {
            "value": ((Q4_K, shared_four_times), (Q3_K, everywhere)),
            "down": ((Q3_K, everywhere),),
            "mixed": ((Q5_K, of_eight_experts), (Q3_K, everywhere)),
        },
    ),
}
TYPES = tuple(MIXES)

# Types of quantised checkpoints that GGUF has too: what is stored in them is kept, the rest is Q8_0.
KEPT: Mapping[str, Mix] = {
    "NVFP4": Mix(Q8_0, LlamaFileType.MOSTLY_NVFP4, keeps=GGMLType.NVFP4),
    "MXFP4": Mix(Q8_0, LlamaFileType.MOSTLY_MXFP4_MOE, keeps=GGMLType.MXFP4),
}
KEPT_TYPES = tuple(KEPT)

# `tensor_type_fallback`: what a row takes that is no whole number of blocks; F16 where that does not fit either.
FALLBACK = {IQ4_XS: IQ4_NL, Q2_K: Q4_0, Q3_K: Q4_0, Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}

# `tensor_allows_quantization`, beside what the converter never writes as anything but F32 (keys.ALWAYS_F32).
NOT_QUANTIZED = re.compile(
    r"_norm\.weight|ssm_conv1d|shortconv\.conv\.weight|altup|laurel|per_layer_model_proj|indexer\.[kq]_proj\.weight"
)

PER_LAYER_PROJ = "per_layer_model_proj.weight"


@dataclass(frozen=True)
class Recipe:
    """The types of one file's tensors. `name` appears in the file's name.

    `vocabulary` is the type of the matrices with a row for every token; None leaves them to llama-quantize's rule.
    """

    name: str
    mix: Mix
    vocabulary: GGMLType | None = None

    @property
    def base(self) -> GGMLType:
        return self.mix.base

    @property
    def file_type(self) -> int:
        return int(self.mix.file_type)

    def types(
        self, tensors: Iterable[tuple[str, Sequence[int]]], model: Model, has_imatrix: bool = False
    ) -> dict[str, GGMLType]:
        """The type of every tensor of a file, given as names and shapes (slowest first), after llama-quantize's rules.

        >>> main_recipe("Q4_K_M").types([("blk.0.attn_v.weight", (256, 1024))], Model(1, 0, 4))
        {'blk.0.attn_v.weight': <GGMLQuantizationType.Q6_K: 14>}
        """
        shapes = dict(tensors)
        tied = keys.OUTPUT not in shapes
        n_values = sum(role_of(name) == "value" for name in shapes)
        seen: Counter[str] = Counter()
        found = dict.fromkeys(shapes, F32)
        for layer, name in sorted((_layer(name), name) for name in shapes):  # llama.cpp's order
            if not self._is_quantized(name, shapes[name]):
                continue
            role, n_cols = role_of(name), shapes[name][-1]
            if not self._has_blocks:
                kind = self.mix.base
            elif role in ("output", "embeddings", "head's vocabulary"):
                kind = self._of_vocabulary(role == "output" or (role == "embeddings" and tied), n_cols)
            else:
                # With experts the layer counts, else the tensors before it: not every layer need have one (`layer_info`).
                i = layer if role == "down" and model.n_experts > 1 else seen[role]
                n = model.n_layers if role == "down" else n_values
                kind = self._by_rules(role, Site(i, n, model, has_imatrix))
            seen[role] += 1
            found[name] = _fitting(kind, n_cols)
        return found

    @property
    def _has_blocks(self) -> bool:
        return bits_per_weight(self.mix.base) < 16

    def _is_quantized(self, name: str, shape: Sequence[int]) -> bool:
        if len(shape) < 2 or not name.endswith(".weight") or name.endswith(keys.ALWAYS_F32):
            return False
        is_matrix = prod(shape[:-1]) > 1
        if self.mix.base == Q8_0 and name == PER_LAYER_PROJ:  # convert_hf_to_gguf.py's choice
            return True
        return not self._has_blocks or (is_matrix and not NOT_QUANTIZED.search(name))

    def _of_vocabulary(self, serves_as_output: bool, n_cols: int) -> GGMLType:
        """The output gets Q6_K or better, and so do the embeddings where they serve as the output."""
        if self.vocabulary is not None:
            return self.vocabulary
        if not serves_as_output:
            return self.mix.base
        if self.mix.base == Q8_0 or n_cols % GGML_QUANT_SIZES[self.mix.base][0]:
            return Q8_0
        return Q6_K

    def _by_rules(self, role: str, site: Site) -> GGMLType:
        rules = (*ALWAYS.get(role, ()), *self.mix.rules.get(role, ()))
        return next((kind for kind, where in rules if where(site)), self.mix.base)


def main_recipe(name: str) -> Recipe:
    """A named type for a main file, or one of KEPT_TYPES. Raises UnknownType."""
    return Recipe(name, KEPT.get(name) or _known(name))


def sidecar_recipe(name: str | None, *, may_keep: bool = False) -> Recipe:
    """A named type for a sidecar; by default Q8_0 with the vocabulary's matrices at Q4_0. Raises UnknownType.

    `may_keep`: there is a checkpoint, so that it may be one of KEPT_TYPES.

    Unlike llama-quantize's, the output is not of a wider type than the rest: a draft that differs now and then costs
    speed and nothing else, and those matrices are most of a sidecar.
    """
    if name is None:
        return Recipe(Q8_0.name, MIXES[Q8_0.name], Q4_0)
    mix = (KEPT.get(name) if may_keep else None) or _known(name)
    return Recipe(name, mix, mix.base)


def head_warnings(tensors: Mapping[str, tuple[GGMLType, int]]) -> list[str]:
    """What the types of a sidecar's tensors (name -> type, number of values) may cost: a block below Q4_K is remarked on.

    Types of four bits count as level with Q4_K: the demo model's head drafts as well with them (docs/PERFORMANCE.md).
    """
    low = [
        (kind, n)
        for name, (kind, n) in tensors.items()
        if name.startswith("blk.") and bits_per_weight(kind) < 4
    ]
    if not low:
        return []
    names = " and ".join(sorted({kind.name for kind, _ in low}))
    saved = sum((bits_per_weight(Q4_K) - bits_per_weight(kind)) * n / 8 for kind, n in low)
    return [
        f"the head's block is at {names}, below Q4_K: fewer of its drafts will be accepted, which costs speed and never "
        f"the text, and {saved / 1e6:.1f} MB are saved; the converter writes Q8_0 unasked"
    ]


def model_of(arch: str, file_keys: Mapping[str, Any]) -> Model:
    """What a file's keys say of the model; of what differs by layer, the first layer's value counts."""

    def value(name: str, default: int) -> int:
        found = file_keys.get(f"{arch}.{name}", default)
        return int(found if isinstance(found, int) else found[0])

    n_heads = value("attention.head_count", 0)
    n_kv_heads = value("attention.head_count_kv", n_heads)
    return Model(
        n_layers=value("block_count", 0),
        n_experts=value("expert_count", 0),
        n_gqa=n_heads // n_kv_heads if n_kv_heads else 0,
    )


def role_of(name: str) -> str:
    return next((role for role, pattern in ROLES.items() if pattern.search(name)), "other")


def bits_per_weight(kind: GGMLType) -> float:
    n_values, n_bytes = GGML_QUANT_SIZES[kind]
    return float(8 * n_bytes / n_values)


def _known(name: str) -> Mix:
    if name not in MIXES:
        raise UnknownType(f"the type asked for is {name!r}; expected one of {', '.join(TYPES)}")
    return MIXES[name]


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _fitting(kind: GGMLType, n_cols: int) -> GGMLType:
    """The type, or the next one whose blocks fill a row of `n_cols` values."""
    for fits in (kind, FALLBACK.get(kind, kind)):
        if n_cols % GGML_QUANT_SIZES[fits][0] == 0:
            return fits
    return F16
