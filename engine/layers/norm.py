"""Root mean square norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels import dispatch


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return dispatch.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual, the residual of the next norm."""
        return dispatch.add_rms_norm(x, residual, self.weight, self.eps)
