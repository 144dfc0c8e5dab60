"""What a conversion would do, before it does it: the files, every tensor's fate, the memory to run them, what a draft costs.

Goes the way of convert.py up to the writing, so that what it says of files is what they will be. Reads headers and the
tokenizer, no weights. Of a config.json alone it gives the same account, of the checkpoint that such a configuration has.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType as GGMLType

from llama_sidecar.converter.borrowed import with_head_of
from llama_sidecar.converter.checkpoint import Checkpoint, open_checkpoint, read_config, read_object
from llama_sidecar.converter.config import Config, Key
from llama_sidecar.converter.convert import (
    Plan,
    Wanted,
    check_inside,
    plan_files,
    stand_alone,
    with_drafter,
    without_drafter,
)
from llama_sidecar.converter.drafts import draft_inside
from llama_sidecar.converter.drafts.convert import D2T, draft_warnings, open_draft, plan_draft, target_for
from llama_sidecar.converter.drafts.convert import Opened as OpenedDraft
from llama_sidecar.converter.drafts.target import of_model
from llama_sidecar.converter.errors import (
    BadConfig,
    ConversionError,
    NotACheckpoint,
    NoWeights,
)
from llama_sidecar.converter.families import Family, Layout, Placement, Source, family_of
from llama_sidecar.converter.file_plan import FilePlan, file_header
from llama_sidecar.converter.head_account import (
    OWN_VOCABULARY,
    VOCABULARY,
    Drafting,
    Parts,
    drafting,
    memory_of,
    parts_of,
)
from llama_sidecar.converter.places import U8, Folder, place_of
from llama_sidecar.converter.plan import F32, Mismatch, canonical_tensors, mismatch
from llama_sidecar.converter.shards import Tensor
from llama_sidecar.converter.tokenizer import vocabulary_keys
from llama_sidecar.converter.writer import GGUFFile, Header, planned_bytes
from llama_sidecar.sidecars import keys as published
from llama_sidecar.sidecars.memory import Memory

N_CTX = 8192
ACCEPTANCE = 0.8
FINGERPRINT = "0" * 64  # as long as the one that a conversion computes
TOKEN_BYTES = 42  # of a header, for each token, where there is no tokenizer: measured on Qwen3.5's
HEAD_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class FileReport:
    """A file to be: its size to the byte (of a compact sidecar about), and its types with the bytes that have each."""

    role: str
    path: Path
    type: str
    n_bytes: int
    n_tensors: int
    types: dict[str, int]
    exists: bool


@dataclass(frozen=True)
class TensorReport:
    """What becomes of tensors of the checkpoint: `name` is GGUF's, `files` gives the type in each file that has it.

    `how` is "renamed", or what else is done: computed, stacked, joined, split, reordered, transposed, transformed, reshaped.
    """

    name: str
    how: str
    sources: list[str]
    stored: str
    shape: list[int]
    files: dict[str, str]


@dataclass(frozen=True)
class DryRun:
    """What a conversion would do. `dropped` tensors are left out on purpose; with a `mismatch` it would refuse.

    `head` is the account of an MTP head, `drafting` what its drafts cost; both are None where there is none, and of a drafter that
    is a model of its own, whose memory is without the model it drafts for.

    `from_config`: there are no weights, and all is told from the configuration. Sizes in bytes.
    """

    checkpoint: str
    from_config: bool
    arch: str
    files: list[FileReport]
    free_bytes: int
    tensors: list[TensorReport]
    dropped: list[str]
    mismatch: Mismatch
    head: Parts | None
    memory: Memory
    drafting: Drafting | None
    read_bytes: int
    checkpoint_bytes: int
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON object, with the schema's version first."""
        values = asdict(self)
        for file in values["files"]:
            file["path"] = str(file["path"])
        if self.head:
            values["head"] |= {"total": self.head.total, "share": self.head.share}
        if self.drafting:
            best = self.drafting
            values["drafting"] |= {"share": best.share, "speedups": best.speedups, "depth": best.depth}
        values["memory"]["total"] = self.memory.total
        return {"schema": 1, **values}

    def kinds(self) -> dict[str, list[TensorReport]]:
        """The tensors by what is done with them, the commonest first."""
        counts = Counter(tensor.how for tensor in self.tensors)
        return {how: [t for t in self.tensors if t.how == how] for how, _ in counts.most_common()}


def dry_run(
    checkpoint: str | Path,
    out: str | Path = ".",
    main_type: str | None = "Q8_0",
    sidecar_type: str | None = None,
    *,
    target: str | Path | None = None,
    mtp_from: str | Path | None = None,
    draft_vocab: int | None = None,
    imatrix: str | Path | None = None,
    pre_tokenizer: str | None = None,
    name: str | None = None,
    n_ctx: int = N_CTX,
    acceptance: float = ACCEPTANCE,
) -> DryRun:
    """Say what `convert` would do with these arguments, and what running the files takes; writes nothing.

    `checkpoint` may also be a config.json, or a folder that holds no weights. `target` is the model that a stand-alone drafter, which
    needs its weights' headers, drafts for. `n_ctx` is the context, in tokens, of the memory;
    `acceptance` (0 to 1) the chance that a draft stands, for the speed-up. Raises a subclass of ConversionError, but none for
    tensors that are missing, left over or misshapen: those are in the result.

    >>> dry_run("Qwen3.5-0.8B").files[1].n_bytes  # doctest: +SKIP
    172935424
    """
    if not 0 <= acceptance <= 1:
        raise ConversionError(f"acceptance {acceptance!r} is not between 0 and 1")
    wanted = Wanted.checked(out, main_type, sidecar_type, draft_vocab, imatrix, pre_tokenizer)
    with _opened(checkpoint) as (opened, from_config), ExitStack() as others:
        draft = stand_alone(opened, target, mtp_from, draft_vocab, imatrix, pre_tokenizer)
        if draft is not None:
            if from_config:
                raise NoWeights(f"{opened.place} holds no weights, whose headers a drafter's dry run needs")
            return _of_draft(
                open_draft(opened, draft, target_for(opened, draft, target)),
                opened,
                wanted.out,
                sidecar_type,
                name,
                n_ctx,
            )
        family, inside = family_of(opened.config), draft_inside(opened.config)
        check_inside(opened, inside, mtp_from, draft_vocab)
        if from_config:
            opened.tensors |= _declared(opened.config, family)
        tensors = canonical_tensors(without_drafter(opened.tensors, inside), family)
        base = others.enter_context(open_checkpoint(mtp_from)) if mtp_from is not None else None
        if base:
            tensors = with_head_of(base, opened, family, tensors)
        layout = family.layout(opened.config, tensors.keys())
        wrong = mismatch(layout, tensors)
        fitting = tensors | _stand_ins(layout, tensors, wrong)
        planned = plan_files(wanted, opened.config, family, layout, fitting, name or opened.name)
        common = _common_keys(opened, family, from_config, pre_tokenizer)
        reports = list(_tensor_reports(layout, fitting, planned.files))
        if inside and not from_config:
            drafter = open_draft(opened, inside[0], of_model(opened, family.ARCH, common, {}))
            wrong = wrong + mismatch(drafter.layout, drafter.tensors)
            drafter = _fitting(drafter)
            planned = with_drafter(planned, plan_draft(drafter, wanted.out, sidecar_type, name))
            reports += _tensor_reports(drafter.as_head, drafter.tensors, planned.files)
        left_out = (
            ["the sidecar of its drafter is left out: there are no weights"] if inside and from_config else []
        )
        if base:
            taken: dict[str, Key] = {published.MTP_FROM: base.name, published.GRAFT_TRUNK: FINGERPRINT}
            planned.files["sidecar"].keys.update(taken)
        files = [
            _file_report(role, file, file_header(file, opened, common, name))
            for role, file in planned.files.items()
        ]
        if planned.compact:
            files.append(_compact_report(planned, common, draft_vocab or 0))
        main, sidecar = (planned.files.get(role) for role in ("main", "sidecar"))
        plan = (main.weights if main else [], sidecar.weights if sidecar else [])
        file_keys = (main.keys if main else {}, sidecar.keys if sidecar else {})
        drafter_arch = sidecar.arch if sidecar and not layout.head else None
        meters = [one.place.meter for one in (opened, base) if one]
        return DryRun(
            checkpoint=str(opened.place),
            from_config=from_config,
            arch=family.ARCH,
            files=files,
            free_bytes=_free_bytes(Path(out)),
            tensors=reports,
            dropped=sorted(name for name in opened.tensors if family.DROPPED.search(name)),
            mismatch=wrong,
            head=parts_of(layout) if layout.head else None,
            memory=memory_of(*plan, family.ARCH, *file_keys, n_ctx, drafter_arch=drafter_arch),
            drafting=drafting(*plan, family.ARCH, file_keys[0], layout.n_head_layers, acceptance)
            if main and sidecar and layout.head
            else None,
            read_bytes=sum(meter.n_read for meter in meters),
            checkpoint_bytes=sum(meter.n_total for meter in meters),
            warnings=opened.warnings + layout.warnings + planned.warnings + left_out,
        )


def _of_draft(
    one: OpenedDraft, opened: Checkpoint, out: Path, sidecar_type: str | None, name: str | None, n_ctx: int
) -> DryRun:
    """What the conversion of a drafter's own checkpoint would do."""
    wrong, one = mismatch(one.layout, one.tensors), _fitting(one)
    file = plan_draft(one, out, sidecar_type, name)
    return DryRun(
        checkpoint=str(opened.place),
        from_config=False,
        arch=file.arch,
        files=[_file_report("sidecar", file, file_header(file, opened, {}, name))],
        free_bytes=_free_bytes(out),
        tensors=list(_tensor_reports(one.as_head, one.tensors, {"sidecar": file})),
        dropped=sorted(opened.tensors.keys() - {tensor.name for tensor in one.tensors.values()} - {D2T}),
        mismatch=wrong,
        head=None,
        memory=memory_of([], file.weights, file.arch, {}, file.keys, n_ctx, drafter_arch=file.arch),
        drafting=None,
        read_bytes=opened.place.meter.n_read,
        checkpoint_bytes=opened.place.meter.n_total,
        warnings=opened.warnings + one.layout.warnings + draft_warnings(file),
    )


def _fitting(one: OpenedDraft) -> OpenedDraft:
    """A drafter with stand-ins for the tensors that are missing or misshapen."""
    found = _stand_ins(one.layout, one.tensors, mismatch(one.layout, one.tensors))
    return replace(one, tensors=one.tensors | found)


# The checkpoint, or what a configuration says of one.


@contextmanager
def _opened(checkpoint: str | Path) -> Iterator[tuple[Checkpoint, bool]]:
    """The checkpoint, and whether there is no more of it than the configuration."""
    path = Path(checkpoint)
    if path.is_file():
        if path.suffix != ".json":
            raise NotACheckpoint(f"{path} is a file; expected a checkpoint's folder, or its config.json")
        yield Checkpoint(Folder(path.parent), Config(read_object(path)), {}, []), True
        return
    try:
        opened = open_checkpoint(checkpoint)
    except NoWeights:
        place = place_of(checkpoint)
        yield Checkpoint(place, read_config(place), {}, []), True
        return
    with opened:
        yield opened, False


@dataclass(frozen=True)
class _Declared(Tensor):
    """A tensor that a configuration calls for; it has no values."""

    def raw_rows(self, start: int, stop: int) -> U8:
        raise AssertionError(f"{self.name} is read in a dry run")

    def rows(self, start: int, stop: int) -> F32:
        raise AssertionError(f"{self.name} is read in a dry run")

    def check_type(self) -> None:
        pass


def _declared(config: Config, family: Family) -> dict[str, Tensor]:
    """The tensors of a checkpoint of this configuration, in BF16, under the names of published ones."""
    problem: ConversionError | None = None
    for root, names in family.TINY.values():
        try:
            layout = family.layout(config, _renumbered(Config(root), names, config))
        except BadConfig:
            raise
        except ConversionError as error:  # this variant is of another sort of checkpoint
            problem = error
            continue
        names_of = {s.name: _published_name(s.name, family.PREFIX) for s in _sources(layout)}
        return {names_of[s.name]: replace(_stand_in(s), name=names_of[s.name]) for s in _sources(layout)}
    raise problem or BadConfig(f"config.json is no configuration of {family.ARCH}")


def _renumbered(tiny: Config, names: Collection[str], config: Config) -> set[str]:
    """The optional tensors of a family's tiny checkpoint, as one of another configuration has them."""
    n_tiny, n_layers = (c.integer("num_hidden_layers") for c in (tiny, config))
    said = next((config.get(key) for key in HEAD_COUNTS if config.get(key) is not None), None)
    found = {"lm_head.weight"} if not config.get("tie_word_embeddings") else set()
    for name in set(names) - {"lm_head.weight"}:
        number = re.match(r"layers\.(\d+)\.", name)
        if not number:
            if said != 0 or not name.startswith("mtp."):
                found.add(name)
        elif int(number[1]) < n_tiny:  # what the layers of the trunk have
            found |= {f"layers.{i}.{name[number.end() :]}" for i in range(n_layers)}
        elif said is None or int(number[1]) - n_tiny < said:
            found.add(f"layers.{n_layers + int(number[1]) - n_tiny}.{name[number.end() :]}")
    return found


def _published_name(name: str, prefix: str) -> str:
    return name if name.startswith(("lm_head.", "mtp.", prefix)) else prefix + name


def _sources(layout: Layout) -> Iterator[Source]:
    return (s for p in (*layout.shared, *layout.trunk, *layout.head) for s in p.sources)


def _stand_in(source: Source) -> Tensor:
    return _Declared(source.name, "BF16", source.shape, "config.json")


def _stand_ins(layout: Layout, tensors: Mapping[str, Tensor], wrong: Mismatch) -> dict[str, Tensor]:
    """Tensors as the configuration calls for them in place of those that are missing or misshapen."""
    replaced = {*wrong.missing, *wrong.misshapen}
    return {s.name: _stand_in(s) for s in _sources(layout) if s.name in replaced}


# The files.


def _common_keys(
    opened: Checkpoint, family: Family, from_config: bool, pre_tokenizer: str | None
) -> dict[str, Key]:
    """The vocabulary, and something as long as the fingerprints; of a configuration alone, something as long as a vocabulary."""
    prints: dict[str, Key] = {
        published.FORMAT: published.FORMAT_VERSION,
        published.FINGERPRINT_TRUNK: FINGERPRINT,
        published.FINGERPRINT_ROWS: FINGERPRINT,
    }
    if from_config and not (opened.folder / "tokenizer.json").is_file():
        return prints | {published.TOKENS: "x" * (TOKEN_BYTES * opened.config.integer("vocab_size"))}
    return prints | vocabulary_keys(opened, family.VOCABULARY, pre_tokenizer)


def _file_report(role: str, file: FilePlan, header: Header) -> FileReport:
    n_bytes = planned_bytes(GGUFFile(file.path, header, file.tensors))
    types: Counter[str] = Counter()
    for tensor in file.tensors:
        types[GGMLType(tensor.type).name] += tensor.n_bytes
    return FileReport(
        role,
        file.path,
        file.recipe.name,
        n_bytes,
        len(file.tensors),
        dict(types.most_common()),
        file.path.exists(),
    )


def _compact_report(planned: Plan, common: Mapping[str, Key], n_rows: int) -> FileReport:
    """A compact sidecar has the first rows of each matrix of the vocabulary, and their tokens and ids."""
    assert planned.compact
    file = planned.files["sidecar"]
    types: Counter[str] = Counter()
    for tensor in file.tensors:
        is_cut = tensor.name in VOCABULARY or tensor.name.endswith(OWN_VOCABULARY)
        types[GGMLType(tensor.type).name] += n_rows * tensor.row_bytes if is_cut else tensor.n_bytes
    tokens = common[published.TOKENS]
    texts = (
        sum(len(str(t).encode()) + 8 for t in tokens[:n_rows])
        if isinstance(tokens, list)
        else TOKEN_BYTES * n_rows
    )
    n_bytes = types.total() + texts + 4 * n_rows + 4096
    return FileReport(
        "compact",
        planned.compact,
        file.recipe.name,
        n_bytes,
        len(file.tensors),
        dict(types.most_common()),
        planned.compact.exists(),
    )


def _free_bytes(folder: Path) -> int:
    existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
    return shutil.disk_usage(existing).free


# The tensors.


def _tensor_reports(
    layout: Layout, tensors: Mapping[str, Tensor], files: Mapping[str, FilePlan]
) -> Iterator[TensorReport]:
    uses = Counter(s.name for p in (*layout.shared, *layout.trunk, *layout.head) for s in p.sources)
    types = {role: {t.name: t.type.name for t in file.weights} for role, file in files.items()}
    placed = [
        *((p, ("main", "sidecar")) for p in layout.shared),
        *((p, ("main",)) for p in layout.trunk),
        *((p, ("sidecar",)) for p in layout.head),
    ]
    for placement, roles in placed:
        written = {role: types[role][placement.name] for role in roles if role in types}
        if written:
            found = [tensors[source.name] for source in placement.sources]
            yield TensorReport(
                name=placement.name,
                how=_how(placement, uses),
                sources=[tensor.name for tensor in found],
                stored=" and ".join(sorted({tensor.dtype for tensor in found})),
                shape=list(placement.shape),
                files=written,
            )


def _how(placement: Placement, uses: Mapping[str, int]) -> str:
    if placement.values is not None:
        return "computed"
    shapes = {source.shape for source in placement.sources}
    is_split = any(uses[source.name] > 1 for source in placement.sources)
    transform = getattr(placement.transform, "func", placement.transform)
    done = {
        "stacked": len(placement.sources) > 1 and not placement.beside,
        "joined": placement.beside,
        "split": is_split,
        "reordered": placement.rows is not None and not is_split,
        "transposed": placement.transposed,
        f"transformed ({getattr(transform, '__name__', '')})": transform is not None,
        "reshaped": len(placement.sources) == 1 and not is_split and shapes != {placement.shape},
    }
    return ", ".join(what for what, is_done in done.items() if is_done) or "renamed"
