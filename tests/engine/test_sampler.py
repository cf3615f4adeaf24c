"""The sampler against plain definitions: distribution, determinism, independence of the batch, logprobs."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.noise import uniform
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import Penalties
from engine.sampling.sampler import Sampler, SampleRow

NOISE = [0.0564663990004608, 0.44008326622012284, 0.6487508310490744, 0.9318107580365629]
VOCAB = 3000  # above the guess for the size of a nucleus


def row(seed=0, index=0, **params):
    return SampleRow(SamplingParams(**params), seed, index)


def logits_of(rows, vocab=VOCAB, seed=0, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def kept_by_definition(logits, params):
    """The tokens min_p, top_k and top_p leave, as a set, from one row of logits: plain sorting in Python."""
    scores = [x / params.temperature for x in (logits.double() - logits.max().double()).tolist()]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    order = [i for i in order if math.exp(scores[i]) >= params.min_p]
    if 0 < params.top_k < len(scores):
        least = scores[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if scores[i] >= least]
    if params.top_p < 1.0:
        total, mass, nucleus = sum(math.exp(scores[i]) for i in order), 0.0, []
        for i in order:
            nucleus.append(i)
            mass += math.exp(scores[i])
            if mass >= params.top_p * total:
                break
        order = [i for i in order if scores[i] >= scores[nucleus[-1]]]
    return set(order)


def pick_by_definition(logits, item):
    """Inverse CDF over the kept tokens in vocabulary order."""
    kept = sorted(kept_by_definition(logits, item.params))
    weights = [math.exp((logits[i].item() - logits.max().item()) / item.params.temperature) for i in kept]
    target, mass = uniform(item.seed, item.index) * sum(weights), 0.0
    for i, weight in zip(kept, weights, strict=True):
        mass += weight
        if mass > target:
            return i
    return kept[-1]


KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 1.5},
    {"top_k": VOCAB + 1},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 1e-9},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.5},
    {"top_k": 2000, "top_p": 0.95, "temperature": 2.0},
    {"min_p": 0.03},
    {"min_p": 1.0},
    {"min_p": 0.2, "temperature": 2.0, "top_k": 10},
    {"min_p": 0.05, "top_p": 0.7},
    {"min_p": 0.4, "top_p": 0.9999},
    {"min_p": 0.02, "top_k": 50, "top_p": 0.9},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_picks_what_the_definition_picks(kind):
    logits = logits_of(24)
    rows = [row(seed=i, index=3 * i, **kind) for i in range(24)]
    got = Sampler().sample(logits, rows).ids
    if rows[0].params.greedy:
        assert got == logits.argmax(-1).tolist()
    else:
        assert got == [pick_by_definition(logits[i], rows[i]) for i in range(24)]


@pytest.mark.parametrize(
    "kind", [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 8, "top_p": 0.9}, {"min_p": 0.1}]
)
def test_distribution(kind):
    logits = logits_of(1, vocab=20, spread=1.5)
    params = SamplingParams(**kind)
    draws = 20000
    rows = [SampleRow(params, 7, index) for index in range(draws)]
    counts = Counter(Sampler().sample(logits.expand(draws, -1), rows).ids)
    kept = sorted(kept_by_definition(logits[0], params))
    assert set(counts) <= set(kept)
    shares = torch.softmax(logits[0, kept].double() / params.temperature, 0).tolist()
    chi2 = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in zip(kept, shares, strict=True))
    degrees = len(kept) - 1
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations; the seed is fixed


def test_rows_do_not_depend_on_their_batch():
    logits = logits_of(64, vocab=5000)
    rows = [row(seed=i, index=i, logprobs=3, **KINDS[i % len(KINDS)]) for i in range(64)]
    sampler = Sampler()
    together = sampler.sample(logits, rows)
    for i in range(64):
        alone = sampler.sample(logits[i : i + 1].clone(), rows[i : i + 1])
        assert (alone.ids[0], alone.logprobs[0]) == (together.ids[i], together.logprobs[i])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:23].tolist()
    part = sampler.sample(logits[order], [rows[i] for i in order])
    assert part.ids == [together.ids[i] for i in order]
    assert part.logprobs == [together.logprobs[i] for i in order]


def test_seed_and_index_decide():
    logits = logits_of(1, spread=0.1)
    draw = lambda seed, index: Sampler().sample(logits, [row(seed, index)]).ids[0]  # noqa: E731
    assert draw(1, 0) == draw(1, 0)
    assert len({draw(1, index) for index in range(30)}) > 20
    assert len({draw(seed, 0) for seed in range(30)}) > 20
    assert draw(-1, 0) == draw(2**64 - 1, 0)


def test_noise_is_fixed_for_all_time():
    """Requests move between versions of the program: these numbers may not change."""
    assert [uniform(s, i) for s, i in [(0, 0), (0, 1), (1, 0), (-1, 5)]] == NOISE


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_noise_is_a_fraction(seed, index):
    assert 0.0 <= uniform(seed, index) < 1.0


def test_noise_is_uniform():
    counts = Counter(int(uniform(3, i) * 16) for i in range(16000))
    assert sum((c - 1000) ** 2 / 1000 for c in counts.values()) < 15 + 4 * math.sqrt(30)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=40),
    st.integers(0, 50),
    st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    st.integers(0, 1000),
)
def test_ties_stay_together(values, top_k, top_p, seed):
    """bf16 logits tie often: tied tokens are kept or dropped as one, so that no order of sorting matters."""
    logits = torch.tensor([values], dtype=torch.float32)
    item = row(seed=seed, top_k=top_k, top_p=top_p)
    picked = Sampler().sample(logits, [item]).ids[0]
    assert picked in kept_by_definition(logits[0], item.params)


def test_masked_tokens_are_never_picked():
    logits = torch.full((200, 50), -torch.inf)
    logits[:, [7, 31]] = 0.0
    for kind in ({}, {"top_k": 10}, {"top_p": 0.9}, {"top_k": 10, "top_p": 0.99}):
        ids = Sampler().sample(logits, [row(index=i, **kind) for i in range(200)]).ids
        assert set(ids) == {7, 31}


def test_the_largest_uniform_stays_inside(monkeypatch):
    monkeypatch.setattr("engine.sampling.sampler.uniform", lambda seed, index: 1.0 - 2.0**-53)
    for vocab in range(1, 40):
        logits = torch.zeros(1, vocab + 1)
        logits[0, -1] = -torch.inf
        assert Sampler().sample(logits, [row()]).ids == [vocab - 1]


def test_the_model_is_asked_for_greedy_rows_without_penalties_only():
    """Its own argmax may read the head's weights: not for rows that would not use it."""
    penalized = SamplingParams(temperature=0.0, presence_penalty=1.0)
    rows = [
        row(temperature=0.0),
        row(temperature=1.0),
        SampleRow(penalized, 0, 0, Penalties([1], 1, penalized)),
        row(temperature=0.0),
    ]
    asked = []

    def greedy(some):
        asked.append(some)
        return torch.tensor([100, 200])

    ids = Sampler().sample(logits_of(4), rows, greedy).ids
    assert asked == [[0, 3]] and (ids[0], ids[3]) == (100, 200)
    assert Sampler().sample(logits_of(4)[[0, 3]], [rows[0], rows[3]], greedy).ids == [100, 200]
    assert asked[1] == slice(None)
    Sampler().sample(logits_of(4)[1:3], rows[1:3], greedy)
    assert len(asked) == 2


def test_greedy_takes_the_first_of_tied_tokens():
    logits = torch.zeros(3, 100)
    logits[:, [40, 60]] = 1.0
    assert Sampler().sample(logits, [row(temperature=0.0)] * 3).ids == [40, 40, 40]


def test_logprobs_are_those_of_the_raw_logits():
    logits = logits_of(6)
    rows = [row(seed=i, temperature=t, top_k=50, logprobs=n) for i, (t, n) in enumerate([(0, 0), (0, 5), (2.0, 3)])]
    rows += [row(temperature=0.0), row(seed=9, logprobs=VOCAB + 10), row(seed=10, top_p=0.5, logprobs=1)]
    output = Sampler().sample(logits, rows)
    expected = torch.log_softmax(logits, -1)
    for i, entry in enumerate(output.logprobs):
        count = rows[i].params.logprobs
        if count is None:
            assert entry is None
            continue
        token = output.ids[i]
        assert entry.logprob == expected[i, token].item()
        assert entry.rank == int((expected[i] > expected[i, token]).sum()) + 1
        order = sorted(range(VOCAB), key=lambda t: (-expected[i, t].item(), t))[:count]
        assert entry.top == [(t, expected[i, t].item()) for t in order]
        if rows[i].params.greedy:
            assert entry.rank == 1


def test_tied_logprobs_are_listed_by_id():
    logits = torch.zeros(2, 100)
    logits[:, 50] = 1.0
    output = Sampler().sample(logits, [row(temperature=0.0, logprobs=3), row(temperature=0.0, logprobs=8)])
    assert [t for t, _ in output.logprobs[0].top] == [50, 0, 1]
    assert [t for t, _ in output.logprobs[1].top] == [50, 0, 1, 2, 3, 4, 5, 6]
