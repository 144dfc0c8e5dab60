"""A Hugging Face Hub of one repository, ORG/NAME, on this machine: what the converter's tests read checkpoints from.

Speaks as much of the Hub's protocol as huggingface_hub asks for: the model's information, and files with ranges. Notes what it
sent of each file, and can be told to refuse, to know no ranges, or to hang up.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = "org/Tiny-1B"
COMMIT = "c0ffee" + "0" * 34


class HubServer:
    """The files of a folder; `sent` lists (file, first byte, last byte + 1) of every answer with data."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sent: list[tuple[str, int, int]] = []
        self.error: tuple[int, str] | None = None  # status and code of every answer
        self.has_ranges = True
        self.hang_up_after: int | None = None  # ranges, from when on no range is answered
        self.endpoint = ""

    def n_sent(self, pattern: str = "*.safetensors") -> int:
        """Bytes sent of the files that match."""
        return sum(stop - start for file, start, stop in self.sent if Path(file).match(pattern))

    def may_answer(self) -> bool:
        if self.hang_up_after is None:
            return True
        self.hang_up_after -= 1
        return self.hang_up_after >= 0


@contextmanager
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """Serves the folder as org/Tiny-1B to huggingface_hub in this process, with a cache of its own."""
    from huggingface_hub import constants

    server = HubServer(folder)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        try:
            yield server
        finally:
            http.shutdown()
            http.server_close()
            thread.join()


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # header and body in one packet: two would wait for each other

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if server.error:
                return self.reply(server.error[0], b"{}", {"X-Error-Code": server.error[1]})
            if path.startswith(f"/api/models/{REPOSITORY}"):
                return self.reply(200, _information(server.folder))
            prefix = f"/{REPOSITORY}/resolve/{COMMIT}/"
            if path.startswith("/api/") or not path.startswith(prefix):
                return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            file = server.folder / path.removeprefix(prefix)
            if not file.is_file():
                return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            self.send_file(file, with_body)

        def send_file(self, file: Path, with_body: bool) -> None:
            size = file.stat().st_size
            start, stop, status = 0, size, 200
            wanted = self.headers.get("Range")
            if wanted and server.has_ranges:
                first, last = wanted.removeprefix("bytes=").split("-")
                start, stop, status = int(first), min(int(last or size - 1) + 1, size), 206
                if not server.may_answer():
                    self.close_connection = True
                    return
            headers = {
                "ETag": f'"{hashlib.sha256(str(file).encode()).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
                "Content-Range": f"bytes {start}-{stop - 1}/{size}",
            }
            with file.open("rb") as data:
                data.seek(start)
                body = data.read(stop - start) if with_body else b""
            if with_body:
                server.sent.append((file.relative_to(server.folder).as_posix(), start, stop))
            self.reply(status, body, headers, stop - start)

        def reply(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _information(folder: Path) -> bytes:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    siblings = [
        {"rfilename": file.relative_to(folder).as_posix(), "size": file.stat().st_size} for file in files
    ]
    return json.dumps({"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()
