"""Random weights: the shape and speed of a model without its checkpoint."""

from __future__ import annotations

import torch
from torch import nn


def fill(model: nn.Module, seed: int) -> None:
    """Weights uniform with variance 1 / fan_in, norms one, biases zero: activations keep their size.

    The same seed gives the same weights in every process.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(seed & (2**63 - 1))
        seed += 1
        bound = (3 / parameter.shape[-1]) ** 0.5
        parameter.uniform_(-bound, bound, generator=generator)
