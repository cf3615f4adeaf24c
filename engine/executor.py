"""The seam between scheduling and computing.

An executor runs plans in order. `engine.runner.ModelRunner` is the one in this process; any other (worker processes,
actors) only has to speak these three calls, because a plan carries deltas and a result carries token ids.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.kv_cache import Slabs
from engine.step import StepPlan, StepResult


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. An exception means the executor's state is lost and the engine must end."""
        ...

    def read_blocks(self, blocks: list[int]) -> np.ndarray:
        """A copy of KV block slabs, uint8 [len(blocks), block_bytes].

        On any thread, also during a step: blocks that are full do not change while a request refers to them. Whoever
        reads must look afterwards whether it still did.
        """
        ...

    def view_blocks(self, blocks: list[int]) -> Slabs:
        """KV block slabs where they lie, read-only; copies where this process cannot see
        them. For who copies them at once, on the terms of `read_blocks`."""
        ...

    def write_blocks(self, blocks: list[int], data: Slabs) -> None:
        """Fill KV blocks with slabs. On any thread, also during a step; only blocks no sequence of a plan uses."""
        ...

    def pool_memory(self) -> tuple[int, int, str]:
        """(address, number of blocks, device) of the KV slabs, for transports that read them where they lie."""
        ...
