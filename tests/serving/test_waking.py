"""Requests held while there is no engine, and the call that has one started."""

from __future__ import annotations

import asyncio

import pytest

from serving import waking
from serving.waking import Waking


class Serve:
    """`wake` queues until there is a replica, as Serve's handle does."""

    def __init__(self) -> None:
        self.calls = self.cancelled = 0
        self.replica = asyncio.Event()
        self.seen = False  # in the ingress's view
        self.error: Exception | None = None

    async def wake(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        try:
            await self.replica.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def make(serve: Serve, limit: int = 10, seconds: float = 5.0) -> Waking:
    return Waking(serve.wake, lambda: serve.seen, limit, seconds)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "POLL_S", 0.005)
    monkeypatch.setattr(waking, "RETRY_S", 0.05)


async def test_with_an_engine_nobody_waits() -> None:
    serve = Serve()
    serve.seen = True
    assert await make(serve).hold() == "" and serve.calls == 0


async def test_one_call_wakes_for_all_and_they_go_on_when_the_engine_is_seen() -> None:
    serve = Serve()
    held = make(serve)
    waiting = [asyncio.create_task(held.hold()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert serve.calls == 1 and held.held == 5
    serve.replica.set()
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waiting), "the replica runs, and no view has shown it yet"
    serve.seen = True
    assert await asyncio.wait_for(asyncio.gather(*waiting), 1.0) == [""] * 5
    assert held.held == 0


async def test_a_replica_that_never_shows_is_called_for_again() -> None:
    serve = Serve()
    serve.replica.set()
    waiting = asyncio.create_task(make(serve).hold())
    await asyncio.sleep(0.3)
    assert 2 <= serve.calls <= 7 and not waiting.done()
    waiting.cancel()


async def test_limits_hold_in_number_and_time() -> None:
    serve = Serve()
    held = make(serve, limit=1, seconds=0.1)
    first = asyncio.create_task(held.hold())
    await asyncio.sleep(0.01)
    assert await held.hold() == "1 requests wait for a replica to start already"
    assert await first == "no replica started within 0.1 s"
    assert held.held == 0
    await asyncio.sleep(0.05)
    assert serve.cancelled == 1, "nobody needs it any more"


async def test_a_client_that_leaves_is_not_held() -> None:
    serve = Serve()
    held = make(serve)
    tasks = [asyncio.create_task(held.hold()) for _ in range(2)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()
    await asyncio.sleep(0.02)
    assert held.held == 1 and serve.cancelled == 0
    tasks[1].cancel()
    await asyncio.sleep(0.02)
    assert held.held == 0 and serve.cancelled == 1
    serve.seen = True
    assert await held.hold() == ""


async def test_a_service_that_cannot_start_one_says_so_and_is_asked_anew_the_next_time() -> None:
    serve = Serve()
    serve.error = RuntimeError("x")
    held = make(serve)
    assert await held.hold() == "no replica can be started: RuntimeError"
    assert await held.hold() == "no replica can be started: RuntimeError"
    assert serve.calls == 2


async def test_requests_under_way_need_an_engine_too_and_the_end_of_the_application_ends_the_wait() -> None:
    serve = Serve()
    held = make(serve)
    held.need(True)
    await asyncio.sleep(0.02)
    assert serve.calls == 1
    waiting = asyncio.create_task(held.hold())
    await asyncio.sleep(0.02)
    held.give_up("the service is shutting down")
    assert await asyncio.wait_for(waiting, 1.0) == "the service is shutting down"
    await asyncio.sleep(0.02)
    assert serve.calls == serve.cancelled == 1
