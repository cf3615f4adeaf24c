"""How the blocks of a moving request are put into messages: as addresses, or as bytes.

Bytes are arguments of a call, copied on the event loop while all token streams wait. So a call carries few of them
(llumnix.transfer.BATCH_BYTES); addresses cost nothing.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from llumnix.transfer import AUTO, BATCH_BYTES, NIXL, NONE
from serving.process_memory import ProcessMemory
from serving.transport import EMPTY, Payload, encode, encode_views

if TYPE_CHECKING:
    from serving.engine_node import EngineNode

logger = logging.getLogger("ferry.moves")


class Payloads:
    """`node` is the engine whose blocks they are; `transport` and `compression` as in llumnix.transfer."""

    def __init__(self, node: EngineNode):
        self.node = node
        self._apart: set[str] = set()  # engines that cannot read this one's memory

    def most(self, destination: str, transport: str, compression: str) -> int | None:
        """Blocks in one call; None where only addresses travel, which the destination reads from."""
        if transport == NIXL or self._memory(destination, transport, compression) is not None:
            return None
        return max(1, BATCH_BYTES // self.node.block_bytes)

    def unreadable(self, destination: str, reason: str) -> None:
        """An engine could not read this one's memory: it gets bytes from now on."""
        self._apart.add(destination)
        logger.info("moves to %s go through the object store: %s", destination, reason)

    async def of(self, blocks: list[int], destination: str, transport: str, compression: str) -> Payload:
        """Full blocks of a request that may go on. If they change hands before the destination has them, the next look
        at the request finds it gone or preempted."""
        if transport == NIXL:
            return await self.node.copy(lambda: self.node.memory.nixl().pack(blocks))
        memory = self._memory(destination, transport, compression)
        if memory is not None:
            return memory.pack(blocks)
        if compression == NONE:  # the blocks where they lie; the call copies them
            return encode_views(await self.node.copy(partial(self.node.engine.executor.view_blocks, blocks)))
        return await self.of_held(blocks, compression)

    async def of_held(self, blocks: list[int], compression: str) -> Payload:
        """A copy of blocks, for COMMIT, after which they may be given away at once."""
        read = self.node.engine.executor.read_blocks
        return await self.node.copy(lambda: encode(read(blocks), compression))

    async def of_copy(self, data: np.ndarray | None, compression: str) -> Payload:
        """Blocks that were copied already, or none."""
        if data is None:
            return encode(EMPTY)
        if compression == NONE:  # no thread: every moment counts
            return encode(data)
        return await self.node.copy(partial(encode, data, compression))

    def _memory(self, destination: str, transport: str, compression: str) -> ProcessMemory | None:
        """What a destination on this host reads itself; None where blocks have to be brought to it."""
        if transport != AUTO or compression != NONE or destination in self._apart:
            return None
        return self.node.memory.process
