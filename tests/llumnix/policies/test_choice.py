"""Which request moves: class first, then the policy; cooldown, the high class, what must go anyway."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from llumnix.load import Movable
from llumnix.policies.choice import (
    BALANCE,
    COOLDOWN,
    DRAIN,
    HANDOVER,
    HIGH_CLASS,
    POLICY,
    PRIORITY,
    ROOM,
    TOO_LARGE,
    allowed,
    choose,
    listed,
    passed_over,
)
from llumnix.settings import DEFAULTS, REQUEST_POLICIES, LlumnixSettings
from tests.llumnix.reports import movable

SHORT = movable("short", blocks=2, started_order=2)
LONG = movable("long", blocks=50, started_order=1)
LAST = movable("last", blocks=9, started_order=3)
HEAD = movable("head", blocks=30, waiting=True, started_order=0)
SECOND = movable("second", blocks=1, waiting=True, started_order=1)
ALL = [SHORT, LONG, LAST, HEAD, SECOND]


def pick(*requests: Movable, policy: str = "SR", most: int = 100, now: float = 100.0, cause: str = BALANCE) -> str:
    found = choose(requests, most, LlumnixSettings(request_policy=policy), now, cause)
    return found.id if found is not None else ""


@pytest.mark.parametrize(
    "policy, order",
    [
        ("SR", ["short", "last", "long"]),
        ("LR", ["long", "last", "short"]),
        ("LCR", ["last", "short", "long"]),
        ("FCW", ["head", "second"]),
        ("FCWSR", ["head", "second", "short", "last", "long"]),
    ],
)
def test_each_policy_takes_its_requests_in_its_order(policy: str, order: list[str]) -> None:
    for requests in itertools.islice(itertools.permutations(ALL), 0, None, 17):
        left = list(requests)
        taken = []
        while name := pick(*left, policy=policy):
            taken.append(name)
            left = [r for r in left if r.id != name]
        assert taken == order


def test_policies_are_all_known() -> None:
    assert set(REQUEST_POLICIES) == {"SR", "LR", "LCR", "FCW", "FCWSR"}


@pytest.mark.parametrize("policy", ["SR", "LR", "LCR", "FCWSR"])
def test_lower_priority_goes_first_whatever_the_policy(policy: str) -> None:
    low = movable("low", priority=3, blocks=7, started_order=2)
    normal = [movable("a", blocks=1, started_order=9), movable("b", blocks=90, started_order=1)]
    assert pick(*normal, low, policy=policy) == "low"


@pytest.mark.parametrize("cause", [BALANCE, ROOM, PRIORITY])
def test_the_high_class_never_moves_for_others(cause: str) -> None:
    assert pick(movable(priority=-1, blocks=1), cause=cause) == ""
    assert pick(movable(priority=-1, blocks=1), LONG, cause=cause) == "long"


@pytest.mark.parametrize("cause", [DRAIN, HANDOVER])
def test_the_high_class_moves_when_it_must(cause: str) -> None:
    assert pick(movable("vip", priority=-1), cause=cause) == "vip"


def test_a_request_rests_after_a_move() -> None:
    moved = SHORT._replace(last_moved=100.0)
    rest = DEFAULTS.move_cooldown_s
    assert pick(moved, LONG, now=100.0 + rest - 0.01) == "long"
    assert pick(moved, LONG, now=100.0 + rest) == "short"
    assert pick(moved, now=100.0, cause=DRAIN) == "short"
    assert pick(moved, now=100.0, cause=HANDOVER) == "short"


def test_only_what_the_destination_can_take_moves() -> None:
    assert pick(SHORT, LONG, most=1) == ""
    assert pick(LONG, LAST, most=9) == "last"
    assert pick(LONG, LAST, most=10**9, policy="LR") == "long"
    assert pick(HEAD, LAST, most=9, cause=DRAIN) == "last"


def test_drain_takes_everything_whatever_the_policy() -> None:
    for policy in REQUEST_POLICIES:
        left, taken = list(ALL), []
        while name := pick(*left, policy=policy, cause=DRAIN):
            taken.append(name)
            left = [r for r in left if r.id != name]
        assert sorted(taken) == sorted(r.id for r in ALL)
        assert taken[:2] == ["head", "second"], "queued requests are free to move"


def test_handover_takes_only_what_runs() -> None:
    assert pick(HEAD, cause=HANDOVER) == ""
    assert pick(HEAD, LONG, cause=HANDOVER, policy="FCW") == "long"


def test_nothing_to_choose_from() -> None:
    assert choose([], 100, DEFAULTS, 0.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_report_lists_the_cheapest_that_may_move(seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        movable(
            str(i),
            priority=rng.choice([-1, 0, 2]),
            blocks=rng.randrange(1, 90),
            waiting=rng.random() < 0.3,
            started_order=i,
            last_moved=rng.choice([0.0, 99.0]),
        )
        for i in range(30)
    ]
    chosen = replace(DEFAULTS, request_policy="FCWSR", movable_reported=6)
    shown = listed(requests, chosen, 100.0)
    may = [r for r in requests if allowed(r, chosen, 100.0)]
    assert len(shown) == min(6, len(may)) and set(shown) <= set(may)
    dearest = max((not r.waiting, r.blocks) for r in shown)
    assert all((not r.waiting, r.blocks) >= dearest for r in may if r not in shown)
    assert len(listed(requests, replace(chosen, movable_reported=64), 100.0, DRAIN)) == 30


def test_an_engine_that_hands_over_hides_nobody() -> None:
    """Neither behind a queue, nor for its class or a move just now: each of them has to go."""
    queue = [movable(f"q{i}", blocks=1, waiting=True, started_order=i) for i in range(20)]
    high = movable("high", priority=-1, blocks=90)
    fresh = movable("fresh", blocks=80, last_moved=99.9)
    found = listed([*queue, high, fresh], DEFAULTS, 100.0, HANDOVER)
    assert [m.id for m in found[:2]] == ["fresh", "high"] and len(found) == DEFAULTS.movable_reported
    assert all(m.waiting for m in listed([*queue, high, fresh], DEFAULTS, 100.0))


def test_who_is_passed_over_is_counted_by_the_reason() -> None:
    candidates = [
        movable("vip", priority=-1),
        movable("fresh", last_moved=99.0),
        movable("queued", waiting=True),
        movable("big", blocks=11),
        movable("fits", blocks=10),
    ]
    running = LlumnixSettings(request_policy="SR")
    expected = {HIGH_CLASS: 1, COOLDOWN: 1, POLICY: 1, TOO_LARGE: 1}
    assert passed_over(candidates, 10, running, 100.0) == expected
    assert passed_over(candidates, 10, running, 100.0, HANDOVER) == {POLICY: 1, TOO_LARGE: 1}
    assert passed_over(candidates, 10, running, 100.0, DRAIN) == {TOO_LARGE: 1}
    for cause in (BALANCE, HANDOVER, DRAIN):
        left = len(candidates) - passed_over(candidates, 10, running, 100.0, cause).total()
        found = set()
        while (one := choose([c for c in candidates if c.id not in found], 10, running, 100.0, cause)) is not None:
            found.add(one.id)
        assert len(found) == left
