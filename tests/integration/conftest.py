from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import Service, start_cluster, stop_cluster
from tests.models import make_llama


@pytest.fixture(scope="session")
def application() -> Iterator[Service]:
    """One cluster for all tests; tests say with `ensure` what is to run on it."""
    yield Service(start_cluster())
    stop_cluster()


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose sequences may be long enough to be interrupted."""
    return make_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=2048)


@pytest.fixture
def service(application: Service, long_llama: Path) -> Service:
    """Two replicas of a tiny Llama in float32."""
    return application.ensure(
        model=str(long_llama), num_replicas=2, dtype="float32", kv_cache_memory_bytes=64 << 20, max_model_len=1024
    )
