"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.values import is_integer, is_number, shown

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
    min_p: float = 0.0  # drops tokens less likely than this share of the likeliest one; 0: no limit
    repetition_penalty: float = 1.0  # of tokens in prompt or output; 1: none (engine/sampling/penalties.py)
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, for each time

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        # Any positive number has a meaning, but far ones take float32 logits to infinity
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {shown(self.ignore_eos)}, must be True or False")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise ValueError(f"stop_token_ids is {shown(self.stop_token_ids)}, must be a list of token ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        """Build from a message; keys of newer versions are ignored."""
        return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """The range is closed; with `above` it leaves out `low`."""
    within = f"in {'(' if above else '['}{low:g}, {high:g}]"
    if not is_number(value):
        raise ValueError(f"{name} is {shown(value)}, must be a number {within}")
    if not low <= value <= high or (above and value == low):
        raise ValueError(f"{name} is {shown(value)}, must be {within}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if not is_integer(value):
        raise ValueError(f"{name} is {shown(value)}, must be an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}, must be in [{low}, {high}]")
