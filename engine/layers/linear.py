"""Linear layers whose parameters know how to load themselves and, on CPU, are repacked after loading.

oneDNN reads a bf16 weight laid out in plain rows at a fraction of memory speed when the batch is small. Packing
replaces the parameter, so only one copy stays alive, except where an embedding shares the rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIXED_ROWS = 16
"""Rows of every product of a layer that is not invariant to its batch (engine/layers/invariance.py)."""


class Linear(nn.Module):
    """y = x W^T + b, with W [out_features, in_features]."""

    min_rows = 1  # smaller batches are padded to this many rows (engine/layers/invariance.py)
    fixed_rows = False  # every product has FIXED_ROWS rows

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        for parameter in self.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, tensor: Tensor, shard: str | None = None) -> None:
        parameter.copy_(tensor)

    def finish_loading(self) -> None:
        if can_pack(self.weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
            self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        if self.fixed_rows:
            padded = F.pad(x, (0, 0, 0, -len(x) % FIXED_ROWS))
            tiles = [self._multiply(tile) for tile in padded.split(FIXED_ROWS)]
            return torch.cat(tiles)[: len(x)]
        if len(x) < self.min_rows:
            return self._multiply(F.pad(x, (0, 0, 0, self.min_rows - len(x))))[: len(x)]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of one input as one product: query, key and value, or gate and up.

    `shards` maps each projection's name in checkpoints to its output size, in output order.
    """

    def __init__(self, in_features: int, shards: dict[str, int], bias: bool = False):
        super().__init__(in_features, sum(shards.values()), bias)
        self.shards = shards

    def load(self, parameter: nn.Parameter, tensor: Tensor, shard: str | None = None) -> None:
        start = 0
        for name, size in self.shards.items():
            if name == shard:
                parameter[start : start + size].copy_(tensor)
                return
            start += size
        raise KeyError(shard)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight faster when it is packed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
