"""Fixtures of all tests: tiny checkpoints, made once a session."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.models import make_llama, make_qwen3

# How long examples take to make or to run says more about a shared machine than about what is tested.
settings.register_profile("ferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ferry")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("qwen3"))
