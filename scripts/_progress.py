"""A progress bar on stderr for commands that write files; nothing where stderr is no terminal. No command itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(first: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows `first` until the callable it gives is called, with the bytes done, the bytes in all and what is being written."""
    bar = Progress(
        TextColumn("{task.description:30.30}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(first, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
