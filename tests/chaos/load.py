"""Clients that stream without pause; every stream is compared with its undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.streams import Result, client_of, stream

CANCELLED_SHARE = 0.1
REFUSED = (429, 503)  # before anything was accepted: the client tries again
RETRY_S = 0.2
PATIENCE_S = 60.0  # of a client that is refused


def requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Bodies of mixed lengths: greedy and seeded, with and without logprobs, penalties, stop strings and classes; every
    fourth begins like the one before it."""
    source = random.Random(seed)
    made: list[dict[str, Any]] = []
    for i in range(count):
        prompt = [source.randrange(10, 200) for _ in range(source.choice((5, 20, 60, 200)))]
        if i % 4 == 3:
            prompt = made[-1]["prompt"] + prompt[:5]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": source.choice((3, 30, 120, 250))}
        body |= {"ignore_eos": True, "priority": source.choice((0, 0, 0, 1, -1))}
        body |= {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": source.randrange(1000), "top_p": 0.9}
        if i % 3 != 2:
            body["logprobs"] = i % 3
        if source.random() < 0.3:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        if source.random() < 0.2:
            body["stop"] = ["e", "q"]
        made.append(body)
    return made


@dataclass
class Load:
    """What `clients` clients do until they are told to end, and what they saw."""

    url: str
    bodies: list[dict[str, Any]]
    expected: list[Result]
    source: random.Random
    clients: int
    finished: int = 0
    cancelled: int = 0
    tokens: int = 0
    worst_gap_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)  # by message
    lost: list[str] = field(default_factory=list)
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async with client_of(self.url) as client:
            await asyncio.gather(*(self._client(client) for _ in range(self.clients)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while not self.ending.is_set():
            number = self.source.randrange(len(self.bodies))
            cancel_at = self.source.randrange(1, 100) if self.source.random() < CANCELLED_SHARE else None
            try:
                await self._one(client, number, cancel_at)
            except Exception as error:
                self.lost.append(f"request {number}: {type(error).__name__}: {error}")

    async def _one(self, client: httpx.AsyncClient, number: int, cancel_at: int | None) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE_S
        while True:
            result = Result()
            task = asyncio.create_task(stream(client, self.bodies[number], result))
            while cancel_at is not None and result.chunks < cancel_at and not task.done():
                await asyncio.wait([task], timeout=0.02)
            if not task.done() and cancel_at is not None:
                task.cancel()
                await asyncio.wait([task])
                self._compare(number, result, cancelled=True)
                return
            await task
            if result.status not in REFUSED or loop.time() > give_up:
                self._compare(number, result)
                return
            assert result.error is not None
            self.refused[f"{result.status}: {result.error['message']}"] += 1
            await asyncio.sleep(RETRY_S)

    def _compare(self, number: int, result: Result, cancelled: bool = False) -> None:
        wanted = self.expected[number]
        self.tokens += len(result.tokens) or result.chunks
        self.worst_gap_s = max(self.worst_gap_s, result.worst_gap_s)
        self.cancelled += cancelled
        self.finished += not cancelled
        if cancelled and result.error is None and not result.done:
            parts = ((result.text, wanted.text), (result.tokens, wanted.tokens), (result.logprobs, wanted.logprobs))
            whole = all(part == all_of_it[: len(part)] for part, all_of_it in parts)
        else:
            whole = result == wanted and result.logprobs == wanted.logprobs
        if not whole:
            self.lost.append(f"request {number}: {difference(result, wanted, cancelled)}")


def difference(result: Result, wanted: Result, cancelled: bool = False) -> str:
    """What is wrong with a stream, in a line."""
    if result.error is not None:
        return f"after {result.chunks} chunks the error {result.error}"
    for i, (got, right) in enumerate(zip(result.tokens, wanted.tokens)):
        if got != right:
            return f"token {i} is {got!r}, must be {right!r}"
    if not cancelled and not result.done:
        return f"it ended without a word after {result.chunks} chunks"
    if result.logprobs != wanted.logprobs[: len(result.logprobs)]:
        return "its logprobs differ"
    return f"text {result.text!r}, must be {wanted.text!r}; {result.finish_reason}, must be {wanted.finish_reason}"
