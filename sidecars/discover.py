"""Which sidecar beside a main model belongs to it, and why.

A candidate is found by its name, as llama.cpp finds one: a GGUF whose name has a kind's name in it as a word
(`mtp-NAME-Q8_0.gguf`), in the main model's folder, or any GGUF in a sub-folder called as a kind is (`MTP/`). A main model in
shards often has a folder to itself, so there the folder above is searched too. What a candidate is, its header says.
Knows the order of kinds only by their rank, and loads nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_sidecar.sidecars.errors import AmbiguousSidecar, LlamaSidecarError, NoSuchSidecar, UnknownKind
from llama_sidecar.sidecars.gguf_header import GGUFHeader
from llama_sidecar.sidecars.kinds import KINDS
from llama_sidecar.sidecars.pair import STATUSES, Match, check_pair
from llama_sidecar.sidecars.shards import shard_name
from llama_sidecar.sidecars.sidecar import MainFile, Sidecar, open_main, open_sidecar

AUTO, NONE = "auto", "none"
CHOSEN, PASSED_OVER = "chosen", "passed over"  # what explain() begins with

KIND_WORD = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(KINDS)})(?![a-z0-9])", re.IGNORECASE)
TYPE_WORD = re.compile(
    r"[-._](?:ud[-_])?(?:i?q\d\w*|tq\d\w*|mxfp\d\w*|nvfp\d\w*|b?f16|f32)(?=[-._]|$)", re.IGNORECASE
)


@dataclass(frozen=True)
class Found:
    """The drafter chosen for a main model; `path` is the main model itself where the head is inside it."""

    path: Path
    kind: str
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A file beside a main model that may be its sidecar: either `sidecar` and `match`, or the `reason` it is not."""

    path: Path
    sidecar: Sidecar | None
    match: Match | None
    reason: str


def discover(main_path: str | os.PathLike[str], spec_type: str = AUTO) -> Found | None:
    """Find the drafter of a main model: the head inside it, or else the best sidecar beside it.

    `spec_type` is "auto", "none", or a kind by our name or llama.cpp's ("mtp", "draft-mtp"). None: there is none, or none
    was wanted. Raises what `open_main` raises, UnknownKind, NoSuchSidecar (a named kind is not there) and AmbiguousSidecar.

    >>> discover("NAME-Q8_0.gguf").path.name  # doctest: +SKIP
    'mtp-NAME-Q8_0.gguf'
    """
    if spec_type == NONE:
        return None
    kind_from_name(spec_type)  # an unknown name fails before any file is opened
    main = open_main(main_path)
    return choose(main, survey(main), spec_type)


def kind_from_name(spec_type: str) -> str | None:
    """Return the kind that a `spec_type` asks for, None for "auto"; raises UnknownKind.

    >>> kind_from_name("draft-mtp")
    'mtp'
    """
    if spec_type == AUTO:
        return None
    for kind in KINDS.values():
        if spec_type in (kind.name, kind.llama_name):
            return kind.name
    known = ", ".join([AUTO, NONE, *(f"{kind.name} ({kind.llama_name})" for kind in KINDS.values())])
    raise UnknownKind(f"there is no kind of sidecar called {spec_type!r}; known are {known}")


def survey(main: MainFile) -> list[Candidate]:
    """Open every candidate beside a main model and compare it with the model; raises nothing a candidate causes."""
    return [_examine(main, path) for path in candidate_paths(main.path)]


def candidate_paths(main_path: Path) -> list[Path]:
    """List the files beside a main model that may be sidecars of it, by name alone, sorted."""
    return sorted(set(_candidates(main_path)) - {main_path})


def _candidates(main_path: Path) -> Iterator[Path]:
    shard = shard_name(main_path)
    folders = [main_path.parent] if shard is None else [main_path.parent, main_path.absolute().parent.parent]
    for folder in folders:
        for path in _entries(folder):
            if path.name.lower() in KINDS and os.path.isdir(path):
                yield from (inner for inner in _entries(path) if _is_first_gguf(inner))
            elif _is_first_gguf(path) and KIND_WORD.search(path.name):
                yield path


def main_paths(sidecar_path: Path) -> list[Path]:
    """List the files beside a sidecar that may be its main model: where `candidate_paths` looks, the other way round."""
    return sorted(set(_main_paths(sidecar_path)) - {sidecar_path})


def _main_paths(sidecar_path: Path) -> Iterator[Path]:
    folder = sidecar_path.parent
    folders = [folder]
    if folder.absolute().name.lower() in KINDS:
        folders.append(folder.absolute().parent)
    for folder in folders:
        for path in _entries(folder):
            if os.path.isdir(path):
                yield from (inner for inner in _entries(path) if shard_name(inner) and _is_first_gguf(inner))
            elif _is_first_gguf(path):
                yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # not ours to read: then nothing there is a candidate
        return []


def _is_first_gguf(path: Path) -> bool:
    """Whether a path is a GGUF, and of shards the first."""
    shard = shard_name(path)
    is_wanted = path.suffix.lower() == ".gguf" and (shard is None or shard[1] == 1)
    return is_wanted and os.path.isfile(
        path
    )  # as above no method of Path: out of reach is no file, and no exception


def _examine(main: MainFile, path: Path) -> Candidate:
    try:
        sidecar = open_sidecar(path)
        match = check_pair(main, sidecar)
    except LlamaSidecarError as error:
        return Candidate(path, None, None, str(error))
    return Candidate(path, sidecar, match, match.detail)


def choose(main: MainFile, candidates: Iterable[Candidate], spec_type: str = AUTO) -> Found | None:
    """Choose from a survey: the head inside the main model, then rank of kind, sureness of the match, name, folder (beside the main
    model before one called as a kind is), nearest type.

    Raises UnknownKind, NoSuchSidecar and AmbiguousSidecar.
    """
    if spec_type == NONE:
        return None
    wanted = kind_from_name(spec_type)
    if main.head_kind is not None and wanted in (None, main.head_kind):
        return Found(main.path, main.head_kind, "embedded: the head is inside the main model")
    candidates = list(candidates)
    fitting = [(c.sidecar, c.match) for c in candidates if c.sidecar is not None and c.match is not None]
    eligible = [(sidecar, match) for sidecar, match in fitting if wanted in (None, sidecar.kind)]
    if not eligible:
        if wanted is None:
            return None
        raise _not_there(main, wanted, candidates)
    best = min(_order(main, sidecar, match) for sidecar, match in eligible)
    leading = [(sidecar, match) for sidecar, match in eligible if _order(main, sidecar, match) == best]
    if len({base_name(sidecar.path) for sidecar, _ in leading}) == 1:  # quantisations of one sidecar
        nearest = min(_type_distance(main, sidecar) for sidecar, _ in leading)
        leading = [(sidecar, match) for sidecar, match in leading if _type_distance(main, sidecar) == nearest]
    if len(leading) > 1:
        names = ", ".join(sorted(str(sidecar.path) for sidecar, _ in leading))
        raise AmbiguousSidecar(
            f"{main.path}: {len(leading)} sidecars fit equally well: {names}; name one with --sidecar"
        )
    sidecar, match = leading[0]
    return Found(sidecar.path, sidecar.kind, f"{match.status}: {match.detail}")


def explain(main: MainFile, candidates: Iterable[Candidate]) -> dict[Path, str]:
    """Say of each file of a survey that fits why it is chosen, or passed over and for which other one; what does not fit says so itself.

    >>> explain(main, survey(main))                                              # doctest: +SKIP
    {PosixPath('mtp-NAME-Q8_0.gguf'): 'chosen: no other fits'}
    """
    candidates = list(candidates)
    fitting = [(c.sidecar, c.match) for c in candidates if c.sidecar is not None and c.match is not None]
    try:
        found = choose(main, candidates)
    except AmbiguousSidecar as error:
        return {sidecar.path: str(error) for sidecar, _ in fitting}
    if found is None or found.path == main.path:
        return {sidecar.path: f"{PASSED_OVER}: the main model has a head inside" for sidecar, _ in fitting}
    best = next((sidecar, match) for sidecar, match in fitting if sidecar.path == found.path)
    others = {s.path: _behind(main, best, (s, match)) for s, match in fitting if s.path != found.path}
    why = "; ".join(dict.fromkeys(others.values())) or "no other fits"
    return {found.path: f"{CHOSEN}: {why}", **{path: f"{PASSED_OVER}: {why}" for path, why in others.items()}}


def _behind(main: MainFile, best: tuple[Sidecar, Match], other: tuple[Sidecar, Match]) -> str:
    """By which rule of `choose` one comes before the other."""
    first, second = best[0], other[0]
    if first.kind != second.kind:
        return f"{KINDS[first.kind].title} comes before {KINDS[second.kind].title}"
    if best[1].status != other[1].status:
        return f"{best[1].status!r} is surer than {other[1].status!r}"
    if base_name(first.path) == base_name(main.path) != base_name(second.path):
        return f"{first.path.name} is called as the main model is, {second.path.name} is not"
    if _is_below(main, second) and not _is_below(main, first):
        return f"{first.path.name} lies beside the main model, {second.path.name} in a folder below"
    types = [_block_type(one.header) for one in (first, main, second)]
    return "{} is nearer the main model's {} than {}".format(*types)


def _order(main: MainFile, sidecar: Sidecar, match: Match) -> tuple[int, int, bool, bool]:
    is_namesake = base_name(sidecar.path) == base_name(main.path)
    return (
        KINDS[sidecar.kind].rank,
        STATUSES.index(match.status),
        not is_namesake,
        _is_below(main, sidecar),
    )


def _is_below(main: MainFile, sidecar: Sidecar) -> bool:
    """Whether it lies in a folder called as a kind is, and the main model does not."""
    folder = sidecar.path.parent
    return folder != main.path.parent and folder.absolute().name.lower() in KINDS


def _not_there(main: MainFile, wanted: str, candidates: list[Candidate]) -> NoSuchSidecar:
    there = [f"{main.head_kind} (inside the main model)"] if main.head_kind else []
    there += [f"{c.path.name} ({c.sidecar.kind})" for c in candidates if c.sidecar is not None]
    there += [f"{c.path.name} (does not fit: {c.reason})" for c in candidates if c.sidecar is None]
    return NoSuchSidecar(
        f"{main.path}: no {wanted} sidecar that fits lies beside it; there is {'; '.join(there) or 'none of any kind'}"
    )


def base_name(path: Path) -> str:
    """Reduce a file name to what a main model and its sidecars share, in lower case.

    >>> base_name(Path("mtp-NAME-Q8_0.gguf")), base_name(Path("NAME-UD-Q4_K_XL-00001-of-00003.gguf"))
    ('name', 'name')
    """
    shard = shard_name(path)
    stem = TYPE_WORD.sub("", KIND_WORD.sub("", shard[0] if shard else path.stem))
    return stem.strip("-._ ").lower()


def _type_distance(main: MainFile, sidecar: Sidecar) -> tuple[float, bool]:
    """How far apart the two are in bits per weight; of equal ones the same type is nearer."""
    distance = abs(_block_bits(main.header) - _block_bits(sidecar.header))
    return round(distance, 3), _block_type(main.header) != _block_type(sidecar.header)


def _block_bits(header: GGUFHeader) -> float:
    """Bits per weight of the matrices in blocks (vocabulary-sized ones have types of their own)."""
    matrices = [
        info for info in header.tensors.values() if len(info.shape) > 1 and info.name.startswith("blk.")
    ]
    return 8 * sum(info.n_bytes for info in matrices) / max(1, sum(info.n_elements for info in matrices))


def _block_type(header: GGUFHeader) -> str:
    sizes: dict[str, int] = {}
    for info in header.tensors.values():
        if len(info.shape) > 1 and info.name.startswith("blk."):
            sizes[info.type_name] = sizes.get(info.type_name, 0) + info.n_elements
    return max(sizes, key=lambda name: sizes[name], default="none")
