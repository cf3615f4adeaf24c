"""Paged attention of one layer: stores its keys and values, attends over the cached ones."""

from __future__ import annotations

from torch import Tensor, nn

from engine.context import get_context
from kernels import dispatch


class Attention(nn.Module):
    def __init__(self, layer: int, head_dim: int):
        super().__init__()
        self.layer = layer
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], not rotated yet -> [T, heads, head_dim].

        q may be rotated in place.
        """
        context = get_context()
        k_cache, v_cache = context.kv.layer(self.layer)
        q = dispatch.rope_and_cache(q, k, v, cos, sin, k_cache, v_cache, context.metadata.slot_mapping)
        return dispatch.attention(q, k_cache, v_cache, context.metadata, self.scale)
