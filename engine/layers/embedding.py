"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, size]."""
        return F.embedding(ids, self.weight)
