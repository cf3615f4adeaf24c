"""The implementations that a test of kernels is run with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.cpu import torch_ops
from kernels.cpu.native_ops import NativeOps
from tests.kernels.cases import TARGETS, compiled


@pytest.fixture(params=[*TARGETS, "torch"])
def ops(request: pytest.FixtureRequest) -> Any:
    return torch_ops if request.param == "torch" else compiled(request.param)


@pytest.fixture(params=TARGETS)
def every_native(request: pytest.FixtureRequest) -> NativeOps:
    return compiled(request.param)


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
