"""Tokens into the text of a completion and the chunks of a stream, as OpenAI's API and llama-cpp-python cut them.

Pure: bytes of tokens in, text out. Knows no model, no vocabulary and no JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def text_before(data: bytes, stops: Sequence[bytes]) -> str:
    """The text up to the first stop string; bytes that are no UTF-8, as of a character that was cut, are left out.

    >>> text_before(b"one\\n\\ntwo", [b"two", b"\\n\\n"])
    'one'
    """
    return data[: _first(data, stops)].decode("utf-8", "ignore")


def chunks(
    pieces: Iterable[bytes], stops: Sequence[bytes], *, join: bool = True
) -> Iterator[tuple[int, str]]:
    """Cuts a text into chunks while it is written: a token each, with the number of tokens before it.

    Held back is what may be the beginning of a stop string and, with `join`, a character that is not whole, whose tokens
    then come as one chunk. What is still held when the tokens end comes token by token, up to the stop string.

    Args:
        pieces: the bytes of each token.
        stops: strings that end the text.
        join: tokens of one character make one chunk; without it each token has its own, with the text it has alone.

    >>> list(chunks([b"a", b"b\\xc3", b"\\xa4", b" E", b"ND"], [b"END"]))
    [(0, 'a'), (1, 'bä'), (3, ' ')]
    """
    done, held, text = 0, list[bytes](), b""
    for piece in pieces:
        held.append(piece)
        text += piece
        if _is_cut(text):
            continue
        if any(stop in text for stop in stops):
            break
        left = b"".join(held)
        n_free = len(left) - _n_begun(left, stops)
        while held:
            n = _n_whole(held) if join else 1
            size = sum(map(len, held[:n]))
            if not n or size > n_free:
                break
            yield done, b"".join(held[:n]).decode("utf-8", "ignore")
            done, held, n_free = done + n, held[n:], n_free - size
    end = _first(b"".join(held), stops)
    for piece in held:
        yield done, piece[:end].decode("utf-8", "ignore")
        done, end = done + 1, end - len(piece)
        if end <= 0:
            break


def _first(data: bytes, stops: Sequence[bytes]) -> int:
    """Where the first stop string begins, or the end."""
    return min([data.index(stop) for stop in stops if stop in data], default=len(data))


def _n_begun(data: bytes, stops: Sequence[bytes]) -> int:
    """How many of the last bytes may be the beginning of a stop string."""
    return max(
        (n for stop in stops for n in range(1, min(len(stop), len(data)) + 1) if data.endswith(stop[:n])),
        default=0,
    )


def _n_whole(pieces: Sequence[bytes]) -> int:
    """The fewest first pieces that are whole characters together; 0 where none are."""
    data = b""
    for n, piece in enumerate(pieces, 1):
        data += piece
        try:
            data.decode("utf-8")
            return n
        except UnicodeDecodeError:
            continue
    return 0


def _is_cut(data: bytes) -> bool:
    """Whether the last character lacks bytes."""
    for n, byte in enumerate(reversed(data[-3:]), 1):
        if byte >= 0xC0:  # the first byte of a character of 2 to 4
            return n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
