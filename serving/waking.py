"""What an ingress does while there is no engine because none was needed: it has one started, and holds requests.

Engines are reached by plain actor calls, which Serve does not see. So one call goes through Serve: without a replica it
queues there, and Serve starts one for it, whatever the scaling policy says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger("ferry.ingress")

POLL_S = 0.05
RETRY_S = 1.0  # between calls that come back while there is no engine to be seen yet


class Waking:
    """`wake` returns once a replica runs, and raises when none can be had. `ready`: an engine takes requests.

    At most `limit` requests are held, each for `seconds`.
    """

    def __init__(self, wake: Callable[[], Awaitable[Any]], ready: Callable[[], bool], limit: int, seconds: float):
        self.wake = wake
        self.ready = ready
        self.limit = limit
        self.seconds = seconds
        self.held = 0
        self.needed = False  # by requests that are not held here
        self._over: asyncio.Future[str] | None = None  # of the attempt under way: why it failed, or ""
        self._task: asyncio.Task[None] | None = None

    async def hold(self) -> str:
        """Wait until an engine is ready. Returns why there is none, or nothing when there is one."""
        if self.ready():
            return ""
        if self.held >= self.limit:
            return f"{self.held} requests wait for a replica to start already"
        self.held += 1
        try:
            return await asyncio.wait_for(asyncio.shield(self._attempt()), self.seconds)
        except TimeoutError:
            return f"no replica started within {self.seconds:g} s"
        finally:
            self.held -= 1

    def need(self, needed: bool) -> None:
        """Requests that were accepted earlier have no engine any more, or have one again."""
        self.needed = needed
        if needed:
            self._attempt()

    def give_up(self, reason: str) -> None:
        """Nobody is held any longer."""
        self.needed = False
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    def _attempt(self) -> asyncio.Future[str]:
        if self._over is None or self._over.done():
            self._over = asyncio.get_running_loop().create_future()
            self._task = asyncio.get_running_loop().create_task(self._run(self._over))
        return self._over

    async def _run(self, over: asyncio.Future[str]) -> None:
        reason = ""
        try:
            while not self.ready() and await self._call(over):
                pass
        except Exception as error:
            logger.warning("no replica can be started: %s", error)
            reason = f"no replica can be started: {type(error).__name__}"
        finally:
            if not over.done():
                over.set_result(reason)

    async def _call(self, over: asyncio.Future[str]) -> bool:
        """One call, and the time until what it started can be seen. False when nobody needs it any more."""
        call = asyncio.ensure_future(self.wake())
        returned = None
        try:
            while not self.ready():
                if over.done() or not (self.held or self.needed):
                    return False
                if call.done():
                    call.result()
                    returned = returned or asyncio.get_running_loop().time()
                    if asyncio.get_running_loop().time() - returned > RETRY_S:
                        return True
                await asyncio.sleep(POLL_S)
            return True
        finally:
            call.cancel()
