"""The one place that chooses a kernel's implementation, by the device of its input.

Shapes and meaning are those of `kernels.reference`, which also serves devices without kernels of their own.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kernels import cpu, reference
from kernels.metadata import AttentionMetadata

_BACKENDS: dict[str, ModuleType] = {"cpu": cpu}


def backend(device: torch.device) -> ModuleType:
    return _BACKENDS.get(device.type, reference)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    backend(k.device).write_kv(k, v, k_cache, v_cache, slot_mapping)


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    return backend(q.device).attention(q, k_cache, v_cache, meta, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return backend(x.device).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return backend(x.device).add_rms_norm(x, residual, weight, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return backend(q.device).rope(q, k, cos, sin)


def silu_mul(x: Tensor) -> Tensor:
    return backend(x.device).silu_mul(x)
