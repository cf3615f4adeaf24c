"""Requests that lose their engine while the application goes away: there is nowhere to go on, so they end at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service import Service
from tests.integration.streams import Result, bodies, run_streams, until

pytestmark = pytest.mark.slow

STREAMS, TOKENS = 8, 900
STEP_S = 0.1  # of a paced engine: streams then take 90 s


def options(model: Path, **more: Any) -> dict[str, Any]:
    one = {"model": str(model), "dtype": "float32", "max_model_len": 1024}
    return {**one, "kv_cache_memory_bytes": 64 << 20, **more}


async def under_way(results: list[Result]) -> None:
    await until(lambda: all(len(result.tokens) >= 5 for result in results))


def assert_closed(results: list[Result], since: float, limit_s: float) -> None:
    for result in results:
        assert result.error is not None and result.error["message"] == "the service is shutting down", result.error
    assert time.monotonic() - since < limit_s


def test_an_application_deleted_while_an_update_drains(application: Service, long_llama: Path) -> None:
    service, same = application, options(long_llama, drain_deadline_s=4)
    service.apply({"num_replicas": 1}, **same)
    service.wait_ready(replicas=1)
    times: list[float] = []

    def draining() -> bool:
        return any(snapshot["state"] == "draining" for snapshot in service.snapshots().values())

    async def disturb(results: list[Result]) -> None:
        await under_way(results)
        await asyncio.to_thread(service.apply, {"num_replicas": 1}, **same, seed=1)
        while not await asyncio.to_thread(draining):
            await asyncio.sleep(0.05)
        times.append(time.monotonic())
        await asyncio.to_thread(service.delete)

    with service.paced(STEP_S):
        results = run_streams(service.url, bodies(STREAMS, TOKENS), disturb)
    assert_closed(results, times[0], 4 + 4)


def test_an_engine_that_dies_while_the_application_is_deleted(application: Service, long_llama: Path) -> None:
    service = application.ensure(**options(long_llama))
    times: list[float] = []

    async def disturb(results: list[Result]) -> None:
        await under_way(results)
        (snapshot,) = (await asyncio.to_thread(service.snapshots)).values()
        deleting = asyncio.create_task(asyncio.to_thread(service.delete))
        await asyncio.sleep(2)
        assert not any(result.error or result.done for result in results), "they run on until drain_deadline_s"
        times.append(time.monotonic())
        os.kill(snapshot["pid"], signal.SIGKILL)
        await deleting

    with service.paced(STEP_S):
        results = run_streams(service.url, bodies(STREAMS, TOKENS), disturb)
    assert_closed(results, times[0], 5)
