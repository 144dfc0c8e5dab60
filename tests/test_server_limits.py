"""What the server does when things go otherwise: bad requests, a full queue, clients that leave, keys, names, its end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import models
import pytest
from click.testing import CliRunner
from served import HELLO, TEMPLATE, Served, served

from llama_sidecar.scripts.__main__ import cli

pytest.importorskip("starlette")
import uvicorn

from llama_sidecar.runtime.server import serve as serve_module
from llama_sidecar.runtime.server.serve import N_CONNECTIONS

ROOT = Path(__file__).parents[1]
LONG = {"messages": HELLO, "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 3}
DRAIN_S = 240  # far longer than ending takes, on however slow a machine


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_pair(tmp_path_factory.mktemp("limits"), template=TEMPLATE).main


@pytest.fixture(scope="module")
def server(main: Path) -> Iterator[Served]:
    """One slot, one place in the queue."""
    options = ("--slots", "1", "--queue", "1", "--ctx", "4096", "--depth", "2", "--threads", "1")
    with served(main, *options, "--max-body", "0.1", "--max-prompt", "2000") as server:
        yield server


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def running(server: Served, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A long stream whose first bytes have come."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
    body = json.dumps({**LONG, "stream": True, **fields})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    response.read(300)
    try:
        yield response
    finally:
        response.close()
        connection.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, "messages is missing"),
        ({"messages": "Hi"}, "messages is 'Hi': a list is expected"),
        ({"max_tokens": 0}, "max_tokens 0: at least 1"),
        ({"max_tokens": "3"}, "a whole number is expected"),
        ({"max_tokens": True}, "a whole number is expected"),
        ({"max_completion_tokens": 4}, "differ"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"n": 2}, "one answer"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "none of them empty"),
        ({"logit_bias": {"x": 1}}, "no token id"),
        ({"logit_bias": {"256": 1}}, "outside the vocabulary"),
        ({"logprobs": 1}, "true or false is expected"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "0 to 20"),
        ({"stream_options": {"include_usage": True}}, "no stream"),
        ({"response_format": {"type": "yaml"}}, "none of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "cannot bind one answer"),
        ({"grammar": "root = 1"}, "grammar"),
        ({"json_schema": {"type": "strange"}}, "JSON schema"),
        ({"json_schema": {"$ref": "https://example.org/x.json"}}, "JSON schema"),
        ({"chat_template_kwargs": {"messages": []}}, "not for a request to give"),
        ({"chat_template_kwargs": {"self": 1}}, "not for a request to give"),
        ({"foo\ud800": 1}, "unknown: foo"),
        ({"functions": [{"name": "f"}]}, "give tools"),
        ({"reasoning_effort": "high"}, "chat_template_kwargs"),
        ({"store": True}, "nothing is stored"),
        ({"foo": 1}, "unknown: foo"),
        ({"accept": "all"}, "none of auto, match, reject"),
        ({"dry_sequence_breakers": 1}, "dry_sequence_breakers"),
        ({"seed": json.loads("[" * 60 + "]" * 60)}, "seed"),
        ({"temperature": "x" * 9000}, "xxx..."),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "template failed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "an image cannot be used"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "this server takes 2000: shorten it"),
    ],
)
def test_a_bad_field_is_one_clear_line(server: Served, fields: dict[str, Any], words: str) -> None:
    for stream in (False,) if "stream_options" in fields else (False, True):
        status, found, _ = server.request("/v1/chat/completions", {**SHORT, "stream": stream, **fields})
        assert status == 400 and words in found["error"]["message"], found
        assert found["error"]["type"] == "invalid_request_error" and "\n" not in found["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["a", "b"]}, "has 2 prompts"),
        ({"prompt": {}}, "a text or a list is expected"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [999]}, "outside the vocabulary"),
        ({"prompt": [999], "echo": True}, "outside the vocabulary"),
        ({"prompt": [10**30], "echo": True}, "outside the vocabulary"),
        ({"prompt": ["a", 1]}, "has 2 prompts"),
        ({"suffix": "x"}, "at its end alone"),
        ({"best_of": 2}, "one answer"),
        ({"echo": True, "logprobs": 1}, "the prompt's tokens have none"),
        ({"messages": HELLO}, "unknown: messages"),
    ],
)
def test_a_bad_text_request_is_one_clear_line(server: Served, fields: dict[str, Any], words: str) -> None:
    status, found, _ = server.request("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields})
    assert status == 400 and words in found["error"]["message"], found


def test_a_body_that_cannot_be_used_is_refused(server: Served) -> None:
    def ask(body: bytes, **headers: str) -> tuple[int, str]:
        status, found, _ = server.request("/v1/chat/completions", body, **headers)
        return status, found["error"]["message"]

    assert ask(b"{") == (
        400,
        "the body is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    )
    assert ask(b"\xff")[0] == 400
    assert ask(b"[" * 50_000)[0] == 400
    assert ask(b"[" * 500 + b"]" * 500) == (
        400,
        "the body has more than 64 lists and objects within each other, the most here",
    )
    assert ask(b"[]") == (400, "the body is []: an object is expected")
    assert ask(b'{"messages": []}', Content_Type="text/plain")[0] == 415
    assert ask(b" " * 200_000)[0] == 413
    assert ask(b" " * 1_000_000)[0] == 413
    assert server.chat(**SHORT)["usage"]["completion_tokens"] == 3


def test_what_is_not_there_is_told_in_json(server: Served) -> None:
    status, found, _ = server.request("/v1/embeddings", {})
    assert status == 404 and found["error"]["message"] == "there is no /v1/embeddings"
    status, found, headers = server.request("/v1/chat/completions")
    assert status == 405 and "does not take GET" in found["error"]["message"] and headers["allow"] == "POST"


def test_a_client_that_leaves_frees_its_slot(server: Served) -> None:
    before = server.gauge("cancelled_total")
    with running(server):
        assert server.gauge("slots_busy") == 1
    wait_until(lambda: server.gauge("slots_busy") == 0)
    assert server.gauge("cancelled_total") == before + 1, "it did not write on to the end"
    assert server.chat(**SHORT)["usage"]["completion_tokens"] == 3


def test_a_client_that_leaves_without_a_stream_frees_its_slot_or_place(server: Served) -> None:
    place = urlsplit(server.url)
    body = json.dumps(LONG).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = []
    for name, n in (("slots_busy", 1), ("waiting", 1)):
        connection = socket.create_connection((str(place.hostname), int(place.port or 0)))
        connection.sendall(head.encode() + body)
        connections.append(connection)
        wait_until(lambda name=name, n=n: server.gauge(name) == n)  # type: ignore[misc]
    connections[1].close()
    wait_until(lambda: server.gauge("waiting") == 0, 10)
    assert server.gauge("slots_busy") == 1
    connections[0].close()
    wait_until(lambda: server.gauge("slots_busy") == 0, 10)


def test_a_flood_is_told_to_come_back_and_others_are_served(server: Served) -> None:
    found: list[tuple[int, dict[str, str]]] = []

    def ask() -> None:
        status, _, headers = server.request("/v1/chat/completions", {**SHORT, "user": "flood"})
        found.append((status, headers))

    with contextlib.ExitStack() as stack:
        stack.enter_context(running(server, user="flood"))
        waiting = threading.Thread(target=ask)
        waiting.start()
        wait_until(lambda: server.gauge("waiting") == 1)  # the one place is taken
        threads = [threading.Thread(target=ask) for _ in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.gauge("slots_busy") == 1 and waiting.is_alive(), "all were refused at once"
    waiting.join()
    statuses = [status for status, _ in found]
    assert sorted(statuses) == [200] + [429] * 7
    retry = [int(headers["retry-after"]) for status, headers in found if status == 429]
    assert all(1 <= seconds <= 60 for seconds in retry)
    wait_until(lambda: server.gauge("slots_busy") == 0)
    assert server.chat(**SHORT, user="other")["usage"]["completion_tokens"] == 3


def test_only_who_has_the_key_is_answered(main: Path) -> None:
    with served(
        main, "--api-key", "secret", "--spec-type", "none", "--ctx", "512", "--threads", "1"
    ) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            for path, body in (("/v1/models", None), ("/metrics", None), ("/v1/chat/completions", SHORT)):
                status, found, _ = server.request(path, body, **headers)
                assert status == 401 and found["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer secret"}
        assert server.request("/v1/models", **right)[0] == 200
        assert server.request("/v1/chat/completions", SHORT, **right)[0] == 200
        assert server.request("/health")[0] == 200
        status, _, headers = server.request("/")
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
        assert server.request("/health", Host="elsewhere.example")[0] == 200
        for name in ("localhost/health?", "localhost/?", "localhost/health#"):  # no way to another path
            assert server.request("/metrics", Host=name)[0] == 401


@pytest.mark.parametrize("model", ["other", ["main"], {}, 1])
def test_another_model_is_not_found(server: Served, model: Any) -> None:
    status, found, _ = server.request("/v1/chat/completions", {**SHORT, "model": model})
    assert status == 404 and "is not here" in found["error"]["message"]


def test_only_names_of_this_machine_are_answered_to(server: Served) -> None:
    status, found, _ = server.request("/v1/models", Host="attacker.example:8080")
    assert status == 403 and "attacker.example" in found["error"]["message"]
    assert server.request("/v1/models", Host="localhost:1")[0] == 200
    assert server.request("/v1/models", Host="[broken")[0] < 500


def test_text_that_is_none_breaks_no_answer(server: Served) -> None:
    fields = {"max_tokens": 2, "echo": True, "user": "\ud800", "ignore_eos": True, "temperature": 0}
    status, found, _ = server.request("/v1/completions", {"prompt": "a\ud800b", **fields})
    assert status == 200 and found["choices"][0]["text"].startswith("a?b")
    server.chat(**{**SHORT, "messages": [{"role": "user", "content": "\ud800"}]})


def test_sigterm_lets_running_answers_end_and_refuses_the_rest(main: Path) -> None:
    options = ("--slots", "1", "--ctx", "4096", "--depth", "2", "--threads", "1", "--drain", "60")
    with served(main, *options) as server:
        waiting: list[int] = []

        def wait() -> None:
            waiting.append(server.request("/v1/chat/completions", SHORT)[0])

        with running(server, max_tokens=1500) as stream:
            thread = threading.Thread(target=wait)
            thread.start()
            wait_until(lambda: server.gauge("waiting") == 1)
            server.process.send_signal(signal.SIGTERM)
            text = stream.read().decode()
        assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
        thread.join()
        assert waiting == [503]
        assert server.process.wait(30) == 0
    assert not any("Traceback" in line for line in server.log)


def test_the_drain_has_a_deadline(main: Path) -> None:
    options = ("--slots", "1", "--ctx", "4096", "--depth", "2", "--threads", "1", "--drain", "0.2")
    with served(main, *options) as server:
        with running(server, max_tokens=4000) as stream:
            server.process.send_signal(signal.SIGTERM)
            text = stream.read().decode()
        # Cancelled, unless the machine stood still until the whole text was written.
        assert "the server is shutting down" in text and text.endswith("data: [DONE]\n\n")
        assert server.process.wait(30) == 0


def test_an_idle_server_ends_at_once(main: Path) -> None:
    options = ("--spec-type", "none", "--ctx", "512", "--threads", "1", "--drain", str(DRAIN_S))
    with served(main, *options) as server:
        server.chat(**SHORT)
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(DRAIN_S / 2) == 0, "it waited for answers, although there are none"


def test_an_address_that_cannot_be_had_is_told_before_the_model_is_loaded(main: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(cli, ["serve", str(main), "--port", str(taken.getsockname()[1])])
        assert "cannot be listened at" in str(result.exception) and "--port" in str(result.exception)
    result = CliRunner().invoke(cli, ["serve", "missing.gguf", "--host", "no.such.host.invalid"])
    assert "the host 'no.such.host.invalid' cannot be used" in str(result.exception)


def test_a_server_for_others_says_so(main: Path) -> None:
    with served(main, "--host", "0.0.0.0", "--spec-type", "none", "--ctx", "512", "--threads", "1") as server:
        assert server.request("/v1/models", Host="box.lan:8080")[0] == 200
    assert any("not this machine alone" in line and "--api-key" in line for line in server.log)


@pytest.mark.parametrize("host", ["127.1", "127.0.0.2", "LocalHost"])
def test_this_machine_is_known_however_it_is_called(main: Path, host: str) -> None:
    with served(main, "--host", host, "--spec-type", "none", "--ctx", "512", "--threads", "1") as server:
        assert server.request("/v1/models")[0] == 200
        assert server.request("/v1/models", Host=host)[0] == 200
        assert server.request("/v1/models", Host="attacker.example")[0] == 403
    assert not any("not this machine alone" in line for line in server.log)


def test_more_connections_than_there_may_be_are_told_so_and_those_there_are_go_on(server: Served) -> None:
    """With one slot and one place in the queue."""
    place = urlsplit(server.url)
    address = (str(place.hostname), int(place.port or 0))
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def answer(connection: socket.socket) -> bytes:
        connection.settimeout(60)
        connection.sendall(ask)
        return connection.recv(4096)

    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(address)) for _ in range(N_CONNECTIONS + 2)
        ]
        beyond = stack.enter_context(socket.create_connection(address))
        refused = answer(beyond)
        assert refused.startswith(b"HTTP/1.1 503") and b"the server has more connections" in refused
        assert answer(connections[0]).startswith(b"HTTP/1.1 200")

    def is_free() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(address) as again:
            return answer(again).startswith(b"HTTP/1.1 200")
        return False

    wait_until(is_free)


async def _answers_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def _listening() -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """The server's protocol before an application that always answers; it, and its port."""
    protocol = serve_module._limited(N_CONNECTIONS)
    config = uvicorn.Config(
        _answers_ok, http=protocol, log_config=None, lifespan="off", timeout_keep_alive=600
    )
    server = uvicorn.Server(config)
    with serve_module.bind("127.0.0.1", 0) as bound:
        running = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield server, int(bound.getsockname()[1])
        finally:
            server.should_exit = True
            await running


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_connection_that_asks_nothing_is_closed_in_time(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(serve_module, "SILENT_S", 0.05)

    async def wait() -> bytes:
        async with _listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            try:
                return await asyncio.wait_for(reader.read(), 120)
            finally:
                writer.close()

    assert asyncio.run(wait()) == b""


def test_a_connection_that_has_asked_stays_open_when_the_time_is_over() -> None:
    ask = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(ask)
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 120)

    async def talk() -> None:
        async with _listening() as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert (await answer(reader, writer)).startswith(b"HTTP/1.1 200")
            (protocol,) = server.server_state.connections
            timer = protocol._silence  # its time comes here and now, and not in half a minute
            left_s = timer.when() - asyncio.get_running_loop().time()
            assert 0 < left_s <= serve_module.SILENT_S and not timer.cancelled()
            protocol._close_if_silent()
            assert (await answer(reader, writer)).startswith(b"HTTP/1.1 200")
            writer.close()
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            assert timer.cancelled(), "it would keep what is gone for half a minute"

    asyncio.run(talk())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_requests_of_all_sorts_leave_no_slot_stuck_and_memory_flat(main: Path) -> None:
    """The short form of scripts/dev/soak.py."""
    soak = runpy.run_path(str(ROOT / "scripts" / "dev" / "soak.py"))["soak"]
    options = ("--slots", "4", "--queue", "8", "--ctx", "1024", "--depth", "2", "--threads", "1")
    with served(main, *options) as server:
        # All slots full once: what they take from then on is a leak.
        full = {**SHORT, "max_tokens": 1000}
        threads = [threading.Thread(target=server.chat, kwargs={**full, "user": name}) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = soak(server, n_requests=150, n_clients=6)
        assert report.problems() == [], report
        assert sum(report.ends.values()) == 150 and report.ends["left"] >= 30
        assert server.process.poll() is None
    assert not any("Traceback" in line for line in server.log)
