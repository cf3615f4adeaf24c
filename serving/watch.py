"""Whether an engine lives, as the replica that supervises it sees it.

An engine whose process is gone, or has been silent for two leases, has lost its requests anyway: their ingresses have
started them again elsewhere. So its supervisor ends with it, and Serve starts another at once, which is sooner than
three failed health checks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import ActorDiedError

logger = logging.getLogger("ferry.replica")

PING_S = 1.0  # between pings, and the longest a ping may take before it counts as silence
MIN_SILENT_PINGS = 3  # one may be lost to this process's own sleep
UNREACHABLE_RETRY_S = 0.5


class Watch:
    """Pings one engine. `answer` is its last answer; `error` why it is unwell, while it is."""

    def __init__(self, actor: Any, silence_s: float):
        self.actor = actor
        self.silence_s = silence_s
        self.answer: dict[str, Any] = {}
        self.error = ""

    async def run(self) -> str:
        """Returns what became of the engine, once it is dead or has been silent for silence_s."""
        death = asyncio.create_task(until_death(self.actor))
        silent = 0
        try:
            while not death.done():
                try:
                    self.answer, self.error, silent = await self._ping(), "", 0
                except TimeoutError:
                    silent += 1
                    if silent >= max(MIN_SILENT_PINGS, self.silence_s / PING_S):
                        return f"it has been silent for {silent * PING_S:g} s"
                    continue
                except ActorDiedError:
                    pass
                except Exception as error:
                    self.error, silent = cause(error), 0
                await asyncio.wait([death], timeout=PING_S)
            return "its process died"
        finally:
            death.cancel()

    async def _ping(self) -> dict[str, Any]:
        answer: dict[str, Any] = await asyncio.wait_for(self.actor.ping.remote(), PING_S)
        return answer


async def until_death(actor: Any) -> None:
    """Returns once an engine actor is dead. One that only cannot be reached for a while is asked again."""
    while True:
        try:
            await actor.until_death.remote()
        except ActorDiedError:
            return
        except Exception as error:
            logger.warning("the engine does not answer: %s", type(error).__name__)
        await asyncio.sleep(UNREACHABLE_RETRY_S)


def cause(error: Exception) -> str:
    """The engine's own sentence, out of Ray's wrapping."""
    inner = getattr(error, "cause", None) or error
    return (str(inner).strip().splitlines() or [type(inner).__name__])[-1]
