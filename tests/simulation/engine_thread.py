"""What serving.engine_thread.EngineThread is to a node, on the virtual loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any

from engine.engine import Engine, EngineStats
from engine.scheduler import Event
from serving import clock
from serving.engine_thread import STATS_AGE_S

STUCK_WAIT_S = 0.05

logger = logging.getLogger("ferry.engine")


class SimulatedThread:
    """Runs queued calls between steps; a step takes virtual time, in which the node's loop goes on.

    What a step computes is there at its beginning or at its end, by chance: both are within what a thread may do.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        on_look: Callable[[Engine], None],
        *,
        random: Random,
        step_s: float,
        after_step: Callable[[Engine], None],
    ):
        self._build = build
        self.on_events, self.on_failure, self.on_look = on_events, on_failure, on_look
        self.random = random
        self.step_s = step_s
        self.after_step = after_step
        self.before_step: list[Callable[[], Any]] = []  # run once, with no call between them and the step
        self.slow_s = 0.0  # the next step takes this much longer
        self.ready: Future[Engine] = Future()
        self.failure: BaseException | None = None
        self.stats: EngineStats | None = None
        self._stats_at = 0.0
        self._step_started: float | None = None
        self._over = False
        self._inbox: deque[tuple[Callable[[], Any], asyncio.Future[Any] | None] | None] = deque()
        self._arrived: asyncio.Future[None] | None = None

    def start(self) -> None:
        asyncio.get_running_loop().create_task(self._run())

    def post(self, call: Callable[[], Any]) -> None:
        self._put((call, None))

    async def call(self, call: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put((call, future))
        return await asyncio.wait_for(future, timeout_s)

    def stop(self) -> None:
        self._put(None)

    def stalled_s(self) -> float:
        return 0.0 if self._step_started is None else clock.now() - self._step_started

    def _put(self, item: tuple[Callable[[], Any], asyncio.Future[Any] | None] | None) -> None:
        self._inbox.append(item)
        if self._over:
            self._refuse_rest()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def _run(self) -> None:
        engine = self._build()
        self.stats = engine.stats()
        self.ready.set_result(engine)
        try:
            await self._loop(engine)
        except Exception as error:
            self.failure = error
            self.on_failure(error)
        self._over = True
        self._refuse_rest()

    async def _loop(self, engine: Engine) -> None:
        stuck = False
        while True:
            if stuck or not engine.has_work:
                await self._wait(STUCK_WAIT_S if stuck else None)
            stuck = False
            if not self._run_inbox():
                return
            if engine.has_work:
                stuck = await self._step(engine)
            self.after_step(engine)
            now = clock.now()
            if now - self._stats_at > STATS_AGE_S or not engine.has_work:
                self.stats, self._stats_at = engine.stats(), now
                self.on_look(engine)

    async def _step(self, engine: Engine) -> bool:
        seconds = self.step_s * self.random.uniform(0.5, 1.5) + self.slow_s
        self._step_started, self.slow_s = clock.now(), 0.0
        early = self.random.random() < 0.5
        if not early:
            await asyncio.sleep(seconds)
        for call in self.before_step:
            call()
        self.before_step.clear()
        events = engine.step()
        stuck = engine.last_step_tokens == 0
        if early and not stuck:
            await asyncio.sleep(seconds)
        self._step_started = None
        if events:
            self.on_events(events)
        return stuck

    async def _wait(self, seconds: float | None) -> None:
        if self._inbox:
            return
        self._arrived = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._arrived], timeout=seconds)

    def _run_inbox(self) -> bool:
        """Run what is queued; False to stop."""
        while self._inbox:
            item = self._inbox.popleft()
            if item is None:
                return False
            call, future = item
            if future is not None and future.done():
                continue  # whoever asked has given up
            try:
                result = call()
            except Exception as error:
                if future is None:
                    logger.exception("a call between steps failed")
                else:
                    future.set_exception(error)
            else:
                if future is not None:
                    future.set_result(result)
        return True

    def _refuse_rest(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if item is not None and item[1] is not None and not item[1].done():
                item[1].set_exception(RuntimeError("the engine is not running any more"))
