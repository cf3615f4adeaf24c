"""Engines that are cut off, fail, hang, are updated or deleted under streams: every stream is complete and the same.

Undisturbed runs are the oracle, as in test_faults.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, bodies, run_streams, until
from tests.machine import slowdown

STREAMS, TOKENS = 8, 300
STEP_S = 0.01  # of a paced engine: streams then take 3 s


@pytest.fixture(scope="module")
def calm() -> list[Result]:
    """The undisturbed answers."""
    return []


def undisturbed(service: Service, calm: list[Result]) -> list[Result]:
    if not calm:
        calm += run_streams(service.url, bodies(STREAMS, TOKENS))
        assert all(result.done and result.completion_tokens == len(result.tokens) == TOKENS for result in calm)
    return calm


async def under_way(results: list[Result], tokens: int = 20) -> None:
    await until(lambda: all(len(result.tokens) >= tokens for result in results))


def busiest(service: Service) -> tuple[str, dict[str, Any]]:
    """The engine with the most requests, and its snapshot."""
    name, snapshot = max(service.snapshots().items(), key=lambda item: len(item[1]["requests"]))
    assert len(snapshot["requests"]) >= STREAMS // 4
    return name, snapshot


def replaced(service: Service, name: str) -> bool:
    return service.num_ready() == 2 and name not in service.engines()


def test_a_stream_between_ingress_and_engine_that_is_cut_costs_no_token(service: Service, calm: list[Result]) -> None:
    expected = undisturbed(service, calm)
    ingress = service.handle.info.remote().result(timeout_s=10)["name"]
    taken: list[int] = []

    def cut() -> None:
        for actor in service.engines().values():
            # An engine has one stream an ingress: this one ends the ingress's, and takes outputs that it needs.
            for reference in actor.stream.options(num_returns="streaming").remote(ingress, {}):
                taken.append(len(ray.get(reference, timeout=10)["outputs"]))

    async def disturb(results: list[Result]) -> None:
        for tokens in (20, 100, 200):
            await under_way(results, tokens)
            await asyncio.to_thread(cut)

    with service.paced(STEP_S):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), disturb) == expected
    assert len(taken) >= 6  # each time at each engine


def test_an_engine_whose_step_raises_is_replaced_and_its_requests_resume(service: Service, calm: list[Result]) -> None:
    expected = undisturbed(service, calm)
    victims: list[str] = []

    async def poison(results: list[Result]) -> None:
        await under_way(results)
        name, _ = await asyncio.to_thread(busiest, service)
        victims.append(name)

        def fail(plan: Any) -> None:
            raise RuntimeError("poisoned")

        def spoil(actor: Any) -> None:
            if actor.id == name:
                actor.engine.executor.execute = fail

        await asyncio.to_thread(service.inside, spoil)

    with service.paced(STEP_S):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), poison) == expected
    wait_for(lambda: replaced(service, victims[0]), 40, "a replacement")
    service.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "step"])
def test_an_engine_that_hangs_is_replaced_and_its_requests_resume(
    application: Service, long_llama: Path, calm: list[Result], kind: str
) -> None:
    service = application.ensure(**two_engines(long_llama), step_timeout_s=2, lease_s=1)
    expected = undisturbed(service, calm)
    victims: list[str] = []
    hung: list[float] = []

    async def hang(results: list[Result]) -> None:
        await under_way(results)
        name, snapshot = await asyncio.to_thread(busiest, service)
        victims.append(name)
        hung.append(time.monotonic())
        if kind == "process":
            os.kill(snapshot["pid"], signal.SIGSTOP)
            return

        def wait(plan: Any) -> None:
            import threading

            threading.Event().wait()

        def stall(actor: Any) -> None:
            if actor.id == name:
                actor.engine.executor.execute = wait

        await asyncio.to_thread(service.inside, stall)

    with service.paced(STEP_S):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), hang) == expected
    wait_for(lambda: replaced(service, victims[0]), 60, "a replacement")
    assert (time.monotonic() - hung[0]) / slowdown() < 20, (
        "3 s of silence or failed health checks, and the start of another"
    )
    service.wait_idle()


def two_engines(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "num_replicas": 2,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 1024,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "deadline_s"),
    [({"seed": 1}, 300.0), ({"num_replicas": 1}, 0.5)],
    ids=["update with time to drain", "scale in without"],
)
def test_a_redeployment_under_streams_costs_no_token(
    application: Service, long_llama: Path, calm: list[Result], change: dict[str, Any], deadline_s: float
) -> None:
    options = {**two_engines(long_llama), "drain_deadline_s": deadline_s}
    service = application.ensure(**options)
    expected = undisturbed(service, calm)
    old = {snapshot["pid"] for snapshot in service.snapshots().values()}
    running_when_one_left: list[int] = []

    async def redeploy(results: list[Result]) -> None:
        await under_way(results)
        update = asyncio.create_task(asyncio.to_thread(service.update, **{**options, **change}))
        await until(lambda: not all(psutil.pid_exists(pid) for pid in old), 60)
        running_when_one_left.append(sum(not result.done for result in results))
        await update

    with service.paced(STEP_S):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), redeploy) == expected
    assert running_when_one_left[0] > STREAMS // 2, "its requests went on elsewhere: it had not to wait for their end"
    service.wait_ready(replicas=service.options["num_replicas"])
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in old), 30, "end of the old engines")


def test_deleting_the_application_lets_streams_finish(service: Service, calm: list[Result]) -> None:
    expected = undisturbed(service, calm)
    pids = [snapshot["pid"] for snapshot in service.snapshots().values()]

    async def delete(results: list[Result]) -> None:
        await under_way(results)
        await asyncio.to_thread(service.delete)

    with service.paced(STEP_S):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), delete) == expected
    assert not service.engines()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5, "end of the engines' processes")


def test_deleting_past_the_drain_deadline_ends_streams_at_once_with_a_typed_error(
    application: Service, long_llama: Path
) -> None:
    service = application.ensure(**two_engines(long_llama), drain_deadline_s=0.5)
    deleted: list[float] = []

    async def delete(results: list[Result]) -> None:
        await under_way(results)
        deleted.append(time.monotonic())
        await asyncio.to_thread(service.delete)

    with service.paced(0.1):
        results = run_streams(service.url, bodies(STREAMS, TOKENS), delete)
    assert (time.monotonic() - deleted[0]) / slowdown() < 10.0
    for result in results:
        assert result.error is not None and result.error["code"] == "service_unavailable"
        assert result.error["message"] == "the service is shutting down"
