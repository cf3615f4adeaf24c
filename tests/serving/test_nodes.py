"""What Ray reserves for an engine and what it has of its node, on clusters of one node and of several."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.host import Share
from serving import nodes


def cluster(monkeypatch: pytest.MonkeyPatch, cpus: dict[str, float], here: str = "a") -> None:
    monkeypatch.setattr(nodes, "cpus_of_nodes", lambda: cpus)
    monkeypatch.setattr(nodes, "this_node", lambda: here)
    monkeypatch.setattr(nodes, "default_threads", lambda share, reserved: (100 - reserved) // share.engines)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


@pytest.mark.parametrize(
    ("cpus", "options", "reserved"),
    [
        ({}, {"num_replicas": 3}, 33),  # Ray does not run: this machine
        ({"a": 8.0}, {"num_replicas": 3}, 33),
        ({"b": 8.0}, {"num_replicas": 3}, 2),  # the head has no CPUs for engines
        ({"a": 8.0, "b": 8.0}, {"num_replicas": 2}, 7),
        ({"a": 8.0, "b": 8.0}, {"num_replicas": 4}, 3),
        ({"a": 8.0, "b": 8.0}, {"min_replicas": 1, "max_replicas": 4}, 3),
        ({"a": 8.0, "b": 8.0}, {"num_replicas": 4, "threads": 2}, 2),
        ({"a": 8.0, "b": 8.0}, {"num_replicas": 4, "threads": 2, "num_cpus_per_replica": 0.5}, 0.5),
    ],
)
def test_what_is_reserved(
    cpus: dict[str, float], options: dict[str, Any], reserved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, cpus)
    assert nodes.cpus_per_replica(config(**options)) == reserved


@pytest.mark.parametrize(
    ("cpus", "replicas", "each", "share"),
    [
        ({"a": 8.0}, 2, 3.0, Share(2, 3.0)),
        ({"a": 8.0, "b": 8.0, "c": 8.0, "d": 8.0}, 8, 3.0, Share(2, 3.0)),
        ({"a": 8.0, "b": 64.0}, 8, 7.0, Share(1, 7.0)),
        ({"b": 8.0}, 2, 4.0, Share(1, 4.0)),
    ],
)
def test_an_engine_shares_its_node_with_those_that_fit(
    cpus: dict[str, float], replicas: int, each: float, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, cpus)
    assert nodes.share_here(config(num_replicas=replicas), each) == share


def test_without_ray_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.ray, "is_initialized", lambda: False)  # other tests may have left one running
    monkeypatch.setattr(nodes.ray, "nodes", lambda: pytest.fail("Ray was asked"))
    assert nodes.cpus_of_nodes() == {}
