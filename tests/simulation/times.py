"""What goes wrong at a time of its own, under load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.simulation.cluster import InjectedFailure

if TYPE_CHECKING:
    from tests.simulation.faults import Faults


async def ingress_killed(faults: Faults) -> None:
    name = await faults.ingress()
    if name is not None:
        faults.cluster.crash(name)
        faults.hit("ingress_killed")


async def ingress_stopped(faults: Faults) -> None:
    name = await faults.ingress()
    if name is not None:
        faults.cluster.stop(name, 15.0)
        faults.hit("ingress_stopped_15s")


async def engine_stopped(faults: Faults) -> None:
    name = await faults.engine()
    if name is not None:
        faults.cluster.stop(name, 15.0)
        faults.hit("engine_stopped_15s")


async def engine_slow(faults: Faults) -> None:
    name = await faults.engine()
    if name is not None:
        faults.cluster.nodes[name].thread.slow_s = 15.0  # type: ignore[attr-defined]
        faults.hit("engine_slow_15s")


async def engine_fails(faults: Faults) -> None:
    name = await faults.engine()
    if name is not None:
        faults.cluster.nodes[name].engine.executor.failure = InjectedFailure("the device is lost")  # type: ignore[attr-defined]
        faults.hit("engine_fails")


async def stream_cut(faults: Faults) -> None:
    name = await faults.engine()
    streams = [s for s in faults.cluster.network.streams if s.call.target == name and s.call.source.alive]
    if streams:
        faults.random.choice(streams).cut()
        faults.hit("stream_cut")


async def item_lost(faults: Faults) -> None:
    """It never comes, and nothing breaks."""
    name = await faults.engine()
    streams = [s for s in faults.cluster.network.streams if s.call.target == name and s.call.source.alive]
    if streams:
        stream = faults.random.choice(streams)
        stream.lose = lose = faults.random.choice((1, 1, 3, 20))
        if await faults.wait(lambda: stream.lose < lose, 1.0):
            faults.hit("item_lost")


async def partition(faults: Faults) -> None:
    one = await faults.engine()
    others = [n for n in (*faults.cluster.nodes, *faults.cluster.clients, *faults.cluster.managers) if n != one]
    if one is not None and others:
        faults.cluster.network.separate(one, faults.random.choice(others), faults.random.uniform(0.3, 4.0))
        faults.hit("partition")


async def manager_away(faults: Faults) -> None:
    if faults.cluster.managers:
        for name in list(faults.cluster.managers):
            faults.cluster.crash(name, back_after_s=30.0)
        faults.hit("manager_away_30s")


async def two_managers(faults: Faults) -> None:
    """As while the deployment is updated: a new one starts, later the old ones end."""
    old = list(faults.cluster.managers)
    if not old:
        return
    faults.cluster.add_manager()
    faults.hit("two_managers")
    await asyncio.sleep(2.0)
    for name in old:
        if faults.cluster.alive(name):
            faults.cluster.managers.pop(name)
            faults.cluster.network.crash(name)


async def drain(faults: Faults) -> None:
    name = await faults.engine()
    if name is not None:
        faults.hit("drain")
        await _drain(faults, name, 3.0)


async def drain_alone(faults: Faults) -> None:
    """Nobody can take what runs there: the others' KV differs."""
    name = await faults.engine()
    if name is None:
        return
    faults.cluster.nodes[name].compat_key = f"of {name} alone"
    faults.hit("drain_without_destination")
    await _drain(faults, name, faults.random.choice((0.3, 3.0)))


async def _drain(faults: Faults, name: str, deadline_s: float) -> None:
    process = faults.cluster.process(name)
    drain = asyncio.ensure_future(faults.cluster.drain(name, deadline_s))
    await faults.wait(lambda: drain.done() or not process.alive, 40.0)
    if not drain.done():
        drain.cancel()


TIMED: dict[str, Callable[[Faults], Awaitable[None]]] = {
    "ingress_killed": ingress_killed,
    "ingress_stopped_15s": ingress_stopped,
    "engine_stopped_15s": engine_stopped,
    "engine_slow_15s": engine_slow,
    "engine_fails": engine_fails,
    "stream_cut": stream_cut,
    "item_lost": item_lost,
    "partition": partition,
    "manager_away_30s": manager_away,
    "two_managers": two_managers,
    "drain": drain,
    "drain_without_destination": drain_alone,
}
