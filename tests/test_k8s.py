"""The manifest for Kubernetes: what KubeRay, Serve and our own checks say of it, and that its times fit together."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from serving.app import DRAIN_MARGIN_S
from serving.config import AppArgs
from serving.config_file import lint, load_yaml

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT.parent / "shared" / "data" / "rayservice-v1.schema.json"
OF_KUBERNETES = {"min_replicas", "max_replicas", "threads"}  # arguments that configs/qwen.yaml has not


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "k8s" / "rayservice.yaml").read_text())


@pytest.fixture
def cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["rayClusterConfig"]


@pytest.fixture
def application(manifest: dict[str, Any]) -> dict[str, Any]:
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    return application


@pytest.fixture
def workers(cluster: dict[str, Any]) -> dict[str, Any]:
    (group,) = cluster["workerGroupSpecs"]
    return group


def pod(group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its specification and its one container."""
    spec = group["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def test_kuberay_takes_it(manifest: dict[str, Any]) -> None:
    if not SCHEMA.exists():
        pytest.skip(f"KubeRay's schema is not at {SCHEMA}")
    schema = Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert not [error.message for error in schema.iter_errors(manifest)]
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplcas"] = 1
    assert list(schema.iter_errors(wrong)), "the schema is strict"


def test_serve_and_our_own_checks_take_its_application(manifest: dict[str, Any]) -> None:
    text = manifest["spec"]["serveConfigV2"]
    document = load_yaml(text)
    lint(document)
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    AppArgs.model_validate(schema.applications[0].args)


def test_it_is_the_application_of_the_local_file(application: dict[str, Any]) -> None:
    (local,) = yaml.safe_load((ROOT / "configs" / "qwen.yaml").read_text())["applications"]
    args = {key: value for key, value in application["args"].items() if key not in OF_KUBERNETES}
    assert {**application, "args": args, "deployments": None} == {**local, "deployments": None}


def test_there_is_a_worker_for_every_engine(
    cluster: dict[str, Any], workers: dict[str, Any], application: dict[str, Any]
) -> None:
    args = application["args"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert workers["minReplicas"] <= args["min_replicas"] <= args["max_replicas"] <= workers["maxReplicas"]
    (deployment,) = application["deployments"]
    (bundle,) = deployment["placement_group_bundles"]
    _, container = pod(workers)
    limits = container["resources"]["limits"]
    assert deployment["name"] == "Engine"
    assert bundle["GPU"] == int(limits["nvidia.com/gpu"]) == 1
    assert bundle["CPU"] == int(limits["cpu"]) == args["threads"]
    assert pod(workers)[0]["restartPolicy"] == "Never", "version 2 of the autoscaler wants it"


def test_a_pod_lives_longer_than_the_drain_of_its_engine(
    cluster: dict[str, Any], workers: dict[str, Any], application: dict[str, Any]
) -> None:
    config = AppArgs.model_validate(application["args"]).config
    for group in (cluster["headGroupSpec"], workers):
        spec, container = pod(group)
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        drain = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert config.drain_deadline_s + DRAIN_MARGIN_S < drain < spec["terminationGracePeriodSeconds"]
        assert "lifecycle" not in container, "`ray stop` before the end would cut what drains"


def test_head_and_workers_are_alike_and_looked_after(cluster: dict[str, Any], workers: dict[str, Any]) -> None:
    head, worker = pod(cluster["headGroupSpec"])[1], pod(workers)[1]
    for name in ("image", "env", "volumeMounts"):
        assert head[name] == worker[name]
    for container in (head, worker):
        assert container["livenessProbe"] and container["readinessProbe"]
        assert {"name": "serve", "containerPort": 8000} in container["ports"]
    assert "/-/healthz" in worker["readinessProbe"]["exec"]["command"][-1]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
