"""Verification on running nodes: what moved is verified, real requests come first, and nobody sees it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.step import Sampled, StepPlan, StepResult
from serving.engine_node import EngineNode
from serving.metrics import render
from serving.move_source import MoveOptions
from tests.fakes import VOCAB, FakeExecutor, continuation, executor_of, extend_chain, make_engine
from tests.serving.nodes import SOON, Handle, Nodes, until

STEP_S = 0.003
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PARAMS = SamplingParams(max_tokens=60)


def slow_engine() -> Engine:
    engine = make_engine(num_blocks=64, max_model_len=128)
    around(executor_of(engine), lambda plan, run: (time.sleep(STEP_S), run(plan))[1])
    return engine


def around(executor: FakeExecutor, wrapped: Callable[[StepPlan, Callable[[StepPlan], StepResult]], StepResult]) -> None:
    execute = executor.execute
    executor.execute = lambda plan: wrapped(plan, execute)  # type: ignore[method-assign]


def verify_all(nodes: Nodes, share: float = 1.0) -> None:
    for node in nodes.nodes.values():
        node.settings = replace(node.settings, verify_moves=share)


async def moved_to_its_end(nodes: Nodes, name: str = "r") -> tuple[EngineNode, list[int]]:
    """Where a request that was moved once has finished, and its tokens."""
    running = asyncio.create_task(nodes.generate(name, PROMPT, PARAMS.to_dict()))
    source = await nodes.owner(name)
    await asyncio.sleep(3 * STEP_S)
    destination = {"a": "b", "b": "a"}[source]
    result = await nodes[source].giving.move(name, destination, Handle(nodes[destination]), MoveOptions())
    assert result["outcome"] == "moved", result
    return nodes[destination], await running


def metrics(node: EngineNode) -> dict[str, float]:
    node.thread.stats = node.engine.stats()
    lines = render([node._report(1)[1]]).decode().splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("ferry_verif")}


async def test_a_moved_request_is_verified_where_it_finished_and_others_are_not() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        verify_all(nodes)
        await nodes.generate("still", [7, 7], PARAMS.to_dict())
        node, tokens = await moved_to_its_end(nodes)
        assert tokens == continuation(PROMPT, PARAMS)[0]
        await until(lambda: node.engine.verifier.verified == 1)
        assert metrics(node) == {
            "ferry_verified_total": 1.0,
            "ferry_verify_mismatches_total": 0.0,
            "ferry_verify_skipped_total": 0.0,
        }
        [other] = [n for n in nodes.nodes.values() if n is not node]
        assert other.engine.verifier.verified == 0 and not other.engine.verifier.queue


async def test_a_resumed_request_is_verified() -> None:
    async with Nodes(slow_engine, "a") as nodes:
        verify_all(nodes)
        tracker = nodes.client.tracker
        running = asyncio.create_task(nodes.generate("r", PROMPT, PARAMS.to_dict()))
        await nodes.owner("r")
        await until(lambda: len(tracker.requests["r"].output) > 3)
        nodes.client._carry_out(tracker.engine_lost("a", 0.0))
        assert await running == continuation(PROMPT, PARAMS)[0]
        assert tracker.resumed == 1
        await until(lambda: nodes["a"].engine.verifier.verified == 1)
        assert metrics(nodes["a"])["ferry_verify_mismatches_total"] == 0.0


async def test_a_share_of_zero_and_engines_without_equal_bits_verify_nothing() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        verify_all(nodes, 0.0)
        node, _ = await moved_to_its_end(nodes)
        verify_all(nodes, 1.0)
        for other in nodes.nodes.values():
            other.engine.reproducible = False
        again, _ = await moved_to_its_end(nodes, "s")
        assert not node.engine.verifier.queue and not again.engine.verifier.queue
        assert not node.engine.verifier.verified and not again.engine.verifier.verified


async def test_an_executor_that_lied_once_is_caught() -> None:
    lied = threading.Event()

    def lying_engine() -> Engine:
        engine = slow_engine()
        executor = executor_of(engine)

        def lie(plan: StepPlan, run: Callable[[StepPlan], StepResult]) -> StepResult:
            result = run(plan)
            for i, found in enumerate(result.sampled):
                sequence = executor.sequences[found.id]
                if not lied.is_set() and found.id == "r" and len(sequence.tokens) == len(PROMPT) + 25:
                    lied.set()
                    sequence.tokens[-1] = (sequence.tokens[-1] + 1) % VOCAB
                    sequence.chain.pop()
                    extend_chain(sequence.chain, sequence.tokens)
                    result.sampled[i] = Sampled("r", sequence.tokens[-1])
            return result

        around(executor, lie)
        return engine

    async with Nodes(lying_engine, "a", "b") as nodes:
        verify_all(nodes)
        node, tokens = await moved_to_its_end(nodes)
        expected = continuation(PROMPT, PARAMS)[0]
        assert lied.is_set() and tokens[:24] == expected[:24] and tokens[24] != expected[24]
        await until(lambda: node.engine.verifier.verified == 1)
        assert metrics(node)["ferry_verify_mismatches_total"] == 1.0


async def test_nobody_sees_it_and_a_request_that_comes_waits_for_one_step_at_most() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        verify_all(nodes)
        node, _ = await moved_to_its_end(nodes)
        verifier = node.engine.verifier
        plans = executor_of(node.engine).plans
        await until(lambda: verifier.running is not None)
        seen: list[Any] = [await node.snapshot(), node._report(1)[0]]
        arrived = asyncio.Event()
        before: list[int] = []

        def add() -> None:
            before.append(len(plans))
            node._add({"client": nodes.client.name, "id": "now", "prompt": [5], "params": PARAMS.to_dict(),
                       "epoch": [0, 0]})  # fmt: skip
            node.loop.call_soon_threadsafe(arrived.set)

        posted = len(plans)
        node.thread.post(add)
        await asyncio.wait_for(arrived.wait(), SOON)
        await until(lambda: len(plans) > before[0])
        assert before[0] - posted <= 1
        assert [work.id for work in plans[before[0]].work] == ["now"], "its step is the next one"
        assert seen[0]["requests"] == [] and seen[1]["movable"] == []
        assert (seen[1]["running"], seen[1]["waiting"], seen[1]["free_blocks"]) == (0, 0, 64)
        await until(lambda: verifier.verified == 1)
        await until(lambda: not node.engine.scheduler.requests)
        outputs = [o for o in node.outboxes.clients[nodes.client.name].history.items() if o[0].startswith("again")]
        assert not outputs


async def test_a_drain_does_not_wait_for_it() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        verify_all(nodes)
        node, _ = await moved_to_its_end(nodes)
        await until(lambda: node.engine.verifier.running is not None)
        assert (await node.drain(30.0))["resumed"] == 0
        assert node.engine.verifier.running is not None


async def test_an_idle_engine_blocks_again_when_everything_is_verified() -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        verify_all(nodes)
        node, _ = await moved_to_its_end(nodes)
        await until(lambda: node.engine.verifier.verified == 1)
        plans, started = len(executor_of(node.engine).plans), time.process_time()
        await asyncio.sleep(0.2)
        assert len(executor_of(node.engine).plans) == plans
        assert node.thread.stats is not None and node.thread.stats.verified == 1
        assert time.process_time() - started < 0.1
