"""Rounds of the native session by hand, for drafters of every kind: what they draft however the sequence got where it is."""

from __future__ import annotations

from collections.abc import Sequence

from llama_sidecar.runtime import Model, Session, _native
from llama_sidecar.runtime.sampling import address
from llama_sidecar.runtime.weights import free_context, make_target_context


def drafts_at_depths(
    model: Model, prompt: Sequence[int], depths: Sequence[int], *, catches_up: bool
) -> list[list[int]]:
    """The drafts of rounds at these depths; the drafter catches up before each of them, or only when it drafts."""
    with model.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(list(prompt), True)
        native.first(chooser)
        drafts = []
        for depth in depths:
            if catches_up:
                native.catch_up()
            drafts.append(native.step(chooser, depth, True).drafts)
    return drafts


def native_run(
    model: Model, prompt: Sequence[int], n: int, depth: int
) -> tuple[list[int], list[list[int]], int]:
    """n greedy ids or a few more, every round's drafts, and how many of them stood."""
    found_drafts, n_accepted = [], 0
    with model.session(depth=depth) as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(list(prompt), True)
        found = [native.first(chooser)]
        while len(found) < n:
            step = native.step(chooser, min(depth, n - len(found) - 1), True)
            found += step.tokens
            found_drafts.append(step.drafts)
            n_accepted += step.n_accepted
    return found, found_drafts, n_accepted


def drafts_after(session: Session, n: int, depth: int) -> list[tuple[list[int], list[int]]]:
    """What n further rounds of a session emit, and draft."""
    chooser = _native.greedy_chooser()
    steps = [session._native.step(chooser, depth, True) for _ in range(n)]
    return [(step.tokens, step.drafts) for step in steps]


def moved_rounds(
    model: Model, prompt: Sequence[int], depths: Sequence[int], *, moves: bool
) -> tuple[list[int], list[list[int]], bytes]:
    """Text, drafts and state after rounds at these depths; those of depth 0 in a plain context, if it moves there."""
    target = make_target_context(model.weights, model.settings, n_ctx=256, depth=3, n_slots=3)
    plain = make_target_context(model.weights, model.settings, n_ctx=256, depth=0, n_slots=0)
    draft = model.make_draft_context(model.settings, n_ctx=256, target=target)
    native = _native.Session(address(target), kind=model.drafter, draft_ctx=address(draft))
    if moves:
        native.set_plain_context(address(plain))
    chooser = _native.greedy_chooser()
    native.feed(list(prompt), True)
    text, drafts = [native.first(chooser)], []
    for depth in depths:
        native.use_plain(depth == 0)
        assert native.is_plain == (moves and depth == 0)
        step = native.step(chooser, depth, True)
        text += step.tokens
        drafts.append(step.drafts)
    state = native.state()
    del native
    for context in (draft, plain, target):
        free_context(context)
    return text, drafts, state
