"""A simulated move: the stages of a live one, and what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llumnix.load import Movable
from llumnix.policies import mechanism
from llumnix.simulator.engine import Engine
from llumnix.simulator.request import Request

if TYPE_CHECKING:
    from llumnix.simulator.cluster import Cluster

MOVED, NO_ROOM, ENDED = "moved", "no_room", "ended"  # outcomes


class Move:
    """Reserve, copy full blocks while the request decodes, hold it for the last ones, commit.

    Whatever happens before the commit leaves the request at the source: `_abort`.
    """

    def __init__(self, cluster: Cluster, request: Request, source: Engine, destination: Engine, cause: str):
        self.cluster = cluster
        self.request = request
        self.source = source
        self.destination = destination
        self.cause = cause
        self.epoch = request.epoch
        self.reserved = 0
        self.copied = 0
        self.stages = 0
        device = cluster.device
        limit = cluster.settings.bandwidth_mb_per_s * 1e6
        self.bytes_per_s = min(limit, device.bandwidth_bytes_per_s) if limit else device.bandwidth_bytes_per_s
        self.call_s = device.call_s

    def start(self) -> None:
        now, request = self.cluster.now, self.request
        request.moving = True
        request.last_moved = now
        if not request.decoding:
            self.source.take_waiting(request, now)
            self.cluster.touch(self.source)
            self.cluster.at(now + self.call_s, self._arrive_waiting, None)
            return
        tokens = self.source.length(request, now)
        blocks = -(-tokens // self.source.size)
        if not self.destination.reserve(blocks, now):
            request.moving = False
            self.cluster.outcomes[self.cause, NO_ROOM] += 1
            return
        self.reserved = blocks
        for engine in (self.source, self.destination):
            self.cluster.busy[engine.name] += 1
            engine.begin_move(now)
            self.cluster.touch(engine)
        how = mechanism.choose(Movable(str(request.id), request.priority, tokens, blocks, False, 0), self._costs())
        if how == mechanism.RECOMPUTE:
            self.source.hold(request, now, self._leave_without_kv)
            self.cluster.touch(self.source)
        else:
            self._copy((tokens - 1) // self.source.size)

    def _costs(self) -> mechanism.Costs:
        device = self.cluster.device
        return mechanism.Costs(
            block_bytes=device.block_bytes,
            block_size=device.block_size,
            bytes_per_s=self.bytes_per_s,
            call_s=self.call_s,
            prefill_tokens_per_s=1 / device.prompt_token_s,
            step_s=device.step_s(len(self.source.running), 0),
        )

    # -- stages -------------------------------------------------------------------------------------------------

    def _copy(self, full: int) -> None:
        """One more stage: the full blocks that are not there yet, while the request goes on."""
        self.stages += 1
        seconds = self._seconds(full - self.copied)
        self.copied = full
        self.cluster.at(self.cluster.now + seconds, self._copied, None)

    def _copied(self, _: object) -> None:
        now, request = self.cluster.now, self.request
        if request.epoch != self.epoch:
            self._abort(ENDED)
            return
        tokens = self.source.length(request, now)
        blocks = -(-tokens // self.source.size)
        more = blocks + 1 - self.reserved  # one for the steps until it is held
        if more > 0:
            if not self.destination.reserve(more, now):
                request.moving = False
                self._abort(NO_ROOM)
                return
            self.reserved += more
            self.cluster.touch(self.destination)
        settings = self.cluster.settings
        if blocks - self.copied <= settings.last_stage_blocks or self.stages >= settings.max_stages:
            self.source.hold(request, now, self._held)
            self.cluster.touch(self.source)
        else:
            self._copy((tokens - 1) // self.source.size)

    def _held(self, now: float) -> None:
        if self.request.stopped < 0 or self.request.epoch != self.epoch:
            self._abort(ENDED)
            return
        left = -(-(self.request.length - 1) // self.source.size) - self.copied
        self.cluster.at(now + self._seconds(left), self._commit, None)

    def _commit(self, _: object) -> None:
        now, request = self.cluster.now, self.request
        self.source.release(request, now)
        self.destination.adopt(request, self.reserved, now)
        request.moves += 1
        self._end(MOVED)

    # -- without KV ---------------------------------------------------------------------------------------------

    def _leave_without_kv(self, now: float) -> None:
        if self.request.stopped < 0 or self.request.epoch != self.epoch:
            self._abort(ENDED)
            return
        self.cluster.at(now + self.call_s, self._arrive_to_recompute, None)

    def _arrive_to_recompute(self, _: object) -> None:
        now = self.cluster.now
        self.source.release(self.request, now)
        self.destination.cancel(self.reserved, now)
        self.destination.add(self.request, now)
        self.request.moves += 1
        self._end(MOVED)

    def _arrive_waiting(self, _: object) -> None:
        self.request.moving = False
        self.request.moves += 1
        self.destination.add(self.request, self.cluster.now)
        self.cluster.touch(self.destination)
        self.cluster.outcomes[self.cause, MOVED] += 1

    # -- ends ---------------------------------------------------------------------------------------------------

    def _abort(self, outcome: str) -> None:
        self.destination.cancel(self.reserved, self.cluster.now)
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.cluster.outcomes[self.cause, outcome] += 1
        for engine in (self.source, self.destination):
            self.cluster.busy[engine.name] -= 1
            engine.end_move(self.cluster.now)
            self.cluster.touch(engine)

    def _seconds(self, blocks: int) -> float:
        return self.call_s + blocks * self.cluster.device.block_bytes / self.bytes_per_s
