"""Engines that drain give their requests away, in one process with a real manager and without Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.step import StepPlan, StepResult
from llumnix.migration import Mechanism
from serving import drain
from serving import manager as manager_module
from serving.manager import Manager
from serving.move_source import MoveOptions
from serving.receipt import receipt_line
from tests.fakes import continuation, executor_of, make_engine
from tests.serving.nodes import SOON, Handle, Nodes

STEP_S = 0.004
PARAMS = SamplingParams(max_tokens=200)
PROMPTS = [[i + 2, 3, 1, 4, 1, 5] for i in range(8)]


def slow_engine(max_num_seqs: int = 8) -> Engine:
    """Room for every request, and steps that take a while, as real ones do."""
    engine = make_engine(num_blocks=512, max_model_len=256, max_num_seqs=max_num_seqs)
    executor = executor_of(engine)
    execute = executor.execute

    def slowly(plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        return execute(plan)

    executor.execute = slowly  # type: ignore[method-assign]
    return engine


def make_manager() -> Any:
    return Manager.func_or_class()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "GAPS_S", 0.1)


async def start(nodes: Nodes, count: int = len(PROMPTS)) -> list[asyncio.Task[list[int]]]:
    """Requests that all decode."""
    tasks = [
        asyncio.create_task(nodes.generate(f"r{i}", prompt, PARAMS.to_dict()))
        for i, prompt in enumerate(PROMPTS[:count])
    ]
    async with asyncio.timeout(SOON):
        while sum(len(node.engine.scheduler.running) for node in nodes.nodes.values()) < count:
            await asyncio.sleep(0.001)
    return tasks


async def check(nodes: Nodes, tasks: list[asyncio.Task[list[int]]]) -> None:
    for prompt, task in zip(PROMPTS, tasks, strict=False):
        assert await task == continuation(prompt, PARAMS)[0]
    for node in nodes.nodes.values():
        await node.thread.call(node.engine.scheduler.check)
        stats = await node.thread.call(node.engine.stats)
        assert stats.free_blocks == stats.total_blocks


async def test_a_draining_engine_is_empty_soon_and_says_what_became_of_its_requests() -> None:
    served = make_manager()
    async with Nodes(slow_engine, "a", "b", "c", manager=served) as nodes:
        tasks = await start(nodes)
        here = len(nodes["a"].engine.scheduler.running)
        assert here >= 2
        receipt = await asyncio.wait_for(nodes["a"].drain(30.0), SOON)
        assert not nodes["a"].engine.scheduler.requests
        assert not any(task.done() for task in tasks), "they moved while they ran"
        assert receipt["moved"] == here and receipt["resumed"] == receipt["finished"] == 0
        await check(nodes, tasks)
        assert nodes.client.tracker.resumed == 0
        assert "a" not in served.cluster.members


async def test_the_receipt_has_the_worst_gap_an_ingress_saw(caplog: pytest.LogCaptureFixture) -> None:
    served = make_manager()
    logging.getLogger("ferry").propagate = True
    try:
        async with Nodes(slow_engine, "a", "b", manager=served) as nodes:
            tasks = await start(nodes, 4)
            with caplog.at_level(logging.INFO, "ferry.manager"):
                receipt = await nodes["a"].drain(30.0)
                await served.downtime(nodes.client.tracker.downtimes)
                async with asyncio.timeout(SOON):
                    while not served.drains:
                        await asyncio.sleep(0.01)
            gaps = [1e3 * seconds for _, _, seconds in nodes.client.tracker.downtimes]
            kept = (await served.snapshot())["manager"]["drains"][0]
            assert kept["worst_gap_ms"] == max(gaps) > 0
            assert kept["gaps_seen"] == len(gaps) == kept["moved"] == receipt["moved"]
            assert receipt_line(kept) in caplog.text
            await check(nodes, tasks)
    finally:
        logging.getLogger("ferry").propagate = False


async def test_with_no_destination_requests_run_on_and_past_the_deadline_they_end() -> None:
    async with Nodes(slow_engine, "a", manager=make_manager()) as nodes:
        tasks = await start(nodes, 2)
        receipt = await asyncio.wait_for(nodes["a"].drain(30.0), SOON)
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (0, 0, 2)
        await check(nodes, tasks)
    async with Nodes(slow_engine, "a", manager=make_manager()) as nodes:
        tasks = await start(nodes, 2)
        receipt = await asyncio.wait_for(nodes["a"].drain(0.05), SOON)
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (0, 2, 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class DownManager:
    """Raises whatever is asked; the view it gave before it went down is all there is."""

    def __init__(self, served: Any):
        self.served, self.down = served, False

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any) -> Any:
            if self.down:
                raise RuntimeError("down")
            return await getattr(self.served, name)(*arguments)

        return ask


async def test_a_manager_that_is_down_loses_nothing() -> None:
    manager = DownManager(make_manager())
    async with Nodes(slow_engine, "a", "b", manager=manager) as nodes:
        tasks = await start(nodes)
        manager.down = True
        here = len(nodes["a"].engine.scheduler.running)
        receipt = await asyncio.wait_for(nodes["a"].drain(0.1), SOON)
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (0, here, 0)
        await check(nodes, tasks)  # at the other engine


async def test_a_manager_that_comes_back_empties_an_engine_that_has_been_draining() -> None:
    manager = DownManager(make_manager())
    async with Nodes(slow_engine, "a", "b", manager=manager) as nodes:
        tasks = await start(nodes, 4)
        manager.down = True
        draining = asyncio.create_task(nodes["a"].drain(30.0))
        await asyncio.sleep(0.05)
        manager.served, manager.down = make_manager(), False
        for node in nodes.nodes.values():
            node.reporter.changed()
        receipt = await asyncio.wait_for(draining, SOON)
        assert receipt["moved"] > 0 and receipt["resumed"] == 0
        await check(nodes, tasks)


async def test_what_waits_moves_without_kv() -> None:
    """The queue of a full engine joins the other's queue; what runs cannot pass it, and stays."""
    served = make_manager()
    async with Nodes(lambda: slow_engine(max_num_seqs=1), "a", "b", manager=served) as nodes:
        tasks = [asyncio.create_task(nodes.generate(f"r{i}", p, PARAMS.to_dict())) for i, p in enumerate(PROMPTS[:6])]
        async with asyncio.timeout(SOON):
            while not all(member.report.waiting == 2 for member in served.cluster.members.values()):
                await asyncio.sleep(0.001)
        receipt = await asyncio.wait_for(nodes["a"].drain(30.0), SOON)
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (2, 0, 1)
        moves = [(move["mechanism"], move["outcome"], move["blocks_sent"]) for move in served.rescheduler.moves]
        assert moves == [("requeue", "moved", 0)] * 2
        await check(nodes, tasks)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_commit_under_way_at_the_deadline_counts_once(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment more; without an answer by then the request is started elsewhere."""
    monkeypatch.setattr(drain, "COMMITS_S", 0.5)
    async with Nodes(slow_engine, "a", "b") as nodes:
        tasks = await start(nodes, 2)
        here = list(nodes["a"].engine.scheduler.requests)
        asked, commit = asyncio.Event(), nodes["b"].taking.commit

        async def slowly(message: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            await asyncio.sleep(0.3 if answers else 0.65)
            return await commit(message)

        nodes["b"].taking.commit = slowly  # type: ignore[method-assign]
        options = MoveOptions(mechanism=Mechanism.STOP_AND_COPY)
        move = asyncio.create_task(nodes["a"].giving.move(here[0], "b", Handle(nodes["b"]), options))
        await asked.wait()
        receipt = await nodes["a"].drain(0.1)
        await move
        others = len(here) - 1
        expected = (1, others, 0) if answers else (0, 1 + others, 0)
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == expected
        await check(nodes, tasks)
        assert nodes.client.tracker.resumed == others  # the process of this test does not end: COMMIT was answered
