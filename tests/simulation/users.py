"""Clients with their oracle: what an undisturbed run would have said to them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from engine.sampling.params import SamplingParams
from serving.engine_client import EngineClient
from tests.fakes import continuation, extend_chain, logprobs_of

LEFT, LOST, CANCELLED = "left", "lost", "cancelled"  # ends that are not the cluster's doing


@dataclass(eq=False)
class User:
    """One request and what came of it. Raises AssertionError at the first output that should not have come."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    max_length: int
    ingress: str = ""
    leave_after: int | None = None  # a stop string is found in this many tokens
    tokens: list[int] = field(default_factory=list)
    end: str | None = None
    message: str = ""
    excused: bool = False  # its error is what the cluster promises in this case
    task: asyncio.Task[None] | None = None
    started: float = 0.0

    def __post_init__(self) -> None:
        self.expected, self.reason = continuation(self.prompt, self.params, max_length=self.max_length)
        self._chain: list[int] = []

    @property
    def active(self) -> bool:
        return self.end is None

    @property
    def left(self) -> int:
        """Tokens to come."""
        return len(self.expected) - len(self.tokens)

    def take(self, output: dict[str, Any]) -> None:
        assert self.end is None, f"{self.id} has ended ({self.end}) and gets {output}"
        if "error" in output:
            assert "token" not in output, output
            self.end, self.message = output["error"], output.get("message", "")
            return
        index = len(self.tokens)
        assert output["index"] == index, f"{self.id} is at {index} and gets {output}"
        assert index < len(self.expected), f"{self.id} has all its tokens and gets {output}"
        assert output["token"] == self.expected[index], f"{self.id}: {self.expected[index]} is next, not {output}"
        extend_chain(self._chain, self.prompt + self.tokens)
        found = logprobs_of(self._chain, output["token"], self.params)
        wanted = None if found is None else [found.logprob, found.rank, [list(pair) for pair in found.top]]
        assert output.get("logprobs") == wanted, f"{self.id}: logprobs must be {wanted}: {output}"
        self.tokens.append(output["token"])
        if "finish" in output:
            self.end = output["finish"]
            assert self.left == 0 and self.end == self.reason, f"{self.id} ends too early: {output}"
        else:
            assert self.left > 0, f"{self.id} goes on after its end: {output}"

    async def read(self, client: EngineClient) -> None:
        """What an ingress does for a connection."""
        try:
            stream = client.generate(self.id, self.prompt, self.params.to_dict(), self.priority)
            async with aclosing(stream) as batches:
                async for outputs in batches:
                    for output in outputs:
                        self.take(output)
                        if self.active and self.leave_after is not None and len(self.tokens) >= self.leave_after:
                            self.end = LEFT
                            return
            assert self.end is not None, f"{self.id}: its stream ended without an end"
        except asyncio.CancelledError:
            self.end = self.end or CANCELLED
            raise
