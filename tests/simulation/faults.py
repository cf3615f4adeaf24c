"""Every fault as a named point, and counters of how often it was really hit.

Faults in the middle of a move wait for a move to come to their stage; the others come at a time of their own, under
load.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np

from engine.request import Status
from tests.simulation.cluster import Cluster, InjectedFailure
from tests.simulation.network import ANSWERED, ARRIVED, DONE, PASS, SENT, Call, Verdict

HOLD, READ = "hold", "read"
ANY = (SENT, ARRIVED, DONE, ANSWERED)
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {  # stage of a move -> (method, at which moment of the message)
    "reserve": ("reserve", ANY),
    "copy": ("write", ANY),
    "read": (READ, (READ,)),
    "hold": (HOLD, (HOLD,)),
    "commit": ("commit", (SENT, ARRIVED)),
    "commit_taken": ("commit", (DONE,)),
}
WAIT_S = 1.5  # how long a message is held up for a request to finish, and so on
LOAD_S = 6.0  # how long a fault waits for the load that it is to come under


@dataclass
class Moment:
    """A move at one of its stages."""

    source: str
    destination: str
    request_id: str
    phase: str
    call: Call | None


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
        await self._wait(lambda: armed not in self.armed, 2 * LOAD_S)
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
        if not self.armed or call.method not in ("reserve", "write", "commit", "migrate", "report"):
            return PASS
        if call.method in ("reserve", "commit"):
            message = call.arguments[0]
            self._moves[call.source.name, message["key"]] = (call.target, message["id"])
        elif call.method == "write":
            message = call.arguments[0]
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
            verdict = armed.action(moment)
            if verdict is None:
                continue
            self.armed.remove(armed)
            if armed.point not in COUNTED_LATER:
                self.hit(armed.point)
            return verdict
        return PASS

    # -- what is done at a moment; None: not possible at this one -------------------------------------------------

    def kill_source(self, moment: Moment) -> Verdict | None:
        return self._kill(moment, moment.source)

    def kill_destination(self, moment: Moment) -> Verdict | None:
        return self._kill(moment, moment.destination)

    def kill_both(self, moment: Moment) -> Verdict | None:
        return self._kill(moment, moment.source, moment.destination)

    def _kill(self, moment: Moment, *names: str) -> Verdict | None:
        if not all(name in self.cluster.nodes for name in names) or not self._fits(moment):
            return None
        for name in names:
            self.cluster.crash(name)
        return PASS

    def _fits(self, moment: Moment) -> bool:
        """COMMIT counts as taken if the destination has the request now."""
        if moment.call is None or moment.call.method != "commit" or moment.phase != DONE:
            return True
        return self._request(moment.destination, moment.request_id) is not None

    def lose(self, moment: Moment) -> Verdict | None:
        return Verdict(lose=True) if self._fits(moment) else None

    def repeat(self, moment: Moment) -> Verdict | None:
        return Verdict(again_s=self.random.choice((0.0, 0.05, 1.0, 3.0)))

    def lose_reservation(self, moment: Moment) -> Verdict | None:
        node = self.cluster.nodes.get(moment.destination)
        if node is None or moment.call is None:
            return None
        node.thread.post(partial(node.engine.cancel_reservation, moment.call.arguments[0]["key"]))
        return PASS

    def out_of_blocks(self, moment: Moment) -> Verdict | None:
        """Another promise takes all that is left at the destination."""
        node = self.cluster.nodes.get(moment.destination)
        if node is None:
            return None
        node.thread.post(partial(self._hog, node))
        return PASS

    def _hog(self, node: Any) -> None:
        scheduler = node.engine.scheduler
        if not scheduler._seats or not scheduler.pool.available:
            return
        key = f"hog {self.cluster.loop.now}"
        scheduler.reservations.promise(key, scheduler.pool.available, self.cluster.loop.now)
        release = partial(node.engine.cancel_reservation, key)
        self.cluster.later(self.random.uniform(0.1, 0.6), lambda: node.thread.post(release))

    def cancel(self, moment: Moment) -> Verdict | None:
        user = self.cluster.user(moment.request_id)
        if user is None or not user.active or user.task is None:
            return None
        user.task.cancel()
        return PASS

    def stop_string(self, moment: Moment) -> Verdict | None:
        user = self.cluster.user(moment.request_id)
        if user is None or not user.active or user.left < 3:
            return None
        user.leave_after = len(user.tokens) + 1
        return PASS

    def finish(self, moment: Moment) -> Verdict | None:
        """The message is held up until the request has ended where it runs."""
        user = self.cluster.user(moment.request_id)
        engine = moment.destination if moment.phase == DONE else moment.source
        if user is None or user.left > 25 or not self._fits(moment) or self._request(engine, user.id) is None:
            return None
        point = f"finishes@{'commit_taken' if moment.phase == DONE else _stage(moment)}"
        done: list[bool] = []

        def finished() -> bool:
            if engine in self.cluster.nodes and self._request(engine, moment.request_id) is None and not done:
                done.append(True)
                self.hit(point)
            return bool(done)

        return Verdict(until=finished, extra_s=WAIT_S)

    def preempt(self, moment: Moment) -> Verdict | None:
        """The request is preempted where it runs before the message goes on."""
        engine = moment.destination if moment.phase == DONE else moment.source
        request = self._request(engine, moment.request_id)
        if request is None or request.status is not Status.RUNNING:
            return None
        point = f"preempted@{'commit_taken' if moment.phase == DONE else _stage(moment)}"
        node = self.cluster.nodes[engine]
        done: list[bool] = []

        def now() -> None:
            if request.status is Status.RUNNING and request in node.engine.scheduler.running:
                node.engine.scheduler._preempt(request)
                self.hit(point)
            done.append(True)

        node.thread.before_step.append(now)  # type: ignore[attr-defined]
        return Verdict(until=lambda: bool(done), extra_s=WAIT_S)

    def preempt_reading(self, moment: Moment) -> Verdict | None:
        """Between a look at the blocks and their copy the request loses them, and they are written anew."""
        request = self._request(moment.source, moment.request_id)
        if request is None or request.status is not Status.RUNNING or not request.blocks:
            return None
        node = self.cluster.nodes[moment.source]
        engine = node.engine
        done: list[bool] = []

        def now() -> None:
            done.append(True)
            scheduler = engine.scheduler
            if request.status is not Status.RUNNING or request not in scheduler.running:
                return
            scheduler._preempt(request)
            copies = scheduler.pool.swap_out
            for block, slot in copies:
                engine.executor.host[slot] = list(engine.executor.kv[block])
            copies.clear()
            number = scheduler.pool.available
            if scheduler._seats:
                scheduler.reservations.promise("others", number, self.cluster.loop.now)
                engine.write_reserved("others", 0, np.zeros((number, 8 * scheduler.pool.block_size), dtype=np.uint8))
                engine.cancel_reservation("others")
                self.hit("preempted@read")

        node.thread.before_step.append(now)
        return Verdict(until=lambda: bool(done) or moment.source not in self.cluster.nodes)

    def other_version(self, moment: Moment) -> Verdict | None:
        """The message comes from code that speaks another version."""
        return self._rewrite(moment, {"v": 99, "of_newer_code": {"a": 1}})

    def _rewrite(self, moment: Moment, change: dict[str, Any]) -> Verdict | None:
        assert moment.call is not None
        message, *rest = moment.call.arguments
        moment.call.data = pickle.dumps(({**message, **change}, *rest))
        return PASS

    def kill_manager(self, moment: Moment) -> Verdict | None:
        """In the middle of a round: its command is under way."""
        if moment.source not in self.cluster.managers:
            return None
        self.cluster.crash(moment.source)
        return PASS

    def late_report(self, moment: Moment) -> Verdict | None:
        """It arrives after newer ones."""
        assert moment.call is not None
        message = moment.call.arguments[0]
        done: list[bool] = []

        def overtaken() -> bool:
            for manager in self.cluster.managers.values():
                member = manager.cluster.members.get(message["engine"])
                if member is not None and member.report.sequence > message["sequence"] and not done:
                    done.append(True)
                    self.hit("reports_out_of_order")
            return bool(done)

        return Verdict(until=overtaken, extra_s=6.0)

    def _request(self, engine: str, request_id: str) -> Any:
        node = self.cluster.nodes.get(engine)
        return node.engine.scheduler.requests.get(request_id) if node is not None else None

    # -- what comes at a time of its own ------------------------------------------------------------------------

    async def _wait(self, condition: Callable[[], Any], seconds: float = LOAD_S) -> bool:
        until = self.cluster.loop.now + seconds
        while not condition():
            if self.cluster.loop.now >= until:
                return False
            await asyncio.sleep(0.02)
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

        return self.random.choice(found) if await self._wait(look) else None

    async def _engine(self) -> str | None:
        return await self._loaded(lambda: [n for n in self.cluster.nodes if not self.cluster.process(n).stopped])

    async def _ingress(self) -> str | None:
        return await self._loaded(lambda: [n for n in self.cluster.clients if not self.cluster.process(n).stopped])

    async def ingress_killed(self) -> None:
        name = await self._ingress()
        if name is not None:
            self.cluster.crash(name)
            self.hit("ingress_killed")

    async def ingress_stopped(self) -> None:
        name = await self._ingress()
        if name is not None:
            self.cluster.stop(name, 15.0)
            self.hit("ingress_stopped_15s")

    async def engine_stopped(self) -> None:
        name = await self._engine()
        if name is not None:
            self.cluster.stop(name, 15.0)
            self.hit("engine_stopped_15s")

    async def engine_slow(self) -> None:
        name = await self._engine()
        if name is not None:
            self.cluster.nodes[name].thread.slow_s = 15.0  # type: ignore[attr-defined]
            self.hit("engine_slow_15s")

    async def engine_fails(self) -> None:
        name = await self._engine()
        if name is not None:
            self.cluster.nodes[name].engine.executor.failure = InjectedFailure("the device is lost")  # type: ignore[attr-defined]
            self.hit("engine_fails")

    async def stream_cut(self) -> None:
        name = await self._engine()
        streams = [s for s in self.cluster.network.streams if s.call.target == name and s.call.source.alive]
        if streams:
            self.random.choice(streams).cut()
            self.hit("stream_cut")

    async def item_lost(self) -> None:
        """It never comes, and nothing breaks."""
        name = await self._engine()
        streams = [s for s in self.cluster.network.streams if s.call.target == name and s.call.source.alive]
        if streams:
            stream = self.random.choice(streams)
            stream.lose = lose = self.random.choice((1, 1, 3, 20))
            if await self._wait(lambda: stream.lose < lose, 1.0):
                self.hit("item_lost")

    async def partition(self) -> None:
        one = await self._engine()
        others = [n for n in (*self.cluster.nodes, *self.cluster.clients, *self.cluster.managers) if n != one]
        if one is not None and others:
            self.cluster.network.separate(one, self.random.choice(others), self.random.uniform(0.3, 4.0))
            self.hit("partition")

    async def manager_away(self) -> None:
        if self.cluster.managers:
            for name in list(self.cluster.managers):
                self.cluster.crash(name, back_after_s=30.0)
            self.hit("manager_away_30s")

    async def two_managers(self) -> None:
        """As while the deployment is updated: a new one starts, later the old ones end."""
        old = list(self.cluster.managers)
        if not old:
            return
        self.cluster.add_manager()
        self.hit("two_managers")
        await asyncio.sleep(2.0)
        for name in old:
            if self.cluster.alive(name):
                self.cluster.managers.pop(name)
                self.cluster.network.crash(name)

    async def drain(self) -> None:
        name = await self._engine()
        if name is not None:
            self.hit("drain")
            await self._drain(name, 3.0)

    async def drain_alone(self) -> None:
        """Nobody can take what runs there: the others' KV differs."""
        name = await self._engine()
        if name is None:
            return
        if any(
            node.compat_key == self.cluster.nodes[name].compat_key
            for n, node in self.cluster.nodes.items()
            if n != name
        ):
            return
        self.hit("drain_without_destination")
        await self._drain(name, self.random.choice((0.3, 3.0)))

    async def _drain(self, name: str, deadline_s: float) -> None:
        process = self.cluster.process(name)
        drain = asyncio.ensure_future(self.cluster.drain(name, deadline_s))
        await self._wait(lambda: drain.done() or not process.alive, 40.0)
        if not drain.done():
            drain.cancel()


def _stage(moment: Moment) -> str:
    return {"reserve": "reserve", "write": "copy"}[moment.call.method if moment.call is not None else ""]


_EACH = ("reserve", "copy", "hold", "commit", "commit_taken")
STAGED: dict[str, tuple[Callable[[Faults, Moment], Verdict | None], str]] = {
    **{f"source_killed@{stage}": (Faults.kill_source, stage) for stage in _EACH},
    **{f"destination_killed@{stage}": (Faults.kill_destination, stage) for stage in _EACH},
    **{f"both_killed@{stage}": (Faults.kill_both, stage) for stage in _EACH},
    **{f"out_of_blocks@{stage}": (Faults.out_of_blocks, stage) for stage in _EACH},
    **{f"cancelled@{stage}": (Faults.cancel, stage) for stage in _EACH},
    **{f"stop_string@{stage}": (Faults.stop_string, stage) for stage in _EACH},
    **{f"finishes@{stage}": (Faults.finish, stage) for stage in ("reserve", "copy", "commit_taken")},
    **{f"preempted@{stage}": (Faults.preempt, stage) for stage in ("reserve", "copy", "commit_taken")},
    "preempted@read": (Faults.preempt_reading, "read"),
    "reservation_lost@copy": (Faults.lose_reservation, "copy"),
    "reservation_lost@commit": (Faults.lose_reservation, "commit"),
    "commit_lost": (Faults.lose, "commit"),
    "commit_reply_lost": (Faults.lose, "commit_taken"),
    "commit_twice": (Faults.repeat, "commit"),
    "other_version@reserve": (Faults.other_version, "reserve"),
    "other_version@commit": (Faults.other_version, "commit"),
}
STAGES["migrate"] = ("migrate", (ARRIVED, DONE))
STAGES["report"] = ("report", (SENT,))
STAGED["manager_killed_mid_round"] = (Faults.kill_manager, "migrate")
STAGED["reports_out_of_order"] = (Faults.late_report, "report")
PHASES = {
    "reservation_lost@copy": ARRIVED,
    "reservation_lost@commit": ARRIVED,
    "commit_lost": SENT,
    "commit_twice": SENT,
    "other_version@reserve": SENT,
    "other_version@commit": SENT,
    **{f"{what}@{stage}": SENT for what in ("finishes", "preempted") for stage in ("reserve", "copy")},
}
COUNTED_LATER = frozenset(
    {"reports_out_of_order", *(n for n in STAGED if n.split("@")[0] in ("finishes", "preempted"))}
)
TIMED: dict[str, Callable[[Faults], Awaitable[None]]] = {
    "ingress_killed": Faults.ingress_killed,
    "ingress_stopped_15s": Faults.ingress_stopped,
    "engine_stopped_15s": Faults.engine_stopped,
    "engine_slow_15s": Faults.engine_slow,
    "engine_fails": Faults.engine_fails,
    "stream_cut": Faults.stream_cut,
    "item_lost": Faults.item_lost,
    "partition": Faults.partition,
    "manager_away_30s": Faults.manager_away,
    "two_managers": Faults.two_managers,
    "drain": Faults.drain,
    "drain_without_destination": Faults.drain_alone,
}
SHAPED = ("unequal_compat_key", "newer_code")  # a matter of the whole cluster, counted by what they lead to
POINTS = (*STAGED, *TIMED, *SHAPED)
