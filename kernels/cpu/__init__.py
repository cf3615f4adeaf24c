"""CPU kernels: native ones where a compiler is, else in torch."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

from kernels.cpu import torch_ops
from kernels.cpu.compile import Unavailable
from kernels.cpu.native_ops import NativeOps

logger = logging.getLogger("ferry.kernels")


@cache
def ops() -> NativeOps | ModuleType:
    """The implementation of this process; compiled at the first call."""
    try:
        return NativeOps()
    except Unavailable as error:
        logger.warning("no native CPU kernels, torch's slower ones are used: %s", error)
        return torch_ops


def numerics(dtype: torch.dtype) -> str:
    """Names the order of rounding of one kind of host; "torch" where none is promised."""
    native = ops()
    if isinstance(native, NativeOps) and native.supports(dtype):
        return native.numerics
    return "torch"
