"""The giving end of moves at one engine: carries out what llumnix.migration decides.

Every call has a time limit. However a move ends, the request has exactly one owner afterwards, or its ingress knows
that it must look: see llumnix.migration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.request import Request, Status
from engine.reservations import Refused
from llumnix.load import PROTOCOL_VERSION
from llumnix.migration import (
    Commit,
    Effect,
    End,
    Hold,
    Limits,
    Mechanism,
    Outcome,
    Outgoing,
    Progress,
    Reserve,
    Send,
)
from llumnix.transfer import BATCH_BYTES, NONE, OBJECT_STORE
from serving import clock
from serving.measured import Measured
from serving.messages import MOVE_FAILED, error_output, moved_output
from serving.move_payload import Payloads
from serving.transport import num_bytes

if TYPE_CHECKING:
    from serving.engine_node import EngineNode

logger = logging.getLogger("ferry.moves")

KEEP_S = 1.0  # between signs of life to a destination while nothing is sent


@dataclass(frozen=True)
class MoveOptions:
    """How moves are done; from the manager's settings."""

    mechanism: Mechanism = Mechanism.LIVE
    chunk_bytes: int = BATCH_BYTES
    commit_bytes: int = BATCH_BYTES
    max_stages: int = 4
    last_stage_blocks: int = 1
    transfer_timeout_s: float = 10.0
    bytes_per_s: float = 0.0  # 0: no limit
    compression: str = NONE
    transport: str = OBJECT_STORE
    use_cached: bool = True  # blocks that the destination has in its cache are not sent


@dataclass
class Move:
    """One move under way."""

    request_id: str
    destination: str
    actor: Any
    options: MoveOptions
    key: str  # of the reservation; of this attempt alone
    machine: Outgoing
    client: str = ""  # the request's ingress
    longest: int = 0  # tokens that the request may grow to
    table: list[int] = field(default_factory=list)  # the request's blocks when it was last looked at
    record: dict[str, Any] = field(default_factory=dict)
    data: np.ndarray | None = None  # what Hold exported, from block `data_first` on
    data_first: int = 0
    held_at: float | None = None
    bytes_sent: int = 0
    committing: bool = False


class MoveSource:
    """`node` is the engine it belongs to."""

    def __init__(self, node: EngineNode):
        self.node = node
        self.moves: dict[str, Move] = {}  # by request
        self.measured = Measured()
        self.payloads = Payloads(node)
        self._paid_until = 0.0  # when what was sent keeps to bandwidth_mb_per_s
        self.moved = 0  # requests that are elsewhere now
        self.lost = 0  # let go of for a move that failed: their ingresses start them again
        self._attempts = count()

    def commits(self, request_id: str) -> bool:
        """Whether a request is beyond being kept: COMMIT has been sent."""
        move = self.moves.get(request_id)
        return move is not None and move.committing

    async def move(
        self, request_id: str, destination: str, actor: Any, options: MoveOptions, queued: bool = False
    ) -> dict[str, Any]:
        """Move one request to another engine; returns what became of it. Does not raise for what may go wrong.

        `queued`: only if it has not started meanwhile."""
        if request_id in self.moves:
            return self._result(None, End(Outcome.ABORTED, "it is moving already"), request_id, destination, 0.0)
        started = clock.now()
        block_bytes = self.node.block_bytes
        limits = Limits(
            self.node.engine.scheduler.pool.block_size,
            max(options.last_stage_blocks + 1, options.chunk_bytes // block_bytes),
            options.last_stage_blocks,
            options.max_stages,
            max(options.last_stage_blocks + 1, min(options.commit_bytes, options.chunk_bytes) // block_bytes),
        )
        key = f"{self.node.id}/{next(self._attempts)}"
        move = Move(request_id, destination, actor, options, key, Outgoing(limits, options.mechanism, queued))
        self.moves[request_id] = move
        effect: Effect
        try:
            effect = move.machine.start(await self._look(move))
            while not isinstance(effect, End):
                effect = await self._perform(move, effect)
        except BaseException as error:
            reason = f"the source failed: {type(error).__name__}"
            effect = End(Outcome.UNCONFIRMED if move.committing else Outcome.ABORTED, reason, release=True)
            if not isinstance(error, Exception):
                raise
            logger.exception("the move of %s failed", request_id)
        finally:
            del self.moves[request_id]
            assert isinstance(effect, End)
            self._end(move, effect)
        return self._result(move, effect, request_id, destination, started)

    # -- effects ------------------------------------------------------------------------------------------------

    async def _perform(self, move: Move, effect: Effect) -> Effect:
        machine = move.machine
        match effect:
            case Reserve(num_blocks=num_blocks):
                tokens = await self.node.thread.call(partial(self._tokens, move))
                if tokens is None:
                    return machine.gone()
                message = {**self._head(move), "num_blocks": num_blocks}
                message["tokens"] = tokens if move.options.use_cached and num_blocks else []
                asked = clock.now()
                reply = await self._ask(move, move.actor.reserve.remote, message)
                if "silent" not in reply:
                    self.measured.called(clock.now() - asked)
                if not reply["ok"]:
                    return _failed(machine, reply)
                return machine.reserved(reply["present"], await self._look(move))
            case Send(first=first, count=number, num_blocks=num_blocks):
                reply = await self._send(move, first, number, num_blocks)
                return machine.sent(number, await self._look(move)) if reply["ok"] else _failed(machine, reply)
            case Hold(first=first, copy=copy):
                most = machine.limits.commit_blocks if copy else 0
                progress = await self.node.thread.call(partial(self._hold, move, first, most))
                if isinstance(progress, str):
                    return machine.gone(progress)
                move.held_at = clock.now()
                return machine.held(progress)
            case Commit():
                return await self._commit(move, effect)
            case End():
                return effect

    async def _commit(self, move: Move, commit: Commit) -> Effect:
        compression = move.options.compression
        if commit.count == 0:
            payload = await self.payloads.of_copy(None, compression)
        elif move.data is None or move.data_first != commit.first or len(move.data) < commit.count:
            blocks = move.table[commit.first : commit.first + commit.count]  # more was sent after the hold
            payload = await self.payloads.of_held(blocks, compression)
            if not await self.node.thread.call(partial(self._holds, move)):
                return move.machine.called_off()  # its blocks may have been another's when they were read
        else:
            payload = await self.payloads.of_copy(move.data[: commit.count], compression)
        move.bytes_sent += num_bytes(payload)
        if move.options.bytes_per_s > 0:
            self._paid_until = max(self._paid_until, clock.now()) + num_bytes(payload) / move.options.bytes_per_s
        message = {
            **self._head(move),
            "record": move.record,
            "epoch": list(commit.epoch),
            "computed": commit.computed,
            "first": commit.first,
            "data": payload,
            "reserved": commit.reserved,
            "history": self.node.outboxes.unacknowledged(move.record["client"], move.request_id),
        }
        move.committing = True
        reply = await self._ask(move, move.actor.commit.remote, message)
        return move.machine.owned() if reply["ok"] else _failed(move.machine, reply)

    async def _send(self, move: Move, first: int, count: int, num_blocks: int) -> dict[str, Any]:
        """Blocks, in as many calls as it takes; the reply to the last one."""
        done, reply = 0, dict[str, Any]()
        while done < count:
            most = self.payloads.most(move.destination, move.options.transport, move.options.compression)
            number = min(count - done, most or count)
            reply = await self._write(move, first + done, number, num_blocks)
            if most is None and reply.get("unreadable"):
                self.payloads.unreadable(move.destination, reply["reason"])
                continue
            if not reply["ok"]:
                break
            done += number
        return reply

    async def _write(self, move: Move, first: int, number: int, num_blocks: int) -> dict[str, Any]:
        blocks = move.table[first : first + number]
        options = move.options
        payload = await self.payloads.of(blocks, move.destination, options.transport, options.compression)
        message = {"key": move.key, "first": first, "num_blocks": num_blocks, "data": payload}
        started = clock.now()
        reply = await self._ask(move, move.actor.write.remote, message)
        seconds = clock.now() - started
        if reply["ok"]:
            sent = num_bytes(payload)
            move.bytes_sent += sent
            self.measured.transferred(sent, max(seconds, 1e-6))
            await self._pause(move, sent, num_blocks)
        return reply

    async def _pause(self, move: Move, sent: int, num_blocks: int) -> None:
        """Keep to the limit on what this engine sends, all moves together. A request that is held does not wait: the
        next transfer does, for it too. The promise is kept alive meanwhile."""
        if move.options.bytes_per_s <= 0:
            return
        self._paid_until = max(self._paid_until, clock.now()) + sent / move.options.bytes_per_s
        while move.held_at is None and (left := self._paid_until - clock.now()) > 0:
            await asyncio.sleep(min(left, KEEP_S))
            if left > KEEP_S:
                message = {**self._head(move), "num_blocks": num_blocks, "tokens": []}
                if not (await self._ask(move, move.actor.reserve.remote, message))["ok"]:
                    return  # the next write says why

    async def _ask(self, move: Move, call: Any, message: Any) -> dict[str, Any]:
        """The destination's reply; {"ok": False, "silent": reason} when none comes in time."""
        try:
            answer: Awaitable[dict[str, Any]] = call(message)
            return await asyncio.wait_for(answer, move.options.transfer_timeout_s)
        except TimeoutError:
            return {"ok": False, "silent": f"no answer within {move.options.transfer_timeout_s:g} s"}
        except Exception as error:
            return {"ok": False, "silent": type(error).__name__}

    def _head(self, move: Move) -> dict[str, Any]:
        return {
            "v": PROTOCOL_VERSION,
            "key": move.key,
            "id": move.request_id,
            "client": move.client,
            "longest": move.longest,
            "compat_key": self.node.compat_key,
        }

    # -- the end ------------------------------------------------------------------------------------------------

    def _end(self, move: Move, end: End) -> None:
        """Leave the request here, or let go of it and tell its ingress."""
        if end.release:
            self.node.spawn(self._ask(move, move.actor.release.remote, move.key))
        if end.outcome is Outcome.ABORTED:
            self.node.thread.post(partial(self._stay, move.request_id))
            return
        if end.outcome is Outcome.MOVED:
            self.moved += 1
        else:
            self.lost += 1
        resume, moved = move.record["epoch"]
        self.node.thread.post(partial(self.node.engine.abort, move.request_id, (resume, moved)))
        client = move.record["client"]
        if end.outcome is Outcome.REFUSED:
            notice = error_output(move.request_id, (resume, moved), MOVE_FAILED, end.reason)
        else:
            index = len(move.record["output"])
            notice = moved_output(move.request_id, (resume, moved + 1), index, move.destination)
        self.node.outboxes.push(client, [notice], clock.now())
        self.node.wake(client)
        self.node.reporter.changed()

    def _result(self, move: Move | None, end: End, request_id: str, destination: str, started: float) -> dict[str, Any]:
        now = clock.now()
        result: dict[str, Any] = {
            "request_id": request_id,
            "source": self.node.id,
            "destination": destination,
            "outcome": end.outcome.value,
            "reason": end.reason,
            "blocks_sent": 0,
            "blocks_skipped": 0,
            "bytes": 0,
            "stages": 0,
            "mechanism": "",
            "duration_ms": 1e3 * (now - started) if move else 0.0,
            "held_ms": 0.0,
            "epoch": None,
        }
        if move is not None:
            machine = move.machine
            result |= {
                "blocks_sent": machine.blocks_sent,
                "blocks_skipped": machine.blocks_skipped,
                "bytes": move.bytes_sent,
                "stages": machine.stages,
                "mechanism": machine.mechanism.value,
                "held_ms": 1e3 * (now - move.held_at) if move.held_at is not None else 0.0,
            }
            if end.outcome is Outcome.MOVED:
                result["epoch"] = [move.record["epoch"][0], move.record["epoch"][1] + 1]
        return result

    # -- on the engine thread -----------------------------------------------------------------------------------

    async def _look(self, move: Move) -> Progress | None:
        return await self.node.thread.call(partial(self._progress, move))

    def _progress(self, move: Move) -> Progress | None:
        request = self.node.engine.scheduler.requests.get(move.request_id)
        if request is None:
            return None
        move.table = list(request.blocks)
        return _progress_of(request)

    def _stay(self, request_id: str) -> None:
        """Go on with a request here; it is left in peace for a while, as after a move."""
        self.node.engine.unhold(request_id)
        request = self.node.engine.scheduler.requests.get(request_id)
        if request is not None:
            request.last_moved = self.node.engine.clock()

    def _tokens(self, move: Move) -> list[int] | None:
        request = self.node.engine.scheduler.requests.get(move.request_id)
        if request is None:
            return None
        move.client = request.client
        longest = self.node.engine.scheduler.max_length
        if request.params.max_tokens is not None:
            longest = min(longest, len(request.prompt) + request.params.max_tokens)
        move.longest = longest
        return list(request.tokens)

    def _hold(self, move: Move, first: int, most: int) -> Progress | str:
        """Stop the request and export what is left, if that is little: in one call, so that no step lies between."""
        try:
            move.record = self.node.engine.hold(move.request_id)
        except Refused:
            return "gone"
        request = self.node.engine.scheduler.requests[move.request_id]
        move.table = list(request.blocks)
        left = -(-request.computed // self.node.engine.scheduler.pool.block_size) - first
        if 0 < left <= most:
            move.data, move.data_first = self.node.engine.export(move.request_id, first, left), first
        return _progress_of(request)

    def _holds(self, move: Move) -> bool:
        request = self.node.engine.scheduler.requests.get(move.request_id)
        return request is not None and request.status is Status.HELD and list(request.epoch) == move.record["epoch"]


def _progress_of(request: Request) -> Progress:
    running = request.status is Status.RUNNING or (request.status is Status.HELD and bool(request.blocks))
    return Progress(running, len(request.tokens), request.computed, request.epoch, request.preemptions)


def _failed(machine: Outgoing, reply: dict[str, Any]) -> Effect:
    return machine.silent(reply["silent"]) if "silent" in reply else machine.refused(reply["reason"])
