"""Writing K and V of a step into their slots."""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    written = slot_mapping >= 0
    if not written.all():
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    block_size = k_cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, offset] = k
    v_cache[block, offset] = v
