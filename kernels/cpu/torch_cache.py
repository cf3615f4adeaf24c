"""Writing K and V of a step into their slots."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.torch_elementwise import rope


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not written.all():
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    block_size = k_cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, offset] = k
    v_cache[block, offset] = v


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    q, k = rope(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q
