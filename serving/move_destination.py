"""The receiving end of moves at one engine: promises room, takes KV in, owns the request.

Replies are dicts: {"ok": True, ...} or {"ok": False, "reason": str}; a refused RESERVE changes nothing here, a
refused WRITE may have made the promise longer, and a refused COMMIT ends it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.kv_cache import Slabs
from engine.reservations import Refused
from llumnix.load import PROTOCOL_VERSION, READY
from llumnix.transfer import NIXL, PROCESS_MEMORY
from serving import clock
from serving.process_memory import Unreadable
from serving.transport import EMPTY, SLABS, Payload, decode

if TYPE_CHECKING:
    from serving.engine_node import EngineNode

Reply = dict[str, Any]
Epoch = tuple[int, int]

FETCH_S = 10.0  # longest read of another engine's memory
REMEMBERED = 10_000  # decisions on COMMIT; one that comes again gets the same answer


class MoveDestination:
    """`node` is the engine it belongs to. `_decided` lives on the engine thread, all else on the loop."""

    def __init__(self, node: EngineNode):
        self.node = node
        self.adopted = 0  # requests taken in
        self.deciding = 0  # COMMITs that the engine thread has and that are not announced yet
        self._decided: OrderedDict[tuple[str, Epoch], str] = OrderedDict()  # "" for owned, or why not

    async def reserve(self, message: dict[str, Any]) -> Reply:
        """Promise room for a request. The answer says how many leading blocks of it are here already."""
        reason = self._unfit(message)
        if reason:
            return _no(reason)
        if message["num_blocks"] == 0:  # it will queue here, and only wants to know whether it may
            return {"ok": True, "present": 0}
        key, tokens = message["key"], message["tokens"]

        def promise() -> int:
            engine = self.node.engine
            engine.reserve(key, message["num_blocks"], message["id"], tokens)
            return engine.scheduler.reservations.present(key)

        try:
            return {"ok": True, "present": await self.node.thread.call(promise)}
        except Refused as error:
            return _no(str(error))

    async def write(self, message: dict[str, Any]) -> Reply:
        """Put blocks into a promise, which grows to num_blocks first. The copy is not the engine thread's work."""
        if self.node.state != READY:  # COMMIT will be refused: the request had better stay where it is
            return _no(f"the engine is {self.node.state}")
        key, first = message["key"], message["first"]
        payload, thread = message["data"], self.node.thread
        if self.node.state != READY:  # better now than at COMMIT
            return _no(f"the engine is {self.node.state}")
        number = payload["shape"][0]
        fill: Callable[[list[int]], None]
        if payload["kind"] == NIXL:

            def fill(blocks: list[int]) -> None:
                self.node.memory.nixl().fetch(payload, blocks, limit_s=FETCH_S)
        elif payload["kind"] == PROCESS_MEMORY:
            memory = self.node.memory.process
            if memory is None:
                return {**_no("this engine's blocks are not in its process's memory"), "unreadable": True}
            fill = partial(memory.fetch, payload)
        else:
            data = await self._unpacked(payload)
            write = self.node.engine.executor.write_blocks

            def fill(blocks: list[int]) -> None:
                write(blocks, data)

        def place() -> list[int]:
            self.node.engine.extend(key, message["num_blocks"])
            return self.node.engine.scheduler.reservations.fill(key, first, number)

        try:
            blocks = await thread.call(place)
        except Refused as error:
            return _no(str(error))
        written = 0
        try:
            await self.node.copy(partial(fill, blocks))
            written = number
        except Unreadable as error:  # another transport may do
            return {**_no(str(error)), "unreadable": True}
        except (RuntimeError, ValueError) as error:  # the other side's memory cannot be read, or its blocks are others
            return _no(str(error))
        finally:
            reservations, now = self.node.engine.scheduler.reservations, self.node.engine.clock
            thread.post(lambda: reservations.filled(key, first, written, now()))
        return {"ok": True}

    async def commit(self, message: dict[str, Any]) -> Reply:
        """Own the request. Repeated, it gets the answer it got the first time."""
        try:
            data: Slabs
            data, unfit = await self._unpacked(message["data"]), self._unfit(message, promised=message["reserved"])
        except ValueError as error:
            data, unfit = EMPTY, str(error)
        self.deciding += 1
        try:
            reason = await self.node.thread.call(partial(self._adopt, message, data, unfit))
        finally:
            self.deciding -= 1
        if reason:
            return _no(reason)
        self.node.reporter.changed()
        return {"ok": True}

    async def release(self, key: str) -> None:
        """Take a promise back."""
        self.node.thread.post(partial(self.node.engine.cancel_reservation, key))

    async def _unpacked(self, payload: Payload) -> Slabs:
        """Blocks, each uint8 [block_bytes]; in a thread where that takes a while."""
        return decode(payload) if payload["kind"] == SLABS else await self.node.copy(partial(decode, payload))

    def _unfit(self, message: dict[str, Any], promised: bool = False) -> str:
        """Why this engine takes no such request; empty if it does. While it drains it takes what has its room already:
        that is given away with all others."""
        node = self.node
        if message["v"] != PROTOCOL_VERSION:
            return f"protocol version {message['v']}, must be {PROTOCOL_VERSION}"
        if message["compat_key"] != node.compat_key:
            return "the engines' KV differs: they have not the same weights, data types and kernels"
        if node.state != READY and not (promised and not node.drains.over and not node.failed):
            return f"the engine is {node.state}"
        if message.get("longest", 0) > node.max_model_len:  # older engines do not say
            return f"the request may have {message['longest']} tokens, {node.max_model_len} fit"
        if not node.streams_to(message["client"]):
            return "the request's ingress does not read this engine's outputs"
        return ""

    # -- on the engine thread -----------------------------------------------------------------------------------

    def _adopt(self, message: dict[str, Any], data: Slabs, reason: str) -> str:
        record, epoch = message["record"], (message["epoch"][0], message["epoch"][1])
        request_id = record["id"]
        known = self._decided.get((request_id, epoch))
        if known is None:
            known = self._decided[request_id, epoch] = reason or self._take_in(message, data, record, epoch)
            while len(self._decided) > REMEMBERED:
                self._decided.popitem(last=False)
            if not known:
                # Before any event of the request: the engine makes its next step after this call
                self.node.loop.call_soon_threadsafe(self._announce, record, message["epoch"], message["history"])
        return known

    def _take_in(self, message: dict[str, Any], data: Slabs, record: dict[str, Any], epoch: Epoch) -> str:
        engine, key, computed = self.node.engine, message["key"], message["computed"]
        here = engine.scheduler.requests.get(record["id"])
        if here is not None and here.epoch < epoch:
            engine.abort(record["id"])  # it was given away, and is back before the answer to that was
        try:
            if message["reserved"]:
                size = engine.scheduler.pool.block_size
                engine.extend(key, -(-len(record["prompt"] + record["output"]) // size))
                if len(data):
                    engine.write_reserved(key, message["first"], data)
                engine.adopt(record, epoch, computed, key)
            else:
                engine.adopt(record, epoch)
        except (Refused, ValueError) as error:
            return str(error)
        finally:
            engine.cancel_reservation(key)
        return ""

    def _announce(self, record: dict[str, Any], epoch: list[int], history: list[dict[str, Any]]) -> None:
        """The request is here: repeat what its ingress had not acknowledged at the source, as this engine's own."""
        if not self.node.outboxes.opened(record["client"], record["id"], epoch, clock.now()):
            return  # its ingress was faster: it has started the request again, here
        self.adopted += 1
        self.node.outboxes.push(record["client"], [{**output, "epoch": epoch} for output in history], clock.now())
        self.node.wake(record["client"])


def _no(reason: str) -> Reply:
    return {"ok": False, "reason": reason}
