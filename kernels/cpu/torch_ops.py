"""The torch path of the CPU kernels: for hosts without a compiler, and for types and layouts the native ones lack."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.torch_attention import attention
from kernels.cpu.torch_cache import rope_and_cache
from kernels.cpu.torch_elementwise import add_rms_norm, rms_norm, silu_mul

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "head_argmax",
    "rms_norm",
    "rope_and_cache",
    "silu_mul",
]


def argmax(logits: Tensor) -> Tensor:
    values, index = logits.max(-1)  # a NaN is the largest
    return index.masked_fill(~values.isfinite(), -1)


def head_argmax(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return argmax(logits)
