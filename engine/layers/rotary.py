"""Rotary position embedding: the angles of each position, computed once."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """cos and sin of position * frequency in float32, for every position up to `max_positions`.

    `factors`, one a frequency, divide the frequencies: how scaled RoPE types reach longer contexts.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, theta: float, max_positions: int, factors: tuple[float, ...] | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.max_positions = max_positions
        self.factors = factors
        self.register_buffer("cos", torch.empty(max_positions, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(max_positions, head_dim // 2), persistent=False)

    def finish_loading(self) -> None:
        device = self.cos.device
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.factors is not None:
            frequencies = frequencies / torch.tensor(self.factors, device=device)
        angles = torch.arange(self.max_positions, dtype=torch.float32, device=device)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cos, sin: float32 [T, head_dim / 2]."""
        return self.cos[positions], self.sin[positions]
