"""What goes wrong in the middle of a move: done at a moment of a message, or between two of them.

Each takes the moment and returns what happens to its message, or None where it cannot be done.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.request import Status
from tests.simulation.network import ANSWERED, ARRIVED, DONE, PASS, SENT, Call, Verdict

if TYPE_CHECKING:
    from tests.simulation.faults import Faults

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


@dataclass
class Moment:
    """A move at one of its stages."""

    source: str
    destination: str
    request_id: str
    phase: str
    call: Call | None
    point: str = ""  # the fault that comes at it


def kill_source(faults: Faults, moment: Moment) -> Verdict | None:
    return _kill(faults, moment, moment.source)


def kill_destination(faults: Faults, moment: Moment) -> Verdict | None:
    return _kill(faults, moment, moment.destination)


def kill_both(faults: Faults, moment: Moment) -> Verdict | None:
    return _kill(faults, moment, moment.source, moment.destination)


def _kill(faults: Faults, moment: Moment, *names: str) -> Verdict | None:
    if not all(name in faults.cluster.nodes for name in names) or not _fits(faults, moment):
        return None
    for name in names:
        faults.cluster.crash(name)
    return PASS


def _fits(faults: Faults, moment: Moment) -> bool:
    """COMMIT counts as taken if the destination has the request now."""
    if moment.call is None or moment.call.method != "commit" or moment.phase != DONE:
        return True
    return faults.request(moment.destination, moment.request_id) is not None


def lose(faults: Faults, moment: Moment) -> Verdict | None:
    return Verdict(lose=True) if _fits(faults, moment) else None


def repeat(faults: Faults, moment: Moment) -> Verdict | None:
    return Verdict(again_s=faults.random.choice((0.0, 0.05, 1.0, 3.0)))


def lose_reservation(faults: Faults, moment: Moment) -> Verdict | None:
    node = faults.cluster.nodes.get(moment.destination)
    if node is None or moment.call is None or not moment.call.arguments[0].get("reserved", True):
        return None
    node.thread.post(partial(node.engine.cancel_reservation, moment.call.arguments[0]["key"]))
    return PASS


def out_of_blocks(faults: Faults, moment: Moment) -> Verdict | None:
    """Another promise takes all that is left at the destination."""
    node = faults.cluster.nodes.get(moment.destination)
    if node is None:
        return None
    node.thread.post(partial(_hog, faults, node, moment.point))
    return PASS


def _hog(faults: Faults, node: Any, point: str) -> None:
    scheduler = node.engine.scheduler
    if not scheduler.seats or not scheduler.pool.available:
        return
    key = f"hog {faults.cluster.loop.now}"
    scheduler.reservations.promise(key, scheduler.pool.available, faults.cluster.loop.now)
    faults.hit(point)
    release = partial(node.engine.cancel_reservation, key)
    faults.cluster.later(faults.random.uniform(0.1, 0.6), lambda: node.thread.post(release))


def cancel(faults: Faults, moment: Moment) -> Verdict | None:
    user = faults.cluster.user(moment.request_id)
    if user is None or not user.active or user.task is None:
        return None
    user.task.cancel()
    return PASS


def stop_string(faults: Faults, moment: Moment) -> Verdict | None:
    user = faults.cluster.user(moment.request_id)
    if user is None or not user.active or user.left < 3:
        return None
    user.leave_after = len(user.tokens) + 1
    return PASS


def finish(faults: Faults, moment: Moment) -> Verdict | None:
    """The message is held up until the request has ended where it runs."""
    user = faults.cluster.user(moment.request_id)
    engine = moment.destination if moment.phase == DONE else moment.source
    if user is None or user.left > 25 or not _fits(faults, moment) or faults.request(engine, user.id) is None:
        return None
    done: list[bool] = []

    def finished() -> bool:
        if engine in faults.cluster.nodes and faults.request(engine, moment.request_id) is None and not done:
            done.append(True)
            faults.hit(moment.point)
        return bool(done)

    return Verdict(until=finished, extra_s=WAIT_S)


def preempt(faults: Faults, moment: Moment) -> Verdict | None:
    """The request is preempted where it runs before the message goes on."""
    engine = moment.destination if moment.phase == DONE else moment.source
    request = faults.request(engine, moment.request_id)
    if request is None or request.status is not Status.RUNNING:
        return None
    node = faults.cluster.nodes[engine]
    done: list[bool] = []

    def now() -> None:
        if request.status is Status.RUNNING and request in node.engine.scheduler.running:
            node.engine.scheduler._preempt(request)
            faults.hit(moment.point)
        done.append(True)

    node.thread.before_step.append(now)  # type: ignore[attr-defined]
    return Verdict(until=lambda: bool(done), extra_s=WAIT_S)


def preempt_reading(faults: Faults, moment: Moment) -> Verdict | None:
    """Between a look at the blocks and their copy the request loses them, and they are written anew."""
    request = faults.request(moment.source, moment.request_id)
    if request is None or request.status is not Status.RUNNING or not request.blocks:
        return None
    engine = faults.cluster.nodes[moment.source].engine

    def lose() -> bool:
        if request.status is not Status.RUNNING or request not in engine.scheduler.running:
            return False
        engine.scheduler._preempt(request)
        for block, slot in engine.scheduler.pool.swap_out:  # as the step would do first
            engine.executor.host[slot] = list(engine.executor.kv[block])
        engine.scheduler.pool.swap_out.clear()
        return True

    return _while_reading(faults, moment, lose)


def cancel_reading(faults: Faults, moment: Moment) -> Verdict | None:
    """Between Hold and the copy of what goes with COMMIT the request is dropped, and its blocks are written anew:
    its ingress has started it again because it was silent for so long."""
    request = faults.request(moment.source, moment.request_id)
    user = faults.cluster.user(moment.request_id)
    if request is None or request.status is not Status.HELD or not request.blocks or user is None or not user.active:
        return None
    engine = faults.cluster.nodes[moment.source].engine
    tracker = faults.cluster.clients[user.ingress].tracker

    def lose() -> bool:
        tracked = tracker.requests.get(request.id)
        here = engine.scheduler.requests.get(request.id) is request
        if not here or tracked is None or tracked.engine != moment.source:
            return False
        engine.abort(request.id)
        tracker.engine_lost(moment.source, faults.cluster.loop.now)
        return True

    return _while_reading(faults, moment, lose)


def _while_reading(faults: Faults, moment: Moment, lose: Callable[[], bool]) -> Verdict:
    node = faults.cluster.nodes[moment.source]
    scheduler, done = node.engine.scheduler, list[bool]()

    def now() -> None:
        done.append(True)
        if scheduler.seats and scheduler.pool.available and lose():
            number = scheduler.pool.available
            scheduler.reservations.promise("others", number, faults.cluster.loop.now)
            zeros = np.zeros((number, 8 * scheduler.pool.block_size), dtype=np.uint8)
            node.engine.write_reserved("others", 0, zeros)
            node.engine.cancel_reservation("others")
            faults.hit(moment.point)

    if moment.point == "preempted@read":
        node.thread.before_step.append(now)  # type: ignore[attr-defined]
    else:
        node.thread.post(now)
    return Verdict(until=lambda: bool(done))


def other_version(faults: Faults, moment: Moment) -> Verdict | None:
    """The message comes from code that speaks another version."""
    return _rewrite(faults, moment, {"v": 99, "of_newer_code": {"a": 1}})


def _rewrite(faults: Faults, moment: Moment, change: dict[str, Any]) -> Verdict | None:
    assert moment.call is not None
    message, *rest = moment.call.arguments
    moment.call.data = pickle.dumps(({**message, **change}, *rest))
    return PASS


def kill_manager(faults: Faults, moment: Moment) -> Verdict | None:
    """In the middle of a round: its command is under way."""
    if moment.source not in faults.cluster.managers:
        return None
    faults.cluster.crash(moment.source)
    return PASS


def late_report(faults: Faults, moment: Moment) -> Verdict | None:
    """It arrives after newer ones."""
    assert moment.call is not None
    message = moment.call.arguments[0]
    done: list[bool] = []

    def overtaken() -> bool:
        for manager in faults.cluster.managers.values():
            member = manager.cluster.members.get(message["engine"])
            if member is not None and member.report.sequence > message["sequence"] and not done:
                done.append(True)
                faults.hit(moment.point)
        return bool(done)

    return Verdict(until=overtaken, extra_s=6.0)


_EACH = ("reserve", "copy", "hold", "commit", "commit_taken")
STAGED: dict[str, tuple[Callable[[Faults, Moment], Verdict | None], str]] = {
    **{f"source_killed@{stage}": (kill_source, stage) for stage in _EACH},
    **{f"destination_killed@{stage}": (kill_destination, stage) for stage in _EACH},
    **{f"both_killed@{stage}": (kill_both, stage) for stage in _EACH},
    **{f"out_of_blocks@{stage}": (out_of_blocks, stage) for stage in _EACH},
    **{f"cancelled@{stage}": (cancel, stage) for stage in _EACH},
    **{f"stop_string@{stage}": (stop_string, stage) for stage in _EACH},
    **{f"finishes@{stage}": (finish, stage) for stage in ("reserve", "copy", "commit_taken")},
    **{f"preempted@{stage}": (preempt, stage) for stage in ("reserve", "copy", "commit_taken")},
    "preempted@read": (preempt_reading, "read"),
    "superseded@read": (cancel_reading, "read"),
    "reservation_lost@copy": (lose_reservation, "copy"),
    "reservation_lost@commit": (lose_reservation, "commit"),
    "commit_lost": (lose, "commit"),
    "commit_reply_lost": (lose, "commit_taken"),
    "commit_twice": (repeat, "commit"),
    "other_version@reserve": (other_version, "reserve"),
    "other_version@commit": (other_version, "commit"),
}
STAGES["migrate"] = ("migrate", (ARRIVED, DONE))
STAGES["report"] = ("report", (SENT,))
STAGES["submission"] = ("add", (SENT,))
STAGED["submission_lost"] = (lose, "submission")
STAGED["manager_killed_mid_round"] = (kill_manager, "migrate")
STAGED["reports_out_of_order"] = (late_report, "report")
PHASES = {
    "reservation_lost@copy": ARRIVED,
    "reservation_lost@commit": ARRIVED,
    "commit_lost": SENT,
    "commit_twice": SENT,
    "other_version@reserve": SENT,
    "other_version@commit": SENT,
    **{f"{what}@{stage}": SENT for what in ("finishes", "preempted") for stage in ("reserve", "copy")},
}
COUNTED_LATER = ("finishes", "preempted", "superseded", "out_of_blocks", "reports")  # once it has really come about
