"""Many streams at once over HTTP, as a load of real clients."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Result:
    """One finished stream."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    logprobs: list[float] = field(default_factory=list, compare=False)  # have the same bits in bfloat16 only
    status: int = field(default=0, compare=False)  # of HTTP
    chunks: int = field(default=0, compare=False)
    chunk_at: float = field(default=0.0, compare=False)  # when the last one came
    worst_gap_s: float = field(default=0.0, compare=False)  # between two


def bodies(count: int, max_tokens: int, model: str = "tiny") -> list[dict[str, Any]]:
    """Prompts of mixed lengths; every other one greedy, the others seeded."""
    source = random.Random(7)
    made = []
    for i in range(count):
        prompt = [source.randrange(10, 200) for _ in range(source.randrange(3, 90))]
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
        body |= {"temperature": 0} if i % 2 == 0 else {"temperature": 1.0, "seed": 1000 + i, "top_p": 0.9}
        made.append(body)
    return made


def client_of(url: str) -> httpx.AsyncClient:
    """With as many connections as it takes."""
    return httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))


async def stream(client: httpx.AsyncClient, body: dict[str, Any], result: Result) -> Result:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        result.status = response.status_code
        if response.status_code != 200:
            result.error = json.loads(await response.aread())["error"]
            return result
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                result.done = True
            elif line.startswith("data: "):
                _take(result, json.loads(line[6:]))
    return result


def _take(result: Result, chunk: dict[str, Any]) -> None:
    assert result.error is None and not result.done, "an error ends a stream"
    if "error" in chunk:
        result.error = chunk["error"]
        return
    now = time.monotonic()
    if result.chunks:
        result.worst_gap_s = max(result.worst_gap_s, now - result.chunk_at)
    result.chunks, result.chunk_at = result.chunks + 1, now
    if chunk.get("usage"):
        result.completion_tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        result.text += choice["text"]
        result.finish_reason = choice["finish_reason"] or result.finish_reason
        if choice["logprobs"]:
            result.tokens += choice["logprobs"]["tokens"]
            result.logprobs += choice["logprobs"]["token_logprobs"]


def run_streams(
    url: str,
    requests: list[dict[str, Any]],
    meanwhile: Callable[[list[Result]], Awaitable[None]] | None = None,
) -> list[Result]:
    """All at once; `meanwhile` runs beside them and sees the results grow."""

    async def run() -> list[Result]:
        async with client_of(url) as client:
            results = [Result() for _ in requests]
            tasks = [stream(client, body, result) for body, result in zip(requests, results, strict=True)]
            others = [meanwhile(results)] if meanwhile else []
            await asyncio.gather(*tasks, *others)
            return results

    return asyncio.run(run())


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the condition did not hold within {timeout_s:g} s")
