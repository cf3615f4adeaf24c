"""Slabs between processes of one host."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from engine.step import StepPlan, StepResult
from llumnix.transfer import AUTO, OBJECT_STORE, PROCESS_MEMORY
from serving import process_memory
from serving.move_source import MoveOptions
from serving.process_memory import ProcessMemory, Unreadable
from serving.transport import SLABS
from tests.serving.nodes import Handle, Method, Nodes

BLOCKS, BYTES = 1200, 1 << 10


def pool(seed: int) -> tuple[np.ndarray, ProcessMemory]:
    slabs = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BYTES), dtype=np.uint8)
    return slabs, ProcessMemory(slabs.ctypes.data, BYTES)


def test_blocks_of_another_process_arrive_where_they_should_and_nowhere_else() -> None:
    program = f"""if True:
        import numpy as np
        from serving.process_memory import ProcessMemory
        slabs = np.random.default_rng(1).integers(0, 256, ({BLOCKS}, {BYTES}), dtype=np.uint8)
        memory = ProcessMemory(slabs.ctypes.data, {BYTES})
        print(memory.pack([*reversed(range(10, {BLOCKS}))]), flush=True)
        input()
    """
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        payload = ast.literal_eval(other.stdout.readline())
        ours, _ = pool(1)
        theirs, destination = pool(2)
        before = theirs.copy()
        targets = np.random.default_rng(3).permutation(BLOCKS)[: BLOCKS - 10]
        assert len(targets) > process_memory.IOV_MAX
        destination.fetch(payload, targets.tolist())
        assert (theirs[targets] == ours[10:][::-1]).all()
        untouched = sorted(set(range(BLOCKS)) - set(targets.tolist()))
        assert (theirs[untouched] == before[untouched]).all()
        other.stdin.close()
        other.wait(10)
        with pytest.raises(Unreadable, match=f"the memory of process {other.pid} cannot be read: No such process"):
            destination.fetch(payload, targets.tolist())


def test_a_stranger_with_the_same_process_id_is_not_read() -> None:
    slabs, source = pool(1)
    theirs, destination = pool(2)
    before = theirs.copy()
    where, _ = source.pack([1])["token"]
    with pytest.raises(Unreadable, match="is another one here"):
        destination.fetch(source.pack([1]) | {"token": (where, bytes(16))}, [1])
    with pytest.raises(Unreadable, match="Bad address"):
        destination.fetch(source.pack([1]) | {"token": (16, bytes(16))}, [1])
    assert (theirs == before).all()
    destination.fetch(source.pack([1]), [2])
    assert (theirs[2] == slabs[1]).all()


@pytest.mark.parametrize("readable", [True, False])
async def test_engines_of_one_host_read_each_other_and_others_use_the_object_store(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    config = EngineConfig(model=str(tiny_llama), dtype="bfloat16", kv_cache_memory_bytes=8 << 20, threads=1)
    prompt = [3 + i * 7 % 90 for i in range(90)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2).to_dict()
    if not readable:

        def refuse(*_: Any) -> None:
            raise Unreadable("the memory of process 7 cannot be read: Operation not permitted")

        monkeypatch.setattr(ProcessMemory, "fetch", refuse)

    def engine() -> Engine:
        engine = build_engine(config)
        execute = engine.executor.execute

        def slowly(plan: StepPlan) -> StepResult:
            time.sleep(0.01)
            return execute(plan)

        engine.executor.execute = slowly  # type: ignore[method-assign]
        return engine

    used: list[str] = []

    class Watched(Handle):
        async def watched(self, message: dict[str, Any]) -> Any:
            used.append(message["data"]["kind"])
            return await self.target.write(message)

        def __getattr__(self, name: str) -> Any:
            return Method(self.watched) if name == "write" else super().__getattr__(name)

    async with Nodes(engine, "a", "b") as nodes:
        expected = await nodes.generate("calm", [*prompt], params)
        request = asyncio.create_task(nodes.generate("r", prompt, params))
        source = await nodes.owner("r")
        destination = {"a": "b", "b": "a"}[source]
        options = MoveOptions(transport=AUTO, chunk_bytes=1, use_cached=False)
        moved = await nodes[source].giving.move("r", destination, Watched(nodes[destination]), options)
        assert moved["outcome"] == "moved" and moved["stages"] > 0, str(moved)
        assert await request == expected
    assert len(used) > 1
    if readable:
        assert set(used) == {PROCESS_MEMORY}
    else:
        assert used == [PROCESS_MEMORY] + [SLABS] * (len(used) - 1), "it is tried once"
    assert MoveOptions().transport == OBJECT_STORE
