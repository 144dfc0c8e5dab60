"""Runs a long build and says how far it is: its output goes to a file, one line of progress to the user.

Knows the step counters of ninja and make, and nothing of what is built. Standard library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from machine_check import Problem

STEP = re.compile(r"\s*\[\s*(\d+)(?:/(\d+)|%)\]")
ERROR = re.compile(r"error:|CMake Error|No space left", re.IGNORECASE)


def parse_step(line: str) -> tuple[int, int] | None:
    """How far a build is, by a line of ninja (`[17/240] ...`) or of make (`[ 7%] ...`): (done, of how many)."""
    found = STEP.match(line)
    return (int(found[1]), int(found[2] or 100)) if found else None


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """One line that says how far a build is: rewritten on a terminal, a new one every 20 seconds elsewhere."""

    def __init__(self, what: str, interval_s: float | None = None) -> None:
        self.what = what
        self.n_done, self.n_steps = 0, 0
        self.terminal = sys.stdout.isatty()
        self.interval_s = interval_s if interval_s is not None else (0.5 if self.terminal else 20.0)
        self.start_s = self.first_step_s = self.shown_s = time.monotonic()

    def read(self, line: str) -> None:
        """Takes a line of the build's output."""
        step = parse_step(line)
        if step and step[1] >= self.n_steps:  # a smaller number of steps is one of CMake's own little builds
            if not self.n_steps:
                self.first_step_s = time.monotonic()
            self.n_done, self.n_steps = step

    def text(self, now_s: float) -> str:
        elapsed = clock(now_s - self.start_s)
        if not self.n_steps:
            return f"{self.what}: fetching and configuring, {elapsed}"
        line = f"{self.what}: {self.n_done} of {self.n_steps} steps, {elapsed}"
        if self.n_done < self.n_steps / 20:
            return line
        left_s = (now_s - self.first_step_s) / self.n_done * (self.n_steps - self.n_done)
        return f"{line}, about {clock(left_s)} left"

    def show(self) -> None:
        now_s = time.monotonic()
        if now_s - self.shown_s < self.interval_s:
            return
        self.shown_s = now_s
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + self.text(now_s)[:width].ljust(width), end="", flush=True)
        else:
            print(self.text(now_s), flush=True)

    def finish(self, word: str) -> None:
        start = "\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r" if self.terminal else ""
        print(f"{start}{self.what}: {word} after {clock(time.monotonic() - self.start_s)}", flush=True)


def run_with_progress(command: list[str], environment: dict[str, str], what: str, log: Path) -> None:
    """Runs a build, its whole output going to `log`; raises `Problem` after showing the first errors in it."""
    progress = Progress(what)
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def collect() -> None:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                progress.read(line)

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    while reader.is_alive():
        reader.join(0.25)
        progress.show()
    failed = process.wait() != 0
    progress.finish("failed" if failed else "done")
    if failed:
        lines = log.read_text(encoding="utf-8").splitlines()
        errors = [line.strip() for line in lines if ERROR.search(line)]
        print("\n".join((errors or lines[-10:])[:10]), file=sys.stderr)
        raise Problem(f"{what} failed; all that it printed is in {log}")
