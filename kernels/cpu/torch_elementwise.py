"""Norms, rotation and activation in few torch calls: at small batches the calls cost more than the arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)  # float32 inside


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x  # float32: rounding every layer's sum to bfloat16 would cost greedy tokens
    return F.rms_norm(total, (total.shape[-1],), weight.float(), eps).to(x.dtype), total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos = torch.cat([cos, cos], -1).unsqueeze(1)
    sin = torch.cat([-sin, sin], -1).unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos).add_(swapped * sin).to(x.dtype)  # cos, sin are float32, and so are the products


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)
