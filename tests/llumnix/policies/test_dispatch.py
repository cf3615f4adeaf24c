"""Every dispatch policy against the sentence that defines it, on random fleets; and its speed."""

from __future__ import annotations

import random
import time

import pytest

from llumnix.load import DECODE, DRAINING, PREFILL, LoadReport, steps_left, summarise, truncated
from llumnix.policies.dispatch import POLICIES, Ask, choose
from llumnix.policies.fleet import Fleet
from llumnix.settings import DISPATCH_POLICIES, LlumnixSettings
from tests.llumnix.reports import report
from tests.machine import cheapest


def settings(policy: str, **rest: object) -> LlumnixSettings:
    return LlumnixSettings(dispatch_policy=policy, **rest)  # type: ignore[arg-type]


def random_report(name: str, rng: random.Random) -> LoadReport:
    total = rng.choice([100, 851])
    free = rng.randrange(total + 1)
    running = rng.randrange(1, 40) if free < total else 0
    waiting = rng.choice([0, 0, rng.randrange(20)])
    return report(
        name,
        total_blocks=total,
        free_blocks=free,
        running=running,
        waiting=waiting,
        waiting_blocks=waiting * rng.randrange(1, 60),
        head_blocks=waiting and rng.randrange(1, 60),
        high_running=rng.choice([0, 0, 0, min(1, running)]),
        queued_prefill_tokens=waiting * rng.randrange(1, 900),
        role=rng.choice(["mixed", "mixed", PREFILL, DECODE]),
        state=rng.choice(["ready", "ready", "ready", DRAINING]),
    )


def test_there_is_a_policy_for_every_name_of_the_settings() -> None:
    assert set(POLICIES) == set(DISPATCH_POLICIES)


@pytest.mark.parametrize("policy", DISPATCH_POLICIES)
def test_nobody_ready_is_none_and_one_ready_is_chosen(policy: str) -> None:
    assert choose(Fleet(), Ask(10), settings(policy)) is None
    assert choose(Fleet([report("a", state=DRAINING)]), Ask(10), settings(policy)) is None
    full = report("b", free_blocks=0, running=90, waiting=500, waiting_blocks=9000)
    assert choose(Fleet([report("a", state=DRAINING), full]), Ask(10), settings(policy)) == "b"


@pytest.mark.parametrize("policy", DISPATCH_POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_only_engines_that_can_take_it_are_chosen(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    reports = [random_report(f"e{i}", rng) for i in range(rng.randrange(1, 12))]
    exclude = {r.engine for r in reports if rng.random() < 0.2}
    found = choose(Fleet(reports), Ask(64, exclude=exclude), settings(policy), counter=seed)
    able = {r.engine for r in reports if r.state == "ready"} - exclude
    prefill = {r.engine for r in reports if r.engine in able and r.role != DECODE}
    assert (found in (prefill or able)) if able else found is None


@pytest.mark.parametrize("policy", ["priority_blind", "llumnix"])
@pytest.mark.parametrize("seed", range(30))
def test_the_freest_engine_is_chosen(policy: str, seed: int) -> None:
    """The vectors agree with the plain function of one report."""
    rng = random.Random(seed)
    reports = [random_report(f"e{i}", rng) for i in range(12)]
    ask = Ask(rng.randrange(1, 600))
    found = choose(Fleet(reports), ask, settings(policy))

    def free(one: LoadReport) -> float:
        reserve = round(one.total_blocks * (1 - 1600 / 13616)) if policy == "llumnix" and one.high_running else 0
        left = one.free_blocks - one.waiting_blocks - reserve - -(-ask.tokens // 16)
        return steps_left(left, one.running + one.waiting + 1, one.block_size, one.capacity)

    able = [r for r in reports if r.state == "ready" and r.role != DECODE]
    best = max(free(r) for r in able)
    tied = [r for r in able if free(r) == best]
    assert found == min(tied, key=lambda r: (r.running + r.waiting, r.engine)).engine


def test_the_high_class_goes_where_its_headroom_is() -> None:
    shielded = report("high", free_blocks=800, running=3, high_running=1)
    normal = report("normal", free_blocks=500, running=3)
    fleet = Fleet([shielded, normal])
    assert choose(fleet, Ask(100), settings("llumnix")) == "normal"
    assert choose(fleet, Ask(100, priority=-1), settings("llumnix")) == "high"
    assert choose(fleet, Ask(100), settings("llumnix", high_headroom=False)) == "high"
    assert choose(fleet, Ask(100), settings("priority_blind")) == "high"


def test_infaas_divides_also_what_is_owed() -> None:
    long = report("long", free_blocks=0, running=10, waiting=100, waiting_blocks=1000)
    short = report("short", free_blocks=0, running=10, waiting=10, waiting_blocks=190)
    assert choose(Fleet([long, short]), Ask(16), settings("infaas")) == "long"
    assert choose(Fleet([long, short]), Ask(16), settings("llumnix")) == "short"


def test_round_robin_visits_all_that_can_take_it_in_the_order_of_names() -> None:
    fleet = Fleet([report(name) for name in ("c", "a", "d", "b")] + [report("aa", state=DRAINING)])
    assert [choose(fleet, Ask(1), settings("round_robin"), counter=i) for i in range(6)] == list("abcdab")


def test_least_requests_counts_running_waiting_and_booked() -> None:
    fleet = Fleet([report("a", running=3), report("b", running=1, waiting=1), report("c", running=2, free_blocks=9)])
    assert choose(fleet, Ask(1), settings("least_requests")) == "b"
    fleet.book("b", 1, 1)
    assert choose(fleet, Ask(1), settings("least_requests")) == "c"
    fleet.book("b", -1, -1, -1)
    assert choose(fleet, Ask(1), settings("least_requests")) == "b"


HASHES = [bytes([i]) * 16 for i in range(1, 9)]
PREFIX = tuple(truncated(digest) for digest in HASHES)


def test_lmetric_multiplies_new_prefill_tokens_and_batch() -> None:
    busy = report("cached", running=3, prefix=summarise(HASHES))  # (0 + 160 - 128) x 4 = 128
    idle = report("idle")  # 160 x 1
    assert choose(Fleet([busy, idle]), Ask(160, prefix=PREFIX), settings("lmetric")) == "cached"
    assert choose(Fleet([busy, idle]), Ask(160), settings("lmetric")) == "idle"
    queued = report("cached", running=3, prefix=summarise(HASHES), queued_prefill_tokens=10)  # 42 x 4 = 168
    assert choose(Fleet([queued, idle]), Ask(160, prefix=PREFIX), settings("lmetric")) == "idle"
    fleet = Fleet([busy, idle])
    fleet.book("cached", 1, 10, 0)
    assert choose(fleet, Ask(160, prefix=PREFIX), settings("lmetric")) == "idle"


def test_sticky_stays_with_the_longest_prefix_until_that_engine_is_saturated() -> None:
    short = report("short", running=1, free_blocks=700, prefix=summarise(HASHES[:2]))
    long = report("long", running=5, free_blocks=600, prefix=summarise(HASHES[5:6]))
    fleet = Fleet([report("idle"), short, long])
    assert choose(fleet, Ask(160, prefix=PREFIX), settings("sticky_prefix")) == "long"
    assert choose(fleet, Ask(160), settings("sticky_prefix")) == "idle"
    fleet.put(report("long", running=30, free_blocks=60, prefix=summarise(HASHES[5:6])))
    assert choose(fleet, Ask(160, prefix=PREFIX), settings("sticky_prefix")) == "short"
    fleet.remove("short")
    assert choose(fleet, Ask(160, prefix=PREFIX), settings("sticky_prefix")) == "idle"


@pytest.mark.parametrize("seed", range(10))
def test_an_updated_fleet_is_the_fleet_made_anew(seed: int) -> None:
    """Reports, bookings, departures and prefixes in any order leave no trace of what is gone."""
    rng = random.Random(seed)
    fleet, reports, booked = Fleet(), {}, {}
    for step in range(300):
        name = f"e{rng.randrange(40)}"
        match rng.randrange(4):
            case 0 if name in reports:
                fleet.remove(name)
                del reports[name], booked[name]
            case 1 if name in reports:
                fleet.book(name, 3, 40)
                booked[name] += 1
            case _:
                made = random_report(name, rng)
                some = summarise(rng.sample(HASHES, rng.randrange(4)))
                reports[name] = LoadReport(**{**made.__dict__, "prefix": some})
                booked.setdefault(name, 0)
                fleet.put(reports[name])
        fresh = Fleet(reports.values())
        for engine, count in booked.items():
            fresh.book(engine, 3 * count, 40 * count, count)
        for policy in DISPATCH_POLICIES:
            ask = Ask(100, prefix=PREFIX)
            assert choose(fleet, ask, settings(policy), step) == choose(fresh, ask, settings(policy), step), policy
    assert sum(len(holders) for holders in fleet._holders.values()) == sum(
        len(r.prefix_hashes) for r in reports.values()
    )


@pytest.mark.parametrize("policy", DISPATCH_POLICIES)
def test_a_choice_among_1024_engines_takes_less_than_100_microseconds(policy: str) -> None:
    rng = random.Random(1)
    fleet = Fleet([random_report(f"e{i}", rng) for i in range(1024)])
    chosen, ask = settings(policy), Ask(300, prefix=PREFIX)

    def some() -> float:
        started = time.process_time()
        for i in range(50):
            name = choose(fleet, ask, chosen, i)
            fleet.book(name, 19, 300)  # type: ignore[arg-type]
        return (time.process_time() - started) / 50

    assert cheapest(some, 100e-6) < 100e-6
