"""What the line below a conversation says: speed, what it gains over plain decoding, acceptance, how full the context is."""

from __future__ import annotations

from collections.abc import Sequence

from llama_sidecar.runtime import Session, Stats
from llama_sidecar.runtime.costs import remembered
from llama_sidecar.runtime.pace import Pace
from llama_sidecar.sidecars.errors import printable


def plain_tok_s(session: Session) -> float | None:
    """Tokens per second that plain decoding has been measured to make here; None where it was not measured."""
    known = session.pace if isinstance(session.pace, Pace) else remembered(session.model)
    seconds = known.plain_s if known else 0.0
    return 1 / seconds if seconds > 0 else None


def status_parts(stats: Stats | None, plain: float | None, n_used: int, n_ctx: int) -> list[str]:
    """The parts in the order of their weight, of a conversation that has taken `n_used` of `n_ctx` tokens.

    >>> stats = Stats("mtp", "on", "", 3, n_rounds=10, n_tokens=31, n_drafted=30, n_accepted=20, generate_s=1.0)
    >>> status_parts(stats, 15.0, 1200, 8192)
    ['30.0 tok/s', '2.0x plain', '67% accepted', 'context 1,200 of 8,192']
    """
    parts = []
    if stats is not None and stats.tok_s:
        parts.append(f"{stats.tok_s:.1f} tok/s")
        if stats.speculation == "off":
            parts.append("speculation off")
        else:
            if plain:
                parts.append(f"{stats.tok_s / plain:.1f}x plain")
            if stats.n_drafted:
                parts.append(f"{100 * stats.n_accepted / stats.n_drafted:.0f}% accepted")
            else:
                parts.append("nothing drafted")
    elif stats is not None and not stats.n_tokens:
        parts.append(f"reading {stats.n_prompt:,} tokens")
    return [*parts, f"context {n_used:,} of {n_ctx:,}"]


def fitted(parts: Sequence[str], columns: int) -> str:
    """As many of the parts as fit.

    >>> fitted(["30.0 tok/s", "2.0x plain", "67% accepted"], 25)
    '30.0 tok/s · 2.0x plain'
    """
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if line and len(longer) > columns:
            break
        line = longer
    return printable(line)[:columns]
