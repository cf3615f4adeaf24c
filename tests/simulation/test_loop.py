"""The simulation's own ground: time, processes, the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.simulation.loop import Hung, Process, VirtualLoop, run_virtually
from tests.simulation.network import ARRIVED, DONE, PASS, Call, Handle, Network, Verdict


class Echo:
    """Answers under a name."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    async def say(self, what: Any, after: float = 0.0) -> Any:
        await asyncio.sleep(after)
        self.said.append(what)
        return what

    async def renew(self, what: Any) -> None:
        self.said.append(what)

    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            self.said.append(number)
            yield number


class Pair:
    """Two processes, `here` calling `there`."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(max_time_s=100.0)
        self.network = Network(self.loop, Random(1))
        self.here, self.there = Process("here", self.loop), Process("there", self.loop)
        self.echo = Echo()
        self.network.join("here", self.here, None)
        self.network.join("there", self.there, self.echo)

    def run(self, coroutine: Any) -> Any:
        async def main() -> Any:
            return await self.here.spawn(coroutine)

        try:
            return run_virtually(main, self.loop)
        finally:
            self.loop.dispose([self.here, self.there])


def test_time_passes_without_waiting() -> None:
    started = time.monotonic()
    pair = Pair()
    pair.run(asyncio.sleep(90.0))
    assert pair.loop.now == 90.0
    assert time.monotonic() - started < 5.0


def test_what_never_ends_is_found_out() -> None:
    with pytest.raises(Hung, match="100 s"):
        Pair().run(asyncio.sleep(101.0))

    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Hung, match="nothing is left to do"):
        Pair().run(forever())

    async def spin() -> None:
        while True:
            await asyncio.sleep(0.0)

    pair = Pair()
    pair.loop.callbacks_left = 1000
    with pytest.raises(Hung, match="callbacks"):
        pair.run(spin())


def test_nothing_is_shared() -> None:
    async def call() -> None:
        said = [1]
        answer = Handle("there").say.remote(said)
        said.append(2)
        got = await answer
        got.append(3)

    pair = Pair()
    pair.run(call())
    assert pair.echo.said == [[1]]


def test_a_stopped_process_goes_on_where_it_was() -> None:
    async def call() -> float:
        pair.there.stop()
        pair.loop.call_later(15.0, pair.there.go_on, context=pair.network.context)
        await Handle("there").say.remote("x", 1.0)
        return pair.loop.now

    pair = Pair()
    assert 16.0 < pair.run(call()) < 16.1


def test_the_dead_do_nothing_more_and_their_callers_hear_of_it() -> None:
    async def call() -> None:
        answer = Handle("there").say.remote("x", 1.0)
        await asyncio.sleep(0.5)
        pair.network.crash("there")
        with pytest.raises(ActorDiedError):
            await answer
        with pytest.raises(ActorDiedError):
            await Handle("there").say.remote("y")
        await asyncio.sleep(5.0)

    pair = Pair()
    pair.run(call())
    assert pair.echo.said == []


def test_messages_can_be_lost_repeated_and_held_up() -> None:
    verdicts = {"lost": Verdict(lose=True), "late": Verdict(until=lambda: pair.loop.now > 3.0, extra_s=9.0)}

    def watch(phase: str, call: Call) -> Verdict:
        what = call.arguments[0]
        if phase == "sent":
            return Verdict(again_s=1.0) if what == "twice" else verdicts.get(what, PASS)
        return Verdict(lose=True) if phase == DONE and what == "unheard" else PASS

    async def call() -> list[bool]:
        calls = [Handle("there").renew.remote(what) for what in ("lost", "late", "twice", "unheard")]
        done, _ = await asyncio.wait(calls, timeout=10.0)
        return [answer in done for answer in calls]

    pair = Pair()
    pair.network.watch = watch
    assert pair.run(call()) == [False, True, True, False]
    assert sorted(pair.echo.said) == ["late", "twice", "twice", "unheard"]


def test_a_stream_waits_for_its_reader_and_can_be_cut() -> None:
    async def call() -> tuple[list[int], int]:
        stream = Handle("there").count.options(num_returns="streaming").remote(100)
        await asyncio.sleep(1.0)
        ahead = len(pair.echo.said)
        got = []
        with pytest.raises(ActorUnavailableError):
            async for reference in stream:
                got.append(await reference)
                if len(got) == 30:
                    stream.items.clear()
                    stream.cut()
        return got, ahead

    pair = Pair()
    got, ahead = pair.run(call())
    assert got == list(range(30)) and ahead == 17
    assert pair.there.alive


def test_those_apart_do_not_hear_each_other() -> None:
    async def call() -> bool:
        pair.network.separate("here", "there", 2.0)
        lost = Handle("there").say.remote("x")
        await asyncio.sleep(3.0)
        await Handle("there").say.remote("y")
        return bool(lost.done())

    pair = Pair()
    assert pair.run(call()) is False
    assert pair.echo.said == ["y"]


def test_a_kill_at_the_arrival_comes_before_the_call() -> None:
    def watch(phase: str, call: Call) -> Verdict:
        if phase == ARRIVED:
            pair.network.crash("there")
        return PASS

    async def call() -> None:
        with pytest.raises(ActorDiedError):
            await Handle("there").say.remote("x")

    pair = Pair()
    pair.network.watch = watch
    pair.run(call())
    assert pair.echo.said == []
