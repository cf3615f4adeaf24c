"""The manager as ingresses meet it: one view a moment, however many engines report."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from llumnix.load import READY, LoadReport
from serving import manager
from serving.manager import Manager

PLAIN: Any = Manager.func_or_class  # type: ignore[attr-defined]


def report(engine: str, sequence: int) -> dict[str, Any]:
    return {**LoadReport(engine, 1.0, sequence, state=READY).to_message(), "actor": f"handle of {engine}"}


async def test_busy_engines_do_not_make_an_ingress_poll_without_pause() -> None:
    served = PLAIN()
    sequence = 0

    async def busy() -> None:
        nonlocal sequence
        while True:
            sequence += 1
            await served.report(report(f"e{sequence % 8}", sequence))
            await asyncio.sleep(0.001)

    task = asyncio.create_task(busy())
    version, answers, started = -1, 0, time.monotonic()
    while time.monotonic() - started < 0.5:
        version = (await served.view(version, []))["version"]
        answers += 1
    task.cancel()
    assert 3 <= answers <= 0.5 / manager.GATHER_S + 1
    assert sequence > 3 * answers and version > sequence - 100


async def test_a_change_is_told_soon_and_nothing_after_a_while() -> None:
    served = PLAIN()
    await served.report(report("a", 1))
    view = await served.view(-1, [])
    assert view["engines"]["a"]["actor"] == "handle of a"
    waiting = asyncio.create_task(served.view(view["version"], ["a"]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await served.report(report("b", 1))
    changed = await asyncio.wait_for(waiting, 4 * manager.GATHER_S)
    assert {name: entry["actor"] for name, entry in changed["engines"].items()} == {"a": None, "b": "handle of b"}
    started = time.monotonic()
    assert (await served.view(changed["version"], ["a", "b"]))["version"] == changed["version"]
    assert 0.5 < time.monotonic() - started < manager.POLL_S + 0.5
