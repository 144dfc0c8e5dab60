"""Where a prompt is worth coming back to, for models whose state cannot be trimmed: recurrent and hybrid ones.

Their state exists at the position where it is and nowhere else, so the next prompt can keep what it shares with this one only
where a copy was made (a checkpoint). A copy costs memory, and an end of a decode: about the time of one token. Two places are
worth it: behind the last message, which a template leaves as it is when it rewrites the answer that follows (drops its
reasoning), and before it, where another question branches off behind the same system prompt. Where messages end is told from
end-of-text and end-of-turn tokens; knows no template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

OPENING = 16  # tokens that a template writes at most behind the last message to open the answer
BEFORE_END = 8  # where no turn ends there: tokens before the prompt's end
STEP = 64  # tokens that a checkpoint must save to be worth a decode
LEAST_KEPT = 64  # fewer are decoded anew: that takes little, and the text then does not depend on what was there before
STEP_REWRITTEN = 16  # the same behind the last message where answers are known to be rewritten


def checkpoint_places(
    tokens: Sequence[int], n_held: int, ends_turn: Callable[[int], bool], *, rewritten: bool = False
) -> list[int]:
    """Positions at which to checkpoint a prompt on its way, ascending; at most two.

    Args:
        tokens: the prompt (n_prompt,).
        n_held: how many of them need not be decoded.
        ends_turn: whether a token ends a message.
        rewritten: whether an answer of this conversation was rewritten before.

    >>> checkpoint_places([*range(100), 7, *range(200, 300), 7, 1, 2, 3], 0, lambda token: token == 7)
    [101, 202]
    >>> checkpoint_places([*range(100)], 0, lambda token: False)
    [92]
    """
    last = len(tokens) - 1  # a token must follow: its logits are wanted
    ends = (min(i + 1, last) for i in range(last, n_held - 1, -1) if ends_turn(tokens[i]))
    behind = next(ends, 0)
    before = next(ends, 0)
    if last + 1 - behind > OPENING:
        behind, before = last + 1 - BEFORE_END, behind
    found: list[int] = []
    if before - n_held >= STEP and (behind - before >= STEP or not rewritten):
        found.append(before)
    if behind - max([n_held, *found]) >= (STEP_REWRITTEN if rewritten else STEP):
        found.append(behind)
    return found
