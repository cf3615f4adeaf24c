"""The lifecycle of one engine: a Serve replica that starts, watches and drains an engine actor in its placement group.

Serve decides how many there are and replaces them; tokens never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineConfig
from serving.application import application_is_going
from serving.engine_actor import EngineActor
from serving.logs import configure_logging
from serving.nodes import share_here
from serving.watch import Watch, cause

logger = logging.getLogger("ferry.replica")

ACTOR_NAMESPACE = "ferry"


@serve.deployment(
    name="Engine",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=1000,
    health_check_period_s=1,
    health_check_timeout_s=10,
    graceful_shutdown_wait_loop_s=0.2,
    max_constructor_retry_count=2,
)
class EngineReplica:
    """One engine's supervisor. Its constructor returns when the engine can step, so Running means ready."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: dict[str, Any], manager: Any
    ) -> None:
        self.config = EngineConfig(**config)
        configure_logging(self.config.log_level)
        self.id = serve.get_replica_context().replica_id.unique_id
        group = ray.util.get_current_placement_group()
        assert group is not None  # build() gives every replica one
        cpus = group.bundle_specs[0].get("CPU", 0)
        self.actor = EngineActor.options(  # type: ignore[attr-defined]
            name=f"engine:{self.id}",
            namespace=ACTOR_NAMESPACE,
            num_cpus=cpus,
            num_gpus=group.bundle_specs[0].get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0),
        ).remote(config, self.id, manager, share_here(self.config, cpus))
        try:
            self.pid = (await self.actor.start.remote())["pid"]
        except Exception as error:
            ray.kill(self.actor)
            raise RuntimeError(cause(error)) from None
        self.leaving = False
        self.watch = Watch(self.actor, 2 * self.config.lease_s)
        self._watching = asyncio.create_task(self.watch.run())
        self._watching.add_done_callback(self._on_loss)

    async def check_health(self) -> None:
        """Raises when the engine failed or its step hangs (`step_timeout_s`); Serve then replaces this replica."""
        if self.watch.error:
            raise RuntimeError(self.watch.error)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the scaling policy looks at (serving.autoscaling); not older than the last ping."""
        answer = self.watch.answer
        return {name: float(answer.get(name, 0)) for name in ("free_share", "running", "waiting")} if answer else {}

    async def wake(self) -> None:
        """Does nothing. Called while there is no replica it queues, and Serve starts one."""

    async def __del__(self) -> None:
        """Drain a live engine. Returns at once for one that is dead, unwell or empty: Serve calls this for unhealthy
        replicas too and holds their placement group, which the replacement needs, until it returns."""
        watching = getattr(self, "_watching", None)
        if watching is None:  # it never started
            return
        self.leaving = True
        if not watching.done() and not self.watch.error:
            draining = asyncio.ensure_future(self._drain())
            await asyncio.wait([draining, watching], return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
        if watching.done():
            self._end_process()
        ray.kill(self.actor)

    async def _drain(self) -> None:
        try:
            receipt = await self.actor.drain.remote(self.config.drain_deadline_s, await application_is_going())
            logger.debug("engine %s is empty: %s", self.id, receipt)  # the manager logs it with what clients saw
        except Exception as error:
            logger.warning("engine %s is not drained: %s", self.id, type(error).__name__)

    def _on_loss(self, watching: asyncio.Task[str]) -> None:
        """End this process with its engine."""
        if self.leaving:
            return
        reason = "the watch failed" if watching.cancelled() or watching.exception() else watching.result()
        logger.error("engine %s is lost: %s", self.id, reason)
        self._end_process()
        os._exit(1)

    def _end_process(self) -> None:
        """At once, and although it may be stopped. It is on this node: replica and engine share a bundle."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
