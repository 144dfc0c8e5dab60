"""What drafts for a main model, and why: the sidecar that was named or found, the head inside it, another model, or the text's own repetitions.

Opens and compares files; loads nothing. What a kind of sidecar is, its file in sidecars/kinds/ says; a draft model is none:
any GGUF of the same vocabulary, which is only ever named.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llama_sidecar.sidecars import (
    KINDS,
    GGUFHeader,
    MainFile,
    Sidecar,
    check_draft_model,
    check_pair,
    choose,
    kind_from_name,
    open_main,
    open_sidecar,
    survey,
)
from llama_sidecar.sidecars.compact import Compact, open_compact
from llama_sidecar.sidecars.errors import CompactGiven, NotASidecar, UnknownKind
from llama_sidecar.sidecars.kinds.mtp import ASSISTANTS

from ._native import drafter_kinds
from .errors import LoadError
from .layer_inputs import check_layer_inputs, check_shared_cache

AUTO, NONE = "auto", "none"
MODEL, NGRAM = "model", "ngram"
# What drafts without being a sidecar: our name, llama.cpp's, and what it is.
OTHERS = {
    MODEL: ("draft-simple", "a smaller model of the same vocabulary, which --sidecar names"),
    NGRAM: ("ngram-simple", "what followed the last time the text ended as now"),
}

File = Sidecar | Compact | MainFile


@dataclass(frozen=True)
class Speculation:
    """What drafts for a model, and why; `kind` None means that nothing does.

    `path` is the sidecar or draft model, or the main file when the head is embedded in it; the look-up has none. `match` says how far the pair is
    proven.
    """

    kind: str | None
    path: Path | None
    why: str
    match: str | None = None


@dataclass(frozen=True)
class Choice:
    """The `file` that is to draft; None where nothing does, or what the main file has inside."""

    speculation: Speculation
    file: File | None = None

    @property
    def drafter(self) -> str | None:
        """The native drafter's name: the kind, but for assistants, which are MTP on the target's own cache."""
        if isinstance(self.file, Sidecar) and self.file.arch in ASSISTANTS:
            return self.file.arch
        return self.speculation.kind

    @property
    def shares_target(self) -> bool:
        """Whether the drafter's context borrows something of the target's."""
        if isinstance(self.file, MainFile) or self.file is None:
            return False
        return bool(self.file.target.layers) or self.drafter != self.file.kind

    @property
    def has_weights(self) -> bool:
        """Whether anything is computed for a draft, in a context of its own."""
        return self.speculation.kind not in (None, NGRAM)

    @property
    def is_head(self) -> bool:
        """Whether the drafter computes MTP blocks, in the kind of context that llama.cpp has for them."""
        return self.speculation.kind == "mtp"

    def max_depth(self, main: MainFile) -> int | None:
        """The most tokens that it can draft in a round; None: any number."""
        kind = self.speculation.kind
        return KINDS[kind].max_depth(self._header(main)) if kind in KINDS else None

    def has_confidence(self, main: MainFile) -> bool:
        """Whether it also says how likely each token is to stand."""
        kind = self.speculation.kind
        return kind in KINDS and KINDS[kind].has_confidence(self._header(main))

    @property
    def in_one_pass(self) -> bool:
        """Whether all drafts of a round come of one decode."""
        kind = self.speculation.kind
        return kind in KINDS and KINDS[kind].in_one_pass

    @property
    def can_be_cut(self) -> bool:
        """Whether its vocabulary may be cut to fewer rows: an MTP head, or a drafter with an output of all tokens; or nothing drafts."""
        kind = self.speculation.kind
        if kind is None or self.is_head:
            return True
        return isinstance(self.file, Sidecar) and bool(KINDS[self.file.kind].output_tensors(self.file.header))

    def _header(self, main: MainFile) -> GGUFHeader:
        return (self.file or main).header


def choose_drafter(
    main: MainFile, sidecar: str | os.PathLike[str] | None, spec_type: str, force: bool
) -> Choice:
    """Chooses what drafts for a main model.

    Args:
        sidecar: a sidecar, a compact one, or a main model that is to draft; None: what lies beside the main file or in it.
        spec_type: "auto", "none", or a kind, which must then be there.
        force: use a sidecar although its fingerprint says that it belongs to another model.

    Raises:
        LlamaSidecarError: a file is missing, broken or not what it is given as; the two do not belong together; the kind asked
            for is not there; llama.cpp lacks what is needed.

    Example:
        >>> choose_drafter(open_main("NAME-Q8_0.gguf"), None, "auto", False).speculation.kind      # doctest: +SKIP
        'mtp'
    """
    wanted = _kind(spec_type)
    if spec_type == NONE:
        if sidecar is not None:
            raise LoadError(f"spec_type 'none' and the sidecar {sidecar} contradict each other")
        return Choice(Speculation(None, None, "it was turned off"))
    if wanted == NGRAM:
        if sidecar is not None:
            raise LoadError(f"spec_type {spec_type!r} and the sidecar {sidecar} contradict each other")
        return Choice(Speculation(NGRAM, None, "it was asked for"))
    if sidecar is not None:
        opened = _open(sidecar)
        if isinstance(opened, MainFile):
            return _draft_model(main, opened, wanted)
        if wanted not in (None, opened.kind):
            raise LoadError(f"{opened.path} is a {opened.kind} sidecar, but {spec_type!r} was asked for")
        return _checked(main, opened, "it was asked for", asked_for=True, force=force)
    if wanted == MODEL:
        raise LoadError(f"spec_type {spec_type!r} needs the model that is to draft (--sidecar FILE names it)")
    candidates = survey(main)
    found = choose(main, candidates, spec_type)
    if found is None:
        reasons = [c.reason for c in candidates if c.sidecar is None]
        why = f"no sidecar was found beside {main.path.name}"
        return Choice(Speculation(None, None, "; ".join([why, *reasons])))
    if found.path == main.path:
        return Choice(Speculation(found.kind, found.path, found.reason, "embedded"))
    why = f"{found.path.name} was found beside it"
    return _checked(main, open_sidecar(found.path), why, asked_for=wanted is not None, force=force)


def _kind(spec_type: str) -> str | None:
    for name, (llama_name, _) in OTHERS.items():
        if spec_type in (name, llama_name):
            return name
    try:
        return None if spec_type == NONE else kind_from_name(spec_type)
    except UnknownKind as error:
        others = ", ".join(f"{name} ({llama_name})" for name, (llama_name, _) in OTHERS.items())
        raise UnknownKind(f"{error}, {others}") from None


def _open(path: str | os.PathLike[str]) -> File:
    try:
        return open_sidecar(path)
    except CompactGiven:
        return open_compact(path)
    except NotASidecar:
        return open_main(path)


def _draft_model(main: MainFile, draft: MainFile, wanted: str | None) -> Choice:
    if wanted not in (None, MODEL):
        raise LoadError(f"{draft.path} is a main model, but a {wanted} sidecar was asked for")
    match = check_draft_model(main, draft)
    return Choice(Speculation(MODEL, draft.path, "it was asked for", match.status), draft)


def _checked(main: MainFile, sidecar: Sidecar | Compact, why: str, *, asked_for: bool, force: bool) -> Choice:
    """The sidecar, if all it needs is there; otherwise an error, or without one where nobody asked for it."""
    chosen = Choice(Speculation(sidecar.kind, sidecar.path, why), sidecar)
    if chosen.drafter not in drafter_kinds():
        missing = f"{sidecar.path.name} is a {chosen.drafter} sidecar, and this version has no {chosen.drafter} drafter"
        if not asked_for:
            return Choice(Speculation(None, None, missing))
        raise LoadError(f"{missing} (spec_type 'none' runs without it)")
    match = check_pair(main, sidecar, force=force)
    try:
        check_layer_inputs(main, sidecar)
        if chosen.shares_target and chosen.is_head:
            check_shared_cache(main, sidecar)
    except LoadError as error:
        if asked_for:
            raise
        return Choice(Speculation(None, None, str(error)))
    return Choice(Speculation(sidecar.kind, sidecar.path, why, match.status), sidecar)
