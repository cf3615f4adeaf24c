"""The same bits whatever happens to a request: batch mates, chunking, caches, preemption, threads, moves.

bfloat16 on the native kernels. A request alone in an engine is the oracle: its tokens and its logprobs, compared as
floats. One model is loaded once; each schedule gets an engine of its own around it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.exact import BLOCK, FAMILIES, Answer, Job, Loaded, add, alone, collect, load, make_engine, promised, run

pytestmark = pytest.mark.skipif(not promised(), reason="bits are promised for the native kernels only")

EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"min_p": 0.05, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {},
    {"repetition_penalty": 0.8, "frequency_penalty": 1.5, "min_p": 0.02},
    {"min_p": 0.1},
    {"frequency_penalty": -0.6},
]
"""Seven kinds, so that neighbours differ and each is met greedy and seeded, with and without logprobs and a prefix."""


def job(seed: int, common: list[int] = (), longest: int = 90, tokens: int = 24) -> Job:  # type: ignore[assignment]
    """A random request: greedy or seeded, with logprobs or without, with penalties and min_p or without."""
    source = random.Random(seed)
    prompt = list(common) + [source.randrange(4, 250) for _ in range(source.randrange(1, longest))]
    params: dict[str, Any] = {"max_tokens": source.randrange(1, tokens), "ignore_eos": True}
    params |= {"temperature": 0.0} if seed % 2 else {"temperature": 1.1, "seed": seed}
    if seed % 3 == 0:
        params |= {"top_p": 0.9} if seed % 2 else {"top_k": 40, "top_p": 0.95}
    params["logprobs"] = (None, 0, 3)[seed % 3]
    params |= EDITS[seed % len(EDITS)]
    return Job(prompt, SamplingParams(**params))


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_undisturbed(loaded: Loaded, jobs: dict[str, Job], answers: dict[str, Answer]) -> None:
    assert set(answers) == set(jobs)
    for name, wanted in jobs.items():
        assert len(answers[name]) == wanted.params.max_tokens
        assert answers[name] == alone(loaded, name, wanted), name


class Work(NamedTuple):
    """What a model is given."""

    jobs: dict[str, Job]
    prefix: list[int]  # of requests that have to be as long as those
    room: int  # times as many blocks as short requests need


def some_jobs(common: list[int], longest: int) -> dict[str, Job]:
    return {f"r{i}": job(i, common) if i % 4 == 0 else job(i, longest=longest) for i in range(64)}


SHORT, LONG = Work(some_jobs([9] * 37, 90), [], 1), Work(some_jobs([9] * 220, 330), [9] * 270, 3)
"""Running states of attention are merged every 256 tokens: of LONG half the requests come that far, some while they
decode."""


def work_of(loaded: Loaded) -> Work:
    return LONG if loaded.family == "wide" else SHORT


def first(loaded: Loaded, count: int) -> dict[str, Job]:
    return dict(list(work_of(loaded).jobs.items())[:count])


def test_long_work_is_long() -> None:
    ends = [(len(job.prompt), len(job.prompt) + (job.params.max_tokens or 0)) for job in LONG.jobs.values()]
    assert sum(end > 256 for _, end in ends) >= 20
    assert sum(start < 256 < end - 1 for start, end in ends) >= 3


def test_penalties_decide_tokens(loaded: Loaded) -> None:
    """Else the rest of this file would not notice if they were lost."""
    differ = {True: 0, False: 0}
    for name, wanted in work_of(loaded).jobs.items():
        if wanted.params.penalized:
            plain = replace(wanted.params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
            engine = make_engine(loaded)
            differ[plain.greedy] += run(engine, {name: Job(wanted.prompt, plain)})[name] != alone(loaded, name, wanted)
    assert min(differ.values()) >= 10, differ


@pytest.mark.parametrize("mates", [1, 2, 7, 15, 31, 63])
def test_batch_mates(loaded: Loaded, mates: int) -> None:
    jobs = first(loaded, mates + 1)
    assert_undisturbed(loaded, jobs, run(make_engine(loaded), jobs))


@pytest.mark.parametrize("budget", [16, 17, 33, 64, 100, 512, 2048])
def test_chunk_budgets(loaded: Loaded, budget: int) -> None:
    jobs = {"long": job(2, [9] * 740), **first(loaded, 12)}
    engine = make_engine(loaded, max_num_batched_tokens=budget, max_num_seqs=min(budget, 64))
    assert_undisturbed(loaded, jobs, run(engine, jobs))


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_cache_on_off_and_partly_hit(loaded: Loaded, caching: bool) -> None:
    engine = make_engine(loaded, prefix_caching=caching)
    jobs = first(loaded, 12)
    assert_undisturbed(loaded, jobs, run(engine, jobs))
    again = {name: jobs[name] for name in reversed(jobs)}
    assert_undisturbed(loaded, again, run(engine, again))
    assert (engine.stats().cached_tokens > 0) == caching


@pytest.mark.parametrize("preempt", ["RECOMPUTE", "SWAP"])
def test_preemption(loaded: Loaded, preempt: str) -> None:
    jobs = first(loaded, 24)
    engine = make_engine(
        loaded,
        blocks=24 * work_of(loaded).room,
        host=200 * work_of(loaded).room,
        preempt=preempt,
        max_num_batched_tokens=128,
    )
    assert_undisturbed(loaded, jobs, run(engine, jobs))
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("preempt", ["RECOMPUTE", "SWAP"])
def test_preemption_in_the_middle_of_an_output(loaded: Loaded, preempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted of the output for penalties has to come back with it."""
    jobs = {f"p{i}": job(i, work_of(loaded).prefix, longest=30) for i in range(14)}
    jobs = {name: Job(w.prompt, replace(w.params, max_tokens=60)) for name, w in jobs.items()}
    engine = make_engine(loaded, blocks=24 + len(work_of(loaded).prefix) // BLOCK, host=600, preempt=preempt)
    lost: list[int] = []  # tokens of the output that penalized requests had
    give_away = engine.scheduler._preempt

    def watched(request: Request) -> None:
        if request.params.penalized:
            lost.append(len(request.output))
        give_away(request)

    monkeypatch.setattr(engine.scheduler, "_preempt", watched)
    assert_undisturbed(loaded, jobs, run(engine, jobs))
    assert sum(length > 10 for length in lost) >= 4, lost


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(loaded: Loaded, threads: int) -> None:
    jobs = {"long": job(4, [9] * 1480, tokens=12), **first(loaded, 4)}
    expected = {name: alone(loaded, name, wanted) for name, wanted in jobs.items()}
    torch.set_num_threads(threads)
    assert run(make_engine(loaded), jobs) == expected
    assert run(make_engine(loaded), {"long": jobs["long"]}) == {"long": expected["long"]}  # its context is split


def test_block_sizes(loaded: Loaded) -> None:
    """Tiles of attention are 16 keys, or a block where that is smaller: all sizes but 8 have the same bits."""
    jobs = first(loaded, 12)
    for size in (32, 64, 128):
        assert_undisturbed(loaded, jobs, run(make_engine(loaded, block_size=size), jobs))
    eights = run(make_engine(loaded, block_size=8), jobs)
    lone = {name: run(make_engine(loaded, block_size=8), {name: wanted})[name] for name, wanted in jobs.items()}
    assert eights == lone


def move(source: Engine, destination: Engine, name: str) -> None:
    """Hand a running request over, KV and all, as a migration will."""
    record = source.hold(name)
    request = source.scheduler.requests[name]
    count = len(request.blocks)
    slabs = source.export(name, 0, count)
    destination.reserve(name, count)
    destination.write_reserved(name, 0, slabs)
    destination.adopt(record, (0, request.epoch[1] + 1), computed=request.computed, key=name)
    source.abort(name)


def test_export_and_adopt(loaded: Loaded) -> None:
    jobs = first(loaded, 8)
    engines = [make_engine(loaded), make_engine(loaded)]
    answers: dict[str, Answer] = {}
    for name, wanted in jobs.items():
        add(engines[0], name, wanted)
    moves = 0
    for step in range(200):
        for engine in engines:
            collect(engine.step(), answers)
        here, there = engines[step % 2], engines[1 - step % 2]
        running = [r.id for r in here.scheduler.running if r.output]
        if running:
            move(here, there, running[step % len(running)])
            moves += 1
        if not any(engine.has_work for engine in engines):
            break
    assert moves > 8
    assert_undisturbed(loaded, jobs, answers)


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_schedules(loaded: Loaded, seed: int) -> None:
    """Arrivals, budgets, caches, tight memory and moves drawn from a seed."""
    source, work = random.Random(seed), work_of(loaded)
    options: dict[str, Any] = {
        "max_num_batched_tokens": source.choice([16, 24, 64, 200, 2048]),
        "max_num_seqs": source.choice([1, 3, 16]),
        "preempt": source.choice(["RECOMPUTE", "SWAP", "AUTO"]),
        "policy": source.choice(["fcfs", "priority"]),
        "prefix_caching": source.random() < 0.7,
        "keep_evicted": source.random() < 0.5,
        "blocks": source.choice([12, 20, 60]) * work.room,
        "host": source.choice([0, 10, 100]) * work.room,
    }
    engines = [make_engine(loaded, **options) for _ in range(2)]
    names = source.sample(sorted(work.jobs), source.randrange(2, 7))
    jobs = {name: work.jobs[name] for name in names}
    waiting = list(jobs)
    answers: dict[str, Answer] = {}
    while waiting or any(engine.has_work for engine in engines):
        if waiting and source.random() < 0.4:
            name = waiting.pop()
            add(source.choice(engines), name, jobs[name])
        for engine in engines:
            collect(engine.step(), answers)
            engine.scheduler.check()
        if source.random() < 0.2:
            here, there = source.sample(engines, 2)
            most = there.scheduler.pool.available - 2
            moving = [r for r in here.scheduler.running if r.output and r.pending == 1 and len(r.blocks) < most]
            seats = len(there.scheduler.running) < options["max_num_seqs"]
            if moving and seats and not there.scheduler.waiting:
                move(here, there, source.choice(moving).id)
    assert_undisturbed(loaded, jobs, answers)
