"""The one place that chooses a kernel's implementation, by the device of its input.

Shapes and meaning are those of `kernels.reference`, which also serves devices without kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import cpu, reference
from kernels.metadata import AttentionMetadata


def backend(device: torch.device) -> Any:
    """The kernels of a device: a module or object with the functions below."""
    return cpu.ops() if device.type == "cpu" else reference


def numerics(device: torch.device, dtype: torch.dtype) -> str:
    """Names the order of rounding: processes with equal names compute equal bits, unless it is "torch"."""
    return cpu.numerics(dtype) if device.type == "cpu" else f"reference-{device.type}"


def transposed_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention wants K of a (block, head) as [head_dim, block_size]: tokens in vector lanes."""
    return device.type == "cpu" and cpu.numerics(dtype) != "torch"


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int = 0
) -> Tensor:
    """`window`: a token sees that many positions, its own included; 0: all."""
    return backend(q.device).attention(q, k_cache, v_cache, meta, scale, window)


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Rotates q and k, stores k and v; returns q rotated, perhaps in place."""
    return backend(q.device).rope_and_cache(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)


def argmax(logits: Tensor) -> Tensor:
    """The first index of the largest of each row [S, V]: int64 [S]; -1 where any is NaN or +inf, or all are -inf."""
    return backend(logits.device).argmax(logits)


def head_argmax(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """`argmax` of logits [S, V] that are hidden [S, H] times weight [V, H], rounded: where the largest are equal, the
    largest unrounded product wins, on devices that have a kernel for it."""
    return backend(logits.device).head_argmax(logits, hidden, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return backend(x.device).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual may be updated in place: only the one that is returned is to be used afterwards."""
    return backend(x.device).add_rms_norm(x, residual, weight, eps)


def silu_mul(x: Tensor) -> Tensor:
    return backend(x.device).silu_mul(x)
