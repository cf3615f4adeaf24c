"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stop parameters of one sequence, checked when made.

    Stop strings are not here: text is the front end's business, the engine knows token ids.

    Raises ValueError with a one-line message naming the field, its value and the range.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: no limit
    top_p: float = 1.0
    max_tokens: int | None = 16  # None: up to max_model_len
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # alternatives reported beside the sampled token; None: no logprobs

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p is 0.0, must be in (0, 1]")
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        """Build from a message; keys of newer versions are ignored."""
        return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, must be a number in [{low:g}, {high:g}]")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, must be in [{low:g}, {high:g}]")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, must be an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, must be in [{low}, {high}]")
