"""The engine as a Ray actor: nothing but the process around an EngineNode."""

from __future__ import annotations

import os
from typing import Any

import ray

from serving.engine_node import EngineNode

# The handle to the manager counts what it has sent, by default ten times a second: a quarter of what an idle engine
# costs. Serve reads this when it is first imported, which in an engine's process is with that handle.
os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "2000")


@ray.remote(max_concurrency=1000)  # type: ignore[call-overload]
class EngineActor(EngineNode):
    async def start(self) -> dict[str, Any]:
        self.reporter.actor = ray.get_runtime_context().current_actor
        return await super().start()
