"""Requests that move between engines while they run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.step import StepPlan, StepResult
from llumnix.migration import Mechanism
from serving.move_source import MoveOptions
from tests.fakes import FakeExecutor, continuation, make_engine
from tests.serving.nodes import Handle, Nodes

STEP_S = 0.004
PARAMS = SamplingParams(max_tokens=40)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def slow_engine() -> Engine:
    """Steps that take a while, as real ones do."""
    engine = make_engine(num_blocks=64, max_model_len=128)
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    execute = executor.execute

    def slowly(plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        return execute(plan)

    executor.execute = slowly  # type: ignore[method-assign]
    return engine


async def move(nodes: Nodes, request_id: str, destination: str, options: MoveOptions) -> dict[str, Any]:
    source = await nodes.owner(request_id)
    return await nodes[source].giving.move(request_id, destination, Handle(nodes[destination]), options)


@pytest.mark.parametrize("mechanism", list(Mechanism))
async def test_a_moved_request_has_the_tokens_of_an_undisturbed_one(mechanism: Mechanism) -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        options = MoveOptions(mechanism=mechanism, chunk_bytes=64, last_stage_blocks=1)
        request = asyncio.create_task(nodes.generate("r", PROMPT, PARAMS.to_dict()))
        source = await nodes.owner("r")
        other = {"a": "b", "b": "a"}
        await asyncio.sleep(5 * STEP_S)
        for destination in (other[source], source, other[source]):
            result = await move(nodes, "r", destination, options)
            assert result["outcome"] == "moved", str(result)
            await asyncio.sleep(3 * STEP_S)
            assert await nodes.owner("r") == destination
        assert await request == continuation(PROMPT, PARAMS)[0]
        assert nodes.client.tracker.resumed == 0
        assert len(nodes.client.tracker.downtimes) == 3
        for node in nodes.nodes.values():
            await node.thread.call(node.engine.scheduler.check)
            assert node.engine.stats().free_blocks == 64
