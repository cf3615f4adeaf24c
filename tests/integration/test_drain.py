"""Engines that go away while they serve: their requests move, none is cut, every stream is the undisturbed one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.service import Service, another_node, wait_for
from tests.integration.streams import Result, bodies, run_streams, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STREAMS, TOKENS = 32, 400
STEP_S = 0.02  # of a paced engine: streams then take 8 s


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
    await until(lambda: all(len(result.tokens) >= tokens for result in results), 60)


def options(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 1024,
        "num_cpus_per_replica": 0.5,
        **more,
    }


def receipts(service: Service, count: int) -> list[dict[str, Any]]:
    """Of that many drained engines, once their gaps are known."""
    wait_for(lambda: len(service.cluster()["manager"]["drains"]) >= count, 10, f"{count} receipts")
    return service.cluster()["manager"]["drains"]


def assert_moved_uncut(found: list[dict[str, Any]]) -> None:
    for receipt in found:
        assert receipt["moved"] > 0 and receipt["resumed"] == 0, receipt
        print(f"drained in {receipt['seconds']:.2f} s: {receipt}")


def test_scale_in_from_three_engines_to_one_under_streams(
    application: Service, long_llama: Path, calm: list[Result]
) -> None:
    service = application
    service.apply({"num_replicas": 3}, **options(long_llama))
    service.wait_ready(replicas=3)
    expected = undisturbed(service, calm)
    old = {name: snapshot["pid"] for name, snapshot in service.snapshots().items()}
    running_when_alone: list[int] = []

    async def scale_in(results: list[Result]) -> None:
        await under_way(results)
        assert sum(len(s["requests"]) > 0 for s in (await asyncio.to_thread(service.snapshots)).values()) == 3
        await asyncio.to_thread(service.apply, {"num_replicas": 1}, **options(long_llama))
        await until(lambda: sum(psutil.pid_exists(pid) for pid in old.values()) == 1, 60)
        running_when_alone.append(sum(not result.done for result in results))

    with service.paced(STEP_S):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), scale_in) == expected
    assert running_when_alone == [STREAMS], "two engines were gone while all streams ran"
    (name,) = service.engines()
    assert service.snapshots()[name]["pid"] == old[name], "the survivor was not restarted"
    assert_moved_uncut(receipts(service, 2))
    moves = service.cluster()["moves"]
    assert sum(m["outcome"] == "moved" for m in moves) >= STREAMS // 2
    assert {m["cause"] for m in moves} == {"drain"} and not any(
        m["outcome"] in ("refused", "unconfirmed") for m in moves
    )
    service.wait_idle()


def test_a_rolling_update_under_streams(application: Service, long_llama: Path, calm: list[Result]) -> None:
    service = application
    service.apply({"num_replicas": 2}, **options(long_llama))
    service.wait_ready(replicas=2)
    expected = undisturbed(service, calm)
    old = [snapshot["pid"] for snapshot in service.snapshots().values()]
    running_when_new: list[int] = []

    async def update(results: list[Result]) -> None:
        await under_way(results)
        await asyncio.to_thread(service.apply, {"num_replicas": 2}, **options(long_llama, seed=1))
        await until(lambda: not any(psutil.pid_exists(pid) for pid in old), 90)
        running_when_new.append(sum(not result.done for result in results))

    with service.paced(0.05):
        assert run_streams(service.url, bodies(STREAMS, TOKENS), update) == expected
    print("streams that ran when no old engine was left:", running_when_new)
    service.wait_ready(replicas=2)
    assert_moved_uncut(receipts(service, 1))
    service.wait_idle()


def test_a_node_that_is_told_to_end_lets_its_engine_drain(
    application: Service, long_llama: Path, calm: list[Result]
) -> None:
    """SIGTERM to `ray start --block`, as Kubernetes ends a pod. There is no room for a replacement."""
    service, same = application, {**options(long_llama), "num_cpus_per_replica": 2}
    service.delete()
    service.apply({"num_replicas": 1}, **same)
    service.wait_ready(replicas=1)  # with ingress and manager: they stay
    expected = undisturbed(service, calm)
    (stays,) = service.engines()
    try:
        with another_node(num_cpus=2) as node:
            service.apply({"num_replicas": 2}, **same)
            service.wait_ready(replicas=2)
            (gone,) = service.engines().keys() - {stays}

            async def end_node(results: list[Result]) -> None:
                await under_way(results)
                node.terminate()
                await asyncio.to_thread(wait_for, lambda: gone not in service.engines(), 60, "the end of its engine")
                assert not any(result.done for result in results)

            with service.paced(STEP_S):
                assert run_streams(service.url, bodies(STREAMS, TOKENS), end_node) == expected
            (receipt,) = receipts(service, 1)
            assert receipt["engine"] == gone
            assert_moved_uncut([receipt])
    finally:
        service.delete()
