"""How an engine goes away: nothing new comes, others take what they can, the rest runs on until a deadline.

A request that was promised room here before may still come: refused at COMMIT it would be computed again, but here it
is given away like all others.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from llumnix.load import DRAINING
from serving import clock
from serving.messages import CLOSING, DRAINED, Output, error_output

if TYPE_CHECKING:
    from serving.engine_node import EngineNode

POLL_S = 0.02
COMMITS_S = 1.0  # past the deadline, for moves that only wait for their destination's word
LAST_OUTPUTS_S = 0.2  # for the streams to carry them


class Drain:
    """`node` is the engine it belongs to."""

    def __init__(self, node: EngineNode):
        self.node = node
        self.closing = False  # the whole application goes away: there is no other engine
        self.over = False  # whatever comes now would go down with the process
        self._until = float("inf")
        self._task: asyncio.Task[dict[str, Any]] | None = None

    async def run(self, deadline_s: float, closing: bool) -> dict[str, Any]:
        """See EngineNode.drain."""
        self.node.state = DRAINING
        self.closing = self.closing or closing
        self._until = min(self._until, clock.now() + deadline_s)
        self.node.reporter.changed(urgent=True)
        if self._task is None:
            self._task = self.node.spawn(self._run())
        return await asyncio.shield(self._task)

    def refusal(self, request_id: str, epoch: list[int], kind: str) -> Output:
        """The end of a request here: it may be started elsewhere, unless there is no elsewhere."""
        if self.closing:
            return error_output(request_id, epoch, CLOSING, "the service is shutting down")
        return error_output(request_id, epoch, kind, f"the replica is {self.node.state}")

    async def _run(self) -> dict[str, Any]:
        node, started = self.node, clock.now()
        here = len(node.outboxes.open_requests() | node.giving.moves.keys())
        adopted, moved, lost = node.taking.adopted, node.giving.moved, node.giving.lost
        if here and not node.failed:
            node.thread.post(node.look_again)
        while self._goes_on():
            await asyncio.sleep(POLL_S)
        self.over = True
        while node.taking.deciding:
            await asyncio.sleep(POLL_S)
        # From here to the counts nothing else runs: every request is open, or moved, or lost, or has ended by itself
        resumed = self._end_all() + node.giving.lost - lost
        resumed += sum(move.committing for move in node.giving.moves.values())  # not known to be anybody's
        here += node.taking.adopted - adopted
        moved = node.giving.moved - moved
        if node.failed:
            resumed = here - moved
        if here:
            await asyncio.sleep(LAST_OUTPUTS_S)
        receipt = {"engine": node.id, "moved": moved, "resumed": resumed, "finished": here - moved - resumed}
        receipt["seconds"] = clock.now() - started
        if not self.closing:  # else the manager goes too
            await node.reporter.drained(receipt)
        return receipt

    def _goes_on(self) -> bool:
        node, now = self.node, clock.now()
        if node.failed:
            return False
        if now < self._until:
            return bool(node.outboxes.open_requests() or node.taking.deciding)
        return now < self._until + COMMITS_S and any(move.committing for move in node.giving.moves.values())

    def _end_all(self) -> int:
        """End what is still here; how many that are."""
        ended = 0
        for name, client in self.node.outboxes.clients.items():
            for request_id, epoch in list(client.open.items()):
                if self.node.giving.commits(request_id):  # it is somebody else's, or its ingress is told
                    continue
                self.node.thread.post(partial(self.node.engine.abort, request_id, (epoch[0], epoch[1])))
                self.node.deliver({name: [self.refusal(request_id, epoch, DRAINED)]})
                ended += 1
        return ended
