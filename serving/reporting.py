"""Pushes one process's load report and metrics to the manager.

On change, as far apart as the manager says (the more engines it has, the farther) unless the news is urgent; a
heartbeat each HEARTBEAT_S; at most one call in flight, and what happens meanwhile goes into the next one. A manager
that is down costs nothing: the next heartbeat tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llumnix.manager import MIN_INTERVAL_S
from serving import clock
from serving.receipt import receipt_line

logger = logging.getLogger("ferry.reporting")

HEARTBEAT_S = 2.0  # nothing has changed; the manager calls an engine suspect after 3 s
METRICS_S = 1.0  # between metrics that changed
REFRESH_S = 4.0  # unchanged metrics are sent again this often, so that the manager does not drop them
CALL_TIMEOUT_S = 2.0


class Reporter:
    """`make(sequence)` returns (report, metric families); the actor handle goes along while the manager lacks it."""

    def __init__(
        self,
        manager: Any,
        make: Callable[[int], tuple[dict[str, Any], list[Any]]],
        on_answer: Callable[[dict[str, Any]], None] = lambda answer: None,
    ):
        self.manager = manager
        self.make = make
        self.on_answer = on_answer
        self.actor: Any = None
        self.sequence = 0
        self.silent = False  # nothing is reported any more
        self.interval_s = MIN_INTERVAL_S
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def changed(self, urgent: bool = False) -> None:
        """There is something to report; what is urgent (a new state) does not wait for its turn."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def drained(self, receipt: dict[str, Any]) -> None:
        """The last words of an engine that is about to end: its load matters no more, its receipt does."""
        self.silent = True
        if self.manager is None:
            return
        try:
            await asyncio.wait_for(self.manager.drained.remote(receipt), CALL_TIMEOUT_S)
        except Exception as error:
            logger.info("%s; no answer from the manager: %s", receipt_line(receipt), type(error).__name__)

    async def run(self) -> None:
        known = False
        metrics_at = 0.0
        sent: list[Any] | None = None
        while self.manager is not None and not self.silent:
            self._changed.clear()
            self._urgent.clear()
            self.sequence += 1
            try:
                report, families = self.make(self.sequence)
            except Exception:
                logger.exception("the load report failed")
                await asyncio.sleep(MIN_INTERVAL_S)
                continue
            if not known:
                report["actor"] = self.actor
            now = clock.now()
            age = now - metrics_at
            if not known or age >= REFRESH_S or (age >= METRICS_S and families != sent):
                report["metrics"], metrics_at, sent = families, now, families
            try:
                answer = await asyncio.wait_for(self.manager.report.remote(report), CALL_TIMEOUT_S)
                self.on_answer(answer)
                self.interval_s = answer.get("interval_s", MIN_INTERVAL_S)
                known = bool(answer.get("known"))
                if not known:  # it has restarted: introduce this engine at once, an idle one too
                    self.changed(urgent=True)
            except Exception as error:  # down, restarting or slow
                logger.debug("no answer from the manager: %s", type(error).__name__)
                known = False
            await asyncio.sleep(MIN_INTERVAL_S)
            await self._pause()

    async def _pause(self) -> None:
        """Until the next report is due."""
        if self.interval_s > MIN_INTERVAL_S:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), self.interval_s - MIN_INTERVAL_S)
        if not self._urgent.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, HEARTBEAT_S - self.interval_s))
