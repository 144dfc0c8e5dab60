"""What a draft head is made of, and what a draft costs: the account that is given before anything is written.

A decode of one row reads every weight that takes part once, and on the machines this is for that is what it costs. So the share
c of a draft step in a pass over the model is that of the bytes read, and with each draft standing at chance a a round of k drafts is

    E(k) / (v(k + 1) + k c),   E(k) = 1 + a + ... + a^k

times as fast as plain decoding (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023). v(n), what n
rows read over what one reads, is 1 but for experts: each row chooses its own, n rows E (1 - (1 - u/E)^n) of E with u used by one.
That is a bound: `llama-sidecar predict` measures a machine. Knows tensors' names and sizes; no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from llama_sidecar.converter.families import Layout
from llama_sidecar.converter.plan import Planned
from llama_sidecar.sidecars import compact, keys
from llama_sidecar.sidecars.memory import AUTO_DEPTH as MAX_DEPTH
from llama_sidecar.sidecars.memory import Contents, Memory, Size, pair_memory

EXPERTS = "_exps."
VOCABULARY = (keys.TOKEN_EMBD, keys.OUTPUT)
OWN_OUTPUT = ".nextn.shared_head_head.weight"
OWN_VOCABULARY = (".nextn.embed_tokens.weight", OWN_OUTPUT)
OUTPUTS = (
    ".nextn.shared_head_head.weight",
    keys.OUTPUT,
    keys.TOKEN_EMBD,
)  # what a head's last product is with, the first there is


@dataclass(frozen=True)
class Parts:
    """How many values each part of a head has; `own_vocabulary` counts embeddings and output that are not the trunk's."""

    projection: int
    block: int
    experts: int
    own_vocabulary: int
    n_blocks: int
    trunk: int

    @property
    def total(self) -> int:
        return self.projection + self.block + self.experts + self.own_vocabulary

    @property
    def share(self) -> float:
        """Of the trunk's values."""
        return self.total / self.trunk


def parts_of(layout: Layout) -> Parts:
    """The parts of a layout's head, and the size of its trunk with embeddings and output."""
    found = dict.fromkeys(("projection", "block", "experts", "own_vocabulary"), 0)
    for placement in layout.head:
        found[_part(placement.name)] += prod(placement.shape)
    trunk = sum(prod(p.shape) for p in layout.shared + layout.trunk)
    return Parts(**found, n_blocks=layout.n_head_layers, trunk=trunk)


def _part(name: str) -> str:
    if name.endswith(OWN_VOCABULARY):
        return "own_vocabulary"
    if ".nextn." in name:
        return "projection"
    return "experts" if EXPERTS in name else "block"


@dataclass(frozen=True)
class Drafting:
    """What a draft step and a pass over the model read, in bytes, and the speed-up that follows at an acceptance.

    `n_rows` are those of the vocabulary that are drafted with; `row_costs` is v(1), v(2), ...; `speedups` is by depth, from 0 on.
    """

    step_bytes: int
    pass_bytes: int
    n_rows: int
    row_costs: list[float]
    acceptance: float

    @property
    def share(self) -> float:
        return self.step_bytes / self.pass_bytes

    @property
    def speedups(self) -> list[float]:
        a = self.acceptance
        return [
            sum(a**i for i in range(k + 1)) / (self.row_costs[k] + k * self.share)
            for k in range(MAX_DEPTH + 1)
        ]

    @property
    def depth(self) -> int:
        """The best one."""
        return max(range(MAX_DEPTH + 1), key=lambda k: self.speedups[k])


def drafting(
    main: Sequence[Planned],
    sidecar: Sequence[Planned],
    arch: str,
    main_keys: Mapping[str, Any],
    n_blocks: int,
    acceptance: float,
) -> Drafting:
    """From the tensors of both files as they are planned."""
    n_experts = int(main_keys.get(f"{arch}.expert_count", 0))
    n_used = int(main_keys.get(f"{arch}.expert_used_count", n_experts))
    used = n_used / n_experts if n_experts else 1.0
    n_vocab = next(t.n_rows for t in main if t.name == keys.TOKEN_EMBD)
    n_rows = compact.default_n_rows(n_vocab) or n_vocab

    experts = sum(t.n_bytes for t in main if EXPERTS in t.name)
    rest = sum(t.n_bytes for t in main if EXPERTS not in t.name and t.name != keys.TOKEN_EMBD)
    if not any(t.name == keys.OUTPUT for t in main):
        rest += next(t.n_bytes for t in main if t.name == keys.TOKEN_EMBD)
    block = sum(
        t.n_bytes * (used if EXPERTS in t.name else 1)
        for t in sidecar
        if t.name.startswith("blk.") and not t.name.endswith(OWN_VOCABULARY)
    )
    own = [t.name for t in sidecar if t.name.endswith(OWN_OUTPUT)]
    matrices = {t.name: t for t in sidecar}
    output = next(matrices[name] for name in (*own, keys.OUTPUT, keys.TOKEN_EMBD) if name in matrices)
    row_costs = [
        (rest + experts * (1 - (1 - used) ** n)) / (rest + experts * used) for n in range(1, MAX_DEPTH + 2)
    ]
    return Drafting(
        step_bytes=int(block / max(1, n_blocks)) + n_rows * output.row_bytes,
        pass_bytes=int(rest + experts * used),
        n_rows=n_rows,
        row_costs=row_costs,
        acceptance=acceptance,
    )


def memory_of(
    main: Iterable[Planned],
    sidecar: Iterable[Planned],
    arch: str,
    main_keys: Mapping[str, Any],
    head_keys: Mapping[str, Any],
    n_ctx: int,
    *,
    drafter_arch: str | None = None,
) -> Memory:
    """What the planned files take when they run with the runtime's defaults.

    `drafter_arch` is that of a drafter which is a model of its own: of its vocabulary no row is left out.
    """
    is_head = drafter_arch is None
    of_main, of_head = _contents(arch, main_keys, main), _contents(drafter_arch or arch, head_keys, sidecar)
    return pair_memory(
        of_main if of_main.tensors else None, of_head if of_head.tensors else None, n_ctx, is_head=is_head
    )


def _contents(arch: str, file_keys: Mapping[str, Any], tensors: Iterable[Planned]) -> Contents:
    sizes = {t.name: Size(t.shape[-2] if len(t.shape) > 1 else 0, t.n_bytes) for t in tensors}
    return Contents(arch, file_keys, sizes)
