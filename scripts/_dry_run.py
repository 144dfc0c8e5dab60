"""What a conversion would do, as text for people. No command itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llama_sidecar.converter import DryRun
from llama_sidecar.sidecars.errors import printable

MAX_NAMES = 3  # of tensors dropped, shown as examples


def summary(found: DryRun) -> str:
    """The files, the head, memory, drafting and the tensors, each a block of lined-up rows under its title."""
    what = "its configuration alone" if found.from_config else "its headers and tokenizer"
    blocks: list[tuple[str, list[tuple[str, ...]]]] = [
        (f"{found.checkpoint} ({found.arch}), from {what}", [])
    ]
    blocks += [
        (title, rows)
        for title, rows in (
            ("files", list(_files(found))),
            ("head", list(_head(found))),
            (f"memory with {found.memory.n_ctx:,} tokens of context", list(_memory(found))),
            ("drafting", list(_drafting(found))),
            ("tensors", list(_tensors(found))),
        )
        if rows
    ]
    return "\n\n".join(
        printable(title) + "".join(f"\n{line}" for line in _lined_up(rows)) for title, rows in blocks
    )


def _files(found: DryRun) -> Iterator[tuple[str, ...]]:
    for file in found.files:
        about = "about " if file.role == "compact" or found.from_config else ""
        types = ", ".join(f"{_size(n)} {name}" for name, n in file.types.items())
        there = ", already there" if file.exists else ""
        yield (
            file.role,
            f"{about}{_size(file.n_bytes)}",
            f"{file.path}{there}",
            f"{file.n_tensors} tensors: {types}",
        )
    needed = sum(file.n_bytes for file in found.files)
    if needed > found.free_bytes:
        yield "room", _size(found.free_bytes), f"is free: {_size(needed - found.free_bytes)} too little", ""
    if found.checkpoint_bytes:
        yield (
            "read",
            _size(found.read_bytes),
            f"of the checkpoint's {_size(found.checkpoint_bytes)} for this",
            "",
        )


def _head(found: DryRun) -> Iterator[tuple[str, ...]]:
    head = found.head
    if head is None:
        if not any(file.role == "sidecar" for file in found.files):
            yield "none", "", "the main file alone is written"
        return
    yield "projection", _count(head.projection), "joins a token's embedding with the hidden row before it"
    blocks = "one block" if head.n_blocks == 1 else f"{head.n_blocks} blocks"
    yield "block", _count(head.block), f"{blocks}: attention, norms, and what is no expert"
    if head.experts:
        yield "experts", _count(head.experts), ""
    own = "copies of its own" if head.own_vocabulary else "shared with the trunk"
    yield "embeddings, output", _count(head.own_vocabulary), own
    yield "in all", _count(head.total), f"{100 * head.share:.1f} % of the trunk's {_count(head.trunk)}"


def _memory(found: DryRun) -> Iterator[tuple[str, ...]]:
    memory = found.memory
    if memory.main:
        yield "main", _size(memory.main), f"and {_size(memory.main_cache)} for keys and values"
    if memory.states:
        yield "states", _size(memory.states), "of recurrent layers, with those that drafts are taken back to"
    if memory.head:
        rows = f"{found.drafting.n_rows:,} rows of its vocabulary, " if found.drafting else ""
        yield "head", _size(memory.head), f"{rows}and {_size(memory.head_cache)} for its cache"
    yield "buffers", f"about {_size(memory.buffers + memory.other)}", "what decodes compute in, vocabularies"
    yield "in all", f"about {_size(memory.total)}", "" if memory.main else "without the main file"


def _drafting(found: DryRun) -> Iterator[tuple[str, ...]]:
    cost = found.drafting
    if cost is None:
        return
    yield "a pass reads", _size(cost.pass_bytes), "of the main file"
    yield "a draft reads", _size(cost.step_bytes), f"of the head: {100 * cost.share:.1f} % of a pass"
    best = cost.speedups[cost.depth]
    gain = f"{best:.2f} times as fast" if cost.depth else "drafting does not pay"
    yield (
        f"acceptance {cost.acceptance:g}",
        gain,
        f"at best, {cost.depth} drafts a round; `llama-sidecar predict` measures this machine"
        if cost.depth
        else "",
    )


def _tensors(found: DryRun) -> Iterator[tuple[str, ...]]:
    for how, tensors in found.kinds().items():
        first = tensors[0]
        source = first.sources[0] if first.sources else "config.json"
        more = f" and {len(first.sources) - 1} more" if len(first.sources) > 1 else ""
        yield (
            how,
            str(len(tensors)),
            f"{source}{more} -> {first.name}" + (", ..." if len(tensors) > 1 else ""),
        )
    for what, names in (
        ("dropped", found.dropped),
        ("missing", found.mismatch.missing),
        ("unplaced", found.mismatch.unplaced),
        ("misshapen", list(found.mismatch.misshapen.values())),
    ):
        yield what, str(len(names)), _some(names)


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])])


def _lined_up(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(2)] if lines else []
    for label, number, *rest in lines:
        text = "  ".join(filter(None, rest))
        yield f"  {label:{widths[0]}}  {number:>{widths[1]}}  {text}".rstrip()


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def _count(n: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:,.2f} {unit}"
    return f"{n:,}"
