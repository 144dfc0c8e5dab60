"""The routes: OpenAI's chat and text completions and models, health, metrics, the page; who may use them, and what errors look like.

A request's work is done in its slot's thread; here its news become a response, and it is cancelled when its client has gone. Knows
no sockets or signals: `serve` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_sidecar.sidecars import LlamaSidecarError

from .._native import check_mapped_files
from ..errors import LibraryError, PromptError
from . import requests
from .answers import Answer, ChatAnswer, TextAnswer
from .errors import RequestError
from .fields import shown
from .metrics import Metrics
from .pool import CHUNK_S, DRAINING, Job, Pool

PING_S = 15.0  # after which a stream that has nothing to say shows that it lives
BODY_S = 30.0  # that a client may take to send its body
MAX_DEPTH = 64  # of lists and objects within each other in a body
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BUSY = "the server has more connections than it takes: try again later"
_PUBLIC = ("/", "/health")
_PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")
_TOO_DEEP = f"the body has more than {MAX_DEPTH} lists and objects within each other, the most here"
_log = logging.getLogger("llama_sidecar.server")


@dataclass(frozen=True)
class Limits:
    """What the server takes: tokens of a prompt, bytes of a body, hosts it may be called by (none: any), a key (none: no key)."""

    n_prompt: int
    n_body_bytes: int
    hosts: tuple[str, ...] = ()
    api_key: str | None = None
    origins: tuple[str, ...] = ()


def make_app(
    pool: Pool, *, model_id: str, names: tuple[str, ...], limits: Limits, metrics: Metrics
) -> ASGIApp:
    """Makes the ASGI application.

    Args:
        pool: answers; closed when the application shuts down.
        model_id: the model's name for clients.
        names: others that a request may use.
        limits: of requests.
        metrics: are shown at `/metrics`.

    Example:
        >>> app = make_app(pool, model_id="demo", names=(), limits=Limits(4096, 2**20), metrics=Metrics())  # doctest: +SKIP
    """
    server = _Server(pool, model_id, {model_id, *names}, limits, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(pool.close)

    middleware = [Middleware(_Gate, limits=limits, metrics=metrics)]
    if limits.origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware, allow_origins=limits.origins, allow_methods=["*"], allow_headers=["*"]
            ),
        )
    return Starlette(
        routes=[
            Route("/", server.page),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
            Route("/v1/models", server.models),
            Route("/v1/models/{id:path}", server.model),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.text, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={
            LlamaSidecarError: _our_error,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        },
        lifespan=lifespan,
    )


class _Server:
    def __init__(self, pool: Pool, model_id: str, names: set[str], limits: Limits, metrics: Metrics) -> None:
        self._pool = pool
        self._model_id = model_id
        self._names = names
        self._limits = limits
        self._metrics = metrics
        self._created = int(time.time())
        self._page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def health(self, request: HttpRequest) -> Response:
        try:
            check_mapped_files()
        except LibraryError as error:
            return _response(RequestError(str(error), status=503))
        draining = self._pool.draining
        return JSONResponse({"status": DRAINING if draining else "ok"}, 503 if draining else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        pool = self._pool
        gauges = {"slots": len(pool.slots), "slots_busy": pool.n_busy, "waiting": pool.n_waiting}
        return PlainTextResponse(self._metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["id"])
        return JSONResponse(self._card())

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, requests.read_chat, ChatAnswer)

    async def text(self, request: HttpRequest) -> Response:
        return await self._answer(request, requests.read_text, TextAnswer)

    def _card(self) -> dict[str, Any]:
        model = self._pool.model
        return {
            "id": self._model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "llama-sidecar",
            "n_ctx": model.n_ctx,
            "drafter": model.kind,
        }

    def _check_model(self, name: Any) -> None:
        if name is not None and not (isinstance(name, str) and name in self._names):
            raise RequestError(
                f"the model {shown(name)} is not here: this server has {self._model_id!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self, http: HttpRequest, read: Callable[..., requests.Request], spelling: type[Answer]
    ) -> Response:
        body = await _read_json(http, self._limits.n_body_bytes)
        if isinstance(body, dict):
            self._check_model(body.get("model"))
        model = self._pool.model
        client = http.client.host if http.client else ""
        # A template and a long prompt's tokens may take a while: other clients' news go on meanwhile.
        request = await asyncio.to_thread(read, body, model.vocab, client=client, n_ctx=model.n_ctx)
        if len(request.tokens) > self._limits.n_prompt:
            raise RequestError(
                f"the prompt has {len(request.tokens)} tokens, this server takes {self._limits.n_prompt}: shorten it",
                code="context_length_exceeded",
            )
        answer = spelling(request, model.vocab, self._model_id)
        running = _Running(self._pool, request)
        try:
            await running.until_started(http.receive)
            if request.stream:
                return _Events(running, answer)
            await running.until_ended(http.receive)
        except BaseException:
            running.cancel()
            raise
        return JSONResponse(answer.whole(running.result(), running.job.take()))


class _Running:
    """A job as coroutines see it."""

    def __init__(self, pool: Pool, request: requests.Request) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._news, self._end = asyncio.Event(), asyncio.Event()
        self._is_told = False  # an event is on its way, and tells of this news, too
        self.job = Job(request, self._tell)
        pool.submit(self.job)

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            if self.job.ended:
                self._loop.call_soon_threadsafe(self._end.set)
            if not self._is_told:
                self._is_told = True
                self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self) -> None:
        """Waits for news since the last call."""
        await self._news.wait()
        self._news.clear()
        self._is_told = False

    async def rest(self) -> None:
        """Lets news gather for CHUNK_S, while there is more to come."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._end.wait(), CHUNK_S)

    async def until_started(self, receive: Receive) -> None:
        """Waits for a slot. Raises what refuses the request there, or ClientDisconnect."""
        await _while_there(receive, self._until(lambda: self.job.started or self.job.ended))
        if not self.job.started:
            self.result()

    async def until_ended(self, receive: Receive) -> None:
        await _while_there(receive, self._until(lambda: self.job.ended))

    def result(self) -> Any:
        """The text that has ended. Raises what ended it early."""
        if self.job.error is not None:
            raise self.job.error
        generation = self.job.generation
        if generation is None or generation.finish_reason == "cancelled":
            raise RequestError(DRAINING if self._pool.draining else "the request was cancelled", status=503)
        return generation

    def cancel(self) -> None:
        if not self.job.ended:
            self._pool.cancel(self.job)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.wait()


class _Events(StreamingResponse):
    """A stream of server-sent events, which ends its job when its client has gone."""

    def __init__(self, running: _Running, answer: Answer) -> None:
        super().__init__(
            self._events(running, answer),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()

    @staticmethod
    async def _events(running: _Running, answer: Answer) -> AsyncIterator[bytes]:
        yield _lines(answer.opening())
        job = running.job
        try:
            while not job.ended:
                try:
                    await asyncio.wait_for(running.wait(), PING_S)
                except asyncio.TimeoutError:
                    yield b": still at it\n\n"
                    continue
                if (news := job.take()) and job.generation is not None:
                    yield _lines(answer.chunk(job.generation, news))
                    await running.rest()
            generation = running.result()
            news = job.take()
            yield _lines([*(answer.chunk(generation, news) if news else ()), *answer.closing(generation)])
        except LlamaSidecarError as error:
            yield _lines([_as_request_error(error).body()])
        except Exception:
            _log.exception("a stream failed")
            yield _lines([_INTERNAL.body()])
        yield b"data: [DONE]\n\n"


def _lines(chunks: list[dict[str, Any]]) -> bytes:
    dumped = (json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in chunks)
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in dumped)


async def _while_there(receive: Receive, work: Awaitable[None]) -> None:
    """Awaits `work` as long as the client is there. Raises ClientDisconnect when it goes."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _read_json(http: HttpRequest, n_most: int) -> Any:
    """The body's JSON. Raises RequestError for one too large, too slow or no JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no foreign page can send unasked
        raise RequestError(
            f"the body is {kind or 'of no type'}: Content-Type: application/json is expected", status=415
        )
    body, n = bytearray(), 0
    try:
        async with _timeout(BODY_S):
            async for data in http.stream():
                n += len(data)
                if n <= n_most:
                    body += data  # what is beyond is read all the same: a client that is still sending hears no answer
                elif n > 16 * n_most:
                    break
    except (asyncio.TimeoutError, TimeoutError):
        raise RequestError(f"the body did not come within {BODY_S:.0f} s", status=408) from None
    if n > n_most:
        raise RequestError(f"the body is larger than {n_most:,} bytes, the most here", status=413)
    try:
        value = json.loads(bytes(body))
    except RecursionError:
        raise RequestError(_TOO_DEEP) from None
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Refuses what nests so deeply that Python might not get through it."""
    layer = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (
            one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, (dict, list))
        )
        layer = [one for many in inner for one in many]
        if not layer:
            return
    raise RequestError(_TOO_DEEP)


@contextlib.asynccontextmanager
async def _timeout(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, which Python 3.10 lacks."""
    task = asyncio.current_task()
    assert task is not None
    late = False

    def stop() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, stop)
    try:
        yield
    except asyncio.CancelledError:
        if late:
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


# Who may use it


class _Gate:
    """Lets in whoever calls the server by a name of its own and knows the key; counts what was answered."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # as proxies call it: the client went before there was an answer

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if error := self._refusal(HttpRequest(scope)):
                await _response(error)(scope, receive, counting)
            else:
                with contextlib.suppress(ClientDisconnect):
                    await self._app(scope, receive, counting)
        except Exception:
            status = 500  # what is outside of this answers so
            raise
        finally:
            path = scope["path"]
            self._metrics.count_request(path if path in _PATHS else "other", status)

    def _refusal(self, http: HttpRequest) -> RequestError | None:
        try:
            name = http.url.hostname or ""
        except ValueError:  # brackets that do not match
            name = ""
        if self._limits.hosts and name not in self._limits.hosts:  # a foreign page whose name leads here
            return RequestError(f"the server is not called {name!r} (--allow-host takes names)", status=403)
        # The path that leads to a route: that of http.url begins with what the client calls the server, and may be another.
        if self._limits.api_key is None or http.scope["path"] in _PUBLIC:
            return None
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode(), self._limits.api_key.encode())
        if scheme.lower() == "bearer" and is_right:
            return None
        return RequestError(
            "the API key is missing or wrong: Authorization: Bearer KEY is expected",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


# What errors look like

_INTERNAL = RequestError("the server failed; its log says more", status=500)
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def _as_request_error(error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "the context holds" in str(error) else None
        return RequestError(str(error), code=code)
    if isinstance(error, LlamaSidecarError):
        return RequestError(str(error), status=500)
    return _INTERNAL


def _response(error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _our_error(request: HttpRequest, error: Exception) -> Response:
    return _response(_as_request_error(error))


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    message = what.get(error.status_code, str(error.detail))
    return _response(RequestError(message, status=error.status_code, headers=dict(error.headers or {})))


async def _unexpected_error(request: HttpRequest, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    return _response(_INTERNAL)
