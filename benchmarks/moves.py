"""What a move costs: the silence its client sees, by context length and mechanism, and what the neighbours feel.

    python -m benchmarks.moves [--lengths 256 512 1024 2048 4096 8192] [--moves 20] [--mechanisms live ...]
                               [--neighbours 9] [--json FILE] [--figure PNG]

Two engine replicas of one thread each on a real local Ray, with the demo model; requests stream over HTTP and are moved
to and fro by the manager. Downtime is the time between the two tokens around a move as the HTTP client sees it, in
milliseconds and in decode steps (the median gap of the same request while nothing moves). Every move sends every block:
what the destination has cached from an earlier visit is not used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray import serve

from benchmarks.machine import describe
from benchmarks.moves_plot import downtime_figure
from llumnix.simulator.plot import need
from serving.app import APP_NAME, build
from serving.config import AppArgs

MODEL = "demo:smollm2"
MAX_MODEL_LEN = 8192
SETTLE_TOKENS = 6  # decoded undisturbed before and after each move
STEP_TOKENS = 24  # decoded undisturbed at the start of each request: its decode step
RESAMPLES = 2000


@dataclass
class Downtimes:
    """Moves at one length by one mechanism."""

    mechanism: str
    length: int
    step_ms: float = 0.0
    client_ms: list[float] = field(default_factory=list)
    ingress_ms: list[float] = field(default_factory=list)
    held_ms: list[float] = field(default_factory=list)
    duration_ms: list[float] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.client_ms)

    @property
    def median_steps(self) -> float:
        return self.median_ms / self.step_ms


class Stream:
    """One request over HTTP; `at` holds when each token came."""

    def __init__(self, client: httpx.AsyncClient, prompt: list[int], max_tokens: int):
        self.client, self.prompt, self.max_tokens = client, prompt, max_tokens
        self.id = ""
        self.at: list[float] = []
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        body = {"model": "m", "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"status {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if not self.id:
                        self.id = json.loads(line[6:])["id"]
                    self.at.append(now)
                    self.changed.set()

    async def tokens(self, count: int) -> None:
        """Until that many tokens are there."""
        while len(self.at) < count:
            if self.task.done():
                self.task.result()
                raise SystemExit(f"a stream ended after {len(self.at)} tokens, {count} were wanted")
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 300)

    async def more(self, count: int) -> None:
        await self.tokens(len(self.at) + count)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def gaps_ms(self, first: int, last: int | None = None) -> list[float]:
        """Milliseconds between tokens [first, last)."""
        return [1e3 * (b - a) for a, b in zip(self.at[first:last], self.at[first + 1 : last], strict=False)]


class Cluster:
    """Two engines, reached through the manager and over HTTP."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.manager = serve.get_deployment_handle("Manager", APP_NAME)

    async def engines(self) -> list[str]:
        return [replica["id"] for replica in (await self.snapshot())["replicas"] if replica["state"] == "ready"]

    async def snapshot(self) -> dict[str, Any]:
        return await self.manager.snapshot.remote()  # type: ignore[no-any-return]

    async def owner(self, request_id: str) -> str:
        for replica in (await self.snapshot())["replicas"]:
            if any(request["id"].startswith(request_id) for request in replica["requests"]):
                return str(replica["id"])
        raise SystemExit(f"no engine has {request_id}")

    async def move(self, stream: Stream, destination: str, mechanism: str) -> dict[str, Any]:
        options = {"mechanism": mechanism, "use_cached": False}
        answer = await self.manager.migrate.remote(stream.id, destination, options)
        if "error" in answer:
            raise SystemExit(f"a move failed: {answer}")
        return answer  # type: ignore[no-any-return]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A private Ray with the application on a free port."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    folder = tempfile.mkdtemp(prefix="fm-", dir="/tmp")  # short: Ray's sockets live below it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, _temp_dir=folder, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"model": MODEL, "served_model_name": ["m"], "num_replicas": 2, "threads": 1, "num_cpus_per_replica": 1}
        args |= {"max_model_len": MAX_MODEL_LEN, "log_level": "WARNING"}
        serve.run(build(AppArgs.model_validate(args)), name=APP_NAME, route_prefix="/")
        yield Cluster(port)
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


async def downtimes(ferry: Cluster, mechanism: str, length: int, moves: int) -> Downtimes:
    """Move requests of about `length` tokens of context to and fro."""
    result = Downtimes(mechanism, length)
    steps: list[float] = []
    source = random.Random(length)
    per_request = max(1, min(moves, (MAX_MODEL_LEN - 1 - min(length, MAX_MODEL_LEN - 400)) // 40))
    async with httpx.AsyncClient(base_url=ferry.url, timeout=600) as client:
        while len(result.client_ms) < moves:
            budget = STEP_TOKENS + per_request * 40
            prompt_len = min(length, MAX_MODEL_LEN - budget - 1)
            stream = Stream(client, [source.randrange(1000, 40_000) for _ in range(prompt_len)], budget)
            await stream.tokens(STEP_TOKENS)
            steps += stream.gaps_ms(4)
            engines = await ferry.engines()
            at = await ferry.owner(stream.id)
            for _ in range(min(per_request, moves - len(result.client_ms))):
                destination = next(engine for engine in engines if engine != at)
                await stream.more(SETTLE_TOKENS)
                first = len(stream.at) - 1
                answer = await ferry.move(stream, destination, mechanism)
                await stream.more(SETTLE_TOKENS)
                at = destination
                result.client_ms.append(max(stream.gaps_ms(first)))
                result.held_ms.append(answer["held_ms"])
                result.duration_ms.append(answer["duration_ms"])
                result.mb.append(answer["bytes"] / 1e6)
            await asyncio.sleep(1.5)  # ingresses tell the manager what they saw once a second
            for move in (await ferry.snapshot())["moves"]:
                if move["request_id"].startswith(stream.id) and move["downtime_ms"] is not None:
                    result.ingress_ms.append(move["downtime_ms"])
            await stream.close()
    result.step_ms = statistics.median(steps)
    return result


def slope(results: list[Downtimes]) -> tuple[float, float]:
    """Least-squares slope of downtime over context, ms a token, and the upper end of its 95 % bootstrap interval."""
    generator = np.random.default_rng(0)

    def fit(samples: list[np.ndarray]) -> float:
        x = np.concatenate([np.full(len(s), r.length) for s, r in zip(samples, results, strict=True)])
        return float(np.polyfit(x, np.concatenate(samples), 1)[0])

    samples = [np.array(result.client_ms) for result in results]
    drawn = [fit([generator.choice(s, len(s)) for s in samples]) for _ in range(RESAMPLES)]
    return fit(samples), float(np.quantile(drawn, 0.95))


async def neighbours(ferry: Cluster, pairs: int, length: int = 4096, seconds: float = 2.0) -> dict[str, list[float]]:
    """Ratios of a neighbour's decode step: while a request's blocks are copied, over just before.

    Away from the neighbour's engine ("source") and to it ("destination"), alternating. Only gaps between the command
    and the moment the request is held count: up to then both batches are what they were before.
    """
    source = random.Random(1)
    ratios: dict[str, list[float]] = {"source": [], "destination": []}
    async with httpx.AsyncClient(base_url=ferry.url, timeout=600) as client:
        neighbour = Stream(client, [source.randrange(1000, 40_000) for _ in range(64)], MAX_MODEL_LEN - 65)
        await neighbour.tokens(STEP_TOKENS)
        prompt = [source.randrange(1000, 40_000) for _ in range(length)]
        mover = Stream(client, prompt, MAX_MODEL_LEN - length - 1)
        await mover.tokens(STEP_TOKENS)
        home = await ferry.owner(neighbour.id)
        away = next(engine for engine in await ferry.engines() if engine != home)
        if await ferry.owner(mover.id) != home:
            await ferry.move(mover, home, "live")
        for _ in range(pairs):
            for side, destination in (("source", away), ("destination", home)):
                await asyncio.sleep(0.5)
                first = len(neighbour.at)
                await asyncio.sleep(seconds)
                still = neighbour.gaps_ms(first)
                started = time.perf_counter()
                answer = await ferry.move(mover, destination, "live")
                until = started + (answer["duration_ms"] - answer["held_ms"]) / 1e3
                during = [
                    1e3 * (b - a)
                    for a, b in zip(neighbour.at, neighbour.at[1:], strict=False)
                    if a >= started and b <= until
                ]
                ratios[side].append(statistics.median(during) / statistics.median(still))
        await mover.close()
        await neighbour.close()
    return ratios


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    generator = np.random.default_rng(0)
    drawn = [np.median(generator.choice(values, len(values))) for _ in range(RESAMPLES)]
    return statistics.median(values), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


async def run(ferry: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    columns = ("step ms", "downtime ms", "in steps", "p90 ms", "ingress ms", "held ms", "MB", "whole ms")
    print(f"{'mechanism':>14} {'context':>8}" + "".join(f"{column:>12}" for column in columns))
    tables: dict[str, list[Downtimes]] = {}
    for length in options.lengths:
        for mechanism in options.mechanisms:
            result = await downtimes(ferry, mechanism, length, options.moves)
            tables.setdefault(mechanism, []).append(result)
            p90 = float(np.quantile(result.client_ms, 0.9))
            values = (result.step_ms, result.median_ms, result.median_steps, p90)
            medians = [
                statistics.median(v) if v else float("nan")
                for v in (result.ingress_ms, result.held_ms, result.mb, result.duration_ms)
            ]
            print(f"{mechanism:>14} {length:>8}" + "".join(f"{v:>12.2f}" for v in (*values, *medians)), flush=True)
    report: dict[str, Any] = {"machine": describe(), "downtimes": {}}
    for mechanism, results in tables.items():
        report["downtimes"][mechanism] = [asdict(result) for result in results]
        if len(results) > 1:
            middle, upper = slope(results)
            span = results[-1].length - results[0].length
            step = statistics.median(result.step_ms for result in results)
            print(
                f"{mechanism}: slope x {span:,} tokens {middle * span:+.1f} ms, 95 % bound {upper * span:.1f} ms "
                f"({upper * span / step:.2f} decode steps)"
            )
            report.setdefault("slopes", {})[mechanism] = {"ms_per_token": middle, "upper": upper, "span": span}
    if options.neighbours:
        report["neighbours"] = await neighbours(ferry, options.neighbours)
        for side, ratios in report["neighbours"].items():
            middle, low, high = interval(ratios)
            print(
                f"a neighbour's decode step at the {side} while blocks are copied: {100 * (middle - 1):+.1f} % "
                f"(95 % interval {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}, {len(ratios)} pairs)"
            )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--mechanisms", nargs="+", default=["live", "stop_and_copy", "recompute"])
    parser.add_argument("--neighbours", type=int, default=9, help="alternating pairs; 0: none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="PNG of the downtime by context length (needs matplotlib)")
    options = parser.parse_args()
    if options.figure:
        need()
        options.figure.parent.mkdir(parents=True, exist_ok=True)
    print(describe())
    with cluster() as ferry:
        report = asyncio.run(run(ferry, options))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if options.figure:
        downtime_figure(report["downtimes"], options.figure)


if __name__ == "__main__":
    main()
