"""Requests forced to move while their clients read: nothing may show. The undisturbed run is the oracle, to the bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from serving.app import APP_NAME
from tests.integration.service import Service
from tests.integration.streams import Result, bodies, run_streams, until

STREAMS, TOKENS, MOVES = 64, 200, 200
MAX_RUNS = 4
STEP_S = 0.05  # slow enough for the requests to live through their moves


@pytest.fixture
def service(application: Service, long_llama: Path) -> Service:
    """Two replicas of a tiny Llama in bfloat16, where a wrong rounding shows."""
    return application.ensure(
        model=str(long_llama), num_replicas=2, dtype="bfloat16", kv_cache_memory_bytes=64 << 20, max_model_len=1024
    )


def mixed(count: int) -> list[dict[str, Any]]:
    """Greedy and seeded, with and without logprobs, with penalties, mixed lengths."""
    requests = bodies(count, TOKENS)
    for i, body in enumerate(requests):
        if i % 3 == 0:
            del body["logprobs"]
        elif i % 3 == 1:
            body["logprobs"] = 3
        if i % 4 == 1:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_p": 0.01}
    return requests


def test_forced_moves_change_nothing(service: Service) -> None:
    requests = mixed(STREAMS)
    expected = run_streams(service.url, requests)
    for result in expected:
        assert result.done and result.error is None and result.completion_tokens == TOKENS
    resumed = service.handle.info.remote().result(timeout_s=5)["resumed"]
    manager = serve.get_deployment_handle("Manager", APP_NAME)
    outcomes: dict[str, int] = {}

    async def move_them(results: list[Result]) -> None:
        """Until the requests are about to end, or there were moves enough."""
        await until(lambda: all(result.chunks >= 2 for result in results))
        source = random.Random(3)
        while outcomes.get("moved", 0) < MOVES:
            replicas = (await manager.snapshot.remote())["replicas"]
            running = [(r["id"], q["id"]) for r in replicas for q in r["requests"]]
            if len(running) < STREAMS // 2:
                return
            chosen = source.sample(running, 8)
            others = {r["id"]: [o["id"] for o in replicas if o is not r] for r in replicas}
            calls = [manager.migrate.remote(request, source.choice(others[at]), {}) for at, request in chosen]
            for answer in await asyncio.gather(*(_wait(call) for call in calls)):
                kind = answer.get("error", "moved")
                outcomes[kind] = outcomes.get(kind, 0) + 1

    with service.paced(STEP_S):
        for _ in range(MAX_RUNS):  # on a busy machine the requests of one run end before there were moves enough
            for got, wanted in zip(run_streams(service.url, requests, move_them), expected, strict=True):
                assert got == wanted
            if outcomes.get("moved", 0) >= MOVES:
                break
    assert outcomes.get("moved", 0) >= MOVES, outcomes
    service.wait_idle()
    info = service.handle.info.remote().result(timeout_s=5)
    assert (info["open"], info["resumed"]) == (0, resumed), "moved, not started again"


async def _wait(call: Any) -> Any:
    return await call
