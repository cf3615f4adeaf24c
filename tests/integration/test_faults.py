"""Processes killed and stopped under streaming load: nothing a client was promised is lost.

Undisturbed runs are the oracle: in float32 a request's tokens do not depend on where or when they are computed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, bodies, run_streams, until
from tests.machine import slowdown

STREAMS, TOKENS = 32, 300


@pytest.fixture(scope="module")
def calm(request: pytest.FixtureRequest) -> list[Result]:
    """The undisturbed answers."""
    return []


def undisturbed(service: Service, calm: list[Result]) -> list[Result]:
    if not calm:
        calm += run_streams(service.url, bodies(STREAMS, TOKENS))
        assert_complete(calm)
    return calm


def assert_complete(results: list[Result]) -> None:
    for result in results:
        assert result.error is None and result.done, result
        assert result.finish_reason == "length"
        assert result.completion_tokens == len(result.tokens) == TOKENS


async def under_way(results: list[Result], tokens: int = 20) -> None:
    """Until all streams have some tokens and none is near its end."""
    await until(lambda: all(len(result.tokens) >= tokens for result in results))


def test_an_engine_killed_under_load_costs_no_token(service: Service, calm: list[Result]) -> None:
    expected = undisturbed(service, calm)
    victim: dict[str, Any] = {}

    async def kill(results: list[Result]) -> None:
        await under_way(results)
        snapshots = await asyncio.to_thread(service.snapshots)
        victim.update(max(snapshots.values(), key=lambda snapshot: len(snapshot["requests"])))
        os.kill(victim["pid"], signal.SIGKILL)
        victim["at"] = time.monotonic()

    results = run_streams(service.url, bodies(STREAMS, TOKENS), kill)
    assert len(victim["requests"]) >= STREAMS // 4  # it had a good share of them
    assert_complete(results)
    assert results == expected
    # Every bundle of the cluster is in use: the replacement needs the dead engine's.
    wait_for(lambda: service.num_ready() == 2 and victim["id"] not in service.engines(), 30, "a replacement")
    assert (time.monotonic() - victim["at"]) / slowdown() < 8.0
    service.wait_idle()


@pytest.mark.slow
def test_a_stopped_ingress_resumes_its_streams(service: Service, calm: list[Result]) -> None:
    expected = undisturbed(service, calm)
    info = service.handle.info.remote().result(timeout_s=10)
    freed: list[float] = []

    async def stop(results: list[Result]) -> None:
        await under_way(results)
        process = psutil.Process(info["pid"])
        process.suspend()
        try:
            started = time.monotonic()
            await asyncio.to_thread(wait_for, lambda: requests_of(service, info["name"]) == 0, 10, "freed blocks")
            freed.append(time.monotonic() - started)
            await asyncio.sleep(max(0.0, 15 - (time.monotonic() - started)))
        finally:
            process.resume()

    results = run_streams(service.url, bodies(STREAMS, TOKENS), stop)
    assert freed[0] / slowdown() < 6.0
    assert_complete(results)
    assert results == expected
    service.wait_idle()


def test_a_killed_ingress_leaves_nothing_behind(service: Service) -> None:
    info = service.handle.info.remote().result(timeout_s=10)
    killed: list[float] = []

    async def kill(results: list[Result]) -> None:
        await under_way(results, 5)
        assert await asyncio.to_thread(requests_of, service, info["name"]) == 8
        os.kill(info["pid"], signal.SIGKILL)
        killed.append(time.monotonic())

    # Its clients' connections die with it: that is the one loss there is.
    with pytest.raises(httpx.TransportError):
        run_streams(service.url, bodies(8, 900), kill)
    wait_for(lambda: requests_of(service, info["name"]) == 0, 10, "freed blocks")
    assert (time.monotonic() - killed[0]) / slowdown() < 6.0
    service.wait_ready(replicas=2)
    service.wait_idle()


def test_nobody_notices_a_killed_manager(service: Service, calm: list[Result]) -> None:
    expected = undisturbed(service, calm)
    pid = service.manager_pid()

    async def kill(results: list[Result]) -> None:
        await under_way(results)
        os.kill(pid, signal.SIGKILL)

    assert run_streams(service.url, bodies(STREAMS, TOKENS), kill) == expected
    assert run_streams(service.url, bodies(STREAMS, TOKENS)) == expected  # new requests, perhaps before it is back
    wait_for(lambda: service.num_ready() == 2, 20, "a manager that knows both engines")
    assert service.manager_pid() != pid


def requests_of(service: Service, ingress: str) -> int:
    return sum(r["client"] == ingress for s in service.snapshots().values() for r in s["requests"])
