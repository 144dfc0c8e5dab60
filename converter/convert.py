"""The conversion, top to bottom: open, choose the family, plan, write main and sidecar, check.

`convert` is the converter's whole public door. Knows the order of the steps and what the files are called, and nothing
of any step's inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from llama_sidecar.converter.borrowed import origin_keys, with_head_of
from llama_sidecar.converter.checkpoint import Checkpoint, open_checkpoint
from llama_sidecar.converter.config import Config
from llama_sidecar.converter.drafts import Draft, draft_inside, draft_of
from llama_sidecar.converter.drafts.convert import convert_draft, draft_warnings, open_draft, plan_draft
from llama_sidecar.converter.drafts.target import of_model
from llama_sidecar.converter.errors import (
    BadDraftVocab,
    BadImatrix,
    HeadMismatch,
    NoHead,
    NotACheckpoint,
    NoTarget,
    OutputFailed,
)
from llama_sidecar.converter.families import Family, Layout, Placement, family_of
from llama_sidecar.converter.file_plan import FilePlan, file_header
from llama_sidecar.converter.fingerprints import fingerprint_keys
from llama_sidecar.converter.general import file_name
from llama_sidecar.converter.imatrix import Imatrix, read_imatrix
from llama_sidecar.converter.kept import keep
from llama_sidecar.converter.plan import account, canonical_tensors, plan
from llama_sidecar.converter.quantize import check_libggml, libggml_path, uses_importance
from llama_sidecar.converter.recipe import (
    Recipe,
    head_warnings,
    main_recipe,
    model_of,
    sidecar_recipe,
)
from llama_sidecar.converter.shards import Tensor
from llama_sidecar.converter.tokenizer import check_pre_tokenizer, vocabulary_keys
from llama_sidecar.converter.writer import (
    GGUFFile,
    Progress,
    check_targets,
    write_files,
)
from llama_sidecar.sidecars import (
    KINDS,
    check_pair,
    compact,
    open_main,
    open_sidecar,
)
from llama_sidecar.sidecars import keys as published
from llama_sidecar.sidecars.errors import UnwritableFile

KIND = "mtp"  # what every family here holds


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion wrote; a path and a type are None, and a size 0, for a file that was not written.

    `read_bytes` counts what was read of the checkpoints' files of weights, which have `checkpoint_bytes` in all.
    """

    main: Path | None
    sidecar: Path | None
    kind: str | None
    main_bytes: int
    sidecar_bytes: int
    n_head_tensors: int
    main_type: str | None
    sidecar_type: str | None
    compact: Path | None
    compact_bytes: int
    draft_vocab: int | None
    read_bytes: int
    checkpoint_bytes: int
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON object, with the schema's version first."""
        return {"schema": 1} | {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Plan:
    """What a conversion is to write: "main" if it is wanted, "sidecar" if there is a head, and a compact one if it was asked for."""

    files: dict[str, FilePlan]
    compact: Path | None
    warnings: list[str]

    @property
    def targets(self) -> list[Path]:
        return [*(file.path for file in self.files.values()), *([self.compact] if self.compact else [])]


@dataclass(frozen=True)
class Wanted:
    """What a user asks for; the arguments of `convert`, checked. Raises UnknownType, BadImatrix, BadTokenizer and OutputFailed."""

    out: Path
    main: Recipe | None
    sidecar: Recipe
    importance: Imatrix | None
    needs_head: bool
    draft_vocab: int | None
    pre_tokenizer: str | None

    @classmethod
    def checked(
        cls,
        out: str | Path,
        main_type: str | None,
        sidecar_type: str | None,
        draft_vocab: int | None,
        imatrix: str | Path | None,
        pre_tokenizer: str | None,
    ) -> Wanted:
        if Path(out).suffix == ".gguf":
            raise OutputFailed(f"{out} is a file's name; expected a folder for the main file and its sidecar")
        main = main_recipe(main_type) if main_type else None
        importance = _importance(imatrix, main) if imatrix is not None else None
        if pre_tokenizer is not None:
            check_pre_tokenizer(pre_tokenizer)
        return cls(
            out=Path(out),
            main=main,
            sidecar=sidecar_recipe(sidecar_type, may_keep=True),
            importance=importance,
            needs_head=bool(sidecar_type or not main_type or draft_vocab is not None),
            draft_vocab=draft_vocab,
            pre_tokenizer=pre_tokenizer,
        )


def convert(
    checkpoint: str | Path,
    out: str | Path,
    main_type: str | None = "Q8_0",
    sidecar_type: str | None = None,
    *,
    target: str | Path | None = None,
    mtp_from: str | Path | None = None,
    draft_vocab: int | None = None,
    imatrix: str | Path | None = None,
    pre_tokenizer: str | None = None,
    name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert a Hugging Face checkpoint into a main GGUF and the sidecar GGUF that holds its draft head.

    `checkpoint` is its folder, or `hf://ORG/NAME[@REVISION]` on the Hub, of whose weights only the ranges that are needed are read.
    `out` is the folder to write to, made if need be. `main_type` is one of `TYPES`, or None
    for the sidecar alone; of a checkpoint that stores matrices in one of `KEPT_TYPES` it may be that, and they are kept as they
    are beside Q8_0. `sidecar_type` is one of the same; without it the sidecar is Q8_0 with the vocabulary's matrices
    at Q4_0, and a checkpoint without a head is converted all the same. `draft_vocab` rows of its vocabulary, the first in
    merge order, are written as a compact sidecar besides. `target` is the model, as a checkpoint or a main GGUF, that a
    stand-alone drafter (EAGLE3, DFlash, DSpark) drafts for: then the sidecar alone is written. `mtp_from` is the checkpoint to take the head
    from where this one lost it, its base model. `imatrix` is a file of llama-imatrix that weighs
    the columns of the main file's matrices. `pre_tokenizer` is llama.cpp's name of the way that tokenizer.json splits text, for one that is
    not recognised. `name` replaces the model's name, `force` replaces existing files, and
    `progress(done_bytes, total_bytes, tensor_name)` is called after every slice.

    Either all files are there and whole, or none is; a conversion that was killed is gone on with. Raises a subclass of
    ConversionError (converter/errors.py), or HubFailed.

    >>> convert("Qwen3.5-0.8B", "models").sidecar  # doctest: +SKIP
    PosixPath('models/mtp-Qwen3.5-0.8B-Q8_0.gguf')
    """
    wanted = Wanted.checked(out, main_type, sidecar_type, draft_vocab, imatrix, pre_tokenizer)
    with open_checkpoint(checkpoint) as opened, ExitStack() as others:
        draft = stand_alone(opened, target, mtp_from, draft_vocab, imatrix, pre_tokenizer)
        if draft is not None:
            return _convert_draft(opened, draft, target, Path(out), sidecar_type, name, force, progress)
        family, inside = family_of(opened.config), draft_inside(opened.config)
        check_inside(opened, inside, mtp_from, draft_vocab)
        tensors = canonical_tensors(without_drafter(opened.tensors, inside), family)
        base = others.enter_context(open_checkpoint(mtp_from)) if mtp_from is not None else None
        if base:
            tensors = with_head_of(base, opened, family, tensors)
        layout = family.layout(opened.config, tensors.keys())
        account(layout, tensors)
        if not layout.head and not inside and wanted.needs_head:
            raise NoHead(
                f"{opened.place} holds no draft head: no tensor in any of its files is called {layout.head_names}; nothing is written"
            )
        planned = plan_files(wanted, opened.config, family, layout, tensors, name or opened.name)
        common = vocabulary_keys(opened, family.VOCABULARY, wanted.pre_tokenizer)
        if inside:
            drafter = open_draft(opened, inside[0], of_model(opened, family.ARCH, common, {}))
            account(drafter.layout, drafter.tensors)
            planned = with_drafter(planned, plan_draft(drafter, wanted.out, sidecar_type, name))
        files, targets, cut = planned.files, planned.targets, planned.compact
        check_targets(targets, force)
        check_libggml(tensor.type for file in files.values() for tensor in file.weights)
        n_threads = opened.place.reading.n_threads
        common |= fingerprint_keys(layout, tensors, opened.config, common[published.TOKENS], n_threads)
        source = _source(opened, imatrix)
        if base:
            files["sidecar"].keys.update(origin_keys(base, family, common, n_threads))
            source += "\n".join(["", str(base.place), *base.place.meter.versions])
        whole = {
            role: GGUFFile(file.path, file_header(file, opened, common, name), file.tensors, source)
            for role, file in files.items()
        }

        def check(written: Mapping[str, Path]) -> AbstractContextManager[None] | None:
            _check_contract(written)
            check_targets(targets, force)  # again: another conversion may have been faster
            return _cutting(written["sidecar"], draft_vocab, cut, progress) if draft_vocab and cut else None

        n_bytes = write_files(whole, check, progress, opened.place.reading)

    meters = [one.place.meter for one in (opened, base) if one]
    main, sidecar = files.get("main"), files.get("sidecar")
    return ConvertResult(
        main=main.path if main else None,
        sidecar=sidecar.path if sidecar else None,
        kind=None if not sidecar else inside[0].KIND if inside else KIND,
        main_bytes=n_bytes.get("main", 0),
        sidecar_bytes=n_bytes.get("sidecar", 0),
        n_head_tensors=len(sidecar.tensors) if sidecar and inside else len(layout.head),
        main_type=main.recipe.name if main else None,
        sidecar_type=sidecar.recipe.name if sidecar else None,
        compact=cut,
        compact_bytes=cut.stat().st_size if cut else 0,
        draft_vocab=draft_vocab,
        read_bytes=sum(meter.n_read for meter in meters),
        checkpoint_bytes=sum(meter.n_total for meter in meters),
        warnings=opened.warnings + layout.warnings + planned.warnings,
    )


def stand_alone(
    opened: Checkpoint,
    target: str | Path | None,
    mtp_from: str | Path | None,
    draft_vocab: int | None,
    imatrix: str | Path | None,
    pre_tokenizer: str | None,
) -> Draft | None:
    """The drafter whose own checkpoint it is; None for a model's. Raises NoTarget for options of the other sort."""
    draft = draft_of(opened.config)
    if draft is not None and any(one is not None for one in (imatrix, draft_vocab, mtp_from)):
        raise NoTarget(
            f"{opened.place} is a drafter's checkpoint: no main file and no compact sidecar is made of it, nor has it a head"
        )
    if draft is not None and pre_tokenizer is not None:
        raise NoTarget(
            f"{opened.place} is a drafter's checkpoint, whose vocabulary is the target's: convert the target with --pre-tokenizer, "
            f"and name its main file with --target"
        )
    if draft is None and target is not None:
        raise NoTarget(
            f"{opened.place} is {opened.config.architecture}, which drafts for no other model: leave --target out"
        )
    return draft


Inside = tuple[Draft, str] | None  # a drafter in a model's checkpoint, and how its tensors' names begin


def check_inside(
    opened: Checkpoint, inside: Inside, mtp_from: str | Path | None, draft_vocab: int | None
) -> None:
    """Raises HeadMismatch and BadDraftVocab for what a drafter that is a model of its own cannot have."""
    if inside and mtp_from is not None:
        raise HeadMismatch(
            f"{opened.place} holds a drafter ({KINDS[inside[0].KIND].title}): leave --mtp-from out to convert that"
        )
    if inside and draft_vocab is not None:
        raise BadDraftVocab(
            f"{opened.place} holds {KINDS[inside[0].KIND].title}, of which no compact sidecar is made: leave --draft-vocab out"
        )


def without_drafter(tensors: Mapping[str, Tensor], inside: Inside) -> dict[str, Tensor]:
    """The main model's tensors."""
    return {name: t for name, t in tensors.items() if not (inside and name.startswith(inside[1]))}


def with_drafter(planned: Plan, file: FilePlan) -> Plan:
    """A plan of the main file, if it is wanted, with a drafter's sidecar."""
    return replace(
        planned,
        files=planned.files | {"sidecar": file},
        warnings=planned.warnings + draft_warnings(file),
    )


def _convert_draft(
    opened: Checkpoint,
    draft: Draft,
    target: str | Path | None,
    out: Path,
    sidecar_type: str | None,
    name: str | None,
    force: bool,
    progress: Progress | None,
) -> ConvertResult:
    """A stand-alone drafter's sidecar, and nothing else."""
    written = convert_draft(
        opened,
        draft,
        target,
        out,
        sidecar_type,
        name=name,
        source=_source(opened, None),
        force=force,
        progress=progress,
    )
    return ConvertResult(
        main=None,
        sidecar=written.path,
        kind=draft.KIND,
        main_bytes=0,
        sidecar_bytes=written.n_bytes,
        n_head_tensors=written.n_tensors,
        main_type=None,
        sidecar_type=written.type_name,
        compact=None,
        compact_bytes=0,
        draft_vocab=None,
        read_bytes=opened.place.meter.n_read,
        checkpoint_bytes=opened.place.meter.n_total,
        warnings=written.warnings,
    )


def _importance(path: str | Path, main: Recipe | None) -> Imatrix:
    if main is None or not uses_importance(main.base):
        found = f"the main file is to be {main.name}" if main else "no main file is to be written"
        raise BadImatrix(
            f"{found}, so that an importance matrix has no effect: leave it out, or ask for a main type below Q8_0"
        )
    return read_imatrix(path)


def plan_files(
    wanted: Wanted,
    config: Config,
    family: Family,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    name: str,
) -> Plan:
    """The files to write: the main file if it is wanted, the sidecar if there is a head. Raises BadDraftVocab, BadImatrix."""
    files = {}
    if main := wanted.main:
        keys = family.keys(config, 0)
        parts = layout.shared + layout.trunk
        types = main.types(_shapes(parts), model_of(family.ARCH, keys), wanted.importance is not None)
        keys |= wanted.importance.keys() if wanted.importance else {}
        path = wanted.out / file_name(name, main.name)
        files["main"] = FilePlan(
            family.ARCH,
            path,
            main,
            keys,
            keep(plan(parts, tensors, types, wanted.importance), main, family.ARCH),
        )
    cut = None
    if layout.head:
        sidecar = wanted.sidecar
        keys = family.keys(config, layout.n_head_layers)
        parts = layout.shared + layout.head
        types = sidecar.types(_shapes(parts), model_of(family.ARCH, keys))
        path = wanted.out / file_name(name, sidecar.name, KINDS[KIND].prefix)
        files["sidecar"] = FilePlan(
            family.ARCH, path, sidecar, keys, keep(plan(parts, tensors, types), sidecar, family.ARCH)
        )
        if wanted.draft_vocab is not None:
            _check_draft_vocab(wanted.draft_vocab, layout)
            cut = path.with_name(compact.file_name(path, wanted.draft_vocab))
    warnings = list(_type_warnings(files.get("main"), files.get("sidecar"), wanted.importance))
    return Plan(files, cut, warnings)


def _shapes(placements: Iterable[Placement]) -> list[tuple[str, tuple[int, ...]]]:
    return [(placement.name, placement.shape) for placement in placements]


def _type_warnings(main: FilePlan | None, sidecar: FilePlan | None, imatrix: Imatrix | None) -> Iterator[str]:
    if main and imatrix:
        yield from imatrix.warnings(t.name for t in main.weights if uses_importance(t.type))
    if sidecar:
        yield from head_warnings({t.name: (t.type, t.n_rows * t.n_cols) for t in sidecar.weights})


def _check_draft_vocab(n_rows: int, layout: Layout) -> None:
    n_vocab = next(p.shape[0] for p in layout.shared if p.name == published.TOKEN_EMBD)
    if not 1 <= n_rows < n_vocab:
        raise BadDraftVocab(
            f"a draft vocabulary of {n_rows:,} rows was asked for; 1 to {n_vocab - 1:,} are expected, of the {n_vocab:,} that the model has"
        )


@contextmanager
def _cutting(sidecar: Path, n_rows: int, path: Path, progress: Progress | None) -> Iterator[None]:
    """Writes a compact sidecar of a sidecar's first rows, for a `with` block at whose end it gets its name."""
    source = open_sidecar(sidecar)
    rows = compact.choose_rows(source.tokens, compact.token_types(source), n_rows)
    try:
        with compact.writing_compact(source, rows, path, progress=progress):
            yield
    except UnwritableFile as error:
        raise OutputFailed(str(error)) from error


def _source(checkpoint: Checkpoint, imatrix: str | Path | None) -> str:
    """All that decides the tensors' bytes beside a file's header: the weights, how they are read, and the code that does."""
    code = sorted(Path(__file__).parent.rglob("*.py"))
    read = [*code, checkpoint.folder / "config.json", *([Path(imatrix)] if imatrix else [])]
    hashes = [_file_hash(path) for path in read]
    library = libggml_path()
    found = library.stat() if library else None
    versions = [
        *checkpoint.place.meter.versions,
        np.__version__,
        str(found and (found.st_size, found.st_mtime_ns)),
    ]
    return "\n".join([*hashes, *sorted(versions)])


def _file_hash(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise NotACheckpoint(f"{path} cannot be read: {error.strerror or error}") from error


def _check_contract(paths: Mapping[str, Path]) -> None:
    """Opens the written files as their users will, and holds them against each other."""
    main = open_main(paths["main"]) if "main" in paths else None
    sidecar = open_sidecar(paths["sidecar"]) if "sidecar" in paths else None
    if main and sidecar:
        check_pair(main, sidecar)
