"""Penalties and min_p against transformers' processors and plain definitions, in equal float32 bits."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from engine.sampling.noise import uniform
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import Penalties, penalize
from engine.sampling.sampler import NOT_FINITE, Sampler, SampleRow

VOCAB = 3000


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3.0


def row(prompt: list[int], output: list[int], seed: int = 0, **params: Any) -> SampleRow:
    wanted = SamplingParams(**params)
    penalties = Penalties(prompt + output, len(prompt), wanted) if wanted.penalized else None
    return SampleRow(wanted, seed, len(output), penalties)


def penalized(logits: Tensor, item: SampleRow) -> Tensor:
    """One row of logits [vocab] after its penalties; the argument stays as it is."""
    edited = logits[None].clone()
    assert item.penalties is not None
    penalize(edited, {0: item.penalties})
    return edited[0]


def by_definition(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """OpenAI's and CTRL's formulas, a token at a time in float32."""
    edited = logits.numpy().copy()
    count = Counter(output)
    for token in {*prompt, *output}:
        x, repetition = edited[token], np.float32(params.repetition_penalty)
        x = x / repetition if x > 0 else x * repetition
        x = x - np.float32(params.frequency_penalty) * np.float32(count[token])
        edited[token] = x - np.float32(params.presence_penalty) if count[token] else x
    return torch.from_numpy(edited)


TOKENS = st.lists(st.integers(0, 59), max_size=40)
PENALTY = st.floats(-2.0, 2.0)


# The formulas


@settings(deadline=None)
@given(st.integers(0, 10**6), TOKENS, TOKENS, st.floats(0.01, 100.0))
def test_repetition_is_transformers(seed: int, prompt: list[int], output: list[int], repetition: float) -> None:
    logits = logits_of(1, 60, seed)[0]
    item = row(prompt, output, repetition_penalty=repetition)
    if not item.params.penalized or not prompt + output:
        return
    ids = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits[None].clone())[0]
    assert torch.equal(penalized(logits, item), expected)


@settings(deadline=None)
@given(st.integers(0, 10**6), TOKENS, TOKENS, st.sampled_from([0.5, 1.0, 1.3]), PENALTY, PENALTY)
def test_all_three_are_their_definitions(
    seed: int, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    logits = logits_of(1, 60, seed)[0]
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    item = row(prompt, output, **penalties)
    if item.params.penalized:
        assert torch.equal(penalized(logits, item), by_definition(logits, prompt, output, item.params))


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = logits_of(1)[0]
    for name in ("presence_penalty", "frequency_penalty"):
        assert torch.equal(penalized(logits, row([1, 2, 2], [], **{name: 2.0})), logits)
        changed = penalized(logits, row([1, 2, 2], [7, 2, 7], **{name: 2.0})) != logits
        assert changed.nonzero().flatten().tolist() == [2, 7]
    changed = penalized(logits, row([1, 2, 2], [7], repetition_penalty=1.5)) != logits
    assert changed.nonzero().flatten().tolist() == [1, 2, 7]


# What is counted


@settings(deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 40), st.sampled_from([1.0, 1.5]))
def test_counts_kept_step_by_step_are_those_of_a_fresh_start(
    prompt: list[int], output: list[int], cut: int, repetition: float
) -> None:
    """A sequence may be met at any length: new, resumed after a preemption or moved here."""
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=1.0)
    kept = Penalties(prompt + output[:cut], len(prompt), params)
    for token in output[cut:]:
        kept.add(token)
    expected = dict.fromkeys(prompt if repetition != 1.0 else [], 0) | Counter(output)
    for penalties in (kept, Penalties(prompt + output, len(prompt), params)):
        assert len(set(penalties.ids.tolist())) == len(penalties.ids) == len(penalties.counts)
        assert dict(zip(penalties.ids.tolist(), penalties.counts.tolist(), strict=True)) == expected


def test_counts_grow_without_a_limit() -> None:
    output = [random.Random(1).randrange(5000) for _ in range(20000)]
    kept = Penalties([], 0, SamplingParams(frequency_penalty=0.5))
    for token in output:
        kept.add(token)
    assert dict(zip(kept.ids.tolist(), kept.counts.tolist(), strict=True)) == Counter(output)


# In the sampler

KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "min_p": 0.02},
    {"min_p": 0.05},
    {"frequency_penalty": -0.7, "presence_penalty": 0.3, "repetition_penalty": 0.8},
    {"frequency_penalty": 2.0, "top_p": 0.9},
    {"min_p": 0.1, "top_k": 30, "top_p": 0.95, "temperature": 1.7},
]


def mixed_rows(count: int, logits: Tensor) -> list[SampleRow]:
    """Greedy and sampled, with and without penalties; what they hold is likely, so penalties decide."""
    rows = []
    for i in range(count):
        likely = logits[i].topk(20).indices.tolist()
        source = random.Random(i)
        prompt, output = (source.choices(likely, k=n) for n in (source.randrange(1, 30), source.randrange(30)))
        params = dict(KINDS[i % len(KINDS)], logprobs=(None, 0, 3)[i % 3])
        if source.random() < 0.5:
            params["temperature"] = 0.0
        rows.append(row(prompt, output, seed=i, **params))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_argmax_of_their_edited_logits(dtype: torch.dtype) -> None:
    logits = logits_of(56).to(dtype)
    rows = mixed_rows(56, logits)
    plain = logits.argmax(-1)  # of what the model says is likeliest
    output = Sampler().sample(logits, rows, lambda some: plain[some])
    changed = 0
    for i, item in enumerate(rows):
        if item.params.greedy:
            edited = penalized(logits[i].float(), item) if item.params.penalized else logits[i].float()
            assert output.ids[i] == int(edited.argmax())
            changed += output.ids[i] != int(plain[i])
    assert changed > 5


def test_rows_do_not_depend_on_their_batch() -> None:
    logits = logits_of(70, vocab=5000)
    rows = mixed_rows(70, logits)
    before = logits.clone()
    together = Sampler().sample(logits, rows)
    assert torch.equal(logits, before)
    for i in range(70):
        alone = Sampler().sample(logits[i : i + 1], rows[i : i + 1])
        assert (alone.ids[0], alone.logprobs[0]) == (together.ids[i], together.logprobs[i])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:23].tolist()
    part = Sampler().sample(logits[order], [rows[i] for i in order])
    assert part.ids == [together.ids[i] for i in order]
    assert part.logprobs == [together.logprobs[i] for i in order]


def test_neighbours_without_penalties_are_as_if_nobody_had_any() -> None:
    logits = logits_of(70)
    rows = mixed_rows(70, logits)
    plain = [i for i, item in enumerate(rows) if not item.params.penalized]
    alone = Sampler().sample(logits[plain], [rows[i] for i in plain])
    together = Sampler().sample(logits, rows)
    assert alone.ids == [together.ids[i] for i in plain]
    assert alone.logprobs == [together.logprobs[i] for i in plain]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(70)
    rows = mixed_rows(70, logits)
    output = Sampler().sample(logits, rows)
    expected = torch.log_softmax(logits, -1)
    ranks = set()
    for i, entry in enumerate(output.logprobs):
        if entry is not None:
            assert entry.logprob == expected[i, output.ids[i]].item()
            assert [value for _, value in entry.top] == expected[i].topk(len(entry.top)).values.tolist()
            ranks.add(entry.rank if rows[i].params.greedy else 1)
    assert max(ranks) > 1  # a penalized greedy token need not be the likeliest


def test_penalties_come_before_temperature() -> None:
    logits = torch.zeros(2000, 2)
    rows = [row([], [0], seed=i, presence_penalty=1.0, temperature=0.5) for i in range(2000)]
    share = Counter(Sampler().sample(logits, rows).ids)[1] / 2000
    assert abs(share - 1 / (1 + math.exp(-2.0))) < 0.03  # exp(-1 / 0.5); after temperature it were exp(-1): 0.73


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [{"repetition_penalty": 1.2, "temperature": 0.0}, {"min_p": 0.1}, {"min_p": 1.0}])
def test_logits_that_are_not_finite_are_noticed(bad: float, kind: dict[str, Any]) -> None:
    logits = torch.zeros(2, 40)
    logits[0, 7] = bad
    ids = Sampler().sample(logits, [row([3], [3], **kind)] * 2).ids
    assert ids[0] == NOT_FINITE and ids[1] >= 0


def test_the_strongest_penalties_leave_finite_logits() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0]])
    for repetition in (0.01, 100.0):
        item = row([0, 1, 2], [0, 1, 2], repetition_penalty=repetition, presence_penalty=2.0, frequency_penalty=2.0)
        assert penalized(logits[0], item).isfinite().all()


def test_a_row_cannot_forget_its_penalties() -> None:
    with pytest.raises(ValueError, match="tokens it has seen"):
        SampleRow(SamplingParams(presence_penalty=1.0), 0, 0)


# min_p


def pick(weights: list[float], kept: list[int], item: SampleRow) -> int:
    """Inverse CDF over the kept tokens in vocabulary order."""
    target, mass = uniform(item.seed, item.index) * sum(weights[i] for i in kept), 0.0
    for i in kept:
        mass += weights[i]
        if mass > target:
            return i
    return kept[-1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float) -> None:
    logits = logits_of(48)
    rows = [row([], [], seed=i, min_p=min_p, temperature=temperature) for i in range(48)]
    got = Sampler().sample(logits, rows).ids
    left = MinPLogitsWarper(min_p)(torch.empty(48, 0), logits / temperature)
    for i, item in enumerate(rows):
        kept = left[i].isfinite().nonzero().flatten().tolist()
        weights = ((logits[i].double() - logits[i].max()) / temperature).exp().tolist()
        assert got[i] == pick(weights, kept, item)


@settings(deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=30),
    st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_min_p_keeps_tied_tokens_together(values: list[int], min_p: float, temperature: float) -> None:
    logits = torch.tensor([values], dtype=torch.float32)
    left = MinPLogitsWarper(min_p)(torch.empty(1, 0), logits / temperature)[0]
    kept = left.isfinite().nonzero().flatten().tolist()
    weights = ((logits[0].double() - logits.max()) / temperature).exp().tolist()
    rows = [row([], [], seed=i, min_p=min_p, temperature=temperature) for i in range(20)]
    assert Sampler().sample(logits.expand(20, -1), rows).ids == [pick(weights, kept, item) for item in rows]
