"""Reports to the manager: on change, not too often, one at a time, and cheap when it is down."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from serving import reporting
from serving.reporting import Reporter


class FakeManager:
    """Looks like a Serve handle: `manager.report.remote(message)` is awaited."""

    def __init__(self, known: bool = True, down: bool = False, seconds: float = 0.0):
        self.known, self.down, self.seconds = known, down, seconds
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.report = self

    async def remote(self, message: dict[str, Any]) -> dict[str, Any]:
        self.messages.append(message)
        self.times.append(time.monotonic())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.seconds)
            if self.down:
                raise ConnectionError("the manager is down")
            return {"v": 1, "known": self.known}
        finally:
            self.in_flight -= 1


async def report(manager: FakeManager, seconds: float, every_s: float | None = None, changing: bool = True) -> Reporter:
    """Run a reporter for a while; something changes every_s, and with it the metrics if they are `changing`."""
    reporter = Reporter(manager, lambda sequence: ({"sequence": sequence}, [sequence if changing else 0]))
    reporter.actor = "handle"
    task = asyncio.create_task(reporter.run())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(every_s or seconds)
        if every_s is not None:
            reporter.changed()
    task.cancel()
    return reporter


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "MIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(reporting, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(reporting, "METRICS_S", 0.2)
    monkeypatch.setattr(reporting, "REFRESH_S", 0.4)
    monkeypatch.setattr(reporting, "CALL_TIMEOUT_S", 0.1)


@pytest.mark.parametrize(
    "manager", [FakeManager(), FakeManager(known=False), FakeManager(down=True)], ids=["up", "forgetful", "down"]
)
async def test_a_busy_engine_reports_no_more_often_than_the_interval(manager: FakeManager) -> None:
    await report(manager, 0.4, every_s=0.001)
    gaps = [b - a for a, b in zip(manager.times, manager.times[1:], strict=False)]
    assert len(gaps) >= 2 and min(gaps) >= 0.045


async def test_a_quiet_engine_sends_heartbeats() -> None:
    manager = FakeManager()
    await report(manager, 0.7)
    assert 2 <= len(manager.messages) <= 5
    assert [m["sequence"] for m in manager.messages] == list(range(1, len(manager.messages) + 1))


async def test_the_actor_goes_along_until_the_manager_knows_the_engine() -> None:
    manager = FakeManager(known=False)
    task = asyncio.create_task(report(manager, 0.4, every_s=0.01))
    await asyncio.sleep(0.15)
    manager.known = True
    await task
    introduced = ["actor" in m for m in manager.messages]
    assert introduced[0] is True and introduced[-1] is False
    assert introduced == sorted(introduced, reverse=True)


async def test_an_idle_engine_introduces_itself_at_once_to_a_manager_that_has_restarted() -> None:
    manager = FakeManager()
    task = asyncio.create_task(report(manager, 1.0))
    await asyncio.sleep(0.1)
    manager.known, before = False, len(manager.messages)
    while len(manager.messages) == before:
        await asyncio.sleep(0.005)
    manager.known = True
    await asyncio.sleep(0.1)
    assert "actor" in manager.messages[before + 1] and "metrics" in manager.messages[before + 1]
    assert manager.times[before + 1] - manager.times[before] < reporting.HEARTBEAT_S / 2
    await task


async def test_a_report_that_cannot_be_made_is_not_the_last() -> None:
    manager, made = FakeManager(), list[int]()

    def make(sequence: int) -> tuple[dict[str, Any], list[Any]]:
        made.append(sequence)
        if len(made) < 3:
            raise ZeroDivisionError("unforeseen")
        return {"sequence": sequence}, []

    task = asyncio.create_task(Reporter(manager, make).run())
    await asyncio.sleep(0.4)
    assert manager.messages and not task.done()
    task.cancel()


@pytest.mark.parametrize(("changing", "interval"), [(True, "METRICS_S"), (False, "REFRESH_S")])
async def test_metrics_go_along_when_they_changed_and_now_and_then(changing: bool, interval: str) -> None:
    manager = FakeManager()
    await report(manager, 0.9, every_s=0.01, changing=changing)
    with_metrics = [t for t, m in zip(manager.times, manager.messages, strict=True) if "metrics" in m]
    assert len(manager.messages) > len(with_metrics) >= 2
    least = getattr(reporting, interval) - 0.01
    gaps = [b - a for a, b in zip(with_metrics, with_metrics[1:], strict=False)]
    assert min(gaps) >= least and (changing or max(gaps) < 2 * least)


async def test_a_hanging_manager_gets_one_report_at_a_time() -> None:
    manager = FakeManager(seconds=10.0)
    await report(manager, 0.5, every_s=0.01)
    assert manager.most_in_flight == 1 and len(manager.messages) >= 2


async def test_without_a_manager_nothing_runs() -> None:
    await asyncio.wait_for(Reporter(None, lambda sequence: ({}, [])).run(), 1.0)
