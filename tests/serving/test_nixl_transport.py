"""Slabs by NIXL, where it is installed: over UCX in host memory."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.build import build_engine
from engine.config import EngineConfig, resolve
from engine.engine import Engine
from engine.options.option import ConfigError
from engine.sampling.params import SamplingParams
from engine.step import StepPlan, StepResult
from llumnix.migration import Mechanism
from llumnix.transfer import NIXL, KVTransfer
from serving import nixl_transport, rescheduling
from serving.move_source import MoveOptions
from serving.nixl_transport import NixlTransport
from tests.fakes import executor_of
from tests.serving.nodes import Handle, Nodes, slow_engine

BLOCKS, BYTES = 16, 1 << 14


class FakeAgent:
    """Looks like nixl_agent, as far as it is used; every read is done at once."""

    made: list[FakeAgent]

    def __init__(self, name: str, config: Any):
        self.name, self.thread = name, threading.current_thread()
        self.peers: list[str] = []
        time.sleep(0.05)  # registering a pool takes a while
        self.made.append(self)

    def get_reg_descs(self, regions: Any, mem_type: str) -> Any:
        return regions

    def register_memory(self, regions: Any) -> None:
        assert regions

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.peers.append(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, rows: Any, mem_type: str) -> Any:
        return rows

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> str:
        assert operation == "READ" and peer in self.peers
        return peer

    def transfer(self, handle: str) -> str:
        return "DONE" if not handle.startswith("stuck") else "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return "PROC"

    def release_xfer_handle(self, handle: str) -> None:
        pass


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[FakeAgent]:
    """The agents that are made, where nixl is this fake."""
    FakeAgent.made = []
    fake = SimpleNamespace(nixl_agent=FakeAgent, nixl_agent_config=lambda backends: backends)
    monkeypatch.setitem(sys.modules, "nixl._api", fake)
    return FakeAgent.made


async def test_a_pool_is_registered_once_and_not_on_the_loop(agents: list[FakeAgent]) -> None:
    async with Nodes(lambda: with_a_pool(slow_engine()), "a", "b") as nodes:
        prompt, params = [1 + i % 90 for i in range(40)], SamplingParams(max_tokens=150).to_dict()
        running = [asyncio.create_task(nodes.generate(f"r{i}", [i + 1, *prompt], params)) for i in range(3)]
        owners = [await nodes.owner(f"r{i}") for i in range(3)]
        options = MoveOptions(Mechanism.STOP_AND_COPY, chunk_bytes=nodes["a"].block_bytes, transport=NIXL)
        await asyncio.sleep(0.05)
        other = {"a": "b", "b": "a"}

        def move(i: int, source: str) -> Any:
            destination = other[source]
            return nodes[source].giving.move(f"r{i}", destination, Handle(nodes[destination]), options)

        for result in await asyncio.gather(*(move(i, source) for i, source in enumerate(owners))):
            assert result["outcome"] == "moved" and result["blocks_sent"] > 5, result
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert sorted(agent.name for agent in agents) == ["a", "b"]
    assert threading.main_thread() not in [agent.thread for agent in agents]


def with_a_pool(engine: Engine) -> Engine:
    """The fake of NIXL copies nothing: blocks are not looked at here."""
    executor = executor_of(engine)
    executor.pool_memory = lambda: (1 << 20, 64, "cpu")  # type: ignore[method-assign]
    executor._prepare = lambda work: None  # type: ignore[method-assign]
    return engine


def test_peers_that_are_not_heard_of_are_forgotten(agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(nixl_transport.time, "monotonic", lambda: now[0])
    here = NixlTransport("here", 0, 8, 64)
    payloads = [NixlTransport(name, 0, 8, 64).pack([1]) for name in ("one", "two", "three")]
    for payload in (payloads[0], payloads[1], payloads[0]):
        here.fetch(payload, [2], 1.0)
        now[0] += 3000.0
    assert agents[0].peers == ["one", "two"]
    here.fetch(payloads[2], [2], 1.0)
    assert agents[0].peers == ["one", "three"]


def test_a_read_takes_no_longer_than_it_may(agents: list[FakeAgent]) -> None:
    here, stuck = NixlTransport("here", 0, 8, 64), NixlTransport("stuck", 0, 8, 64)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="state PROC"):
        here.fetch(stuck.pack([1]), [2], 0.2)
    assert 0.2 <= time.monotonic() - started < 5.0


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ValueError, match=r"pip install 'ferry-serve\[nixl\]'"):
        NixlTransport("a", 0, 1, 1)


def pool(name: str, seed: int) -> tuple[np.ndarray, NixlTransport]:
    slabs = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BYTES), dtype=np.uint8)
    return slabs, NixlTransport(name, slabs.ctypes.data, BLOCKS, BYTES)


def test_blocks_arrive_where_they_should_and_nowhere_else() -> None:
    pytest.importorskip("nixl._api", reason="the extra nixl is not installed")
    ours, source = pool("source", 1)
    theirs, destination = pool("destination", 2)
    before = theirs.copy()
    for _ in range(2):  # the second time the peer is known
        destination.fetch(source.pack([1, 5, 9, 7]), [3, 2, 8, 0], nixl_transport.POLL_S * 50_000)
        assert (theirs[[3, 2, 8, 0]] == ours[[1, 5, 9, 7]]).all()
    untouched = [i for i in range(BLOCKS) if i not in (3, 2, 8, 0)]
    assert (theirs[untouched] == before[untouched]).all()


def test_the_configuration_asks_for_the_package_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescheduling, "find_spec", lambda name: None)
    config = resolve({"model": "m", "kv_transfer_config": {"transport": "nixl"}})
    with pytest.raises(ConfigError, match=r"pip install 'ferry-serve\[nixl\]'"):
        rescheduling.kv_transfer_of(config)


def test_nixl_and_compression_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="compression is 'zlib', must be none with nixl"):
        KVTransfer(transport=NIXL, compression="zlib")


async def test_a_request_moved_by_nixl_has_the_tokens_of_an_undisturbed_one(tiny_llama: Path) -> None:
    pytest.importorskip("nixl._api", reason="the extra nixl is not installed")
    config = EngineConfig(model=str(tiny_llama), dtype="bfloat16", kv_cache_memory_bytes=8 << 20, threads=1)
    prompt = [3 + i * 7 % 90 for i in range(90)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2).to_dict()

    def engine() -> Engine:
        engine = build_engine(config)
        execute = engine.executor.execute

        def slowly(plan: StepPlan) -> StepResult:
            time.sleep(0.01)
            return execute(plan)

        engine.executor.execute = slowly  # type: ignore[method-assign]
        return engine

    async with Nodes(engine, "a", "b") as nodes:
        expected = await nodes.generate("calm", [*prompt], params)
        request = asyncio.create_task(nodes.generate("r", prompt, params))
        source = await nodes.owner("r")
        destination = {"a": "b", "b": "a"}[source]
        options = MoveOptions(transport=NIXL, chunk_bytes=1, use_cached=False)
        moved = await nodes[source].giving.move("r", destination, Handle(nodes[destination]), options)
        assert moved["outcome"] == "moved" and moved["stages"] > 0, str(moved)
        assert await request == expected
