"""Engine nodes and an ingress's client in one process, on a real loop and real engine threads, without Ray."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.step import StepPlan, StepResult
from llumnix.load import PROTOCOL_VERSION
from serving.engine_client import EngineClient
from serving.engine_node import EngineNode
from tests.fakes import executor_of, make_engine

SOON = 10.0
STEP_S = 0.004


def slow_engine(**config: Any) -> Engine:
    """Steps that take a while, as real ones do; arguments as of make_engine."""
    engine = make_engine(**{"num_blocks": 64, "max_model_len": 256, **config})
    executor = executor_of(engine)
    execute = executor.execute

    def slowly(plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        return execute(plan)

    executor.execute = slowly  # type: ignore[method-assign]
    return engine


class Handle:
    """Looks like the handle of an actor or a deployment; every method call is a task of its own."""

    def __init__(self, target: Any):
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return Method(getattr(self.target, name))


class Method:
    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        if inspect.isasyncgenfunction(self.call):
            return self._stream(*arguments)
        return asyncio.ensure_future(self.call(*arguments))

    async def _stream(self, *arguments: Any) -> AsyncIterator[Awaitable[Any]]:
        async for item in self.call(*arguments):
            yield asyncio.ensure_future(_ready(item))


async def _ready(value: Any) -> Any:
    return value


class StillManager:
    """Knows the nodes it is given, and nothing changes."""

    def __init__(self, nodes: dict[str, EngineNode]):
        self.nodes = nodes

    async def view(self, version: int | None, known: list[str], *_: Any) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        version = version or 0
        engines = {
            name: {
                "actor": None if name in known else Handle(node),
                "report": node._report(version + 2)[0],
                "silent_s": 0.0,
            }
            for name, node in self.nodes.items()
        }
        return {"v": PROTOCOL_VERSION, "version": version + 1, "engines": engines}

    async def report(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"v": PROTOCOL_VERSION, "known": True}


class Nodes:
    """`async with Nodes(make_engine, "a", "b") as nodes`: nodes.client is an ingress that reads them all.

    `manager` takes the place of one that knows the nodes and never moves anything.
    """

    def __init__(self, build: Callable[[], Engine], *names: str, manager: Any = None, **config: Any):
        self.build, self.names, self.manager = build, names, manager
        self.config = {"model": "m", **config}
        self.nodes: dict[str, EngineNode] = {}

    def __getitem__(self, name: str) -> EngineNode:
        return self.nodes[name]

    async def __aenter__(self) -> Nodes:
        manager = Handle(self.manager or StillManager(self.nodes))
        for name in self.names:
            node = self.nodes[name] = EngineNode(self.config, name, manager)
            node.thread._build = self.build
            node.reporter.actor = Handle(node)
            await node.start()
        self.client = EngineClient(EngineConfig(**self.config), manager)
        self.client.start()
        async with asyncio.timeout(SOON):
            while not all(node.streams_to(self.client.name) for node in self.nodes.values()):
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: Any) -> None:
        for node in self.nodes.values():
            node.thread.stop()
            await asyncio.to_thread(node.thread.join, SOON)
        tasks = [*self.client._tasks, *(task for node in self.nodes.values() for task in node.tasks)]
        while left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()  # wait_for may lose one: it does when what it waits for comes at that moment
            await asyncio.wait(left, timeout=0.2)

    async def generate(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
        """The tokens of one request, to its end. Raises AssertionError when it ends with an error."""
        tokens: list[int] = []
        async with aclosing(self.client.generate(request_id, prompt, params)) as stream:
            async for outputs in stream:
                for output in outputs:
                    assert "error" not in output, output
                    tokens.append(output["token"])
        return tokens

    async def owner(self, request_id: str) -> str:
        """The one node that has a request, soon."""
        async with asyncio.timeout(SOON):
            while True:
                for name, node in self.nodes.items():
                    if request_id in node.engine.scheduler.requests:
                        return name
                await asyncio.sleep(0.001)


async def until(condition: Callable[[], bool], seconds: float = SOON) -> None:
    """Wait for something that will be. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
