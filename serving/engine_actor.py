"""The engine as a Ray actor: nothing but the process around an EngineNode."""

from __future__ import annotations

from typing import Any

import ray

from serving.engine_node import EngineNode


@ray.remote(max_concurrency=1000)  # type: ignore[call-overload]
class EngineActor(EngineNode):
    async def start(self) -> dict[str, Any]:
        self.reporter.actor = ray.get_runtime_context().current_actor
        return await super().start()
