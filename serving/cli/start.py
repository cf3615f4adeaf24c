"""Starting the service on this machine, waiting until it answers, and stopping it.

Phases are printed while they run; the last line before the service waits says where to send the first request.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from types import FrameType
from typing import Any

from engine.config import ConfigError
from serving.checks import check_port, engines_text
from serving.cli.failure import cause_sentence
from serving.config import AppArgs
from serving.config_file import APP_NAME
from serving.plan import Plan

START_LIMIT_S = 1800.0
HEALTH_LIMIT_S = 120.0
DRAIN_LIMIT_S = 5.0
DELETE_LIMIT_S = 1.0  # the end of DRAIN_LIMIT_S, in which the application is deleted
POLL_S = 0.5


class Stop(BaseException):
    """A signal asked the service to end. Not an Exception, so that no handler on the way swallows it."""


def serve(plan: Plan) -> int:
    """Run the service until a signal. Returns the exit code."""
    check_port(plan.config.host, plan.config.port)
    running = False
    try:
        _connect(plan)
        _on_signals()
        _deploy(plan)
        _wait_until_healthy(plan)
        running = True
        print(ready_line(plan), flush=True)
        while True:
            signal.pause()
    except (Stop, KeyboardInterrupt):
        print(f"Stopping; running requests get {DRAIN_LIMIT_S:g} s.", file=sys.stderr, flush=True)
        _stop(running)
        return 0
    except ConfigError:
        _stop(running)
        raise


def ready_line(plan: Plan) -> str:
    """Where to send the first request, as one command."""
    messages = [{"role": "user", "content": "Tell me the capital of France."}]
    body = {"model": plan.config.served_model_name[0], "messages": messages, "temperature": 0, "max_tokens": 64}
    url = f"{address(plan)}/v1/chat/completions"
    return f"Ferry is ready: curl {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def address(plan: Plan) -> str:
    host = plan.config.host
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{plan.config.port}"


def phase(text: str) -> None:
    print(text, flush=True)


def _on_signals() -> None:
    """The first SIGINT or SIGTERM drains, a second one ends at once."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        raise Stop

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def _connect(plan: Plan) -> None:
    """Start Ray and its proxy here, or join the cluster of RAY_ADDRESS. A new cluster has token authentication on."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    debug = plan.config.log_level == "DEBUG"
    level = logging.DEBUG if debug else logging.WARNING
    own: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    import ray
    from ray import serve as ray_serve

    phase("Starting Ray")
    try:
        ray.init(log_to_driver=debug, logging_level=level, namespace="serve", **own)
    except Exception as error:
        raise ConfigError(f"Ray did not start: {error}") from error
    logging.getLogger("ray.serve").setLevel(level)
    phase("Starting the HTTP proxy")
    try:
        ray_serve.start(
            proxy_location=plan.proxy_location, http_options=plan.http_options, logging_config=plan.logging_config
        )
    except Exception as error:
        raise ConfigError(f"the HTTP proxy did not start: {cause_sentence(str(error))}") from error


def _deploy(plan: Plan) -> None:
    from ray import serve as ray_serve

    from serving.app import build

    phase(f"Loading {plan.config.model} into {engines_text(plan.config)} engine(s)")
    failure: list[Exception] = []

    def run() -> None:
        try:
            ray_serve.run(build(AppArgs.from_config(plan.config)), name=APP_NAME, route_prefix="/", blocking=False)
        except Exception as error:
            failure.append(error)

    worker = threading.Thread(target=run, name="serve-run", daemon=True)
    worker.start()
    deadline = time.monotonic() + START_LIMIT_S
    shown = ""
    while worker.is_alive():
        worker.join(POLL_S)
        state = _deployments()
        if state and state != shown:
            phase(f"  {state}")
            shown = state
        if time.monotonic() > deadline:
            raise ConfigError(f"the service did not start within {START_LIMIT_S:g} s ({state})")
    if failure:
        raise ConfigError(cause_sentence(_status_messages() or str(failure[0]))) from failure[0]


def _deployments() -> str:
    """`Ingress 1/1, Engine 0/2`: running of wanted replicas, from Serve's status."""
    from ray import serve as ray_serve

    try:
        application = ray_serve.status().applications[APP_NAME]
    except Exception:  # the application is not registered yet
        return ""
    parts = []
    for name, deployment in application.deployments.items():
        counts = {str(state).split(".")[-1]: number for state, number in deployment.replica_states.items()}
        wanted = sum(counts.values()) - counts.get("STOPPING", 0)
        if wanted:
            parts.append(f"{name} {counts.get('RUNNING', 0)}/{wanted}")
    return ", ".join(parts)


def _status_messages() -> str:
    from ray import serve as ray_serve

    try:
        application = ray_serve.status().applications[APP_NAME]
    except Exception:  # Serve itself is gone
        return ""
    failed = [d.message for d in application.deployments.values() if "FAILED" in str(d.status) and d.message]
    return "\n".join(failed) or application.message


def _wait_until_healthy(plan: Plan) -> None:
    phase("Waiting for /health")
    deadline = time.monotonic() + HEALTH_LIMIT_S
    last = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address(plan)}/health", timeout=5) as response:
                if response.status == 200:
                    return
                last = f"status {response.status}"
        except urllib.error.HTTPError as error:
            last = f"status {error.code}"
        except OSError as error:
            last = str(error)
        time.sleep(POLL_S)
    raise ConfigError(f"GET {address(plan)}/health did not become 200 within {HEALTH_LIMIT_S:g} s ({last})")


def _stop(running: bool) -> None:
    """Drain and delete the application within DRAIN_LIMIT_S, then leave Ray; a cluster started here ends with that."""
    import ray
    from ray import serve as ray_serve

    from serving.app import drain

    def delete() -> None:
        try:
            if running:
                drain(DRAIN_LIMIT_S - DELETE_LIMIT_S)
            ray_serve.delete(APP_NAME)
        except Exception as error:
            print(f"ferry: stopping: {cause_sentence(str(error))}", file=sys.stderr, flush=True)

    if ray.is_initialized():
        worker = threading.Thread(target=delete, name="serve-stop", daemon=True)
        worker.start()
        worker.join(DRAIN_LIMIT_S)
        ray.shutdown()
