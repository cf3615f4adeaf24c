"""A scripted run in which exactly one message goes wrong: the N-th, for every N there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from engine.sampling.params import SamplingParams
from tests.simulation.cluster import MANAGER, MAX_LENGTH, OPERATOR, Cluster, Shape
from tests.simulation.loop import Hung, run_virtually
from tests.simulation.network import ANSWERED, ARRIVED, DONE, PASS, SENT, Call, Handle, Verdict
from tests.simulation.users import User

ANSWER_S = 8.0  # what the operator waits for a move
REST_S = 100.0


def crash_caller(cluster: Cluster, call: Call) -> Verdict:
    if call.source.name != OPERATOR:
        cluster.crash(call.source.name)
    return PASS


def crash_callee(cluster: Cluster, call: Call) -> Verdict:
    cluster.crash(call.target)
    return PASS


def lose(cluster: Cluster, call: Call) -> Verdict:
    return Verdict(lose=True)


def repeat(cluster: Cluster, call: Call) -> Verdict:
    return Verdict(again_s=0.05) if call.method in REPEATED else PASS


REPEATED = ("reserve", "write", "commit", "release", "add", "abort", "renew", "report", "downtime")
WRONGS: dict[str, tuple[str, Callable[[Cluster, Call], Verdict]]] = {
    "request_lost": (SENT, lose),
    "request_twice": (SENT, repeat),
    "caller_dies_sending": (SENT, crash_caller),
    "callee_dies_before": (ARRIVED, crash_callee),
    "reply_lost": (DONE, lose),
    "callee_dies_after": (DONE, crash_callee),
    "caller_dies_answered": (ANSWERED, crash_caller),
}


def run_step(wrong: str, number: int, trace: list[str] | None = None) -> tuple[bool, list[str]]:
    """(whether there was a number-th message to go wrong, what did not hold)"""
    phase, act = WRONGS[wrong]
    shape = Shape(
        step_s=0.02,
        copy_s=0.002,
        lease_s=2.0,
        settings={"enable_moves": False, "transfer_timeout_s": 1.0, "last_stage_blocks": 1},
    )
    cluster = Cluster(shape, Random("steps"), trace)
    state = {"first": 1 << 60, "done": False}

    def watch(moment: str, call: Call) -> Verdict:
        cluster.network.note(call, moment)
        if state["done"] or moment != phase or call.number != state["first"] + number:
            return PASS
        state["done"] = True
        cluster.note("WRONG", wrong, call)
        return act(cluster, call)

    cluster.network.watch = watch
    with cluster.logs():
        try:
            run_virtually(lambda: _script(cluster, state), cluster.loop)
        except Hung as error:
            cluster.violations += [str(error), *cluster.unrest()]
    cluster.violations += cluster.loop.errors
    exists = cluster.network.messages >= state["first"] + number and number < state["last"] - state["first"]  # type: ignore[operator]
    cluster.loop.dispose(cluster.processes)
    return exists, cluster.violations


async def _script(cluster: Cluster, state: dict[str, int | bool]) -> None:
    """Two requests; one moves there and back while it runs, the other once."""
    cluster.start()
    await asyncio.sleep(0.4)
    state["first"] = cluster.network.messages + 1
    prompt = list(range(1, 71))
    one = User("one", prompt, SamplingParams(temperature=0.0, max_tokens=36, logprobs=1), 0, MAX_LENGTH)
    two = User("two", prompt[:50], SamplingParams(seed=5, max_tokens=24), 0, MAX_LENGTH)
    cluster.use(one, next(iter(cluster.clients)))
    cluster.use(two, next(iter(cluster.clients)))
    for user, mechanism in ((one, "live"), (two, "stop_and_copy"), (one, "live")):
        await _until(lambda user=user: len(user.tokens) >= 3 or not user.active, 5.0)  # type: ignore[misc]
        await cluster.operator.spawn(_move(cluster, user.id, mechanism))
    await _until(lambda: not one.active and not two.active, 120.0)
    state["last"] = cluster.network.messages + 1
    state["done"] = True
    until = cluster.loop.now + REST_S
    while not cluster.violations and (left := next(cluster.unrest(), None)) is not None:
        if cluster.loop.now > until:
            cluster.violate(left)
        await asyncio.sleep(0.5)
    for user in (one, two):
        if user.end not in ("length", "lost"):
            cluster.violate(f"{user.id} ended with {user.end!r}: {user.message}")


async def _move(cluster: Cluster, request_id: str, mechanism: str) -> None:
    for name, node in list(cluster.nodes.items()):
        if node.state == "ready" and request_id in node.engine.scheduler.requests:
            others = [n for n, other in cluster.nodes.items() if n != name and other.state == "ready"]
            if others:
                call = Handle(MANAGER).migrate.remote(
                    request_id, others[0], {"mechanism": mechanism, "chunk_bytes": 128}
                )
                await asyncio.wait([asyncio.ensure_future(call)], timeout=ANSWER_S)
            return


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while not condition() and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.01)
