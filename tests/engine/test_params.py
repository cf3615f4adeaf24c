"""SamplingParams: ranges, one sentence for each wrong value, and the message they travel in."""

from __future__ import annotations

from typing import Any

import pytest

from engine.sampling.params import SamplingParams

RANGES = {
    "temperature": "[0, 100]",
    "top_p": "(0, 1]",
    "min_p": "[0, 1]",
    "repetition_penalty": "[0.01, 100]",
    "presence_penalty": "[-2, 2]",
    "frequency_penalty": "[-2, 2]",
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_told_in_one_sentence(name: str) -> None:
    within = RANGES[name]
    low, high = (float(bound) for bound in within[1:-1].split(","))
    for value in (high, (low + high) / 2, *([low] if within[0] == "[" else [1e-9])):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (high + 0.01, low - 0.01, *([] if within[0] == "[" else [low])):
        with pytest.raises(ValueError) as wrong:
            SamplingParams(**{name: value})
        assert str(wrong.value) == f"{name} is {value!r}, must be in {within}"
    for value in ("1", True, float("nan"), float("inf"), None):
        with pytest.raises(ValueError) as wrong:
            SamplingParams(**{name: value})
        assert str(wrong.value) == f"{name} is {value!r}, must be a number in {within}"


@pytest.mark.parametrize(
    ("fields", "penalized"),
    [
        ({}, False),
        ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0.5}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalized_is_said_of_those_that_change_logits(fields: dict[str, Any], penalized: bool) -> None:
    assert SamplingParams(**fields).penalized == penalized


def test_a_message_carries_every_field() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, max_tokens=7, stop_token_ids=(4,), ignore_eos=True, seed=1, logprobs=2,
        min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=1.0,
    )  # fmt: skip
    message = params.to_dict()
    assert all(message[name] != value for name, value in SamplingParams().to_dict().items())
    assert SamplingParams.from_dict({**message, "of_a_newer_version": 1}) == params
