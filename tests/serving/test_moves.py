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
LONG = SamplingParams(max_tokens=110)  # goes on for as long as three moves take on a busy machine
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
        request = asyncio.create_task(nodes.generate("r", PROMPT, LONG.to_dict()))
        source = await nodes.owner("r")
        other = {"a": "b", "b": "a"}
        await asyncio.sleep(5 * STEP_S)
        for destination in (other[source], source, other[source]):
            result = await move(nodes, "r", destination, options)
            assert result["outcome"] == "moved", str(result)
            await asyncio.sleep(3 * STEP_S)
            assert await nodes.owner("r") == destination
        assert await request == continuation(PROMPT, LONG)[0]
        assert nodes.client.tracker.resumed == 0
        assert len(nodes.client.tracker.downtimes) == 3
        for node in nodes.nodes.values():
            await node.thread.call(node.engine.scheduler.check)
            assert node.engine.stats().free_blocks == 64


# How KV travels: what the manager's command says


def command(nodes: Nodes, source: str, destination: str, **rest: Any) -> dict[str, Any]:
    transfer = {"transfer_mode": "async", "compression": "none", "batch_size": 0}
    return {
        "destination": destination,
        "actor": Handle(nodes[destination]),
        "cause": "operator",
        "count": 1,
        "max_blocks": 1 << 30,
        "request_id": "r",
        "settings": {"last_stage_blocks": 2},
        **transfer,
        **rest,
    }


async def given(nodes: Nodes, **rest: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The move of a long request "r" as such a command makes it, and the transfers before its commit."""
    prompt = [1 + i % 90 for i in range(60)]
    request = asyncio.create_task(nodes.generate("r", prompt, PARAMS.to_dict()))
    source = await nodes.owner("r")
    destination = {"a": "b", "b": "a"}[source]
    await asyncio.sleep(5 * STEP_S)
    writes: list[dict[str, Any]] = []
    write = nodes[destination].taking.write

    async def watched(message: dict[str, Any]) -> dict[str, Any]:
        writes.append(message)
        return await write(message)

    nodes[destination].taking.write = watched  # type: ignore[method-assign]
    (move,) = await nodes[source].giving.give(command(nodes, source, destination, **rest))
    assert move["outcome"] == "moved" and move["cause"] == "operator", str(move)
    assert await request == continuation(prompt, PARAMS)[0]
    return move, writes


async def test_async_copies_while_the_request_goes_on_and_sync_holds_it_first() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        live, writes = await given(nodes, transfer_mode="async")
        assert live["mechanism"] == "live" and live["stages"] >= 1 and writes
    async with Nodes(slow_engine, "a", "b") as nodes:
        stopped, writes = await given(nodes, transfer_mode="sync")
        assert stopped["mechanism"] == "stop_and_copy" and stopped["stages"] == 0 and not writes


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("batch", [1, 2, 5])
async def test_a_transfer_has_at_most_batch_size_blocks(mode: str, batch: int) -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        move, writes = await given(nodes, transfer_mode=mode, batch_size=batch)
        sizes = [message["data"]["shape"][0] for message in writes]
        assert max(sizes) == batch
        assert move["blocks_sent"] - sum(sizes) <= batch  # the rest went with the commit
        assert len(sizes) >= (15 - batch) // batch


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_compression_makes_fewer_bytes_travel(mode: str) -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        plain, _ = await given(nodes, transfer_mode=mode)
    async with Nodes(slow_engine, "a", "b") as nodes:
        packed, writes = await given(nodes, transfer_mode=mode, compression="zlib")
    size = plain["bytes"] / plain["blocks_sent"]
    assert size == nodes["a"].block_bytes
    assert packed["bytes"] != size * packed["blocks_sent"]
    assert all(message["data"]["compression"] == "zlib" for message in writes)


async def test_a_request_is_moving_from_the_first_stage_on() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        seen: list[str] = []
        request = asyncio.create_task(nodes.generate("r", PROMPT, PARAMS.to_dict()))
        source = await nodes.owner("r")
        destination = {"a": "b", "b": "a"}[source]
        reserve = nodes[destination].taking.reserve

        async def watched(message: dict[str, Any]) -> dict[str, Any]:
            snapshot = await nodes[source].snapshot()
            seen.extend(r["status"] for r in snapshot["requests"])
            return await reserve(message)

        nodes[destination].taking.reserve = watched  # type: ignore[method-assign]
        await asyncio.sleep(5 * STEP_S)
        assert [r["status"] for r in (await nodes[source].snapshot())["requests"]] == ["running"]
        await move(nodes, "r", destination, MoveOptions())
        assert seen == ["moving"]
        await request


async def test_settings_reach_the_engine() -> None:
    async with Nodes(slow_engine, "a") as nodes:
        node = nodes["a"]
        node._on_answer({"settings": {"reservation_timeout_s": 3.5}, "settings_version": 7})
        await node.thread.call(lambda: None)
        assert node.engine.scheduler.reservations.seconds == 3.5
        assert node._report(1)[0]["settings"] == 7
