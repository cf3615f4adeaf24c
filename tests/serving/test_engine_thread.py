"""The thread that owns an engine: calls between steps, idleness, failure and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.scheduler import Event
from serving.engine_thread import EngineThread
from tests.fakes import continuation, executor_of, make_engine

SOON = 5.0


class Harness:
    def __init__(self, build: Callable[[], Engine]):
        self.events: list[Event] = []
        self.failures: list[BaseException] = []
        self.ended = threading.Semaphore(0)  # one a finished request
        self.thread = EngineThread(build, self._on_events, self._on_failure)

    def _on_events(self, events: list[Event]) -> None:
        self.events += events
        for _ in [e for e in events if e.finish_reason]:
            self.ended.release()

    def _on_failure(self, error: BaseException) -> None:
        self.failures.append(error)

    async def submit(self, name: str = "a", max_tokens: int = 4) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        await self.thread.call(lambda: self.engine.add_request(name, [1, 2, 3], params))

    async def until_end(self) -> None:
        assert await asyncio.to_thread(self.ended.acquire, timeout=SOON)

    def start(self) -> Engine:
        self.thread.start()
        self.engine = self.thread.ready.result(SOON)
        return self.engine

    def stop(self) -> None:
        self.thread.stop()
        self.thread.join(SOON)
        assert not self.thread.is_alive()


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness(make_engine)
    made.start()
    yield made
    made.stop()


def raise_(error: BaseException) -> Any:
    raise error


async def test_requests_run_to_their_end_on_the_engines_thread(harness: Harness) -> None:
    await harness.submit()
    await harness.until_end()
    assert [e.token for e in harness.events] == continuation([1, 2, 3], SamplingParams(max_tokens=4))[0]
    assert await harness.thread.call(threading.current_thread) is harness.thread


async def test_calls_return_values_and_errors_and_the_engine_goes_on(harness: Harness) -> None:
    assert await harness.thread.call(lambda: 42) == 42
    with pytest.raises(KeyError):
        await harness.thread.call(lambda: raise_(KeyError("no such request")))
    harness.thread.post(lambda: raise_(ValueError("nobody waits for this")))
    await harness.submit()
    await harness.until_end()
    assert not harness.failures


async def test_calls_run_in_order_and_posted_ones_are_not_lost(harness: Harness) -> None:
    order: list[int] = []
    for n in range(20):
        harness.thread.post(lambda n=n: order.append(n))  # type: ignore[misc]
    await harness.thread.call(lambda: order.append(20))
    assert order == list(range(21))


async def test_calls_get_through_while_steps_run(harness: Harness) -> None:
    for n in range(8):
        await harness.submit(f"r{n}", 40)
    assert await harness.thread.call(lambda: True)
    await harness.until_end()


async def test_an_idle_engine_does_not_step(harness: Harness) -> None:
    await harness.submit()
    await harness.until_end()
    await harness.thread.call(lambda: None)
    steps, started = harness.engine.steps, time.process_time()
    await asyncio.sleep(0.1)
    assert harness.engine.steps == steps
    assert time.process_time() - started < 0.05


async def test_work_that_cannot_run_does_not_spin_and_goes_on_when_it_can(harness: Harness) -> None:
    """A held request keeps the blocks that a waiting one needs."""
    engine, schedule, attempts = harness.engine, harness.engine.scheduler.schedule, list[int]()

    def counted() -> Any:
        attempts.append(1)
        return schedule()

    def arrange() -> None:
        engine.add_request("a", list(range(24)), SamplingParams(max_tokens=4))
        engine.step()
        engine.hold("a")
        engine.add_request("b", list(range(50, 94)), SamplingParams(max_tokens=2))
        engine.scheduler.schedule = counted  # type: ignore[method-assign]

    await harness.thread.call(arrange)
    await asyncio.sleep(0.1)
    assert 1 < len(attempts) < 60 and not harness.events
    await harness.thread.call(lambda: engine.unhold("a"))
    await harness.until_end()
    await harness.until_end()
    assert {e.request.id for e in harness.events if e.finish_reason} == {"a", "b"}


async def test_an_idle_engine_notices_that_a_reservation_expired() -> None:
    harness = Harness(lambda: make_engine(reservation_s=0.05))
    engine = harness.start()
    engine.scheduler.clock = engine.clock = time.monotonic
    await harness.thread.call(lambda: engine.reserve("x", 3))
    for _ in range(100):
        if harness.thread.stats is not None and not engine.scheduler.reservations:
            break
        await asyncio.sleep(0.01)
    await harness.thread.call(lambda: None)
    assert engine.scheduler.pool.available == engine.scheduler.pool.total
    harness.stop()


async def test_stats_are_there_from_the_start_and_fresh_when_idle(harness: Harness) -> None:
    assert harness.thread.stats is not None and harness.thread.stats.steps == 0
    await harness.submit()
    await harness.until_end()
    for _ in range(100):
        if harness.thread.stats.generated_tokens == 4:
            break
        await asyncio.sleep(0.01)
    assert harness.thread.stats.generated_tokens == 4 and harness.thread.stats.running == 0


def test_a_failed_start_is_told_to_whoever_waits() -> None:
    harness = Harness(lambda: raise_(ValueError("no such model")))
    harness.thread.start()
    with pytest.raises(ValueError, match="no such model"):
        harness.thread.ready.result(SOON)
    harness.thread.join(SOON)
    assert not harness.failures and not harness.thread.is_alive()


def test_a_start_that_nobody_waits_for_is_not_made() -> None:
    built: list[Engine] = []

    def build() -> Engine:
        built.append(make_engine())
        return built[0]

    harness = Harness(build)
    harness.thread.ready.cancel()
    harness.thread.start()
    harness.thread.join(SOON)
    assert not harness.thread.is_alive() and not built


async def test_a_failing_executor_ends_the_engine_and_is_reported_once() -> None:
    harness = Harness(make_engine)
    executor_of(harness.start()).failure = RuntimeError("device lost")
    await harness.submit()
    await asyncio.to_thread(harness.thread.join, SOON)
    assert [str(e) for e in harness.failures] == ["device lost"]
    assert harness.thread.failure is harness.failures[0]


async def test_after_the_end_calls_fail_at_once() -> None:
    harness = Harness(make_engine)
    harness.start()
    harness.stop()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="not running"):
        await harness.thread.call(lambda: 1)
    harness.thread.post(lambda: 1)
    assert time.monotonic() - started < 1.0


async def test_calls_queued_behind_the_end_fail_at_once() -> None:
    harness = Harness(make_engine)
    harness.start()
    gate = threading.Event()
    harness.thread.post(lambda: gate.wait(SOON))
    harness.thread.stop()
    late = asyncio.create_task(harness.thread.call(lambda: 1))
    await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(RuntimeError, match="not running"):
        await asyncio.wait_for(late, SOON)


async def test_a_call_given_up_before_it_ran_is_not_run(harness: Harness) -> None:
    gate, ran = threading.Event(), list[int]()
    harness.thread.post(lambda: gate.wait(SOON))
    with pytest.raises(TimeoutError):
        await harness.thread.call(lambda: ran.append(1), timeout_s=0.02)
    gate.set()
    await harness.thread.call(lambda: None)
    assert ran == []


async def test_a_call_given_up_while_it_runs_does_not_end_the_engine(harness: Harness) -> None:
    entered, gate = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        gate.wait(SOON)

    with pytest.raises(TimeoutError):
        await harness.thread.call(slow, timeout_s=0.05)
    assert entered.is_set()
    gate.set()
    assert await harness.thread.call(lambda: 7) == 7
    assert not harness.failures


def test_a_cancellation_between_check_and_answer_does_not_end_the_engine() -> None:
    """The worst moment: the waiter gives up when the result is there but not handed over yet."""
    harness = Harness(make_engine)
    harness.start()
    future: Future[Any] = Future()
    done = threading.Event()
    harness.thread._inbox.put((future.cancel, future))
    harness.thread.post(done.set)
    assert done.wait(SOON) and not harness.failures
    assert future.result(SOON) is False, "a call that runs can no longer be given up"
    harness.stop()


async def test_a_step_that_takes_long_shows_how_long() -> None:
    harness = Harness(make_engine)
    engine = harness.start()
    assert harness.thread.stalled_s() == 0.0
    gate = threading.Event()
    execute = engine.executor.execute

    def slow(plan: Any) -> Any:
        gate.wait(SOON)
        return execute(plan)

    engine.executor.execute = slow  # type: ignore[method-assign]
    await harness.submit()
    await asyncio.sleep(0.05)
    assert 0.02 < harness.thread.stalled_s() < SOON
    gate.set()
    await harness.until_end()
    await harness.thread.call(lambda: None)
    assert harness.thread.stalled_s() == 0.0
    harness.stop()
