"""Who gives to whom: causes, thresholds, limits, and that repeated rounds come to rest."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from llumnix.load import DECODE, DRAINING, PREFILL, STARTING, LoadReport, Movable, freeness
from llumnix.policies.choice import BALANCE, DRAIN, HANDOVER, PRIORITY, ROOM, choose, listed
from llumnix.policies.pairing import Pair, pair
from llumnix.settings import DEFAULTS, LlumnixSettings
from tests.llumnix.reports import movable, report
from tests.machine import cheapest

SMALL = (movable("small", blocks=10),)


def loaded(engine: str = "full", **rest: Any) -> LoadReport:
    """F = 20 x 16 / 20 = 16 steps, below the 48 of the threshold."""
    return report(engine, **{"free_blocks": 20, "running": 20, "movable": SMALL, **rest})


def idle(engine: str = "idle", **rest: Any) -> LoadReport:
    return report(engine, **{"free_blocks": 800, "running": 2, "movable": SMALL, **rest})


def only(*reports: LoadReport, **rest: Any) -> Pair | None:
    pairs = pair(reports, **rest)
    assert len(pairs) <= 1
    return pairs[0] if pairs else None


def causes(*reports: LoadReport) -> list[tuple[str, str, str]]:
    return [(p.source, p.destination, p.cause) for p in pair(reports)]


# Causes


def test_the_overloaded_gives_to_the_freest() -> None:
    assert causes(idle("a", free_blocks=500), loaded(), idle("b")) == [("full", "b", BALANCE)]


def test_a_prompt_that_does_not_fit_asks_for_room() -> None:
    assert causes(loaded(waiting=1, head_blocks=21, waiting_blocks=21), idle()) == [("full", "idle", ROOM)]
    assert causes(loaded(waiting=1, head_blocks=20, waiting_blocks=20), idle()) == [("full", "idle", BALANCE)]


def test_an_engine_with_plenty_of_room_gives_for_its_head() -> None:
    """150 blocks free, F without the queue far above the threshold: only the head of 200 blocks makes it a source."""
    assert causes(report("full", free_blocks=150, running=5, movable=SMALL), idle()) == []
    blocked = report("full", free_blocks=150, running=5, waiting=1, head_blocks=200, waiting_blocks=200, movable=SMALL)
    assert causes(blocked, idle()) == [("full", "idle", ROOM)]


def test_the_high_class_pushes_the_others_out() -> None:
    vip = report("vip", free_blocks=600, running=3, high_running=1, movable=SMALL)
    assert causes(vip, idle()) == [("vip", "idle", PRIORITY)]
    assert pair([vip, idle()], LlumnixSettings(high_headroom=False)) == []


def test_an_engine_of_the_high_class_takes_nobody() -> None:
    """More than its target would be used. Below the target there is room for others."""
    assert causes(loaded(), idle("vip", free_blocks=765, high_running=1)) == []
    assert causes(loaded(), idle("vip", free_blocks=840, high_running=1)) == [("full", "vip", BALANCE)]


def test_a_draining_engine_gives_and_never_takes() -> None:
    leaving = report("leaving", state=DRAINING, running=1, free_blocks=850, movable=SMALL)
    assert causes(leaving, idle()) == [("leaving", "idle", DRAIN)]
    assert causes(leaving, loaded()) == [("leaving", "full", DRAIN)], "room is enough: it is no time to be choosy"
    assert causes(leaving, loaded(free_blocks=17)) == [], "10 blocks and the watermark of 8 do not fit"
    assert causes(leaving, loaded(waiting=1, waiting_blocks=5, head_blocks=5)) == []
    assert causes(leaving, leaving) == []


def test_many_moves_at_a_time_empty_an_engine_whatever_takes_them() -> None:
    many = tuple(movable(f"m{i}", blocks=10) for i in range(8))
    leaving, also = (report(name, state=DRAINING, running=8, movable=many) for name in ("leaving", "also"))
    settings = LlumnixSettings(max_moves_draining=4)
    assert [p[:2] for p in pair([leaving, idle()], settings)] == [("leaving", "idle")] * 4
    assert [p[1] for p in pair([leaving, idle("b", free_blocks=700), idle("a")], settings)] == ["a", "b", "a", "b"]
    assert len(pair([leaving, idle()], settings, {"leaving": 1, "idle": 1})) == 3
    both = pair([leaving, also, idle("a"), idle("b")], settings)
    assert Counter(p[0] for p in both) == {"leaving": 4, "also": 4} and Counter(p[1] for p in both) == {"a": 4, "b": 4}
    assert causes(leaving, idle(), loaded())[-1] == ("leaving", "full", DRAIN), "one that takes is nobody's destination"


def test_a_draining_engine_gives_its_queue_to_engines_that_have_one_too() -> None:
    queue = (movable(waiting=True), *SMALL)
    leaving = report("leaving", state=DRAINING, running=1, waiting=1, free_blocks=0, movable=queue)
    long, short = (loaded(name, waiting=n, waiting_blocks=n, head_blocks=1) for name, n in (("long", 9), ("short", 2)))
    assert pair([leaving, long, short]) == [
        ("leaving", "short", DRAIN, short.total_blocks, True),
        ("leaving", "long", DRAIN, long.total_blocks, True),
    ]
    assert pair([leaving, long, idle()])[0][:3] == ("leaving", "idle", DRAIN) and not pair([leaving, idle()])[0].waiting
    assert pair([leaving, report("new", state=STARTING, waiting=1)]) == []


def test_a_draining_engine_gives_even_when_moves_are_off() -> None:
    leaving = report("leaving", state=DRAINING, running=1, free_blocks=850, movable=SMALL)
    off = LlumnixSettings(enable_moves=False)
    assert [p.cause for p in pair([leaving, idle(), loaded()], off)] == [DRAIN]


def test_draining_engines_spread_over_many_destinations() -> None:
    leaving = report("leaving", state=DRAINING, running=9, free_blocks=700, movable=SMALL * 8)
    made = pair([leaving, *(idle(f"d{i}") for i in range(9))])
    assert [p.source for p in made] == ["leaving"] * DEFAULTS.max_moves_draining
    assert len({p.destination for p in made}) == DEFAULTS.max_moves_draining
    assert len(pair([leaving, *(idle(f"d{i}") for i in range(9))], busy={"leaving": 3, "elsewhere": 3})) == 1


def test_prefill_engines_hand_over() -> None:
    done = report("p", role=PREFILL, running=1, free_blocks=800, movable=SMALL)
    decoder = idle("d", role=DECODE)
    assert causes(done, decoder) == [("p", "d", HANDOVER)]
    assert causes(done, idle("m")) == [("p", "m", HANDOVER)]
    queued = report("p", role=PREFILL, waiting=1, movable=(movable(waiting=True),))
    assert causes(queued, decoder) == [], "what is not prefilled yet stays"


def test_without_decode_engines_the_prefill_engines_decode() -> None:
    done = report("p", role=PREFILL, running=1, free_blocks=800, movable=SMALL)
    assert causes(done, report("q", role=PREFILL)) == []
    assert causes(done, idle("d", role=DECODE, state=DRAINING)) == [("d", "p", DRAIN)]


def test_balance_stays_within_a_role() -> None:
    assert causes(loaded(role=DECODE), idle(role=PREFILL, movable=())) == []
    assert causes(loaded(role=DECODE), idle("d", role=DECODE), report("p", role=PREFILL)) == [("full", "d", BALANCE)]


# What forbids a pair


def test_engines_exchange_only_with_an_equal_key() -> None:
    assert causes(loaded(compat_key="x"), idle(compat_key="y")) == []
    assert causes(loaded(compat_key="x"), idle("y", compat_key="y"), idle("x", compat_key="x", free_blocks=700)) == [
        ("full", "x", BALANCE)
    ]


@pytest.mark.parametrize("state", ["starting", DRAINING, "gone"])
def test_only_ready_engines_take(state: str) -> None:
    assert only(loaded(), idle(state=state, movable=())) is None


def test_hung_engines_take_no_part() -> None:
    assert only(loaded(), idle(stalled_s=11.0)) is None
    assert only(loaded(stalled_s=11.0), idle()) is None


def test_an_engine_with_a_queue_takes_nobody() -> None:
    """It would refuse: those in its queue are older."""
    assert only(loaded(), idle(waiting=1, waiting_blocks=1, head_blocks=1)) is None


def test_an_engine_without_a_movable_request_is_no_source() -> None:
    assert only(loaded(movable=()), idle()) is None


def test_between_the_thresholds_nobody_moves() -> None:
    assert only(report("a", free_blocks=60, running=20, movable=SMALL), idle()) is None  # F = 48, not below it
    assert only(report("a", free_blocks=59, running=20, movable=SMALL), idle()) is not None


def test_the_destination_stays_above_its_threshold() -> None:
    """With 21 requests it must keep 6 blocks for each: of 140 it can give 14."""
    tight = report("tight", free_blocks=140, running=20)
    assert only(loaded(), tight) == Pair("full", "tight", BALANCE, 14)
    assert only(loaded(movable=(movable(blocks=15),)), tight) is None
    assert only(loaded(movable=(movable(blocks=14),)), tight) is not None


def test_a_move_that_would_turn_the_gap_around_is_not_made() -> None:
    """One huge request: the engine that gives it is then far freer than the one that has it."""
    huge = report("huge", free_blocks=2, running=1, movable=(movable(blocks=250),))
    assert only(huge, idle(free_blocks=400, running=3)) is None
    assert only(huge, idle(free_blocks=400, running=1)) is not None


def test_of_a_source_that_owes_the_most_goes_first() -> None:
    worse = loaded("worse", free_blocks=0, waiting=1, head_blocks=90, waiting_blocks=90)
    assert [p.source for p in pair([loaded("a"), worse, loaded("b"), idle("x"), idle("y")])] == ["worse", "a"]


def test_drains_come_first() -> None:
    leaving = report("leaving", state=DRAINING, running=1, free_blocks=850, movable=SMALL)
    assert [p.source for p in pair([loaded("a", free_blocks=0), leaving, idle("x")])] == ["leaving"]


# Limits


def test_an_engine_takes_part_in_one_move_at_a_time() -> None:
    assert only(loaded(), idle(), busy={"idle": 1}) is None
    assert only(loaded(), idle(), busy={"full": 1}) is None
    two = LlumnixSettings(max_moves_per_engine=2)
    assert only(loaded(), idle(), settings=two, busy={"full": 1, "idle": 1}) is not None
    assert len(pair([loaded("a"), loaded("b"), idle()])) == 1, "one engine, one pair a round"


def test_the_cluster_has_a_limit() -> None:
    reports = [loaded(f"s{i}") for i in range(9)] + [idle(f"d{i}") for i in range(9)]
    assert len(pair(reports)) == 9
    assert len(pair(reports, LlumnixSettings(max_moves=5))) == 5
    assert len(pair(reports, LlumnixSettings(max_moves=5), busy={"x": 2, "y": 2})) == 3
    assert pair(reports, LlumnixSettings(max_moves=5), busy={"x": 5, "y": 5}) == []


# Repeated rounds


@dataclass
class Engine:
    """A cluster's engine without time: requests stay as they are until they move."""

    name: str
    running: list[Movable]
    queue: list[Movable]
    total: int = 200

    @property
    def free(self) -> int:
        return self.total - sum(r.blocks for r in self.running)

    def admit(self) -> None:
        while self.queue and self.queue[0].blocks <= self.free:
            self.running.append(self.queue.pop(0)._replace(waiting=False))

    def report(self, settings: LlumnixSettings) -> LoadReport:
        everything = self.running + self.queue
        return report(
            self.name,
            total_blocks=self.total,
            free_blocks=self.free,
            running=len(self.running),
            waiting=len(self.queue),
            head_blocks=self.queue[0].blocks if self.queue else 0,
            waiting_blocks=sum(r.blocks for r in self.queue),
            high_running=sum(r.priority < 0 for r in self.running),
            movable=listed(everything, settings, 0.0),
        )


@dataclass
class Cluster:
    engines: dict[str, Engine]
    settings: LlumnixSettings
    moves: list[tuple[Pair, str, float, float]] = field(default_factory=list)

    def round(self) -> int:
        """One round of pairing, all of it carried out; the number of moves."""
        reports = {name: engine.report(self.settings) for name, engine in self.engines.items()}
        done = 0
        for made in pair(reports.values(), self.settings):
            source, end = self.engines[made.source], self.engines[made.destination]
            found = choose(source.running + source.queue, made.max_blocks, self.settings, 0.0, made.cause)
            if found is None:
                continue
            before = self.gap(source, end)
            (source.queue if found.waiting else source.running).remove(found)
            end.running.append(found._replace(waiting=False))
            self.moves.append((made, found.id, before, self.gap(source, end)))
            done += 1
            assert end.free >= 0
            assert freeness(end.report(self.settings), self.settings) >= self.settings.in_steps(end.total * 16) - 1e-9
        for engine in self.engines.values():
            engine.admit()
        return done

    def gap(self, a: Engine, b: Engine) -> float:
        free = [freeness(engine.report(self.settings), self.settings) for engine in (a, b)]
        return abs(free[0] - free[1])


def random_cluster(rng: random.Random, settings: LlumnixSettings) -> Cluster:
    engines = {}
    for i in range(rng.randrange(2, 14)):
        engine = Engine(f"e{i}", [], [])
        for j in range(rng.choice([0, 3, 10, 30])):
            blocks = rng.choice([1, 2, 5, 20, 60])
            priority = rng.choice([0, 0, 0, 0, 2, -1])
            engine.queue.append(movable(f"{i}.{j}", blocks=blocks, waiting=True, started_order=j, priority=priority))
        engine.admit()
        engines[engine.name] = engine
    return Cluster(engines, settings)


@pytest.mark.parametrize("policy", ["SR", "LR", "LCR", "FCW", "FCWSR"])
def test_rounds_come_to_rest_and_no_gap_grows(policy: str) -> None:
    """Ping-pong is what one threshold without a check after the move does."""
    moves = 0
    for seed in range(60):
        cluster = random_cluster(random.Random(seed), LlumnixSettings(request_policy=policy, move_cooldown_s=0.0))
        count = sum(len(e.running) + len(e.queue) for e in cluster.engines.values())
        for _ in range(600):
            if cluster.round() == 0 and cluster.round() == 0:
                break
        else:
            raise AssertionError(f"seed {seed}: still moving after 600 rounds")
        assert sum(len(e.running) + len(e.queue) for e in cluster.engines.values()) == count
        for made, name, before, after in cluster.moves:
            assert after < before or cluster.settings.request_policy.startswith("FCW"), (seed, made, name)
        moves += len(cluster.moves)
    assert moves > 300


def test_no_request_moves_twice_in_a_cluster_that_stands_still() -> None:
    """What an engine took keeps it above the threshold below which it would give."""
    for seed in range(60):
        cluster = random_cluster(random.Random(seed), LlumnixSettings(move_cooldown_s=0.0, high_headroom=False))
        queued = {r.id for e in cluster.engines.values() for r in e.queue}
        while cluster.round():
            pass
        moved = [name for _, name, _, _ in cluster.moves if name not in queued]
        assert len(moved) == len(set(moved)), seed


def test_a_prompt_that_fits_nowhere_is_admitted_after_moves() -> None:
    """Fragmentation: 3 x 60 blocks are free, no engine has the 100 that the head wants."""
    engines = {}
    for i in range(3):
        running = [movable(f"{i}.{j}", blocks=10, started_order=j) for j in range(14)]
        engines[f"e{i}"] = Engine(f"e{i}", running, [])
    engines["e0"].queue.append(movable("long", blocks=100, waiting=True))
    cluster = Cluster(engines, LlumnixSettings(migrate_in_share=3 / 851))
    for _ in range(20):
        cluster.round()
        if not engines["e0"].queue:
            break
    assert any(r.id == "long" for r in engines["e0"].running)
    assert {made.cause for made, *_ in cluster.moves} == {ROOM}


def test_the_high_class_gets_its_headroom() -> None:
    """Normal requests leave until what is used is at the target, and then stay away."""
    running = [movable("vip", blocks=10, priority=-1), *(movable(str(i), blocks=10) for i in range(12))]
    engines = {"e0": Engine("e0", running, []), "e1": Engine("e1", [], []), "e2": Engine("e2", [], [])}
    cluster = Cluster(engines, LlumnixSettings(high_target_share=0.2))
    for _ in range(50):
        cluster.round()
    assert [r.id for r in engines["e0"].running if r.priority < 0] == ["vip"]
    assert 200 - engines["e0"].free <= 0.2 * 200
    assert all(made.source == "e0" and made.cause == PRIORITY for made, *_ in cluster.moves)


# Speed


def test_a_round_of_1024_engines_takes_less_than_50_ms() -> None:
    rng = random.Random(3)
    reports = []
    for i in range(1024):
        free = rng.choice([rng.randrange(60), rng.randrange(851)])
        listed_here = tuple(movable(f"{i}.{j}", blocks=rng.choice([1, 10, 80])) for j in range(8))
        reports.append(report(f"e{i}", free_blocks=free, running=rng.randrange(1, 40), movable=listed_here))

    def timed() -> float:
        started = time.process_time()
        assert len(pair(reports, LlumnixSettings(max_moves=1024))) > 100
        return time.process_time() - started

    assert cheapest(timed, 0.05) < 0.05
