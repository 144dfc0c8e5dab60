"""Does this sidecar belong to this main model? Compares what the two files say; opens and searches nothing."""

from __future__ import annotations

from dataclasses import dataclass

from llama_sidecar.sidecars import keys
from llama_sidecar.sidecars.compact import Compact
from llama_sidecar.sidecars.errors import PairMismatch
from llama_sidecar.sidecars.sidecar import MainFile, Sidecar

VERIFIED = "verified"
SAME_TRUNK = "same trunk, unverified"
SAME_FAMILY = "same family, unverified"
UNVERIFIED = "unverified"
FORCED = "forced"
SAME_VOCABULARY = "same vocabulary"  # all that a draft model needs
STATUSES = (VERIFIED, SAME_TRUNK, SAME_FAMILY, UNVERIFIED, FORCED)  # the surest first

MAX_PADDING = 128  # ids by which vocabularies of one tokenizer differ at most, as llama.cpp allows

GRAFT = ", or graft this one (llama-sidecar graft) if that is a fine-tune of it"


@dataclass(frozen=True)
class Match:
    """How sure it is that two files belong together: `status` is one of STATUSES, `detail` one line on why."""

    status: str
    detail: str


def check_pair(main: MainFile, sidecar: Sidecar | Compact, *, force: bool = False) -> Match:
    """Check that a sidecar drafts for this main model: architecture, width, layers, vocabulary and fingerprints.

    `force` accepts fingerprints that differ (the text stays what the main model alone writes; drafts are accepted less
    often), nothing else. Raises PairMismatch, which names both values (of a vocabulary: the first token that differs,
    and both texts).

    >>> check_pair(open_main("NAME-Q4_K_M.gguf"), open_sidecar("mtp-NAME-Q8_0.gguf")).status  # doctest: +SKIP
    'verified'
    """
    _check_target(main, sidecar)
    if isinstance(sidecar, Compact):
        _check_rows(main, sidecar)
    else:
        _check_vocabulary(main, sidecar)
    try:
        return _compare_fingerprints(main, sidecar)
    except PairMismatch as error:
        if not force:
            raise
        return Match(UNVERIFIED, f"forced: {error}")


def check_draft_model(main: MainFile, draft: MainFile) -> Match:
    """Check that another model can draft for this one: equal texts for every id that both have; the larger may be padded.

    Raises PairMismatch, which names the first token that differs and both texts.

    >>> check_draft_model(open_main("NAME-7B-Q8_0.gguf"), open_main("NAME-0.5B-Q8_0.gguf")).status  # doctest: +SKIP
    'same vocabulary'
    """
    if draft.path.samefile(main.path):
        raise PairMismatch(
            f"{draft.path} is the main model itself, and its drafts would cost what its tokens do: give a smaller model"
        )
    same = f"every token of both has the same text ({min(len(main.tokens), len(draft.tokens)):,} ids)"
    if main.tokens == draft.tokens:
        return Match(SAME_VOCABULARY, same)
    for i, (ours, theirs) in enumerate(zip(main.tokens.iter_raw(), draft.tokens.iter_raw(), strict=False)):
        if ours != theirs:
            raise _no_draft_model(
                main, draft, f"text of token {i}", repr(main.tokens[i][:99]), repr(draft.tokens[i][:99])
            )
    if abs(len(main.tokens) - len(draft.tokens)) > MAX_PADDING:
        raise _no_draft_model(main, draft, "vocabulary's size", len(main.tokens), len(draft.tokens))
    return Match(SAME_VOCABULARY, same)


def _no_draft_model(main: MainFile, draft: MainFile, what: str, ours: object, theirs: object) -> PairMismatch:
    return PairMismatch(
        f"{draft.path} cannot draft for {main.path}: the {what} is {theirs}, the main model's is {ours}; "
        f"use a model with the same tokenizer, or a sidecar"
    )


def _compare_fingerprints(main: MainFile, sidecar: Sidecar | Compact) -> Match:
    if None not in (main.trunk, sidecar.trunk) and main.trunk != sidecar.trunk:
        raise _mismatch(
            main, sidecar, "trunk's fingerprint", _short(main.trunk), _short(sidecar.trunk), GRAFT
        )
    if None not in (main.rows, sidecar.rows) and main.rows != sidecar.rows:
        raise _mismatch(
            main, sidecar, "fingerprint of source rows", _short(main.rows), _short(sidecar.rows), GRAFT
        )
    if main.trunk is None or sidecar.trunk is None:
        which = "main model" if main.trunk is None else "sidecar"
        return Match(UNVERIFIED, f"the {which} has no fingerprint; architecture, width and vocabulary agree")
    if keys.GRAFT_TRUNK in sidecar.header.keys:
        return Match(
            SAME_FAMILY, "the head was grafted onto this main model and trained with another of its family"
        )
    if main.rows is None or sidecar.rows is None:
        return Match(
            SAME_TRUNK, "tokens and norms of the trunk are the same; its matrices could not be compared"
        )
    return Match(VERIFIED, "both come from the same checkpoint")


def _short(fingerprint: str | None) -> str:
    return f"{fingerprint or '':.12}..."


def _mismatch(
    main: MainFile, sidecar: Sidecar | Compact, what: str, ours: object, theirs: object, advice: str = ""
) -> PairMismatch:
    return PairMismatch(
        f"{sidecar.path} does not belong to {main.path}: the {what} is {theirs}, the main model's is {ours}; "
        f"use the sidecar that was converted from the same checkpoint{advice}"
    )


def _check_target(main: MainFile, sidecar: Sidecar | Compact) -> None:
    target = sidecar.target
    if target.arch is not None and target.arch != main.arch:
        raise _mismatch(main, sidecar, "architecture", main.arch, target.arch)
    if target.width is not None and target.width != main.width:
        raise _mismatch(main, sidecar, "width (embedding_length)", main.width, target.width)
    if target.n_layers is not None and target.n_layers != main.n_layers:
        raise _mismatch(main, sidecar, "number of trunk layers", main.n_layers, target.n_layers)
    deepest = max(target.layers, default=0)
    if deepest > main.n_layers:
        raise _mismatch(main, sidecar, "deepest layer", main.n_layers, deepest)
    if target.n_vocab is not None and target.n_vocab != len(main.tokens):
        raise _mismatch(
            main, sidecar, "vocabulary's size (it borrows the output)", len(main.tokens), target.n_vocab
        )


def _check_vocabulary(main: MainFile, sidecar: Sidecar) -> None:
    """Equal texts for every id of the main model; a sidecar may be padded beyond them."""
    if main.tokens == sidecar.tokens:
        return
    for i, (ours, theirs) in enumerate(zip(main.tokens.iter_raw(), sidecar.tokens.iter_raw(), strict=False)):
        if ours != theirs:
            raise _mismatch(
                main, sidecar, f"text of token {i}", repr(main.tokens[i][:99]), repr(sidecar.tokens[i][:99])
            )
    if len(sidecar.tokens) < len(main.tokens):
        raise _mismatch(main, sidecar, "vocabulary's size", len(main.tokens), len(sidecar.tokens))


def _check_rows(main: MainFile, compact: Compact) -> None:
    """Equal texts for every id that a compact sidecar has a row for; the head it was cut from may be padded beyond."""
    if compact.n_vocab < len(main.tokens):
        raise _mismatch(main, compact, "vocabulary's size", len(main.tokens), compact.n_vocab)
    last = int(compact.target_ids[-1])
    if last >= len(main.tokens):
        raise _mismatch(main, compact, "last token id", len(main.tokens) - 1, last)
    for i, theirs in zip(compact.target_ids.tolist(), compact.tokens.iter_raw(), strict=True):
        ours = main.tokens.raw(i)
        if ours != theirs:
            text = theirs[:99].decode("utf-8", "replace")
            raise _mismatch(main, compact, f"text of token {i}", repr(main.tokens[i][:99]), repr(text))
