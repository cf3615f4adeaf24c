"""Prefill and decode replicas: the ratio, and who serves when a role is missing."""

from __future__ import annotations

import random

import pytest

from llumnix.load import DECODE, MIXED, PREFILL
from llumnix.policies.roles import assign, serving, split


@pytest.mark.parametrize(
    "present, prefill, decode",
    [
        ({PREFILL, DECODE}, {PREFILL}, {DECODE}),
        ({PREFILL, DECODE, MIXED}, {PREFILL, MIXED}, {DECODE, MIXED}),
        ({PREFILL}, {PREFILL}, {PREFILL}),
        ({DECODE}, {DECODE}, {DECODE}),
        ({MIXED}, {MIXED}, {MIXED}),
        ({MIXED, DECODE}, {MIXED}, {MIXED, DECODE}),
        (set(), set(), set()),
    ],
)
def test_who_serves_a_phase(present: set[str], prefill: set[str], decode: set[str]) -> None:
    assert serving(PREFILL, present) == prefill
    assert serving(DECODE, present) == decode


@pytest.mark.parametrize(
    "replicas, ratio, expected",
    [
        (8, (1, 3), (2, 6)),
        (2, (1, 9), (1, 1)),
        (2, (9, 1), (1, 1)),
        (3, (1, 1), (1, 2)),
        (5, (1, 1), (2, 3)),
        (3, (5, 1), (2, 1)),
        (1, (1, 1), (0, 0)),
        (0, (1, 1), (0, 0)),
        (8, None, (0, 0)),
        (16, (3, 5), (6, 10)),
    ],
)
def test_the_split(replicas: int, ratio: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    assert split(replicas, ratio) == expected


@pytest.mark.parametrize("seed", range(30))
def test_roles_are_assigned_with_the_fewest_changes(seed: int) -> None:
    rng = random.Random(seed)
    roles = {f"e{i}": rng.choice([PREFILL, DECODE, MIXED]) for i in range(rng.randrange(2, 20))}
    ratio = (rng.randrange(1, 5), rng.randrange(1, 5))
    made = assign(roles, ratio)
    prefill, decode = split(len(roles), ratio, sum(role == PREFILL for role in roles.values()))
    count = {role: sum(r == role for r in made.values()) for role in (PREFILL, DECODE, MIXED)}
    assert count == {PREFILL: prefill, DECODE: decode, MIXED: 0}
    old = {role: sum(r == role for r in roles.values()) for role in (PREFILL, DECODE)}
    kept = sum(made[name] == roles[name] for name in roles)
    assert kept == min(old[PREFILL], prefill) + min(old[DECODE], decode)
    assert assign(made, ratio) == made


@pytest.mark.parametrize("now, expected", [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_between_two_splits_the_one_there_is_stays(now: int, expected: int) -> None:
    assert split(3, (1, 1), now) == (expected, 3 - expected)
    assert split(4, (1, 1), now) == (2, 2)


@pytest.mark.parametrize("seed", range(30))
def test_roles_stay_while_engines_come_and_go(seed: int) -> None:
    """A rolling update at 1:1, one engine more at a time: a newcomer changes nobody, a loss one engine at most."""
    rng = random.Random(seed)
    names = iter(rng.sample([f"e{i}" for i in range(100)], 12))
    roles = assign({next(names): MIXED for _ in range(4)}, (1, 1))
    for old in rng.sample(sorted(roles), 4):
        grown = assign({**roles, next(names): MIXED}, (1, 1))
        shrunk = assign({name: role for name, role in grown.items() if name != old}, (1, 1))
        assert all(grown[name] == role for name, role in roles.items())
        assert sum(grown[name] != role for name, role in shrunk.items()) <= 1
        roles = shrunk


def test_whoever_has_the_most_to_lose_decodes() -> None:
    both = {"a": MIXED, "b": MIXED}
    assert assign(both, (1, 1), {"a": 5}) == {"a": DECODE, "b": PREFILL}
    assert assign(both, (1, 1), {"b": 5}) == {"a": PREFILL, "b": DECODE}
    all_decode = {"a": DECODE, "b": DECODE, "c": DECODE}
    assert assign(all_decode, (1, 2), {"a": 3, "b": 1, "c": 2}) == {"a": DECODE, "b": PREFILL, "c": DECODE}


@pytest.mark.parametrize("role", [PREFILL, DECODE, MIXED])
def test_one_that_is_alone_keeps_its_role_and_so_has_it_when_another_comes(role: str) -> None:
    alone = assign({"a": role}, (1, 1))
    assert alone == {"a": role}
    both = assign({**alone, "b": MIXED}, (1, 1))
    assert set(both.values()) == {PREFILL, DECODE}
    if role != MIXED:
        assert both["a"] == role


def test_the_newest_takes_the_place_of_one_that_is_lost() -> None:
    """The lost one is listed until it has been silent for long enough; by then another has come."""
    for survivor, new in (("a", "z"), ("z", "a")):
        three = assign({survivor: DECODE, "lost": PREFILL, new: MIXED}, (1, 1))
        assert (three[survivor], three["lost"]) == (DECODE, PREFILL)
        del three["lost"]
        assert assign(three, (1, 1)) == {survivor: DECODE, new: PREFILL}


def test_without_a_ratio_everyone_is_mixed() -> None:
    assert assign({"a": PREFILL, "b": DECODE}, None) == {"a": MIXED, "b": MIXED}
    assert assign({}, (1, 1)) == {}
