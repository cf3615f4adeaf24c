"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor, nn

from engine.layers.linear import Linear, MergedLinear
from kernels import dispatch


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        shards = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, shards, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(dispatch.silu_mul(self.gate_up_proj(x)))
