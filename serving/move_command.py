"""What the manager or an operator tells an engine to give away: which of its requests go, and by which mechanism."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.engine import Engine
from engine.request import Status
from llumnix.load import DRAINING, Movable
from llumnix.migration import Mechanism, Outcome
from llumnix.policies.choice import DRAIN, PREFILL, choose, passed_over
from llumnix.policies.mechanism import QUEUE, RECOMPUTE, Costs
from llumnix.policies.mechanism import choose as choose_mechanism
from llumnix.settings import LlumnixSettings
from llumnix.transfer import BATCH_BYTES, SYNC, KVTransfer
from serving import clock
from serving.move_source import MoveOptions, MoveSource

if TYPE_CHECKING:
    from serving.engine_node import EngineNode

OF_THE_REQUEST = ("gone", "preempted", "superseded", "started")  # reasons that say nothing about the destination
BATCH_S = 5.0  # moves of one command are told of when the command is over


class MoveCommands:
    """`node` is the engine they are for, `source` what carries moves out there."""

    def __init__(self, node: EngineNode, source: MoveSource):
        self.node, self.source = node, source
        self.passed_over: Counter[str] = Counter()  # requests that were not considered when one was to move, by reason
        self._choosing = 0  # places among the moves under way that somebody is about to take

    async def give(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Move up to command["count"] requests, one after another, to command["destination"].

        Which ones is decided here, from what runs now; with "request_id" it is that one. Together they are no larger
        than the destination has room for by the manager's view. Ends early when there is nothing left to give, the
        destination takes no more, or the manager has waited for BATCH_S.
        """
        settings, transfer = LlumnixSettings.of_message(command["settings"]), KVTransfer.of_message(command)
        destination, actor, cause = command["destination"], command["actor"], command["cause"]
        draining = self.node.state == DRAINING
        most = settings.max_moves_draining if draining else settings.max_moves_per_engine
        results: list[dict[str, Any]] = []
        started, room = clock.now(), command["max_blocks"]
        while len(results) < command["count"] and (
            len(self.source.moves) + self._choosing < most or "request_id" in command
        ):
            if results and clock.now() - started > BATCH_S:
                break
            self._choosing += 1
            try:
                candidates, prefilling = await self.node.thread.call(partial(_look_over, self.node.engine, draining))
            finally:
                self._choosing -= 1
            if "request_id" in command:
                chosen = next((c for c in candidates if c.id == command["request_id"]), None)
            else:
                able = [
                    c for c in candidates if c.id not in self.source.moves and (c.waiting or not command.get("waiting"))
                ]
                now = self.node.engine.clock()
                chosen = choose(able, room, settings, now, cause)
                self.passed_over += passed_over(able, room, settings, now, cause)
                self.passed_over[PREFILL] += prefilling
            if chosen is None:
                break
            by_address = self.source.payloads.most(destination, transfer.transport, transfer.compression) is None
            options = MoveOptions(
                mechanism=self._mechanism(chosen, command, settings, transfer),
                chunk_bytes=int(command.get("chunk_bytes", transfer.batch_bytes(self.node.block_bytes, by_address))),
                commit_bytes=min(transfer.batch_bytes(self.node.block_bytes), BATCH_BYTES),
                max_stages=settings.max_stages,
                last_stage_blocks=transfer.last_blocks(settings.last_stage_blocks),
                transfer_timeout_s=settings.transfer_timeout_s,
                bytes_per_s=settings.bandwidth_mb_per_s * 1e6,
                compression=transfer.compression,
                transport=transfer.transport,
                use_cached=command.get("use_cached", True),
            )
            queued = chosen.waiting and "mechanism" not in command
            result = await self.source.move(chosen.id, destination, actor, options, queued)
            results.append(result | {"cause": cause, "ended": clock.now()})
            if result["outcome"] == Outcome.MOVED.value:
                room -= chosen.blocks + (0 if cause == DRAIN else self._stay_blocks(settings))
            if result["outcome"] != Outcome.MOVED.value and result["reason"] not in OF_THE_REQUEST:
                break
        for result in results:
            result["ended_s_ago"] = clock.now() - result.pop("ended")
        return results

    def _stay_blocks(self, settings: LlumnixSettings) -> int:
        """What a destination keeps free for one more request, if it is like this engine (llumnix.policies.pairing)."""
        pool = self.node.engine.scheduler.pool
        return -int(-settings.in_steps(pool.total * pool.block_size) // pool.block_size)

    def _mechanism(
        self, request: Movable, command: dict[str, Any], settings: LlumnixSettings, transfer: KVTransfer
    ) -> Mechanism:
        if "mechanism" in command:
            return Mechanism(command["mechanism"])
        stats = self.node.thread.stats
        costs = Costs(
            self.node.block_bytes,
            self.node.engine.scheduler.pool.block_size,
            self.source.measured.bytes_per_s,
            self.source.measured.call_s,
            command.get("prefill_tokens_per_s", 0.0),
            stats.step_seconds if stats is not None else 0.0,
        )
        chosen = choose_mechanism(request, costs, settings)
        copy = Mechanism.STOP_AND_COPY if transfer.transfer_mode == SYNC else Mechanism.LIVE
        return {QUEUE: Mechanism.REQUEUE, RECOMPUTE: Mechanism.RECOMPUTE}.get(chosen, copy)


def movable(engine: Engine, all_of_them: bool = False) -> list[Movable]:
    """The requests an engine could give away: queued and decoding ones.

    A prompt in the middle of its prefill stays until its first token, unless `all_of_them` must go.
    """
    scheduler = engine.scheduler
    found = []
    for request in (*scheduler.running, *scheduler.waiting):
        if request.status is Status.HELD or (
            request.status is Status.RUNNING and request.pending > 1 and not all_of_them
        ):
            continue
        waiting = request.status is Status.WAITING
        blocks = scheduler.pool.blocks_for(len(request.tokens))
        found.append(
            Movable(
                request.id, request.priority, len(request.tokens), blocks, waiting, request.order, request.last_moved
            )
        )
    return found


def in_prefill(engine: Engine) -> int:
    """Requests whose prompt is not computed yet."""
    return sum(request.status is Status.RUNNING and request.pending > 1 for request in engine.scheduler.running)


def _look_over(engine: Engine, all_of_them: bool) -> tuple[list[Movable], int]:
    """What may move, and how many may not because of their prefill."""
    return movable(engine, all_of_them), 0 if all_of_them else in_prefill(engine)
