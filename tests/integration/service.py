"""A real service for tests: a private local Ray, Serve on a free loopback port, our application."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from ray.util import list_named_actors

from serving.app import APP_NAME, build
from serving.config import AppArgs
from serving.replica import ACTOR_NAMESPACE

_folders: list[str] = []  # of the clusters started here


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_cluster(num_cpus: int = 2) -> int:
    """A private Ray and Serve's proxy; returns the HTTP port."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    folder = tempfile.mkdtemp(prefix="ferry-", dir="/tmp")  # short: Ray's sockets live below it
    _folders.append(folder)
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=150 << 20,
        _temp_dir=folder,
        log_to_driver=bool(os.environ.get("FERRY_TEST_LOGS")),
        namespace="serve",
    )
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return port


@contextmanager
def another_node(num_cpus: int) -> Iterator[subprocess.Popen[bytes]]:
    """A node that joins the cluster as those of Kubernetes do; the process is what SIGTERM goes to."""
    ray_command = str(Path(sys.executable).parent / "ray")
    address = ray.get_runtime_context().gcs_address
    words = ("start", f"--address={address}", f"--num-cpus={num_cpus}", "--object-store-memory=80000000", "--block")
    words += (f"--dashboard-agent-listen-port={free_port()}",)  # the usual one may belong to another cluster's node
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_TMPDIR", "RAY_ADDRESS")}
    known = living_nodes()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([ray_command, *words], env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: process.poll() is not None or living_nodes() > known, 60, "another node")
            output.seek(0)
            assert process.poll() is None, output.read().decode()
            yield process
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait(10)
            wait_for(lambda: living_nodes() <= known, 60, "the end of the node")


def stop_cluster() -> None:
    serve.shutdown()
    ray.shutdown()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@dataclass
class Service:
    """The application under test. `ensure` starts it, and keeps it while the options stay the same."""

    port: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        return "tiny"

    @property
    def defaults(self) -> dict[str, Any]:
        level = "INFO" if os.environ.get("FERRY_TEST_LOGS") else "WARNING"
        small = {"swap_space": 0.05, "threads": 1, "num_cpus_per_replica": 1}
        return {"served_model_name": [self.model], "log_level": level, **small}

    def ensure(self, **options: Any) -> Service:
        """The application with these options, all its engines ready and idle."""
        if options != self.options:
            self.delete()
            self.update(**options)
        self.wait_ready(replicas=options.get("num_replicas", 1))
        self.wait_idle()
        return self

    def update(self, **options: Any) -> None:
        """Deploy these options over what runs; returns when Serve says that the application runs."""
        args = AppArgs.model_validate({**self.defaults, **options})
        self.options = options
        serve.run(build(args), name=APP_NAME, route_prefix="/", blocking=False)

    def apply(self, engines: dict[str, Any], manager: dict[str, Any] | None = None, **options: Any) -> None:
        """Deploy as `serve deploy` does, with `engines` as Serve's options of the deployment Engine and `manager` as
        the Manager's user_config; returns when Serve has taken note. Options that have not changed leave everything
        running."""
        args = {**self.defaults, **options}
        deployments: list[dict[str, Any]] = [{"name": "Engine", **engines}]
        if manager is not None:
            deployments.append({"name": "Manager", "user_config": manager})
        application = {
            "name": APP_NAME,
            "route_prefix": "/",
            "import_path": "serving.app:build",
            "args": args,
            "deployments": deployments,
        }
        if "deployments" not in self.options:
            self.delete()
        self.options = {**options, "deployments": engines}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def delete(self) -> None:
        if self.options:
            serve.delete(APP_NAME)
        self.options = {}

    @property
    def handle(self) -> Any:
        return serve.get_app_handle(APP_NAME)

    def wait_ready(self, replicas: int | None = None, timeout_s: float = 60.0) -> None:
        """Until GET /health is 200 and, if asked for, that many engines are ready in the manager's view."""
        wait_for(lambda: httpx.get(f"{self.url}/health", timeout=5).status_code == 200, timeout_s, "/health 200")
        if replicas is not None:
            wait_for(lambda: self.num_ready() == replicas, timeout_s, f"{replicas} ready engines")

    def cluster(self) -> dict[str, Any]:
        return self.handle.cluster.remote().result(timeout_s=10)

    def num_ready(self) -> int:
        return sum(replica["state"] == "ready" for replica in self.cluster()["replicas"])

    def engines(self) -> dict[str, Any]:
        """Engine id -> actor, of the engines alive."""
        found = {}
        for entry in list_named_actors(all_namespaces=True):
            if entry["namespace"] == ACTOR_NAMESPACE and entry["name"].startswith("engine:"):
                found[entry["name"].removeprefix("engine:")] = ray.get_actor(entry["name"], ACTOR_NAMESPACE)
        return found

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Engine id -> its process id and requests."""
        actors = self.engines()
        return dict(zip(actors, ray.get([a.snapshot.remote() for a in actors.values()], timeout=10), strict=True))

    @contextmanager
    def paced(self, seconds: float) -> Iterator[None]:
        """Every step of the engines takes at least this long."""

        def slow(actor: Any) -> None:
            import time

            runner = actor.engine.executor
            execute = type(runner).execute
            runner.execute = lambda plan: (time.sleep(seconds), execute(runner, plan))[1]

        def restore(actor: Any) -> None:
            if hasattr(actor, "engine"):  # else it still starts
                actor.engine.executor.__dict__.pop("execute", None)

        self.inside(slow)
        try:
            yield
        finally:
            for actor in self.engines().values():
                with suppress(RayError):  # some may be about to die
                    ray.get(actor.__ray_call__.remote(restore), timeout=5)

    def inside(self, call: Callable[[Any], Any]) -> dict[str, Any]:
        """Run a function in every engine's process with its EngineActor; results by engine id.

        It must be a nested function: those of modules are looked up there by name.
        """
        actors = self.engines()
        results = ray.get([actor.__ray_call__.remote(call) for actor in actors.values()], timeout=10)
        return dict(zip(actors, results, strict=True))

    def manager_pid(self) -> int:
        """The manager's process: Ray names processes after the actor they host."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "ServeReplica:llm:Manager" in " ".join(process.cmdline()):
                    return process.pid
        raise AssertionError("no manager process")

    def open_requests(self) -> int:
        return sum(len(snapshot["requests"]) for snapshot in self.snapshots().values())

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """No engine has a request, and all blocks are free."""
        wait_for(lambda: self.open_requests() == 0, timeout_s, "no open requests")

        def all_free() -> bool:
            blocks = [r["blocks"] for r in self.cluster()["replicas"] if r["state"] == "ready"]
            return all(b["free"] == b["total"] for b in blocks)

        wait_for(all_free, timeout_s, "free blocks == total blocks")


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until the condition held; AssertionError after timeout_s."""
    started = time.monotonic()
    last: Exception | None = None
    while time.monotonic() - started < timeout_s:
        try:
            if condition():
                return time.monotonic() - started
        except Exception as error:  # the thing waited for may not exist yet
            last = error
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {timeout_s:g} s ({last!r})")
