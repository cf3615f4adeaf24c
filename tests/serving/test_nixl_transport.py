"""Slabs by NIXL, where it is installed: over UCX in host memory."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.build import build_engine
from engine.config import EngineConfig, resolve
from engine.engine import Engine
from engine.options.option import ConfigError
from engine.sampling.params import SamplingParams
from engine.step import StepPlan, StepResult
from llumnix.transfer import NIXL, KVTransfer
from serving import nixl_transport, rescheduling
from serving.move_source import MoveOptions
from serving.nixl_transport import NixlTransport
from tests.serving.nodes import Handle, Nodes

BLOCKS, BYTES = 16, 1 << 14


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
