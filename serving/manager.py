"""The manager as a Serve deployment: a thin adapter around llumnix.manager, plus the metrics of all processes.

One replica, soft state: after its restart engines report with their next change or heartbeat (two seconds), and
ingresses go on meanwhile with the view they have. Ingresses follow by a long poll that answers within POLL_S, never by
an endless stream: an open stream would hold up shutdown and updates.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from ray import serve

from llumnix.manager import GONE_S, ClusterView
from serving.metrics import Family, render

POLL_S = 1.0
GATHER_S = 0.05  # between answers to an ingress: changes that come meanwhile are answered together


@serve.deployment(
    name="Manager",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=10_000,
    graceful_shutdown_timeout_s=2,
    graceful_shutdown_wait_loop_s=0.2,
    health_check_period_s=1,
    health_check_timeout_s=5,
)
class Manager:
    def __init__(self) -> None:
        self.cluster = ClusterView(started=time.time())
        self.sources: dict[str, tuple[float, list[Family]]] = {}  # process -> when, its metrics
        self.changed = asyncio.Event()

    async def report(self, message: dict[str, Any]) -> dict[str, Any]:
        """A load report of an engine, with its metrics now and then."""
        before = self.cluster.version
        answer = self.cluster.on_report(message, time.time())
        if "metrics" in message:
            self._take_metrics(message["engine"], message["metrics"])
        self._notify(before)
        return answer

    async def metrics(self, source: str, families: list[Family]) -> None:
        """The metrics of an ingress."""
        self._take_metrics(source, families)

    async def view(self, version: int, known: list[str]) -> dict[str, Any]:
        """The cluster view, soon after it differs from `version`, after POLL_S at the latest; without the actors of
        the engines in `known`. Busy engines change it all the time: every answer waits for what GATHER_S brings."""
        before = self.cluster.version
        self.cluster.tick(time.time())
        self._notify(before)
        if version == self.cluster.version:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), POLL_S)
        await asyncio.sleep(GATHER_S)
        return self.cluster.view(time.time(), known)

    async def metrics_text(self) -> bytes:
        """All processes' metrics in Prometheus's text format."""
        return render(families for _, families in self.sources.values())

    async def snapshot(self) -> dict[str, Any]:
        """The cluster for people."""
        return self.cluster.snapshot(time.time())

    def _take_metrics(self, source: str, families: list[Family]) -> None:
        now = time.time()
        self.sources[source] = (now, families)
        for name in [name for name, (when, _) in self.sources.items() if now - when > GONE_S]:
            del self.sources[name]

    def _notify(self, before: int) -> None:
        if self.cluster.version != before:
            self.changed.set()
            self.changed = asyncio.Event()
