"""Every fault as a named point, and counters of how often it was really hit.

Faults in the middle of a move wait for a move to come to their stage; the others come at a time of their own, under
load.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from tests.simulation.cluster import Cluster
from tests.simulation.moments import COUNTED_LATER, HOLD, PHASES, READ, STAGED, STAGES, Moment
from tests.simulation.network import PASS, Call, Verdict
from tests.simulation.times import TIMED

WATCHED = frozenset({"reserve", "write", "commit", "migrate", "report", "add"})
LOAD_S = 6.0  # how long a fault waits for the load that it is to come under

Action = Callable[[Moment], Verdict | None]


@dataclass(eq=False)
class Armed:
    point: str
    method: str
    phase: str
    action: Action
    skip: int  # matching moments to let pass


class Faults:
    """`points`: what to do in this run. `hits` counts what was done."""

    def __init__(self, cluster: Cluster, random: Random, points: list[str]):
        self.cluster = cluster
        self.random = random
        self.hits: Counter[str] = Counter()
        self.armed: list[Armed] = []
        self.under_way = len(points)
        self.points = points
        self._moves: dict[tuple[str, str], tuple[str, str]] = {}  # (source, key) -> (destination, request)
        cluster.network.watch = self._watch
        cluster.on_hold = self._on_hold
        cluster.on_read = self._on_read

    async def run(self, period_s: float) -> None:
        """Begin one fault after another; returns when all have been tried."""
        tasks = []
        for point in self.points:
            await asyncio.sleep(self.random.uniform(0.2, 1.8) * period_s)
            tasks.append(asyncio.ensure_future(self._begin(point)))
        for task in tasks:
            await task

    async def _begin(self, point: str) -> None:
        if point in TIMED:
            await TIMED[point](self)
            return
        action, stage = STAGED[point]
        method, phases = STAGES[stage]
        skip = self.random.randrange(3) if stage == "copy" else 0
        armed = Armed(point, method, self.random.choice(phases), partial(action, self), skip)
        if point in PHASES:
            armed.phase = PHASES[point]
        self.armed.append(armed)
        await self.wait(lambda: armed not in self.armed, 2 * LOAD_S)
        if armed in self.armed:
            self.armed.remove(armed)

    def hit(self, point: str) -> None:
        self.cluster.note("FAULT", point)
        self.hits[point] += 1

    # -- moments of moves ---------------------------------------------------------------------------------------

    def _watch(self, phase: str, call: Call) -> Verdict:
        network = self.cluster.network
        if self.cluster.trace is not None:
            network.note(call, phase)
        if not self.armed or call.method not in WATCHED:
            return PASS
        if call.method in ("reserve", "commit"):
            message = call.arguments[0]
            self._moves[call.source.name, message["key"]] = (call.target, message["id"])
        elif call.method == "write":
            message = call.arguments[0]
        elif call.method == "add":
            return self._fire("add", Moment(call.source.name, call.target, call.arguments[0]["id"], phase, call))
        else:
            return self._fire(call.method, Moment(call.source.name, call.target, "", phase, call))
        destination, request_id = self._moves.get((call.source.name, message["key"]), (call.target, ""))
        return self._fire(call.method, Moment(call.source.name, destination, request_id, phase, call))

    def _on_hold(self, engine: str, request_id: str) -> None:
        move = self.cluster.nodes[engine].giving.moves.get(request_id) if engine in self.cluster.nodes else None
        if move is not None:
            self._fire(HOLD, Moment(engine, move.destination, request_id, HOLD, None))

    def _on_read(self, engine: str) -> Callable[[], bool] | None:
        for move in list(self.cluster.nodes[engine].giving.moves.values()) if engine in self.cluster.nodes else ():
            verdict = self._fire(READ, Moment(engine, move.destination, move.request_id, READ, None))
            if verdict.until is not None:
                return verdict.until
        return None

    def _fire(self, method: str, moment: Moment) -> Verdict:
        for armed in self.armed:
            if armed.method != method or armed.phase != moment.phase:
                continue
            if armed.skip > 0:
                armed.skip -= 1
                continue
            moment.point = armed.point
            verdict = armed.action(moment)
            if verdict is None:
                continue
            self.armed.remove(armed)
            if not armed.point.startswith(COUNTED_LATER):
                self.hit(armed.point)
            return verdict
        return PASS

    # -- for the faults --------------------------------------------------------------------------------------------

    def request(self, engine: str, request_id: str) -> Any:
        node = self.cluster.nodes.get(engine)
        return node.engine.scheduler.requests.get(request_id) if node is not None else None

    async def wait(self, condition: Callable[[], Any], seconds: float = LOAD_S) -> bool:
        until = self.cluster.loop.now + seconds
        while not condition():
            if self.cluster.loop.now >= until:
                return False
            await asyncio.sleep(0.03)
        return True

    async def _loaded(self, names: Callable[[], list[str]]) -> str | None:
        """A process that has streaming requests, soon."""
        found: list[str] = []

        def look() -> list[str]:
            streaming = {user.ingress for user in self.cluster.users if user.active and user.tokens}
            for name in names():
                node = self.cluster.nodes.get(name)
                if node is not None and node.state == "ready" and node.engine.scheduler.running or name in streaming:
                    found.append(name)
            return found

        return self.random.choice(found) if await self.wait(look) else None

    async def engine(self) -> str | None:
        return await self._loaded(lambda: [n for n in self.cluster.nodes if not self.cluster.process(n).stopped])

    async def ingress(self) -> str | None:
        return await self._loaded(lambda: [n for n in self.cluster.clients if not self.cluster.process(n).stopped])


SHAPED = ("unequal_compat_key", "newer_code")  # a matter of the whole cluster, counted by what they lead to
POINTS = (*STAGED, *TIMED, *SHAPED)
SELDOM = (
    *("finishes@copy", "finishes@commit_taken", "finishes@copy", "finishes@commit_taken", "preempted@read"),
    *("superseded@read", "source_killed@copy", "out_of_blocks@copy", "preempted@copy", "reports_out_of_order"),
    *("out_of_blocks@commit_taken", "out_of_blocks@commit_taken", "cancelled@commit_taken", "commit_reply_lost"),
    *("destination_killed@commit_taken", "reservation_lost@commit", "stop_string@commit", "stop_string@commit_taken"),
)
