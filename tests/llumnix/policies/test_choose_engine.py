"""Freeness by hand-computed values, and the engine that is chosen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llumnix.load import DRAINING, READY, STARTING, LoadReport, freeness
from llumnix.policies import dispatch
from llumnix.policies.dispatch import Ask
from llumnix.policies.fleet import Fleet


def report(engine: str = "e", **rest: Any) -> LoadReport:
    values = {"state": READY, "block_size": 16, "total_blocks": 100, "free_blocks": 100, **rest}
    return LoadReport(engine, 1.0, 1, **values)


Booked = dict[str, tuple[int, int]]  # engine -> requests, blocks


def choose(
    *reports: LoadReport, tokens: int = 16, booked: Booked | None = None, exclude: Any = (), **rest: Any
) -> str | None:
    fleet = Fleet(reports)
    for name, (requests, blocks) in (booked or {}).items():
        fleet.book(name, blocks, 16 * blocks, requests)
    return dispatch.choose(fleet, Ask(tokens, exclude=exclude), **rest)


# Load


@pytest.mark.parametrize(
    "load, expected",
    [
        ({"free_blocks": 50, "running": 4}, 50 * 16 / 4),
        ({"free_blocks": 50, "running": 4, "waiting": 3, "waiting_blocks": 30, "head_blocks": 10}, 40 * 16 / 4),
        ({"free_blocks": 5, "running": 4, "waiting": 1, "waiting_blocks": 10, "head_blocks": 10}, -5 * 16),
        ({"free_blocks": 100}, 1600),
        ({"free_blocks": 100, "block_size": 32, "running": 1}, 3200),
        ({"total_blocks": 0, "free_blocks": 0}, 0),
    ],
)
def test_freeness_counts_only_the_head_of_the_queue(load: dict[str, Any], expected: float) -> None:
    assert freeness(report(**load)) == expected


@pytest.mark.parametrize(
    "load, booked, tokens, expected",
    [
        ({"free_blocks": 50, "running": 4}, (0, 0), 80, 45 * 16 / 5),
        ({"free_blocks": 50, "running": 4}, (1, 5), 16, 44 * 16 / 6),
        ({"free_blocks": 50, "running": 4, "waiting": 3, "waiting_blocks": 30}, (0, 0), 96, 14 * 16 / 8),
        ({"free_blocks": 35, "running": 4, "waiting": 3, "waiting_blocks": 30}, (0, 0), 80, 0),
        ({"free_blocks": 10, "running": 4, "waiting": 3, "waiting_blocks": 30}, (1, 2), 64, -26 * 16),
        ({"total_blocks": 0, "free_blocks": 0, "state": STARTING}, (0, 0), 0, 0),
    ],
)
def test_a_new_request_would_come_after_all_that_waits_and_all_that_is_booked(
    load: dict[str, Any], booked: tuple[int, int], tokens: int, expected: float
) -> None:
    fleet = Fleet([report(**load)])
    requests, blocks = booked
    fleet.book("e", blocks, 16 * blocks, requests)
    assert dispatch.steps(fleet, Ask(tokens)).tolist() == [expected]


def test_freeness_is_capped_at_the_capacity_and_always_finite() -> None:
    assert freeness(report(free_blocks=100, running=0)) == report().capacity == 1600
    json.dumps([freeness(report(state=state)) for state in (STARTING, READY, DRAINING)], allow_nan=False)


def test_a_report_survives_the_wire_and_newer_keys() -> None:
    one = report(role="prefill", waiting=3, step_seconds=0.5)
    assert LoadReport.from_message(json.loads(json.dumps(one.to_message()))) == one
    assert LoadReport.from_message({**one.to_message(), "actor": object(), "metrics": []}) == one


# Choice


def test_the_freest_engine_is_chosen() -> None:
    assert choose(report("a", free_blocks=20, running=2), report("b", free_blocks=30, running=2)) == "b"
    assert choose(report("a", free_blocks=30, running=1), report("b", free_blocks=40, running=2)) == "a"


def test_a_larger_engine_is_freer() -> None:
    assert choose(report("a"), report("b", total_blocks=200, free_blocks=200)) == "b"


@pytest.mark.parametrize("state", [STARTING, DRAINING, "gone"])
def test_only_ready_engines_are_chosen(state: str) -> None:
    assert choose(report("a", state=state), report("b", free_blocks=1, running=50)) == "b"
    assert choose(report("a", state=state)) is None


def test_excluded_and_hung_engines_are_passed_over() -> None:
    assert choose(report("a"), report("b", running=9), exclude={"a"}) == "b"
    assert choose(report("a", stalled_s=61.0), report("b", running=9)) == "b"
    assert choose(report("a", stalled_s=6.0), report("b", running=9), step_timeout_s=5.0) == "b"
    assert choose(report("a", stalled_s=60.0)) == "a"
    assert choose(report("a"), exclude=["a"]) is None
    assert choose() is None


def test_an_engine_that_could_never_hold_the_request_is_passed_over() -> None:
    small, large = report("a", max_model_len=100), report("b", max_model_len=200, running=50)
    assert choose(small, large, tokens=99) == "a"
    assert choose(small, large, tokens=100) == "b"
    assert choose(small, tokens=100) is None
    assert choose(report("a", max_model_len=0), tokens=10**6) == "a", "0: it did not say"


def test_ties_go_to_fewer_requests_then_to_the_first_name() -> None:
    assert choose(report("b"), report("a")) == "a"
    one = report("a", free_blocks=31, running=2)  # (31 - 1) x 16 / 3
    two = report("b", free_blocks=21, running=1)  # (21 - 1) x 16 / 2
    assert choose(one, two) == "b"


def test_bookings_count_at_once() -> None:
    engines = report("a"), report("b")
    assert choose(*engines, booked={"a": (1, 4)}) == "b"
    assert choose(*engines, booked={"a": (1, 4), "b": (2, 8)}) == "a"
    assert choose(*engines, booked={"a": (1, 40), "b": (1, 4)}) == "b"


def test_a_burst_from_one_ingress_spreads_evenly() -> None:
    engines = [report(name) for name in "abc"]
    booked: Booked = {}
    for _ in range(30):
        name = choose(*engines, tokens=40, booked=booked)
        assert name is not None
        requests, blocks = booked.get(name, (0, 0))
        booked[name] = requests + 1, blocks + 3
    assert {name: requests for name, (requests, _) in booked.items()} == {"a": 10, "b": 10, "c": 10}


def test_when_all_are_full_the_shorter_queue_is_chosen() -> None:
    """Dividing what is owed by the batch would make a long queue look like a short one."""
    long = report("a", free_blocks=0, running=10, waiting=100, waiting_blocks=1000)
    short = report("b", free_blocks=0, running=10, waiting=10, waiting_blocks=110)
    assert choose(long, short) == "b"
    assert choose(long) == "a", "requests queue at engines, never in the middle"


def test_an_engine_with_room_beats_one_without() -> None:
    full = report("a", free_blocks=0, running=1)
    assert choose(full, report("b", free_blocks=2, running=90)) == "b"


def test_the_length_of_the_request_counts() -> None:
    few_blocks = report("a", free_blocks=10, running=0)
    many_blocks = report("b", free_blocks=90, running=9)
    assert choose(few_blocks, many_blocks, tokens=16) == "a"  # 9 x 16 / 1 against 89 x 16 / 10
    assert choose(few_blocks, many_blocks, tokens=160) == "b"  # 0 against 80 x 16 / 10
