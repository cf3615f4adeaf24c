"""The lifecycle of one engine: a Serve replica that starts, watches and drains an engine actor in its placement group.

Serve decides how many there are and replaces them; tokens never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineConfig
from serving.engine_actor import EngineActor
from serving.logs import configure_logging

logger = logging.getLogger("ferry.replica")

ACTOR_NAMESPACE = "ferry"
PING_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 2.0
UNREACHABLE_RETRY_S = 0.5


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
        self.actor = EngineActor.options(  # type: ignore[attr-defined]
            name=f"engine:{self.id}",
            namespace=ACTOR_NAMESPACE,
            num_cpus=group.bundle_specs[0].get("CPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0),
        ).remote(config, self.id, manager)
        try:
            await self.actor.start.remote()
        except Exception as error:
            ray.kill(self.actor)
            raise RuntimeError(_cause(error)) from None
        self._watch = asyncio.create_task(self._until_death())

    async def check_health(self) -> None:
        """Raises when the engine failed or its step hangs (`step_timeout_s`); Serve then replaces this replica."""
        await asyncio.wait_for(self.actor.ping.remote(), PING_TIMEOUT_S)

    async def __del__(self) -> None:
        """Drain a live engine. Returns at once for one that is dead, hung or empty: Serve calls this for unhealthy
        replicas too and holds their placement group, which the replacement needs, until it returns."""
        actor = getattr(self, "actor", None)
        if actor is None:
            return
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.cancel()
        try:
            state = await asyncio.wait_for(actor.ping.remote(), 1.0)
            if state["open"]:
                ended = await actor.drain.remote(self.config.drain_deadline_s, await application_is_going())
                logger.info("engine %s drained: %d requests had to end early", self.id, ended)
        except Exception as error:
            logger.warning("engine %s is not drained: %s", self.id, type(error).__name__)
        ray.kill(actor)

    async def _until_death(self) -> None:
        """End this process when the engine's dies: Serve sees a dead replica sooner than three failed health checks."""
        await until_death(self.actor)
        logger.error("engine %s died", self.id)
        os._exit(1)


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


async def application_is_going() -> bool:
    """Whether the whole application is being deleted, not only the replica this runs in."""
    name = serve.get_replica_context().app_name
    try:
        status = await asyncio.wait_for(asyncio.to_thread(serve.status), STATUS_TIMEOUT_S)
    except Exception as error:
        logger.warning("no answer from Serve's controller: %s", type(error).__name__)
        return False
    application = status.applications.get(name)
    return application is None or application.status == ApplicationStatus.DELETING


def _cause(error: Exception) -> str:
    """The engine's own sentence, out of Ray's wrapping."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
