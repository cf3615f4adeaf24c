"""The receiving end of a move, told things that no source should say, or too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from llumnix.load import DRAINING, PROTOCOL_VERSION
from serving.engine_node import EngineNode
from serving.transport import encode
from tests.fakes import executor_of, make_engine
from tests.serving.nodes import Nodes, slow_engine, until

PARAMS = SamplingParams(max_tokens=30)
HELD = 9  # tokens of the request that moves, one of them not computed yet


class Giver:
    """A source that has run a request for a few steps and holds it, and what it says to a destination."""

    def __init__(self, nodes: Nodes, destination: str = "b"):
        self.client, self.compat_key = nodes.client.name, nodes[destination].compat_key
        self.engine = make_engine()
        self.engine.add_request("r", [5, 4, 3, 2, 1, 6], PARAMS, client=self.client)
        while len(self.engine.scheduler.requests["r"].tokens) < HELD:
            self.engine.step()
        self.record = self.engine.hold("r")

    def head(self, key: str = "k") -> dict[str, Any]:
        head = {"v": PROTOCOL_VERSION, "key": key, "id": "r", "client": self.client}
        return {**head, "compat_key": self.compat_key}

    def reserve(self, num_blocks: int = 3) -> dict[str, Any]:
        return {**self.head(), "num_blocks": num_blocks, "tokens": []}

    def write(self, first: int, count: int, num_blocks: int = 3) -> dict[str, Any]:
        data = encode(self.engine.export("r", first, count))
        return {"key": "k", "first": first, "num_blocks": num_blocks, "data": data}

    def commit(self, first: int, count: int, reserved: bool = True) -> dict[str, Any]:
        return {
            **self.head(),
            "record": self.record,
            "epoch": [0, 1],
            "computed": HELD - 1 if reserved else 0,
            "first": first,
            "data": encode(self.engine.export("r", first, count)),
            "reserved": reserved,
            "history": [],
        }


async def state(node: EngineNode) -> tuple[int, int]:
    """(promises, free blocks)"""
    stats = await node.thread.call(node.engine.stats)
    return len(node.engine.scheduler.reservations), stats.free_blocks


async def test_a_write_to_a_promise_that_is_gone_makes_no_new_one() -> None:
    async with Nodes(make_engine, "a", "b") as nodes:
        node, giver = nodes["b"], Giver(nodes)
        assert (await node.reserve(giver.reserve()))["ok"]
        assert (await node.write(giver.write(0, 1)))["ok"]
        await node.release("k")
        late = await node.write(giver.write(1, 1))
        assert not late["ok"] and late["reason"] == "nothing is reserved for k"
        assert await state(node) == (0, 16)
        lost = await node.commit(giver.commit(0, 2))
        assert not lost["ok"] and lost["reason"] == "nothing is reserved for k"
        assert await state(node) == (0, 16)


async def test_what_could_not_be_written_is_not_there_at_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Nodes(make_engine, "a", "b") as nodes:
        node, giver = nodes["b"], Giver(nodes)
        assert (await node.reserve(giver.reserve()))["ok"]

        def fail(*_: Any) -> None:
            raise ValueError("slabs of another size")

        with monkeypatch.context() as patched:
            patched.setattr(executor_of(node.engine), "write_blocks", fail)
            failed = await node.write(giver.write(0, 1))
        assert not failed["ok"] and failed["reason"] == "slabs of another size"
        refused = await node.commit(giver.commit(1, 1))
        assert not refused["ok"] and "is not here" in refused["reason"]
        assert await state(node) == (0, 16)


async def promised(nodes: Nodes) -> Giver:
    """A source whose destination "b" has promised the room and has one block."""
    giver = Giver(nodes)
    assert (await nodes["b"].reserve(giver.reserve()))["ok"]
    assert (await nodes["b"].write(giver.write(0, 1)))["ok"]
    return giver


async def test_blocks_are_refused_once_the_engine_drains() -> None:
    async with Nodes(make_engine, "a", "b") as nodes:
        giver = await promised(nodes)
        nodes["b"].state = DRAINING
        late = await nodes["b"].write(giver.write(1, 1))
        assert not late["ok"] and late["reason"] == "the engine is draining"


@pytest.mark.parametrize("reserved", [True, False])
async def test_what_has_its_room_may_still_come_to_an_engine_that_drains(reserved: bool) -> None:
    async with Nodes(slow_engine, "a", "b") as nodes:
        node, giver = nodes["b"], await promised(nodes)
        nodes["a"].state = DRAINING
        await until(lambda: nodes.client.links["a"].report.state == DRAINING)
        other = asyncio.create_task(nodes.generate("other", [1, 2, 3], SamplingParams(max_tokens=30).to_dict()))
        assert await nodes.owner("other") == "b"
        draining = asyncio.create_task(node.drain(30.0))
        await asyncio.sleep(0)
        reply = await node.commit(giver.commit(1, 1, reserved))
        assert reply == ({"ok": True} if reserved else {"ok": False, "reason": "the engine is draining"})
        receipt = await draining
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (0, 0, 1 + reserved)
        assert len(await other) == 30


async def test_nothing_comes_to_an_engine_whose_drain_is_over() -> None:
    async with Nodes(make_engine, "a", "b") as nodes:
        giver = await promised(nodes)
        receipt = await nodes["b"].drain(30.0)
        refused = await nodes["b"].commit(giver.commit(1, 1))
        assert not refused["ok"] and refused["reason"] == "the engine is draining"
        assert (receipt["moved"], receipt["resumed"], receipt["finished"]) == (0, 0, 0)
