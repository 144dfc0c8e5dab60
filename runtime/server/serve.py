"""The process: a socket bound before the model is loaded, uvicorn, and an end in order.

SIGTERM and Ctrl-C drain: no connection is accepted, what waits is refused, what runs may end within the deadline and is then
cancelled; a second Ctrl-C cancels at once. Plain HTTP/1.1: encryption and slow clients are a reverse proxy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..errors import LoadError
from ..llm import Model
from .app import BUSY, LOOPBACK, Limits, make_app
from .errors import RequestError
from .metrics import Metrics
from .pool import Job, Pool

DRAIN_S = 20.0
N_BODY_BYTES = 8 * 2**20
N_CONNECTIONS = 256  # beside those that are answered or wait; a process often may have 1,024 files open
SILENT_S = 30.0  # that a connection may be open without asking anything
SWITCH_S = 0.0005  # CPython's threads change places as often: a round that has ended waits no longer for a response to be written

_BUSY_BODY = json.dumps(RequestError(BUSY, status=503).body()).encode()
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY_BODY), _BUSY_BODY)
)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet; port 0 takes a free one.

    Raises:
        LoadError: the address is unknown, not ours, or taken.

    Example:
        >>> with bind("127.0.0.1", 0) as bound:
        ...     bound.getsockname()[0]
        '127.0.0.1'
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise LoadError(f"the host {host!r} cannot be used: {_why(error)}") from error
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise LoadError(
            f"{host} port {port} cannot be listened at: {_why(error)}; choose another --port"
        ) from error
    return bound


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach a bound socket, whatever its address was called.

    >>> with bind("localhost", 0) as inside, bind("0.0.0.0", 0) as outside:
    ...     is_loopback(inside), is_loopback(outside)
    (True, False)
    """
    return _address(bound).is_loopback


def _address(bound: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def url_of(bound: socket.socket) -> str:
    """How a client on this machine calls a bound socket."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    model: Model,
    bound: socket.socket,
    *,
    host: str = "127.0.0.1",
    model_id: str | None = None,
    slots: int = 2,
    queue: int = 16,
    api_key: str | None = None,
    max_prompt: int | None = None,
    max_body_bytes: int = N_BODY_BYTES,
    allow_hosts: tuple[str, ...] = (),
    allow_origins: tuple[str, ...] = (),
    drain_s: float = DRAIN_S,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves a model until SIGTERM or Ctrl-C; from the main thread, whose signals it takes meanwhile.

    Args:
        model: stays the caller's.
        bound: of `bind`; closed at the end.
        host: what it was bound to: on loopback without a key, only names of this machine are answered to.
        model_id: the model's name for clients (default: the file's stem; the file's name is one, too).
        slots: answers at a time.
        queue: requests that may wait for one.
        api_key: that requests must have.
        max_prompt: tokens of a prompt (default: the context).
        max_body_bytes: of a request.
        allow_hosts: more names that the server may be called by.
        allow_origins: web pages elsewhere that may use it; "*" for all.
        drain_s: seconds that running answers have at the end.
        on_ready: called when requests are answered.

    Raises:
        LoadError: there is no memory for the slots.

    Example:
        >>> with load("demo-Q8_0.gguf") as model, bind("127.0.0.1", 8080) as bound:   # doctest: +SKIP
        ...     serve(model, bound)
    """
    metrics = Metrics()

    def count(job: Job) -> None:
        if job.generation is not None:
            cancelled = job.generation.finish_reason == "cancelled"
            metrics.count_answer(job.generation.stats, waited_s=job.waited_s, cancelled=cancelled)

    pool = Pool(model, n_slots=slots, n_waiting=queue, on_end=count)
    before = sys.getswitchinterval()
    try:
        names = (*LOOPBACK, str(_address(bound)), host, *allow_hosts)
        hosts = tuple(name.lower() for name in names) if is_loopback(bound) and api_key is None else ()
        app = make_app(
            pool,
            model_id=model_id or model.main.path.stem,
            names=(model.main.path.name,),
            limits=Limits(
                n_prompt=min(max_prompt or model.n_ctx, model.n_ctx),
                n_body_bytes=max_body_bytes,
                hosts=hosts,
                api_key=api_key,
                origins=allow_origins,
            ),
            metrics=metrics,
        )
        config = uvicorn.Config(
            app,
            http=_limited(N_CONNECTIONS + slots + queue),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(drain_s)
            + 5,  # of clients that do not read what is written to them
            lifespan="on",
            ws="none",
        )
        sys.setswitchinterval(min(before, SWITCH_S))
        asyncio.run(_Server(config, pool, drain_s, on_ready).serve(sockets=[bound]))
    finally:
        sys.setswitchinterval(before)
        pool.close()


def _limited(n_most: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which tells more than so many connections that they are too many, and closes those that ask nothing."""
    base: Any = AutoHTTPProtocol

    class Limited(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._is_beyond = len(self.connections) > n_most
            self._silence = self.loop.call_later(SILENT_S, self._close_if_silent)

        def data_received(self, data: bytes) -> None:
            if self._is_beyond:  # answered when it asks: one that is closed before reads no answer
                self.transport.write(_BUSY)
                self.transport.close()
            else:
                super().data_received(data)

        def connection_lost(self, error: Exception | None) -> None:
            self._silence.cancel()
            super().connection_lost(error)

        def _close_if_silent(self) -> None:
            if self.cycle is None:  # no request has come
                self.transport.close()

    return Limited


class _Server(uvicorn.Server):
    """uvicorn, which drains the pool when it is told to end."""

    def __init__(
        self, config: uvicorn.Config, pool: Pool, drain_s: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._pool = pool
        self._drain_s = drain_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pool.drain()
        deadline = self._loop.call_later(self._drain_s, self._pool.cancel_all)
        await super().shutdown(sockets)
        deadline.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that ended it in order is not raised again: then the command ends with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if (
            self.should_exit and sig == signal.SIGINT
        ):  # not here: the lock it takes may be this thread's just now
            self._loop.call_soon_threadsafe(self._pool.cancel_all)
        self.should_exit = True
