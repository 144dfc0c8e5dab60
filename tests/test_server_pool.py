"""Slots and their jobs without HTTP: who gets which slot, what is kept, what an error or a client that leaves costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import PairOf

from llama_sidecar.runtime import LoadError, Model, PromptError, load
from llama_sidecar.runtime.server import app
from llama_sidecar.runtime.server.answers import TextAnswer
from llama_sidecar.runtime.server.errors import RequestError
from llama_sidecar.runtime.server.pool import Job, Pool, Slot
from llama_sidecar.runtime.server.requests import Request

SECONDS = 60.0


@pytest.fixture(scope="module")
def model(pair_of: PairOf) -> Iterator[Model]:
    with load(pair_of("R").main, ctx=4096, depth=2, threads=1) as model:
        yield model


@pytest.fixture
def pool(model: Model) -> Iterator[Pool]:
    pool = Pool(model, n_slots=2, n_waiting=2)
    yield pool
    pool.close()


class Asked:
    """A job, and a way to wait for it."""

    def __init__(self, pool: Pool, tokens: list[int], n: int = 4, client: str = "", **fields: Any) -> None:
        self._news = threading.Event()
        options = {"max_tokens": n, "temperature": 0, "ignore_eos": True}
        stream = {"stream": False, "has_usage": False, "lens": False, **fields}
        self.job = Job(Request(tokens=tokens, options=options, client=client, **stream), self._news.set)
        pool.submit(self.job)

    def until(self, what: str) -> Asked:
        while not getattr(self.job, what):
            assert self._news.wait(SECONDS)
            self._news.clear()
        return self

    @property
    def tokens(self) -> list[int]:
        assert self.job.generation is not None
        return self.job.generation.tokens

    @property
    def n_held(self) -> int:
        assert self.job.generation is not None
        return self.job.generation.stats.n_reused


def test_each_conversation_goes_on_in_the_slot_that_holds_it(pool: Pool) -> None:
    system = list(range(10, 30))  # in which both begin alike
    talks = {"a": [*system, *range(40, 80)], "b": [*system, *range(90, 130)]}
    for turn in range(3):
        for client, talk in talks.items():
            asked = Asked(pool, list(talk), client=client).until("ended")
            assert asked.n_held == (0 if turn == 0 else len(talk) - 6), (turn, client)
            talk += [*asked.tokens, 50, 51, 52, 53, 54]


def test_a_slot_knows_what_it_would_keep_of_a_prompt(model: Model) -> None:
    slots = [Slot(None, held=held) for held in ([1, 2, 3, 4], [1, 2, 9], [])]  # type: ignore[arg-type]
    assert [slot.n_common([1, 2, 3, 5, 6]) for slot in slots] == [3, 2, 0]
    assert [slot.n_common([1, 2, 3, 4]) for slot in slots] == [4, 2, 0]
    assert [slot.n_common([7]) for slot in slots] == [0, 0, 0]
    assert [slot.n_kept([1, 2, 5]) for slot in slots] == [0, 2, 0]


def test_what_finds_no_slot_waits_and_beyond_that_is_refused(pool: Pool) -> None:
    running = [Asked(pool, [i, 2, 3], 4000).until("started") for i in (1, 2)]
    waiting = [Asked(pool, [i, 2, 3]) for i in (3, 4)]
    assert (pool.n_busy, pool.n_waiting) == (2, 2)
    with pytest.raises(RequestError, match="2 requests wait already") as caught:
        Asked(pool, [5, 2, 3])
    assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
    other = Asked(pool, [6, 2, 3], client="other")  # whose place is taken from the client with two
    waiting[1].until("ended")
    assert isinstance(waiting[1].job.error, RequestError) and waiting[1].job.error.status == 429
    pool.cancel(running[0].job)
    for asked in (waiting[0], other):
        assert len(asked.until("ended").tokens) == 4
    pool.cancel(running[1].job)
    running[1].until("ended")
    assert running[1].job.generation is not None
    assert running[1].job.generation.finish_reason == "cancelled"


def test_a_slot_holds_what_was_read_of_a_prompt_that_was_cancelled(model: Model, pool: Pool) -> None:
    with model.turns:  # so that it cannot begin
        asked = Asked(pool, list(range(1, 200))).until("started")
        pool.cancel(asked.job)
    asked.until("ended")
    assert [slot.held for slot in pool.slots] == [slot.session.held for slot in pool.slots] == [[], []]


def test_a_job_that_is_cancelled_while_it_waits_never_runs(pool: Pool) -> None:
    running = [Asked(pool, [i, 2, 3], 4000).until("started") for i in (1, 2)]
    waiting = Asked(pool, [3, 2, 3])
    pool.cancel(waiting.job)
    assert waiting.job.ended and waiting.job.generation is None and pool.n_waiting == 0
    for asked in running:
        pool.cancel(asked.job)
        asked.until("ended")


def test_a_cancel_that_comes_late_does_not_end_the_next_answer(pool: Pool) -> None:
    for _ in range(30):
        first = Asked(pool, [1, 2, 3], 2).until("ended")
        second = Asked(pool, [1, 2, 3], 30)
        pool.cancel(first.job)
        assert len(second.until("ended").tokens) == 30


def test_an_error_costs_its_request_alone(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Asked(pool, [999, 2]).until("ended")
    assert isinstance(bad.job.error, PromptError) and bad.job.generation is None
    with monkeypatch.context() as patch:
        for slot in pool.slots:
            patch.setattr(slot.session, "generate", lambda *_, **__: 1 // 0)
        broken = Asked(pool, [1, 2]).until("ended")
        assert isinstance(broken.job.error, ZeroDivisionError)
    assert len(Asked(pool, [1, 2]).until("ended").tokens) == 4 and pool.n_busy == 0


def test_an_owner_s_error_at_the_end_does_not_end_the_slot(model: Model) -> None:
    def fail(job: Job) -> None:
        raise ZeroDivisionError

    pool = Pool(model, n_slots=1, n_waiting=0, on_end=fail)
    for _ in range(2):
        assert len(Asked(pool, [1, 2]).until("ended").tokens) == 4
    pool.close()


def test_a_stream_s_pieces_are_its_text(pool: Pool) -> None:
    for fields in ({"stream": True}, {"lens": True}, {"stream": True, "lens": True}):
        asked = Asked(pool, [1, 2, 3], 30, **fields).until("ended")
        news = asked.job.take()
        assert asked.job.generation is not None
        text = "".join(one if isinstance(one, str) else one.text for one in news)
        assert text == asked.job.generation.text and asked.job.take() == []


def test_a_stream_that_has_ended_is_told_so_at_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CHUNK_S", 3600.0)
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    fields = {"options": options, "client": "", "stream": True, "has_usage": False, "lens": False}

    async def read() -> list[bytes]:
        request = Request(tokens=[1, 2, 3], **fields)  # type: ignore[arg-type]
        events = app._Events._events(app._Running(pool, request), TextAnswer(request, pool.model.vocab, "R"))
        return [event async for event in events]

    events = asyncio.run(asyncio.wait_for(read(), SECONDS))
    assert events[-1] == b"data: [DONE]\n\n" and b'"finish_reason":"length"' in events[-2]


def test_draining_refuses_what_waits_and_lets_the_rest_end(model: Model) -> None:
    pool = Pool(model, n_slots=1, n_waiting=2)
    running = Asked(pool, [1, 2, 3], 200).until("started")
    waiting = Asked(pool, [2, 2, 3])
    pool.drain()
    assert (
        waiting.job.ended and isinstance(waiting.job.error, RequestError) and waiting.job.error.status == 503
    )
    with pytest.raises(RequestError, match="shutting down"):
        Asked(pool, [1])
    assert len(running.until("ended").tokens) == 200
    pool.close()
    pool.close()
    assert all(slot.session.closed for slot in pool.slots)


def test_slots_that_cannot_be_made_leave_nothing_behind(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = model.session

    def session() -> Any:
        if len(made) == 2:
            raise LoadError("no memory")
        made.append(real())
        return made[-1]

    monkeypatch.setattr(model, "session", session)
    with pytest.raises(LoadError, match=r"slot 3 of 4 cannot be made \(--slots 2 needs less\): no memory"):
        Pool(model, n_slots=4, n_waiting=0)
    assert all(one.closed for one in made)
