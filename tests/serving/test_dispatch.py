"""An ingress's choice of an engine: every policy live, bookings that come and go, and what a choice costs."""

from __future__ import annotations

import random
import statistics
import time
from itertools import count
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from llumnix.load import DRAINING, READY, LoadReport, Movable, summarise
from llumnix.settings import DISPATCH_POLICIES, LlumnixSettings
from serving.dispatch import BOOKING_S, Dispatcher
from tests.fakes import make_engine
from tests.machine import cheapest

ENGINES = 1024


def report(engine: str, **rest: Any) -> LoadReport:
    values = {"state": READY, "block_size": 4, "total_blocks": 100, "free_blocks": 100, **rest}
    return LoadReport(engine, 1.0, 1, **values)


def dispatcher(*reports: LoadReport, policy: str = "llumnix") -> Dispatcher:
    made = Dispatcher(4)
    made.settings = LlumnixSettings(dispatch_policy=policy)
    for one in reports:
        made.put(one, 0.0)
    return made


def choose(made: Dispatcher, tokens: int = 8, now: float = 0.0, priority: int = 0, **rest: Any) -> str | None:
    return made.choose([1] * tokens, [], priority, (), now, **rest)


def test_a_burst_spreads_and_a_booking_ends_with_the_report_that_shows_it() -> None:
    made = dispatcher(report("a"), report("b", free_blocks=99))
    chosen = [choose(made, now=i / 100) for i in range(10)]
    assert chosen.count("a") == chosen.count("b") == 5
    assert made.fleet.batch.tolist() == [5, 5]
    made.put(report("a", running=1, free_blocks=98), BOOKING_S - 0.01)  # it may be older than the first of them
    assert made.fleet.batch.tolist() == [6, 5]
    made.put(report("a", running=5, free_blocks=90), BOOKING_S + 0.045)
    assert made.fleet.batch.tolist() == [5 + 2, 5], "three of them were sent at 0, 0.02 and 0.04 s"
    made.put(report("a", running=5, free_blocks=90), 1.0)
    assert made.fleet.batch.tolist() == [5, 5]
    assert made.fleet.owed_blocks.tolist() == [0, 10] and made.fleet.owed_tokens.tolist() == [0, 40]


@pytest.mark.parametrize("policy", [name for name in DISPATCH_POLICIES if name != "sticky_prefix"])
def test_without_reports_requests_spread_however_far_apart_they_come(policy: str) -> None:
    """The manager is down."""
    made = dispatcher(*(report(name, free_blocks=100 - 5 * i) for i, name in enumerate("abcd")), policy=policy)
    chosen = [choose(made, now=float(second)) for second in range(80)]
    assert min(chosen.count(name) for name in "abcd") >= 10, chosen


def test_what_is_resumed_counts_with_its_output() -> None:
    made = dispatcher(report("a", max_model_len=10))
    assert made.choose([1] * 5, [2] * 4, 0, (), 0.0) == "a"
    assert made.fleet.owed_blocks.tolist() == [3]
    assert made.choose([1] * 5, [2] * 5, 0, (), 0.0) is None


def test_an_engine_that_was_lost_takes_its_bookings_along() -> None:
    made = dispatcher(report("a"), report("b", state=DRAINING))
    assert choose(made) == "a" and made.decisions == {("a", "llumnix"): 1}
    made.remove("a")
    assert choose(made) is None and not made.decisions
    made.put(report("a"), BOOKING_S + 1)
    choose(made, now=BOOKING_S + 1)
    assert made.fleet.batch[made.fleet.rows["a"]] == 1


def test_a_home_is_taken_whatever_the_policy_and_booked() -> None:
    made = dispatcher(report("a", running=50), report("b"))
    assert choose(made, home="a") == "a"
    assert made.fleet.batch.tolist() == [51, 0]


def test_ready_and_the_longest_sequence_are_those_of_ready_engines() -> None:
    made = dispatcher()
    assert not made.ready and made.max_model_len is None
    made.put(report("a", state=DRAINING, max_model_len=300), 0.0)
    assert not made.ready and made.max_model_len is None
    made.put(report("b", max_model_len=200, stalled_s=61.0), 0.0)
    assert not made.ready and made.max_model_len == 200
    made.put(report("b", max_model_len=200), 0.0)
    assert made.ready


# Policies, as the manager's settings name them


def chosen_by(policy: str, *reports: LoadReport, count: int = 1, priority: int = 0) -> list[str | None]:
    made = dispatcher(*reports, policy=policy)
    return [choose(made, priority=priority) for _ in range(count)]


def test_every_policy_is_live_and_counted() -> None:
    for policy in DISPATCH_POLICIES:
        made = dispatcher(report("a"), policy=policy)
        assert choose(made) == "a" and made.decisions == {("a", policy): 1}


def test_round_robin_goes_round() -> None:
    loaded = report("b", free_blocks=1, running=9)
    assert chosen_by("round_robin", report("a"), loaded, report("c"), count=6) == ["a", "b", "c", "a", "b", "c"]


def test_least_requests_does_not_look_at_memory() -> None:
    reports = report("a", running=2, free_blocks=100), report("b", running=1, free_blocks=10)
    assert chosen_by("least_requests", *reports) == ["b"]
    assert chosen_by("llumnix", *reports) == ["a"]


def test_the_high_class_is_shielded_unless_the_policy_is_blind() -> None:
    reports = report("a", running=2, high_running=1), report("b", running=2, free_blocks=90)
    assert chosen_by("llumnix", *reports) == ["b"]
    assert chosen_by("llumnix", *reports, priority=-1) == ["a"]
    assert chosen_by("priority_blind", *reports) == ["a"]


@pytest.mark.parametrize("policy", ["sticky_prefix", "lmetric"])
def test_a_prompt_goes_where_an_engine_has_its_prefix(policy: str) -> None:
    engine = make_engine(num_blocks=100, block_size=4)
    prompt = list(range(1, 18))
    engine.add_request("r", prompt, SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    prefix = summarise(engine.scheduler.pool.recent(100))
    made = dispatcher(report("a"), report("b", running=1, free_blocks=90, prefix=prefix), policy=policy)
    assert made.choose([90, *prompt[1:]], [], 0, (), 0.0) == "a"
    made = dispatcher(report("a", running=1), report("b", running=1, free_blocks=90, prefix=prefix), policy=policy)
    assert made.choose(prompt, [], 0, (), 0.0) == "b"
    assert made.fleet.owed_tokens.tolist() == [0, 1]  # 16 of 17 tokens are cached there
    assert made.choose(prompt[:8], prompt[8:], 0, (), 0.0) == "b"  # resumed: prompt and output are one sequence


def test_hashes_are_made_only_where_they_are_looked_at() -> None:
    made = dispatcher(report("a"))
    assert made._prefix([1] * 40, []) == []
    made.settings = LlumnixSettings(dispatch_policy="lmetric")
    assert [len(made._prefix([1] * count, [])) for count in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    made.prefix_caching = False
    assert made._prefix([1] * 40, []) == []


# Cost


def crowd(seed: int) -> list[LoadReport]:
    source = random.Random(seed)
    movable = tuple(Movable(f"chatcmpl-{i}", 0, 500, 32, False, i) for i in range(8))
    return [
        report(f"engine-{i:04d}", free_blocks=source.randrange(100), running=source.randrange(64), movable=movable)
        for i in range(ENGINES)
    ]


@pytest.mark.parametrize("policy", DISPATCH_POLICIES)
def test_a_choice_among_a_thousand_engines_takes_less_than_100_microseconds(policy: str) -> None:
    made = dispatcher(*crowd(0), policy=policy)
    prompt = list(range(64))

    def median() -> float:
        times = []
        for i in range(300):
            started = time.thread_time()
            made.choose(prompt, [], 0, (), i * 0.001)
            times.append(time.thread_time() - started)
        return statistics.median(times)

    assert cheapest(median, 100e-6) < 100e-6


def test_taking_in_the_reports_of_a_thousand_engines_takes_less_than_10_milliseconds() -> None:
    made, seeds = dispatcher(*crowd(0)), count()

    def taken_in() -> float:
        messages = [one.to_message() | {"movable": ()} for one in crowd(next(seeds))]
        started = time.thread_time()
        for message in messages:
            made.put(LoadReport.from_message(message), 0.0)
        return time.thread_time() - started

    assert cheapest(taken_in, 10e-3) < 10e-3
