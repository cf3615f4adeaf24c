"""Priorities: who is spared, who overtakes whom, and how waiting lifts a request."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import Engine
from engine.event import Event
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.fakes import VOCAB, Clock, continuation, make_engine

POLICIES = ("fcfs", "priority")
QUEUE_S = 40.0
LIFT_S = QUEUE_S / 4


def add(engine: Engine, name: str, length: int, max_tokens: int = 4, priority: int = 0) -> Request:
    prompt = [(ord(name[0]) * 31 + i * 7 + 1) % VOCAB for i in range(length)]
    return engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens), priority=priority)


def run(engine: Engine) -> list[Event]:
    events: list[Event] = []
    for _ in range(500):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.scheduler.check()
    raise AssertionError("work is left after 500 steps")


def ids(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def busy(clock: Clock, seats: int = 1, **options: Any) -> Engine:
    """An engine whose seats are taken for long."""
    engine = make_engine(clock=clock, max_num_seqs=seats, policy="priority", max_queue_time_s=QUEUE_S, **options)
    for i in range(seats):
        add(engine, f"{i}", 3, 40, priority=-9)
    engine.step()
    return engine


def vacate(engine: Engine) -> None:
    for request in list(engine.scheduler.running):
        engine.abort(request.id)


# The high class


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["high first", "high last"])
def test_the_high_class_is_preempted_last(policy: str, order: str) -> None:
    engine = make_engine(num_blocks=6, policy=policy, prefix_caching=False)
    for name in ("high", "normal") if order == "high first" else ("normal", "high"):
        add(engine, name, 8, 14, priority=-1 if name == "high" else 0)
    engine.step()
    high = engine.scheduler.requests["high"]
    events = run(engine)
    assert engine.scheduler.preemptions and not high.preemptions
    for event in events:
        if event.finish_reason:
            request = event.request
            assert request.output == continuation(request.prompt, request.params)[0]
    ends = [e.request.id for e in events if e.finish_reason]
    assert ends == ["high", "normal"]


def test_those_between_two_of_the_high_class_go_on_in_the_step_that_preempts() -> None:
    engine = make_engine(num_blocks=7, prefix_caching=False)
    add(engine, "old", 8, 14)
    add(engine, "young", 4, 14)
    add(engine, "high", 8, 14, priority=-1)
    for _ in range(50):
        events = engine.step()
        if engine.scheduler.preemptions:
            break
    assert ids(engine.scheduler.waiting) == ["young"]
    assert {e.request.id for e in events} == {"old", "high"}
    run(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_among_the_high_class_the_last_gives_way(policy: str) -> None:
    engine = make_engine(num_blocks=6, policy=policy, prefix_caching=False)
    add(engine, "a", 8, 14, priority=-1)
    add(engine, "b", 8, 14, priority=-1)
    while not engine.scheduler.preemptions:
        engine.step()
    assert ids(engine.scheduler.waiting) == ["b"]
    assert [e.request.id for e in run(engine) if e.finish_reason] == ["a", "b"]


def test_under_fcfs_the_queue_knows_no_class_and_what_gave_way_comes_back_first() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=2, prefix_caching=False)
    add(engine, "normal", 8, 14)
    add(engine, "high", 8, 14, priority=-1)
    add(engine, "another", 3, 4, priority=-1)
    while not engine.scheduler.preemptions:
        engine.step()
    assert ids(engine.scheduler.waiting) == ["normal", "another"]
    assert [e.request.id for e in run(engine) if e.finish_reason] == ["high", "another", "normal"]
    assert engine.scheduler.preemptions == 1


# Ageing


@pytest.mark.parametrize("priority, lifts", [(1, 1), (2, 2), (3, 3)])
def test_a_waiting_request_gains_one_step_every_quarter_of_max_queue_time(priority: int, lifts: int) -> None:
    clock = Clock()
    engine = busy(clock)
    add(engine, "low", 3, priority=priority)
    clock.now += lifts * LIFT_S - 0.01
    add(engine, "new", 3)
    engine.step()
    assert ids(engine.scheduler.waiting) == ["new", "low"]
    clock.now += 0.02
    engine.step()
    assert ids(engine.scheduler.waiting) == ["low", "new"], "as urgent as the new one, and older"
    vacate(engine)
    assert [e.request.id for e in run(engine) if e.finish_reason] == ["low", "new"]


def test_a_lift_comes_also_where_another_request_joined_the_queue_shortly_before() -> None:
    clock = Clock()
    engine = busy(clock)
    low = add(engine, "low", 3, priority=1)
    for _ in range(20):
        clock.now += LIFT_S / 8
        add(engine, f"n{clock.now}", 3)
        engine.step()
        assert low.lift == int((clock.now - 100.0) / LIFT_S)


def test_under_fcfs_nothing_is_lifted() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_num_seqs=1, max_queue_time_s=QUEUE_S)
    add(engine, "seat", 3, 40)
    engine.step()
    old, new = add(engine, "old", 3, priority=5), add(engine, "new", 3, priority=-5)
    clock.now += 3 * LIFT_S
    engine.step()
    assert ids(engine.scheduler.waiting) == ["old", "new"]
    assert old.lift == new.lift == 0


def test_the_time_limit_of_the_queue_is_not_lifted() -> None:
    clock = Clock()
    engine = busy(clock)
    add(engine, "low", 3, priority=1)
    clock.now += QUEUE_S + 1.0
    assert [(e.request.id, e.error) for e in engine.step() if e.error] == [("low", "queue_timeout")]


def test_a_lift_is_kept_while_the_request_runs() -> None:
    """Those it overtook join the batch behind it, and give way before it."""
    clock = Clock()
    engine = busy(clock, 2, num_blocks=6, prefix_caching=False)
    low = add(engine, "low", 8, 14, priority=1)
    clock.now += 2 * LIFT_S
    add(engine, "normal", 8, 14)
    vacate(engine)
    engine.step()
    assert ids(engine.scheduler.running) == ["low", "normal"] and low.lift == 2
    while not engine.scheduler.preemptions:
        engine.step()
    assert ids(engine.scheduler.waiting) == ["normal"]
    run(engine)


def test_time_in_the_queue_counts_on_after_a_preemption_and_not_while_running() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=6, clock=clock, policy="priority", max_queue_time_s=QUEUE_S, prefix_caching=False)
    low = add(engine, "low", 8, 14, priority=9)
    clock.now += 0.75 * LIFT_S
    engine.step()
    assert low.waited_s == 0.75 * LIFT_S
    clock.now += 5 * LIFT_S
    add(engine, "normal", 8, 14)
    while not low.preemptions:
        engine.step()
    assert low.lift == 0
    clock.now += 0.5 * LIFT_S
    engine.step()
    assert low.lift == 1
    run(engine)


def test_what_was_preempted_is_not_overtaken_for_ever() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=6, clock=clock, policy="priority", max_queue_time_s=QUEUE_S, prefix_caching=False)
    low = add(engine, "low", 8, 14, priority=6)
    add(engine, "n", 8, 14)
    for i in range(400):
        clock.now += 0.25
        if len(engine.scheduler.requests) < 4:
            add(engine, f"n{i}", 8, 14)
        if any(e.request is low and e.finish_reason for e in engine.step()):
            break
    assert low.preemptions and len(low.output) == 14


def test_a_lift_takes_nobody_into_the_high_class() -> None:
    clock = Clock()
    engine = busy(clock, 2, num_blocks=6, prefix_caching=False)
    normal = add(engine, "normal", 8, 14)
    clock.now += 3 * LIFT_S
    high = add(engine, "high", 8, 14, priority=-1)
    engine.step()
    assert ids(engine.scheduler.waiting) == ["normal", "high"] and normal.lift == 3
    assert [request.high for request in engine.scheduler.waiting] == [False, True]
    vacate(engine)
    engine.step()
    assert ids(engine.scheduler.running) == ["high", "normal"]
    assert engine.stats().high_running == 1
    run(engine)
    assert normal.preemptions and not high.preemptions


@pytest.mark.parametrize("held_s", [0.0, 2.0])
def test_a_queued_request_takes_its_lift_along(held_s: float) -> None:
    clock = Clock()
    source, destination = busy(clock), busy(clock)
    add(source, "low", 3, priority=2)
    clock.now += 2.2 * LIFT_S
    add(destination, "new", 3, priority=1)
    record = source.hold("low")
    clock.now += held_s
    moved = destination.adopt(record, (0, 1))
    assert ids(destination.scheduler.waiting) == ["low", "new"]
    clock.now += 0.9 * LIFT_S
    destination.step()
    assert moved.lift == 3
    source.unhold("low")
    clock.now += 0.0 if held_s else 1e-9
    source.step()
    assert source.scheduler.requests["low"].lift == 3, "of a move that failed, the time in between counts too"


def test_a_running_request_takes_its_lift_along() -> None:
    clock = Clock()
    source, destination = busy(clock), make_engine(clock=clock, policy="priority", max_queue_time_s=QUEUE_S)
    add(source, "low", 3, 20, priority=2)
    clock.now += 2.2 * LIFT_S
    vacate(source)
    source.step()
    add(destination, "new", 3, 20, priority=1)
    destination.step()
    destination.reserve("low", 1)
    destination.write_reserved("low", 0, source.export("low", 0, 1))
    destination.adopt(source.hold("low"), (0, 1), 3, "low")
    assert ids(destination.scheduler.running) == ["low", "new"]
    run(destination)


def test_a_queue_in_which_nothing_is_due_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = busy(clock, max_num_queued=1000, num_blocks=64)
    for i in range(200):
        add(engine, f"r{i}", 3, priority=i % 5)
    looks: list[str] = []
    lift = engine.scheduler.order._lift
    monkeypatch.setattr(engine.scheduler.order, "_lift", lambda r, now: (looks.append(r.id), lift(r, now)))
    for _ in range(20):
        clock.now += LIFT_S / 25
        engine.step()
    assert not looks
    clock.now += LIFT_S / 4
    engine.step()
    assert len(looks) == 200
