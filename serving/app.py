"""`build(args)`: the Serve application, for `serve run`, `ferry serve`, `blade_llm_server` and Python."""

# No `from __future__ import annotations`: Serve reads the type of build's argument as an object.

from typing import Any

from ray import serve

from engine.config import EngineConfig
from serving.autoscaling import autoscaling_config
from serving.config import AppArgs
from serving.ingress import Ingress
from serving.manager import Manager
from serving.nodes import cpus_per_replica
from serving.replica import EngineReplica
from serving.rescheduling import user_config

APP_NAME = "llm"
DRAIN_MARGIN_S = 10.0


def build(args: AppArgs) -> serve.Application:
    """Ingress -> engines, with the manager beside them. Its user_config may change while everything runs."""
    config = args.config
    values: dict[str, Any] = config.to_dict()
    manager = Manager.options(  # type: ignore[attr-defined]
        user_config=user_config(config)
    ).bind(config.log_level)
    engines = EngineReplica.options(  # type: ignore[attr-defined]
        placement_group_bundles=[{"CPU": cpus_per_replica(config)}],
        graceful_shutdown_timeout_s=config.drain_deadline_s + DRAIN_MARGIN_S,
        **number_of_replicas(config),
    ).bind(values, manager)
    ingress = Ingress.options(  # type: ignore[attr-defined]
        graceful_shutdown_timeout_s=config.request_timeout_s
    )
    return ingress.bind(values, manager, engines)


def number_of_replicas(config: EngineConfig) -> dict[str, Any]:
    """Serve's options: a fixed number, or limits between which serving.autoscaling decides."""
    if config.min_replicas is None or config.max_replicas is None:
        return {"num_replicas": config.num_replicas}
    settings = user_config(config)["llumnix"]
    return {"autoscaling_config": autoscaling_config(config.min_replicas, config.max_replicas, settings)}


def drain(seconds: float) -> None:
    """Tell every engine of the running application to let go of its requests within `seconds`. Blocks that long."""
    handle = serve.get_app_handle(APP_NAME)
    handle.drain.remote(seconds).result(timeout_s=seconds + 2)
