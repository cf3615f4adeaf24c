"""What is done to the service, at moments and to victims that a seed chooses."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray import serve

from llumnix.load import READY
from serving.app import APP_NAME
from tests.integration.service import Service

CALL_S = 3.0  # longest wait for an answer of a process that may be stopped or dead
MOVE_EVERY_S = 0.3
MOVES_AT_A_TIME = 4
PACE_EVERY_S = 1.0
LOOK_EVERY_S = 0.5

EAGER = {
    "pairing_interval_s": 0.05,
    "migrate_out_share": 0.2,
    "migrate_in_share": 0.25,
    "move_cooldown_s": 0.2,
    "max_moves_per_engine": 4,
    "verify_moves": 0.2,
}
"""Rounds that move requests all the time."""


@dataclass
class Faults:
    """`options` are the application's arguments; moves that were seen are kept, also those of managers that died."""

    service: Service
    source: random.Random
    options: dict[str, Any]
    step_s: float  # of an engine, at least
    replicas: int = 2
    settings: dict[str, Any] = field(default_factory=lambda: dict(EAGER))
    injected: Counter[str] = field(default_factory=Counter)
    moves: dict[tuple[str, float], dict[str, Any]] = field(default_factory=dict)
    resumed: dict[str, int] = field(default_factory=dict)  # by ingress
    updates: int = 0
    asleep: set[asyncio.Task[None]] = field(default_factory=set)  # each wakes an engine that was stopped
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def deck(self) -> list[Callable[[], Awaitable[bool]]]:
        """Every fault as often as it is due; each returns whether it was possible just now."""
        often = [self.kill_engine, self.stop_engine] * 2
        return [
            *often,
            *(self.kill_manager, self.end_stream, self.lose_items, self.silence_stream),
            *(self.change_roles, self.change_replicas, self.update),
        ]

    async def run(self, every_s: float) -> None:
        """Until `ending`: deal the deck again and again, about every_s apart. Moves go on all the time."""
        others = [asyncio.create_task(self._repeat(*job)) for job in self._jobs()]
        cards: list[Callable[[], Awaitable[bool]]] = []
        while not self.ending.is_set():
            if not cards:
                cards = self.source.sample(self.deck, len(self.deck))
            card = cards.pop()
            try:
                done = await card()
            except Exception as error:  # whatever it needed is down just now
                done, name = False, type(error).__name__
                self.injected[f"not possible: {card.__name__} ({name})"] += 1
            if not done and len(cards) > 1:
                cards.insert(0, card)  # later
            with suppress(TimeoutError):
                seconds = every_s * self.source.uniform(0.5, 1.5) if done else 0.5
                await asyncio.wait_for(self.ending.wait(), seconds)
        await asyncio.gather(*others, *self.asleep)

    def _jobs(self) -> list[tuple[Callable[[], Awaitable[None]], float]]:
        return [(self._move_some, MOVE_EVERY_S), (self._pace, PACE_EVERY_S), (self.look, LOOK_EVERY_S)]

    async def _repeat(self, job: Callable[[], Awaitable[None]], every_s: float) -> None:
        while not self.ending.is_set():
            with suppress(Exception):  # the manager is down, an engine is stopped
                await job()
            await asyncio.sleep(every_s)

    # -- processes ----------------------------------------------------------------------------------------------

    async def kill_engine(self) -> bool:
        victim = await self._victim()
        if victim is not None:
            os.kill(victim["pid"], signal.SIGKILL)
            self.injected["engine killed"] += 1
        return victim is not None

    async def stop_engine(self) -> bool:
        """SIGSTOP, and SIGCONT later: before anybody has given it up, or after."""
        victim = await self._victim()
        if victim is None:
            return False
        pid, seconds = victim["pid"], self.source.uniform(1, 15)

        async def wake() -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), seconds)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(wake())
        self.asleep.add(task)
        task.add_done_callback(self.asleep.discard)
        self.injected["engine stopped 1 to 15 s"] += 1
        return True

    async def kill_manager(self) -> bool:
        os.kill(await asyncio.to_thread(self.service.manager_pid), signal.SIGKILL)
        self.injected["manager killed"] += 1
        return True

    async def _victim(self) -> dict[str, Any] | None:
        """An engine that answers, if another one does too: with none at all there is nothing to survive."""
        found = await self.engines()
        return self.source.choice(found) if len(found) > 1 else None

    async def engines(self) -> list[dict[str, Any]]:
        """{"actor", "pid", "requests", ...} of every engine that is ready and answers."""
        actors = await asyncio.to_thread(self.service.engines)

        async def ask(actor: Any) -> dict[str, Any]:
            return {**await asyncio.wait_for(actor.snapshot.remote(), CALL_S), "actor": actor}

        answers = await asyncio.gather(*map(ask, actors.values()), return_exceptions=True)
        found = [answer for answer in answers if isinstance(answer, dict) and answer["state"] == READY]
        return sorted(found, key=lambda engine: engine["id"])

    # -- streams ------------------------------------------------------------------------------------------------

    async def end_stream(self) -> bool:
        """An engine's streams end, all of them."""

        def end(actor: Any) -> None:
            from asyncio import Event

            def replace() -> None:
                for name, event in list(actor.wakeups.items()):
                    actor.wakeups[name] = Event()
                    event.set()

            actor.loop.call_soon_threadsafe(replace)

        return await self._at_an_engine(end, "streams ended")

    async def lose_items(self) -> bool:
        """What each of an engine's streams was about to carry is lost, with both ends alive."""

        def lose(actor: Any) -> None:
            boxes, left = actor.outboxes, set(actor.outboxes.clients)

            def take(name: str) -> list[Any]:
                outputs = type(boxes).take(boxes, name)
                if outputs and name in left:
                    left.discard(name)
                    return []
                return outputs

            boxes.take = take

        return await self._at_an_engine(lose, "stream items lost")

    async def silence_stream(self) -> bool:
        """An engine's streams carry nothing any more, with both ends alive."""

        def silence(actor: Any) -> None:
            for event in actor.wakeups.values():
                event.set = lambda: None

        return await self._at_an_engine(silence, "streams fallen silent")

    async def _at_an_engine(self, call: Callable[[Any], None], name: str) -> bool:
        found = [engine for engine in await self.engines() if engine["requests"]]
        if not found:
            return False
        await asyncio.wait_for(self.source.choice(found)["actor"].__ray_call__.remote(call), CALL_S)
        self.injected[name] += 1
        return True

    # -- deployments --------------------------------------------------------------------------------------------

    async def update(self) -> bool:
        """Redeploy everything for a harmless change, engine by engine."""
        self.updates += 1
        self.options["request_timeout_s"] = 3600 + self.updates
        return await self._redeploy("rolling update")

    async def change_replicas(self) -> bool:
        self.replicas = 5 - self.replicas
        return await self._redeploy(f"scaled to {self.replicas}")

    async def change_roles(self) -> bool:
        """Prefill and decode replicas, or every replica mixed."""
        ratio = "1:1" if self.settings.get("pd_ratio", "none") == "none" else "none"
        self.settings["pd_ratio"] = ratio
        await self.deploy()
        self.injected["roles given" if ratio != "none" else "roles taken back"] += 1
        return True

    async def _redeploy(self, name: str) -> bool:
        await self.deploy()
        self.injected[name] += 1
        return True

    async def deploy(self) -> None:
        user_config = {"llumnix": self.settings}
        await asyncio.to_thread(self.service.apply, {"num_replicas": self.replicas}, user_config, **self.options)

    # -- all the time -------------------------------------------------------------------------------------------

    async def _move_some(self) -> None:
        found = await self.engines()
        running = [(engine["id"], request["id"]) for engine in found for request in engine["requests"]]
        manager = serve.get_deployment_handle("Manager", APP_NAME)
        calls = []
        for at, request in self.source.sample(running, min(MOVES_AT_A_TIME, len(running))):
            others = [engine["id"] for engine in found if engine["id"] != at]
            if others:
                calls.append(manager.migrate.remote(request, self.source.choice(others), {}))
        await asyncio.gather(*(asyncio.wait_for(_answer(call), 10) for call in calls), return_exceptions=True)

    async def _pace(self) -> None:
        """New engines are as slow as the others."""
        seconds = self.step_s

        def slow(actor: Any) -> None:
            import time

            runner = actor.engine.executor
            if "execute" not in runner.__dict__:
                execute = type(runner).execute
                runner.execute = lambda plan: (time.sleep(seconds), execute(runner, plan))[1]

        calls = [engine["actor"].__ray_call__.remote(slow) for engine in await self.engines()]
        await asyncio.gather(*(asyncio.wait_for(call, CALL_S) for call in calls), return_exceptions=True)

    async def look(self) -> None:
        """Keep what is known only while its process lives."""
        handle = self.service.handle
        info = await asyncio.wait_for(_answer(handle.info.remote()), CALL_S)
        self.resumed[info["name"]] = max(info["resumed"], self.resumed.get(info["name"], 0))
        cluster = await asyncio.wait_for(_answer(handle.cluster.remote()), CALL_S)
        for move in cluster["moves"]:
            self.moves[move["request_id"], move["at"]] = move


async def _answer(call: Any) -> Any:
    return await call
