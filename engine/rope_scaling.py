"""Scaled RoPE: how a checkpoint's `rope_type` changes the rotation frequencies.

Each type comes down to one divisor a frequency, so the rotary layer needs to know no types.
"""

from __future__ import annotations

import math
from typing import Any


def frequency_factors(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...] | None:
    """The divisors of the head_dim / 2 frequencies, None where nothing is scaled.

    Raises ValueError naming a type that is not supported or a key that is missing.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _TYPES:
        raise ValueError(f"rope type {kind!r} is not supported, known are {', '.join(_TYPES)}")
    try:
        return _TYPES[kind](rope, theta, head_dim)
    except KeyError as error:
        raise ValueError(f"rope type {kind!r} needs {error.args[0]}, which the configuration lacks") from None


def _default(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    return None


def _linear(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    return (float(rope["factor"]),) * (head_dim // 2)


def _llama3(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for i in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * i / head_dim))  # within the original context
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


_TYPES = {"default": _default, "linear": _linear, "llama3": _llama3}
