"""A real `llama-sidecar serve` in a process of its own, for the tests of the server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Served:
    """A running server: where it is, its process, and what it wrote to stderr."""

    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def request(
        self, path: str, body: Any = None, *, timeout: float = 60, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON or text, and headers of one request; a body that is no bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **names})
        try:
            answer = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read().decode()
            found = json.loads(text) if "json" in answer.headers.get("content-type", "") else text
            return answer.status, found, dict(answer.headers)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """The answer to a chat request, which must work."""
        status, found, _ = self.request("/v1/chat/completions", {"messages": HELLO, **fields})
        assert status == 200, found
        return dict(found)

    def gauge(self, name: str) -> float:
        """A number of `/metrics`."""
        text: str = self.request("/metrics")[1]
        line = next(line for line in text.splitlines() if line.startswith(f"llama_sidecar_{name} "))
        return float(line.split()[1])


@contextlib.contextmanager
def served(main: Path, *options: str) -> Iterator[Served]:
    """Starts it at a free port, and ends it."""
    command = [sys.executable, "-m", "llama_sidecar.scripts", "serve", str(main), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or []))
    reader.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), (line, log)
        yield Served(line.split(" at ")[1].split()[0], process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
            reader.join()
            process.stderr.close()
