"""The cluster's nodes and their CPUs as Ray knows them, and what one engine gets of them."""

from __future__ import annotations

import ray

from engine.config import EngineConfig
from engine.host import SERVICE_CORES, Share, default_threads, equal_part


def cpus_of_nodes() -> dict[str, float]:
    """Node id -> CPUs, of the living nodes that have some; empty where Ray does not run."""
    if not ray.is_initialized():
        return {}
    found = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
    return {node: cpus for node, cpus in found.items() if cpus > 0}


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def cpus_per_replica(config: EngineConfig) -> float:
    """CPUs Ray reserves for one engine: what was asked for, its threads, or an equal part of the nodes there are."""
    if config.num_cpus_per_replica is not None:
        return config.num_cpus_per_replica
    if config.threads is not None:
        return float(config.threads)
    nodes = cpus_of_nodes()
    if not nodes or set(nodes) == {this_node()}:  # which knows its physical cores
        return float(default_threads(Share(config.most_replicas), SERVICE_CORES))
    return float(equal_part(list(nodes.values()), config.most_replicas, SERVICE_CORES))


def share_here(config: EngineConfig, cpus: float) -> Share:
    """What an engine with so many CPUs reserved has of this node."""
    return Share.of_node(config.most_replicas, cpus, cpus_of_nodes().get(this_node(), cpus))
