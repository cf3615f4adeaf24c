"""The time of everything that runs on an event loop."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Seconds of the running loop's clock: monotonic, and virtual where a simulation runs the loop."""
    return asyncio.get_running_loop().time()
