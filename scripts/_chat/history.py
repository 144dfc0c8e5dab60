"""The questions of earlier chats, in the user's state folder, for the arrow keys."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_BYTES = 1 << 20  # of the file; of a larger one the older half goes
NAME = "chat-history"


def history_path() -> Path | None:
    """Where they are kept: $XDG_STATE_HOME/llama-sidecar, by default ~/.local/state/llama-sidecar; None where there is no such place.

    The folder is made, for its user alone.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "llama-sidecar"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / NAME
        path.touch(mode=0o600)
        return path
    except (OSError, RuntimeError):
        return None


def trim(path: Path, n_most: int = MAX_BYTES) -> None:
    """Removes the older half of a history that has grown beyond `n_most` bytes; entries begin with a line of `# time`."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= n_most:
            return
        data = path.read_bytes()
        begin = data.find(b"\n# ", len(data) - n_most // 2)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data[begin + 1 :] if begin >= 0 else b"")
            part.chmod(0o600)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
