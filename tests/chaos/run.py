"""One run: a service, its undisturbed answers, load and faults together, and what is left at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.faults import Faults
from tests.chaos.load import Load, difference, requests
from tests.integration.service import Service
from tests.integration.streams import Result, run_streams

REQUESTS, CLIENTS = 24, 14
STEP_S = 0.01
END_S = 120.0  # until all is idle again


@dataclass
class Outcome:
    seed: int
    seconds: float
    injected: Counter[str]
    moves: Counter[tuple[str, str]]  # (cause, outcome)
    resumed: int
    worst_downtime_ms: float
    verified: int
    finished: int
    cancelled: int
    tokens: int
    worst_gap_s: float
    refused: Counter[str]
    lost: list[str] = field(default_factory=list)


def arguments(model: Path) -> dict[str, Any]:
    """Of the application: small engines that run out of memory now and then."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "num_gpu_blocks_override": 96,
        "num_cpus_per_replica": 0.25,
        "max_resumes": 1000,
        "drain_deadline_s": 20,
        "scheduling_policy": "priority",
    }


def run(
    service: Service,
    model: Path,
    seed: int,
    seconds: float,
    every_s: float,
    progress: Callable[[Load, Faults], None] = lambda load, faults: None,
) -> Outcome:
    """`every_s`: seconds between two faults. `progress` is called every second."""
    source = random.Random(seed)
    faults = Faults(service, source, arguments(model), STEP_S)
    wanted, faults.settings = faults.settings, {"enable_moves": False}
    asyncio.run(faults.deploy())
    service.wait_ready(replicas=faults.replicas, timeout_s=END_S)
    bodies = requests(seed, REQUESTS)
    expected = run_streams(service.url, bodies)
    for result in expected:
        assert result.done and result.error is None, result
    faults.settings = wanted
    load = Load(service.url, bodies, expected, source, CLIENTS)
    started = time.monotonic()
    asyncio.run(_disturb(load, faults, seconds, every_s, progress))
    lost = [*load.lost, *_after(service, faults, bodies, expected)]
    verified, mismatches = _verified(service)
    if mismatches:
        lost.append(f"{mismatches} requests had other tokens when they were computed again")
    moves = list(faults.moves.values())
    return Outcome(
        seed,
        time.monotonic() - started,
        faults.injected,
        Counter((move["cause"], move["outcome"]) for move in moves),
        sum(faults.resumed.values()),
        max((move["downtime_ms"] or 0.0 for move in moves), default=0.0),
        verified,
        load.finished,
        load.cancelled,
        load.tokens,
        load.worst_gap_s,
        load.refused,
        lost,
    )


async def _disturb(
    load: Load, faults: Faults, seconds: float, every_s: float, progress: Callable[[Load, Faults], None]
) -> None:
    await faults.deploy()
    tasks = [asyncio.create_task(load.run()), asyncio.create_task(faults.run(every_s))]
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not any(task.done() for task in tasks):
        await asyncio.sleep(1)
        progress(load, faults)
    faults.ending.set()
    load.ending.set()
    await asyncio.gather(*tasks)


def _after(service: Service, faults: Faults, bodies: list[dict[str, Any]], expected: list[Result]) -> list[str]:
    """What is not as it should be once all have had their answers: open requests, blocks in use, wrong tokens."""
    problems = []
    try:
        service.wait_ready(replicas=faults.replicas, timeout_s=END_S)
        service.wait_idle(END_S)
        for i, (got, wanted) in enumerate(zip(run_streams(service.url, bodies), expected, strict=True)):
            if got != wanted or got.logprobs != wanted.logprobs:
                problems.append(f"afterwards request {i}: {difference(got, wanted)}")
        service.wait_idle(END_S)
        open_requests = service.handle.info.remote().result(timeout_s=10)["open"]
        if open_requests:
            problems.append(f"{open_requests} requests are open at the ingress")
        asyncio.run(faults.look())
    except AssertionError as error:
        problems.append(f"afterwards: {error}")
    return problems


def _verified(service: Service) -> tuple[int, int]:
    """(requests computed again, those that differed), of the engines that are left."""
    text = httpx.get(f"{service.url}/metrics", timeout=10).text
    totals = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += int(sample.value)
    return totals["ferry_verified_total"], totals["ferry_verify_mismatches_total"]
