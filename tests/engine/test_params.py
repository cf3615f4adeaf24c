"""SamplingParams: ranges, one sentence for each wrong value, and the message they travel in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


HUGE = 10**400  # no float holds it
WRONG: list[Any] = [
    *(HUGE, -HUGE, 10**5000, float("nan"), float("inf"), -float("inf"), True, False, None),
    *("", "1", "a" * 5000, b"1", [], [1], [[1]], (), {}, {1}, object(), 1j, torch.tensor(1.0)),
]
RIGHT: dict[str, list[Any]] = {
    "max_tokens": [None],
    "stop_token_ids": [[], [1], ()],
    "ignore_eos": [True, False],
    "seed": [None],
    "logprobs": [None],
}
"""Of WRONG, what is right for a field."""


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
def test_whatever_a_field_is_given_is_taken_or_refused_in_one_line(name: str) -> None:
    for value in WRONG:
        if any(value is right or (type(value) is type(right) and value == right) for right in RIGHT.get(name, [])):
            SamplingParams(**{name: value})
            continue
        with pytest.raises(ValueError, match=rf"^{name} is .{{1,70}}, must be ") as wrong:
            SamplingParams(**{name: value})
        assert len(str(wrong.value).splitlines()) == 1 and len(str(wrong.value)) < 160


def test_stop_token_ids_holds_token_ids_only() -> None:
    for inner in WRONG:
        for outer in ([inner], (1, inner)):
            with pytest.raises(ValueError, match=r"^stop_token_ids is .{1,70}, must be "):
                SamplingParams(stop_token_ids=outer)  # type: ignore[arg-type]


def test_a_huge_number_is_shown_in_part() -> None:
    with pytest.raises(ValueError) as wrong:
        SamplingParams(temperature=HUGE)
    assert str(wrong.value) == f"temperature is 1{'0' * 56}..., must be a number in [0, 100]"
    with pytest.raises(ValueError) as wrong:
        SamplingParams(seed=10**5000)
    assert str(wrong.value).startswith("seed is an integer of thousands of digits, must be in [")


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
