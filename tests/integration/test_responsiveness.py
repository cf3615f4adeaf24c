"""An engine that computes or idles leaves its process, and everybody else, alone."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import httpx
import psutil
import pytest
import ray

from engine.host import SERVICE_CORES, physical_cores, usable_cores
from tests.integration.service import Service
from tests.machine import cheapest, slowdown

CORES = min(len(physical_cores()), usable_cores())
LIMIT_S = 0.05
PROMPT_TOKENS = 8000


def ensure(application: Service, threads: int | None) -> Service:
    options = {"model": "demo:smollm2", "num_replicas": 1, "kv_cache_memory_bytes": 512 << 20}
    return application.ensure(**options, threads=threads, num_cpus_per_replica=None)


def threads_of(demo: Service) -> int:
    """Of the engine's own thread."""

    def threads(actor: Any) -> int:
        from concurrent.futures import Future

        import torch

        found: Future[int] = Future()
        actor.thread.post(lambda: found.set_result(torch.get_num_threads()))
        return found.result(5)

    return next(iter(demo.inside(threads).values()))


@pytest.fixture
def demo(application: Service) -> Service:
    return ensure(application, None)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [CORES, None], ids=["all cores", "default"])
def test_a_long_prefill_holds_up_neither_health_nor_the_engine_process(
    threads: int | None, application: Service
) -> None:
    demo = ensure(application, threads)
    assert threads_of(demo) == (threads or max(1, CORES - SERVICE_CORES))
    engine = next(iter(demo.engines().values()))
    body = {"model": "tiny", "prompt": [i % 40_000 for i in range(PROMPT_TOKENS)], "max_tokens": 1}
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{demo.url}/v1/completions", json=body, timeout=120))
    )
    health, pings = [], []
    with httpx.Client(base_url=demo.url) as client:
        client.get("/health")
        thread.start()
        while thread.is_alive():
            started = time.perf_counter()
            assert client.get("/health").status_code == 200
            health.append(time.perf_counter() - started)
            started = time.perf_counter()
            ray.get(engine.ping.remote(), timeout=10)
            pings.append(time.perf_counter() - started)
            time.sleep(0.02)
    assert answers[0].status_code == 200, answers[0].text
    assert len(health) > 20  # the prefill took a while
    for name, seconds in (("/health", health), ("ping", pings)):
        p95 = statistics.quantiles(seconds, n=20)[-1]
        print(f"{name}: median {statistics.median(seconds) * 1e3:.1f} ms, p95 {p95 * 1e3:.1f} ms")
        assert p95 / slowdown() < LIMIT_S, name


@pytest.mark.slow
def test_an_idle_engine_uses_less_than_one_percent_of_a_core(demo: Service) -> None:
    processes = [psutil.Process(snapshot["pid"]) for snapshot in demo.snapshots().values()]
    time.sleep(2)

    def used() -> float:
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(10)
        shares = [(sum(process.cpu_times()[:2]) - start) / 10 for process, start in zip(processes, before, strict=True)]
        print("idle engine:", ", ".join(f"{share:.2%}" for share in shares), "of a core")
        return max(shares)

    assert cheapest(used, 0.01, attempts=4) < 0.01
