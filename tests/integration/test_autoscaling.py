"""The number of engines follows the load: up under a queue, down without one, to none and back on a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.autoscaling import autoscaling_config
from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, bodies, run_streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SOON = {"scale_interval_s": 1, "scale_up_after_s": 0, "scale_down_after_s": 3, "scale_to_zero_after_s": 3}


def options(model: Path, low: int, high: int) -> dict[str, Any]:
    """Engines with 128 blocks: a few streams fill one."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "num_gpu_blocks_override": 128,
        "num_cpus_per_replica": 0.5,
        "min_replicas": low,
        "max_replicas": high,
        "llumnix_config": SOON,
    }


@pytest.fixture(autouse=True)
def afterwards(application: Service) -> Iterator[None]:
    yield
    application.delete()


def test_one_engine_becomes_two_under_load_and_one_again(application: Service, long_llama: Path) -> None:
    service = application
    service.update(**options(long_llama, 1, 2))
    service.wait_ready(replicas=1)
    requests = bodies(16, 300)
    expected = run_streams(service.url, requests[:4])
    (first,) = service.engines()
    seen: set[str] = set()
    ready: list[float] = []

    def look() -> None:
        seen.update(service.engines())
        ready.extend([time.monotonic()] * (service.num_ready() == 2))

    async def watch(results: list[Result]) -> None:
        started = time.monotonic()
        while not all(result.done or result.error for result in results):
            await asyncio.to_thread(look)
            await asyncio.sleep(0.2)
        print(
            f"two engines {ready[0] - started:.1f} s after the load began, load for {time.monotonic() - started:.1f} s"
        )

    with service.paced(0.03):
        results = run_streams(service.url, requests, watch)
    assert results[:4] == expected and all(result.done and result.error is None for result in results)
    assert len(seen) == 2 and len(ready) > 1, "one was added, and stayed while requests waited"
    seconds = wait_for(lambda: service.num_ready() == 1 and len(service.engines()) == 1, 40, "one engine again")
    print(f"one engine {seconds:.1f} s after the load ended")
    assert list(service.engines()) == [first], "the newest goes"
    time.sleep(5)
    assert service.num_ready() == 1, "min_replicas"


def test_none_while_there_is_nothing_to_do_and_one_for_a_request(application: Service, long_llama: Path) -> None:
    service = application
    service.update(**options(long_llama, 0, 2))
    assert not service.engines() and service.cluster()["replicas"] == []
    health = httpx.get(f"{service.url}/health", timeout=5)
    assert (health.status_code, health.json()["status"]) == (200, "idle")
    started = time.monotonic()
    first = run_streams(service.url, bodies(3, 50))
    print(f"three requests found no engine: answered after {time.monotonic() - started:.1f} s")
    assert all(result.done and result.completion_tokens == 50 for result in first)
    assert len(service.engines()) == 1
    assert run_streams(service.url, bodies(3, 50)) == first, "it stays for a while"
    seconds = wait_for(lambda: not service.engines(), 40, "no engine")
    print(f"none {seconds:.1f} s after the last request")
    wait_for(lambda: service.cluster()["replicas"] == [], 15, "an empty view")
    assert run_streams(service.url, bodies(3, 50)) == first, "and back"


def test_requests_that_cannot_be_held_are_refused_and_may_try_again(application: Service, long_llama: Path) -> None:
    service = application
    small = {"num_cpus_per_replica": 64, "max_num_queued": 2, "max_queue_time": 3, "drain_deadline_s": 0}
    service.update(**options(long_llama, 0, 1) | small)
    body = bodies(1, 5)[0]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [503] * 3
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    messages = sorted(answer.json()["error"]["message"] for answer in answers)
    assert messages[0].startswith("2 requests wait for a replica to start already")
    assert messages[1:] == ["no replica started within 3 s"] * 2


def test_limits_of_the_deployment_change_while_its_engines_run(application: Service, long_llama: Path) -> None:
    """Unlike args, which restart everything: docs/operations.md shows this form."""
    service = application

    def limits(low: int, high: int) -> dict[str, Any]:
        return {"autoscaling_config": autoscaling_config(low, high, SOON)}

    service.apply(limits(1, 2), **options(long_llama, 1, 2))
    service.wait_ready(replicas=1)
    ((name, snapshot),) = service.snapshots().items()
    service.apply(limits(2, 3), **options(long_llama, 1, 2))
    wait_for(lambda: service.num_ready() == 2, 40, "two engines")
    assert service.snapshots()[name]["pid"] == snapshot["pid"]
