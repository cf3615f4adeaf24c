"""Requests that move between engines while they run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from engine.sampling.params import SamplingParams
from llumnix.load import DRAINING
from llumnix.migration import Mechanism
from llumnix.transfer import PROCESS_MEMORY
from serving.metrics import render
from serving.move_source import MoveOptions
from serving.process_memory import ProcessMemory
from serving.transport import encode
from tests.fakes import continuation
from tests.serving.nodes import SOON, STEP_S, Handle, Nodes, slow_engine

PARAMS = SamplingParams(max_tokens=180)  # longer than moves take on a busy machine
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


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
            async with asyncio.timeout(SOON):  # the source's thread lets go of it between its steps
                while await nodes.owner("r") != destination:
                    await asyncio.sleep(STEP_S)
        assert await request == continuation(PROMPT, PARAMS)[0]
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
    (move,) = await nodes[source].commands.give(command(nodes, source, destination, **rest))
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
    assert all(message["data"]["kind"] == "zlib" for message in writes)


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


# What a destination refuses


async def reserved(nodes: Nodes, name: str, blocks: int) -> None:
    await nodes[name].thread.call(lambda: nodes[name].engine.reserve("k", blocks))


def writing(nodes: Nodes, name: str, first: int, count: int, num_blocks: int) -> dict[str, Any]:
    slabs = np.zeros((count, nodes[name].block_bytes), dtype=np.uint8)
    return {"key": "k", "first": first, "num_blocks": num_blocks, "data": encode(slabs)}


async def test_a_write_to_a_promise_that_is_gone_makes_no_new_one() -> None:
    async with Nodes(slow_engine, "a") as nodes:
        await reserved(nodes, "a", 4)
        assert (await nodes["a"].write(writing(nodes, "a", 0, 2, 6)))["ok"]
        await nodes["a"].release("k")
        answer = await nodes["a"].write(writing(nodes, "a", 2, 2, 12))
        assert answer == {"ok": False, "reason": "nothing is reserved for k"}
        assert nodes["a"].engine.stats().free_blocks == 64


async def crowd(nodes: Nodes, count: int) -> tuple[list[asyncio.Task[list[int]]], list[list[int]]]:
    """Requests r0, r1, ... that decode at "a", and their prompts, of a block more each."""
    prompts = [[1 + i] * (4 * i + 6) for i in range(count)]
    nodes.client.dispatcher.choose = lambda *_: "a"  # type: ignore[method-assign]
    tasks = [asyncio.create_task(nodes.generate(f"r{i}", p, PARAMS.to_dict())) for i, p in enumerate(prompts)]
    async with asyncio.timeout(SOON):
        while len(nodes["a"].engine.scheduler.running) < count:
            await asyncio.sleep(STEP_S)
    return tasks, prompts


async def test_a_batch_is_no_larger_than_the_room_that_was_seen() -> None:
    async with Nodes(lambda: slow_engine(num_blocks=192), "a", "b") as nodes:
        tasks, prompts = await crowd(nodes, 5)
        given = command(nodes, "a", "b", cause="drain", count=16, max_blocks=12)
        del given["request_id"]  # whichever
        results = await nodes["a"].commands.give(given)
        assert {result["outcome"] for result in results} == {"moved"} and 1 < len(results) < 5
        used = await nodes["b"].thread.call(lambda: sum(len(r.blocks) for r in nodes["b"].engine.scheduler.running))
        assert used <= 12 + 2 * len(results), "each may have begun another block or two"
        assert all(0 <= result["ended_s_ago"] < SOON for result in results)
        assert results[0]["ended_s_ago"] > results[-1]["ended_s_ago"]
        assert [await task for task in tasks] == [continuation(prompt, PARAMS)[0] for prompt in prompts]


async def test_a_call_that_timed_out_says_nothing_of_how_long_calls_take() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        request = asyncio.create_task(nodes.generate("r", PROMPT, PARAMS.to_dict()))
        source = await nodes.owner("r")
        destination = {"a": "b", "b": "a"}[source]
        reserve = nodes[destination].taking.reserve
        nodes[destination].taking.reserve = pausing(reserve, 0.4)  # type: ignore[method-assign]
        result = await move(nodes, "r", destination, MoveOptions(transfer_timeout_s=0.2))
        measured = nodes[source].giving.measured
        assert result["outcome"] == "aborted" and measured.call_s == 0.0
        nodes[destination].taking.reserve = reserve  # type: ignore[method-assign]
        assert (await move(nodes, "r", destination, MoveOptions()))["outcome"] == "moved"
        assert 0.0 < measured.call_s < 0.2
        await request


async def test_who_is_passed_over_is_in_the_metrics() -> None:
    async with Nodes(lambda: slow_engine(num_blocks=192), "a", "b") as nodes:
        tasks, _ = await crowd(nodes, 4)
        given = command(nodes, "a", "b", cause="balance", max_blocks=0)
        del given["request_id"]
        assert await nodes["a"].commands.give(given) == []
        text = render([nodes["a"]._report(1)[1]]).decode().splitlines()
        assert 'ferry_move_passed_over_total{reason="too_large",replica="a"} 4.0' in text
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        nodes["a"].thread.stop()
        await asyncio.to_thread(nodes["a"].thread.join, SOON)
        engine = nodes["a"].engine
        engine.add_request("long", [1] * 200, PARAMS)
        engine.step()  # one part of the prompt
        engine.add_request("vip", [1], PARAMS, priority=-1)
        nodes["a"]._on_look(engine)
        assert nodes["a"].staying == {"prefill": 1, "high_class": 1}


async def test_commands_at_a_time_do_not_pass_the_limit_together() -> None:
    async with Nodes(lambda: slow_engine(num_blocks=192), "a", "b", "c") as nodes:
        tasks, prompts = await crowd(nodes, 5)
        given = command(nodes, "a", "b", cause="handover", count=2, settings={"max_moves_per_engine": 2})
        del given["request_id"]
        most = 0
        reserve = nodes["b"].taking.reserve

        async def watched(message: dict[str, Any]) -> dict[str, Any]:
            nonlocal most
            most = max(most, len(nodes["a"].giving.moves))
            return await reserve(message)

        nodes["b"].taking.reserve = watched  # type: ignore[method-assign]
        results = await asyncio.gather(*(nodes["a"].commands.give(given) for _ in range(5)))
        assert most == 2 and sum(len(result) for result in results) >= 2
        assert [await task for task in tasks] == [continuation(prompt, PARAMS)[0] for prompt in prompts]


async def test_blocks_that_could_not_be_written_do_not_count_as_written() -> None:
    async with Nodes(slow_engine, "a") as nodes:
        await reserved(nodes, "a", 4)
        wrong = writing(nodes, "a", 0, 2, 4)
        wrong["data"] |= {"kind": PROCESS_MEMORY, "pid": 2**22, "token": (0, b"x"), "rows": [0, 0]}
        memory = ProcessMemory(0, nodes["a"].block_bytes)
        nodes["a"].process_memory = lambda: memory  # type: ignore[method-assign]
        assert (await nodes["a"].write(wrong))["unreadable"]
        reservations = nodes["a"].engine.scheduler.reservations
        assert await nodes["a"].thread.call(lambda: reservations.present("k")) == 0
        assert (await nodes["a"].write(writing(nodes, "a", 0, 2, 4)))["ok"]
        assert await nodes["a"].thread.call(lambda: reservations.present("k")) == 2


async def test_a_destination_that_begins_to_drain_leaves_the_request_where_it_is() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        prompt = [1 + i % 90 for i in range(60)]
        request = asyncio.create_task(nodes.generate("r", prompt, PARAMS.to_dict()))
        source = await nodes.owner("r")
        destination = nodes[{"a": "b", "b": "a"}[source]]
        write = destination.taking.write

        async def last(message: dict[str, Any]) -> dict[str, Any]:
            answer = await write(message)
            destination.state = DRAINING
            return answer

        destination.taking.write = last  # type: ignore[method-assign]
        result = await move(nodes, "r", destination.id, MoveOptions(chunk_bytes=64))
        assert (result["outcome"], result["reason"]) == ("aborted", "the engine is draining")
        assert await request == continuation(prompt, PARAMS)[0]
        assert nodes.client.tracker.resumed == 0


async def test_a_request_does_not_move_to_where_it_could_not_end() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        request = asyncio.create_task(nodes.generate("r", PROMPT, PARAMS.to_dict()))
        source = await nodes.owner("r")
        destination = nodes[{"a": "b", "b": "a"}[source]]
        destination.max_model_len = len(PROMPT) + 179
        for mechanism in Mechanism:
            result = await move(nodes, "r", destination.id, MoveOptions(mechanism=mechanism))
            assert (result["outcome"], result["reason"]) == ("aborted", "the request may have 190 tokens, 189 fit")
        destination.max_model_len += 1
        assert (await move(nodes, "r", destination.id, MoveOptions()))["outcome"] == "moved"
        assert await request == continuation(PROMPT, PARAMS)[0]


async def test_a_limit_on_bandwidth_holds_for_all_moves_of_an_engine_together() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        params = SamplingParams(max_tokens=84)  # 31 blocks in the end, half of an engine's
        prompts = {"r0": [*range(1, 41)], "r1": [*range(41, 81)]}
        requests = [asyncio.create_task(nodes.generate(n, p[:], params.to_dict())) for n, p in prompts.items()]
        for name in prompts:
            if await nodes.owner(name) == "b":
                assert (await move(nodes, name, "a", MoveOptions()))["outcome"] == "moved"
        limit = 250 * nodes["a"].block_bytes  # a second
        options = MoveOptions(chunk_bytes=4 * nodes["a"].block_bytes, bytes_per_s=limit, use_cached=False)
        started = time.monotonic()
        moves = [nodes["a"].giving.move(name, "b", Handle(nodes["b"]), options) for name in prompts]
        results = await asyncio.gather(*moves)
        took = time.monotonic() - started
        sent = sum(result["bytes"] for result in results)
        assert [result["outcome"] for result in results] == ["moved"] * 2, [
            (r["reason"], r["duration_ms"], r["bytes"]) for r in results
        ]
        assert sent >= 20 * nodes["a"].block_bytes and sent / took <= 1.3 * limit
        assert [await request for request in requests] == [continuation(p, params)[0] for p in prompts.values()]


def pausing(call: Any, seconds: float) -> Any:
    async def paused(message: dict[str, Any]) -> Any:
        await asyncio.sleep(seconds)
        return await call(message)

    return paused
