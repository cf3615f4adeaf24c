"""The service as its users meet it: time until the first 200, then streams over HTTP.

    python -m benchmarks.http [--config configs/smollm2.yaml] [--cold] [--requests-per-stream 2]

`--cold` first starts with compiled Python files removed and, where permitted, the page cache dropped. Figures are
through Serve's Python proxy, with the client on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.machine import describe

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300.0
PROMPT_TOKENS = OUTPUT_TOKENS = 128


@dataclass
class Stream:
    """One finished request, seconds."""

    ttft: float
    total: float
    tokens: int

    @property
    def tpot(self) -> float:
        return (self.total - self.ttft) / max(1, self.tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/smollm2.yaml")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--requests-per-stream", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    print(describe())
    if options.cold:
        dropped = forget()
        with service(options.config) as (_, seconds):
            pass
        print(f"start until the first 200, cold (page cache {'dropped' if dropped else 'kept'})  {seconds:6.1f} s")
    with service(options.config) as (url, seconds):
        print(f"start until the first 200, warm                       {seconds:6.1f} s")
        asyncio.run(measure(url, options.streams, options.requests_per_stream))


@contextmanager
def service(config: str) -> Iterator[tuple[str, float]]:
    """The service in its own process, healthy: its address, and seconds until GET /health was 200."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    folder = tempfile.mkdtemp(prefix="fb-", dir="/tmp")  # short: Ray's sockets live below it
    environment.update(RAY_AUTH_MODE="disabled", RAY_TMPDIR=folder)
    command = [str(Path(sys.executable).parent / "ferry"), "serve", config, "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until_healthy(process, url)
        yield url, time.perf_counter() - started
    finally:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < START_LIMIT_S:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None:
            raise SystemExit(f"ferry serve ended with status {process.returncode}")
        time.sleep(0.05)
    raise SystemExit(f"no 200 within {START_LIMIT_S:g} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def forget() -> bool:
    """Remove our compiled files and drop the page cache; whether the latter was permitted."""
    for package in ("serving", "engine", "kernels", "llumnix"):
        for folder in (ROOT / package).rglob("__pycache__"):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


async def measure(url: str, streams: list[int], rounds: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await one(client, model, random.Random(0))
        print(f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, greedy, streamed from /v1/completions")
        print(f"{'streams':>8} {'tok/s':>8} {'TTFT mean':>10} {'TTFT p99':>9} {'TPOT mean':>10}   (ms)")
        for count in streams:
            await load(client, model, count, 1)
            started = time.perf_counter()
            done = await load(client, model, count, rounds)
            seconds = time.perf_counter() - started
            ttft = sorted(stream.ttft * 1e3 for stream in done)
            tpot = statistics.mean(stream.tpot * 1e3 for stream in done)
            rate = sum(stream.tokens for stream in done) / seconds
            p99 = ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))]
            print(f"{count:>8} {rate:>8.1f} {statistics.mean(ttft):>10.1f} {p99:>9.1f} {tpot:>10.1f}")


async def load(client: httpx.AsyncClient, model: str, count: int, rounds: int) -> list[Stream]:
    """`count` clients, each with one request after another."""

    async def loop(seed: int) -> list[Stream]:
        source = random.Random(seed)
        return [await one(client, model, source) for _ in range(rounds)]

    return [stream for batch in await asyncio.gather(*(loop(i) for i in range(count))) for stream in batch]


async def one(client: httpx.AsyncClient, model: str, source: random.Random) -> Stream:
    prompt = [source.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    first = 0.0
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"status {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter()
            if '"choices":[]' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return Stream(first - started, time.perf_counter() - started, tokens)


if __name__ == "__main__":
    main()
