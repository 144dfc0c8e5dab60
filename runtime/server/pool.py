"""Slots: N sessions over one model's weights, each with a thread, and the queue before them.

Slots do not share a decode: they take turns at compute, a round or a few short ones (the model's fair lock), so a round costs with four
running what it costs with one, and pace's figures stay right. A slot keeps what it holds when a text has ended; a request gets the
free slot that has most of its prompt, if that slot then loses less than it keeps. Knows no HTTP: a job tells its owner that there is news, from the slot's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llama_sidecar.sidecars import LlamaSidecarError

from ..errors import LibraryError, LoadError
from ..llm import Model
from ..session import Generation, Piece, Session
from .errors import RequestError
from .requests import Request
from .waiting import Waiting

DRAINING = "the server is shutting down"
CHUNK_S = 0.02  # between news: tokens that come faster share one, which nobody sees and costs far less
_MAX_RETRY_S = 60
_log = logging.getLogger("llama_sidecar.server")


class Job:
    """A request on its way to an answer.

    Args:
        request: what is wanted.
        on_news: called from any thread when `started`, `ended` or what `take` gives has changed.
    """

    def __init__(self, request: Request, on_news: Callable[[], None]) -> None:
        self.request = request
        self.arrived = time.monotonic()
        self.waited_s = 0.0  # for its slot
        self.generation: Generation | None = None
        self.error: BaseException | None = None
        self.ended = False
        self.cancelled = False
        self._on_news = on_news
        self._news: list[str | Piece] = []
        self._lock = threading.Lock()
        self._session: Session | None = None

    @property
    def started(self) -> bool:
        """Whether its request was accepted; with an error, `ended` is set instead."""
        return self.generation is not None

    def take(self) -> list[str | Piece]:
        """What has come since the last call: pieces where the request has a lens or log-probabilities, else text."""
        with self._lock:
            news, self._news = self._news, []
            return news

    def cancel(self) -> None:
        """Ends it after its current round or piece of prompt."""
        self.cancelled = True
        with self._lock:
            if self._session is not None:
                self._session.cancel()

    def run(self, session: Session) -> None:
        """Answers on a session; in the slot's thread."""
        self.waited_s = time.monotonic() - self.arrived
        try:
            if not self.cancelled:
                self._run(session)
        except LlamaSidecarError as error:
            if isinstance(error, LibraryError):  # no client's fault
                _log.error("a request failed: %s", error)
            self.error = error
        except BaseException as error:  # of ours: the slot goes on with the next
            _log.exception("a request failed")
            self.error = error
        finally:
            with self._lock:
                self._session = None

    def end(self, error: BaseException | None = None) -> None:
        """Tells its owner that nothing more comes."""
        self.error = self.error or error
        self.ended = True
        self._on_news()

    def _run(self, session: Session) -> None:
        generation = session.generate(self.request.tokens, **self.request.options)
        with self._lock:
            self._session = session
        self.generation = generation
        if self.cancelled:  # before its session was known
            generation.close()
        self._on_news()
        request = self.request
        if not (request.stream or request.has_pieces):
            generation.read()
            return
        generation.stretch(CHUNK_S)
        for piece in generation.pieces() if request.has_pieces else generation:
            with self._lock:
                self._news.append(piece)
            if request.stream:
                self._on_news()


@dataclass
class Slot:
    """A session, what it holds, and the jobs for it."""

    session: Session
    inbox: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    held: list[int] = field(default_factory=list)
    job: Job | None = None
    used: float = 0.0

    def n_kept(self, tokens: list[int]) -> int:
        """Tokens that it would keep for a prompt; none where they are less than half: conversations that begin alike, with the
        same system prompt, are not to push each other out while another slot rests."""
        n = self.n_common(tokens)
        return n if 2 * n > len(self.held) else 0

    def n_common(self, tokens: list[int]) -> int:
        """How many tokens of a prompt it holds."""
        n, n_most = 0, min(len(self.held), len(tokens))
        while n < n_most:  # slices compare far faster than a loop over tokens
            middle = (n + n_most + 1) // 2
            if self.held[n:middle] == tokens[n:middle]:
                n = middle
            else:
                n_most = middle - 1
        return n


class Pool:
    """The slots of a model and the requests that wait for one.

    Args:
        model: stays its owner's.
        n_slots: sessions.
        n_waiting: requests that may wait.
        on_end: called with each job that ran, in its slot's thread.

    Raises:
        LoadError: a session cannot be made.

    Example:
        >>> pool = Pool(model, n_slots=2, n_waiting=8)           # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        *,
        n_slots: int,
        n_waiting: int,
        on_end: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.model = model
        self.draining = False
        self._on_end = on_end
        self._lock = threading.Lock()
        self._waiting = Waiting[Job](n_waiting)
        self._mean_s = 1.0  # of a request, the last ones counting most
        self.slots: list[Slot] = []
        try:
            for _ in range(n_slots):
                self.slots.append(Slot(model.session()))
        except LoadError as error:
            n = len(self.slots)
            self._close_sessions()
            fewer = f" (--slots {n} needs less)" if n else ""
            raise LoadError(f"slot {n + 1} of {n_slots} cannot be made{fewer}: {error}") from error
        except BaseException:
            self._close_sessions()
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"slot-{i}", daemon=True)
            for i, slot in enumerate(self.slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_waiting(self) -> int:
        with self._lock:
            return len(self._waiting)

    @property
    def n_busy(self) -> int:
        with self._lock:
            return sum(slot.job is not None for slot in self.slots)

    def submit(self, job: Job) -> None:
        """Gives a job to a slot, or lets it wait for one.

        Raises:
            RequestError: the queue is full (429), or the server is shutting down (503).
        """
        with self._lock:
            if self.draining:
                raise RequestError(DRAINING, status=503)
            if any(slot.job is None for slot in self.slots):
                self._place(job)
                return
            out = self._waiting.push(job.request.client, job)
            full = self._full() if out is not None else None
        if out is job and full is not None:
            raise full
        if out is not None:
            out.end(full)

    def cancel(self, job: Job) -> None:
        """Ends a job wherever it is; nothing where it has ended. Its slot is free after a round or a piece of prompt."""
        with self._lock:
            was_waiting = self._waiting.remove(job.request.client, job)
        job.cancel()
        if was_waiting:
            job.end()

    def drain(self) -> None:
        """Refuses whatever comes or waits; what runs goes on."""
        with self._lock:
            self.draining = True
            waiting = []
            while (job := self._waiting.pop()) is not None:
                waiting.append(job)
        for job in waiting:
            job.end(RequestError(DRAINING, status=503))

    def cancel_all(self) -> None:
        """Ends whatever runs."""
        with self._lock:
            running = [slot.job for slot in self.slots if slot.job is not None]
        for job in running:
            job.cancel()

    def close(self) -> None:
        """Ends everything, waits for the threads and frees the sessions."""
        self.drain()
        self.cancel_all()
        for slot in self.slots:
            slot.inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._close_sessions()

    def _close_sessions(self) -> None:
        for slot in self.slots:
            slot.session.close()

    def _place(self, job: Job) -> None:
        """Gives a job to the free slot that keeps most of what it holds for it, or to the one that rested longest."""
        tokens = job.request.tokens
        free = [slot for slot in self.slots if slot.job is None]
        best = max(free, key=lambda slot: (slot.n_kept(tokens), -slot.used))
        best.job = job
        best.inbox.put(job)

    def _serve(self, slot: Slot) -> None:
        while (job := slot.inbox.get()) is not None:
            began = time.monotonic()
            job.run(slot.session)
            slot.held = slot.session.held
            try:
                self._on_end(job)
            except Exception:  # whatever is made of what has ended, the slot goes on
                _log.exception("a request that has ended was not counted")
            with self._lock:
                slot.job, slot.used = None, time.monotonic()
                self._mean_s += 0.2 * (slot.used - began - self._mean_s)
                if (waiting := self._waiting.pop()) is not None:
                    self._place(waiting)
            job.end()

    def _full(self) -> RequestError:
        """How long until there is a place: as long as those before take, as far as the last ones tell."""
        seconds = self._mean_s * (len(self._waiting) + 1) / len(self.slots)
        return RequestError(
            f"{len(self._waiting)} requests wait already, the most here: try again later",
            status=429,
            headers={"Retry-After": str(max(1, min(_MAX_RETRY_S, round(seconds))))},
        )
