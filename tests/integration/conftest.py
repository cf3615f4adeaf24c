from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.service import Service, start_cluster, stop_cluster


@pytest.fixture(scope="session")
def cluster_port() -> Iterator[int]:
    port = start_cluster()
    yield port
    stop_cluster()


@pytest.fixture(scope="session")
def service(cluster_port: int, tiny_llama) -> Service:
    """Two replicas of a tiny Llama in float32."""
    service = Service(cluster_port)
    service.run(
        model=str(tiny_llama),
        served_model_name=["tiny"],
        num_replicas=2,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        max_model_len=1024,
        num_cpus_per_replica=1,
        threads=1,
    )
    service.wait_ready(replicas=2)
    return service
