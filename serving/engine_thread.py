"""The thread that owns an Engine: it runs queued calls between steps and steps while there is work.

When there is none it first verifies what there is to verify (engine/verification.py) and then blocks on the queue, so
an idle engine costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.engine import Engine, EngineStats
from engine.scheduler import Event

STATS_AGE_S = 0.05
STUCK_WAIT_S = 0.005

logger = logging.getLogger("ferry.engine")


class EngineThread(threading.Thread):
    """Builds an engine and runs it. `on_events`, `on_failure` and `on_look` (whenever there are new stats) are called
    on this thread."""

    def __init__(
        self,
        build: Callable[[], Engine],
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        on_look: Callable[[Engine], None] = lambda engine: None,
    ):
        super().__init__(name="engine", daemon=True)
        self._build = build
        self.on_events = on_events
        self.on_failure = on_failure
        self.on_look = on_look
        self.ready: Future[Engine] = Future()  # the engine, or the exception of its start-up
        self.failure: BaseException | None = None
        self.stats: EngineStats | None = None  # a snapshot at most STATS_AGE_S old while stepping
        self._stats_at = 0.0
        self._step_started: float | None = None  # monotonic; None between steps
        self._over = threading.Event()  # nothing runs any more
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any] | None] | None] = queue.SimpleQueue()

    def post(self, call: Callable[[], Any]) -> None:
        """Run `call` between steps; nobody waits for it."""
        self._put(call, None)

    async def call(self, call: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Run `call` between steps and await its result. Raises RuntimeError once the engine is over."""
        future: Future[Any] = Future()
        self._put(call, future)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    def stop(self) -> None:
        self._inbox.put(None)

    def stalled_s(self) -> float:
        """Seconds the step under way has taken; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._over.set()
            self._refuse_rest()

    def _run(self) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        try:
            engine = self._build()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.stats = engine.stats()
        self.ready.set_result(engine)
        try:
            self._loop(engine)
        except BaseException as error:  # the executor's state is lost: everything here must go elsewhere
            self.failure = error
            logger.exception("the engine failed")
            self.on_failure(error)

    def _put(self, call: Callable[[], Any], future: Future[Any] | None) -> None:
        self._inbox.put((call, future))
        if self._over.is_set():
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Whoever still waits learns at once that nothing runs any more."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None and item[1] is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(RuntimeError("the engine is not running any more"))

    def _loop(self, engine: Engine) -> None:
        stuck = False  # there is work, but none of it can run (all of it is held)
        while self._run_inbox(engine, stuck):
            stuck = verifying = False
            if engine.has_work:
                self._step_started = time.monotonic()
                events = engine.step()
                self._step_started = None
                stuck = engine.last_step_tokens == 0
                if events:
                    self.on_events(events)
            elif engine.verifier.has_work:
                self._step_started = time.monotonic()
                engine.verifier.step()
                self._step_started = None
                verifying = engine.verifier.has_work
            now = time.monotonic()
            if now - self._stats_at > STATS_AGE_S or not (engine.has_work or verifying):
                self.stats, self._stats_at = engine.stats(), now
                self.on_look(engine)

    def _run_inbox(self, engine: Engine, stuck: bool) -> bool:
        """Run what is queued, waiting for something if there is no work; False to stop."""
        wait = stuck or not (engine.has_work or engine.verifier.has_work)
        while True:
            try:
                item = self._inbox.get(block=wait, timeout=STUCK_WAIT_S if stuck else None)
            except queue.Empty:
                return True
            if item is None:
                return False
            wait = False
            call, future = item
            if future is not None and not future.set_running_or_notify_cancel():
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
