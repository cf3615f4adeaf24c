"""What the scheduler decides, one rule at a time, on an executor that proves every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.request import Status
from engine.sampling.params import SamplingParams
from engine.scheduler import Event, QueueFull, Refused
from engine.step import StepPlan
from tests.fakes import VOCAB, Clock, continuation, executor_of, make_engine

GREEDY = SamplingParams(max_tokens=4)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * 7 + 1) % VOCAB for i in range(length)]


def add(
    engine: Engine, name: str, length: int, max_tokens: int | None = 4, salt: int | None = None, **rest: Any
) -> None:
    salt = ord(name[0]) if salt is None else salt
    engine.add_request(name, prompt_of(length, salt), SamplingParams(max_tokens=max_tokens), **rest)


def run(engine: Engine, steps: int = 500) -> list[Event]:
    """Step until nothing is left to do."""
    events: list[Event] = []
    for _ in range(steps):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.scheduler.check()
    raise AssertionError(f"work is left after {steps} steps")


def tokens_of(events: list[Event], name: str) -> list[int]:
    return [event.token for event in events if event.request.id == name and event.token is not None]


def last_plan(engine: Engine) -> StepPlan:
    return executor_of(engine).plans[-1]


def works(engine: Engine) -> list[tuple[str, int, int]]:
    """(id, start, count) of the last plan."""
    return [(work.id, work.start, work.count) for work in last_plan(engine).work]


# Ends


def test_max_tokens_ends_with_length() -> None:
    engine = make_engine()
    add(engine, "a", 5, 3)
    events = run(engine)
    assert [(e.index, e.finish_reason) for e in events] == [(0, None), (1, None), (2, "length")]
    assert tokens_of(events, "a") == continuation(prompt_of(5, 97), SamplingParams(max_tokens=3))[0]
    assert engine.scheduler.pool.available == engine.scheduler.pool.total


def test_without_max_tokens_the_sequence_ends_at_max_model_len() -> None:
    engine = make_engine(max_model_len=20)
    add(engine, "a", 5, None)
    events = run(engine)
    assert len(events) == 15 and events[-1].finish_reason == "length"


def test_a_pool_smaller_than_max_model_len_bounds_the_sequence() -> None:
    engine = make_engine(num_blocks=3, block_size=4, max_model_len=1000)
    assert engine.scheduler.max_length == 12
    add(engine, "a", 5, None)
    assert len(run(engine)) == 7


@pytest.mark.parametrize("ignore_eos, expected", [(False, "stop"), (True, "length")])
def test_eos_ends_unless_it_is_ignored(ignore_eos: bool, expected: str) -> None:
    prompt = prompt_of(5)
    third = continuation(prompt, SamplingParams(max_tokens=8))[0][2]
    engine = make_engine(eos_token_ids=(third,))
    engine.add_request("a", prompt, SamplingParams(max_tokens=8, ignore_eos=ignore_eos))
    events = run(engine)
    assert events[-1].finish_reason == expected
    assert len(events) == (8 if ignore_eos else 3)
    assert events[2].token == third, "the token that ends a sequence is reported"


def test_stop_token_ids_end_even_where_eos_is_ignored() -> None:
    prompt = prompt_of(5)
    second = continuation(prompt, SamplingParams(max_tokens=8))[0][1]
    engine = make_engine()
    engine.add_request("a", prompt, SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(second,)))
    events = run(engine)
    assert len(events) == 2 and events[-1].finish_reason == "stop"


# What can never run, and limits of the queue


@pytest.mark.parametrize(
    "prompt, output, message",
    [
        ([], (), "empty"),
        ([1] * 48, (), "48 tokens"),
        ([1] * 40, [1] * 8, "48 tokens"),
        ([VOCAB], (), "vocabulary"),
        ([-1], (), "vocabulary"),
        ([1], [VOCAB], "vocabulary"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], output: list[int], message: str) -> None:
    engine = make_engine(max_model_len=48)
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, GREEDY, output=output)
    assert not engine.has_work


def test_an_id_that_is_here_is_refused() -> None:
    engine = make_engine()
    add(engine, "a", 5)
    with pytest.raises(ValueError, match="already here"):
        add(engine, "a", 5)


def test_more_logprobs_than_the_engine_gives_are_refused() -> None:
    with pytest.raises(ValueError, match="logprobs"):
        make_engine().add_request("a", [1], SamplingParams(logprobs=21))


def test_the_queue_has_a_limit_that_counts_only_what_waits() -> None:
    engine = make_engine(max_num_queued=2, max_num_seqs=1)
    add(engine, "a", 3, 8)
    engine.step()
    add(engine, "b", 3)
    add(engine, "c", 3)
    with pytest.raises(QueueFull):
        add(engine, "d", 3)
    engine.abort("b")
    add(engine, "d", 3)
    assert {e.request.id for e in run(engine) if e.finish_reason} == {"a", "c", "d"}


def test_requests_that_have_a_seat_do_not_count_as_queued() -> None:
    engine = make_engine(max_num_queued=0, max_num_seqs=2)
    add(engine, "a", 3, 8)
    add(engine, "b", 3, 8)  # both before the first step
    with pytest.raises(QueueFull):
        add(engine, "c", 3)
    engine.step()
    with pytest.raises(QueueFull):
        add(engine, "c", 3)
    engine.abort("a")
    add(engine, "c", 3)
    assert {e.request.id for e in run(engine) if e.finish_reason} == {"b", "c"}


def test_a_request_that_was_let_in_elsewhere_is_not_refused_for_a_full_queue() -> None:
    engine = make_engine(max_num_queued=0, max_num_seqs=1)
    add(engine, "a", 3, 8)
    engine.step()
    engine.add_request("resumed", [1, 2, 3], SamplingParams(max_tokens=4), output=[4])
    with pytest.raises(QueueFull):
        add(engine, "new", 3)
    assert {e.request.id for e in run(engine) if e.finish_reason} == {"a", "resumed"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("priority", ["high", None, 1.5, float("nan"), [1]], ids=repr)
def test_a_priority_that_is_no_integer_is_refused_and_leaves_nothing(policy: str, priority: Any) -> None:
    engine = make_engine(policy=policy)
    add(engine, "a", 3)
    with pytest.raises(ValueError, match="priority"):
        engine.add_request("b", [1], SamplingParams(), priority=priority)
    assert set(engine.scheduler.requests) == {"a"}
    engine.scheduler.check()
    add(engine, "b", 3)


def test_max_queue_time_ends_what_never_started() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_queue_time_s=10.0, max_num_seqs=1)
    add(engine, "a", 3, 40)
    engine.step()
    add(engine, "b", 3)
    clock.now += 9.0
    assert all(e.request.id == "a" for e in engine.step())
    clock.now += 3.0
    ended = [e for e in engine.step() if e.request.id == "b"]
    assert [(e.error, e.token, e.index) for e in ended] == [("queue_timeout", None, 0)]
    assert set(engine.scheduler.requests) == {"a"}


def test_a_preempted_request_is_not_ended_by_max_queue_time() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=6, clock=clock, max_queue_time_s=10.0, prefix_caching=False)
    add(engine, "a", 8, 16)
    add(engine, "b", 8, 12)
    while not engine.scheduler.preemptions:
        engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["b"]
    clock.now += 60.0
    assert [e.finish_reason for e in run(engine) if e.finish_reason or e.error] == ["length", "length"]


# Order, seats, budget


def finish_order(policy: str) -> list[str]:
    engine = make_engine(policy=policy, max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        add(engine, name, 3, priority=priority)
    return [e.request.id for e in run(engine) if e.finish_reason]


def test_fcfs_ignores_priorities() -> None:
    assert finish_order("fcfs") == ["a", "b", "c", "d"]


def test_priority_serves_lower_values_first_and_equal_ones_by_arrival() -> None:
    assert finish_order("priority") == ["c", "a", "d", "b"]


def test_the_lowest_priority_is_preempted_first() -> None:
    engine = make_engine(num_blocks=6, policy="priority", prefix_caching=False)
    add(engine, "late", 8, 12, priority=9)
    add(engine, "soon", 8, 12, priority=0)
    while not engine.scheduler.preemptions:
        engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["late"]


def test_a_preempted_request_keeps_its_place_before_later_ones() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=2, prefix_caching=False, preempt="RECOMPUTE")
    add(engine, "a", 8, 16)
    add(engine, "b", 8, 12)
    add(engine, "c", 8, 2)
    while not engine.scheduler.preemptions:
        engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["b", "c"]


def test_max_num_seqs_bounds_the_batch() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        add(engine, name, 3)
    engine.step()
    assert [r.id for r in engine.scheduler.running] == ["a", "b"]
    assert len(engine.scheduler.waiting) == 1
    run(engine)


def test_one_budget_serves_decodes_first_and_cuts_the_prompt() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    add(engine, "a", 4, 16)
    engine.step()
    add(engine, "b", 14, 2)
    engine.step()
    assert works(engine) == [("a", 4, 1), ("b", 0, 7)]
    engine.step()
    assert works(engine) == [("a", 5, 1), ("b", 7, 7)]
    assert [work.sample for work in last_plan(engine).work] == [True, True]


def test_without_chunked_prefill_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = make_engine(max_num_batched_tokens=16, max_model_len=16, chunked_prefill=False)
    add(engine, "a", 4, 3)
    add(engine, "b", 14, 2)
    engine.step()
    assert works(engine) == [("a", 0, 4)]
    engine.step()
    assert works(engine) == [("a", 4, 1), ("b", 0, 14)]
    assert all(plan.work for plan in executor_of(engine).plans)
    run(engine)


def test_the_queue_is_strictly_in_order_small_requests_do_not_overtake() -> None:
    engine = make_engine(num_blocks=6, prefix_caching=False)
    add(engine, "a", 16, 2)
    add(engine, "big", 20, 2)
    add(engine, "c", 2, 2)
    engine.step()
    assert [r.id for r in engine.scheduler.running] == ["a"]
    assert [e.request.id for e in run(engine) if e.finish_reason] == ["a", "big", "c"]


def test_admission_needs_room_for_the_whole_prompt_not_for_its_first_chunk() -> None:
    engine = make_engine(num_blocks=6, max_num_batched_tokens=8, prefix_caching=False)
    add(engine, "a", 12, 4)
    engine.step()
    engine.step()
    add(engine, "b", 16, 2)  # its first chunk would fit
    engine.step()
    assert [r.id for r in engine.scheduler.running] == ["a"]
    run(engine)


def test_one_percent_of_the_blocks_stays_free_at_admission_while_others_run() -> None:
    def admitted(length: int) -> bool:
        engine = make_engine(num_blocks=200, block_size=1, max_num_batched_tokens=256, max_model_len=200)
        add(engine, "a", 50, 30)
        engine.step()  # 50 positions hold blocks, 2 blocks are the margin
        add(engine, "b", length, 2)
        engine.scheduler.pool.check([r.blocks for r in engine.scheduler.running])
        engine.step()
        return len(engine.scheduler.running) == 2

    assert admitted(200 - 51 - 2)
    assert not admitted(200 - 51 - 1)


def test_the_margin_does_not_keep_a_lone_request_out() -> None:
    engine = make_engine(num_blocks=200, block_size=1, max_num_batched_tokens=256, max_model_len=200)
    add(engine, "a", 199, 2)
    assert run(engine)[-1].finish_reason == "length"


def test_scheduler_delay_factor_lets_prompts_gather() -> None:
    def admitted_after(factor: float) -> int:
        clock = Clock()
        engine = make_engine(clock=clock, delay_factor=factor, seconds_per_token=0.125)
        add(engine, "a", 10, 30)
        engine.step()  # a prompt of 1.25 s
        add(engine, "b", 2, 2)
        for steps in range(1, 40):
            engine.step()
            if any(r.id == "b" for r in engine.scheduler.running):
                return steps
        raise AssertionError("b was never admitted")

    assert admitted_after(0.0) == 1
    # It waits until factor x 1.25 s have passed since its arrival; a decode step takes 0.125 s.
    assert admitted_after(0.5) == 6
    assert admitted_after(1.0) == 11


def test_an_empty_engine_does_not_delay_a_prompt() -> None:
    engine = make_engine(delay_factor=5.0, seconds_per_token=0.1)
    add(engine, "a", 10, 1)
    run(engine)
    add(engine, "b", 10, 1)
    engine.step()
    assert works(engine) == [("b", 0, 10)]


# Preemption


def squeeze(**options: Any) -> tuple[Engine, list[Event]]:
    """Two requests in a pool with room for one and a half."""
    engine = make_engine(num_blocks=6, **options)
    add(engine, "a", 8, 16)
    add(engine, "b", 8, 12)
    events = run(engine)
    assert engine.scheduler.preemptions
    for name, count in (("a", 16), ("b", 12)):
        assert tokens_of(events, name) == continuation(prompt_of(8, ord(name)), SamplingParams(max_tokens=count))[0]
    return engine, events


def copies(engine: Engine) -> tuple[int, int]:
    plans = executor_of(engine).plans
    return sum(len(plan.swap_out) for plan in plans), sum(len(plan.swap_in) for plan in plans)


def prefilled(engine: Engine, name: str) -> int:
    """Positions of a request that were computed more than once or as part of a prompt."""
    return sum(work.count for plan in executor_of(engine).plans for work in plan.work if work.id == name)


def test_recompute_copies_nothing_and_computes_again() -> None:
    engine, _ = squeeze(preempt="RECOMPUTE", host_slots=16, prefix_caching=False)
    assert copies(engine) == (0, 0)
    assert prefilled(engine, "b") > 8 + 12 - 1


def test_swap_copies_out_and_in_and_computes_little_again() -> None:
    engine, _ = squeeze(preempt="SWAP", host_slots=16, prefix_caching=False)
    out, back = copies(engine)
    assert out >= 2 and back >= 1
    recompute, _ = squeeze(preempt="RECOMPUTE", host_slots=16, prefix_caching=False)
    assert prefilled(engine, "b") < prefilled(recompute, "b")


def test_swap_without_host_memory_recomputes() -> None:
    engine, _ = squeeze(preempt="SWAP", host_slots=0, prefix_caching=False)
    assert copies(engine) == (0, 0)


@pytest.mark.parametrize(
    "seconds_per_copy, swaps_again", [(0.0001, True), (10.0, False)], ids=["copies are cheap", "copies are dear"]
)
def test_auto_takes_what_was_measured_to_be_cheaper(seconds_per_copy: float, swaps_again: bool) -> None:
    engine = make_engine(
        num_blocks=6, preempt="AUTO", host_slots=64, prefix_caching=False,
        seconds_per_token=0.01, seconds_per_copy=seconds_per_copy,
    )  # fmt: skip
    add(engine, "a", 8, 16)
    add(engine, "b", 8, 12)
    run(engine)
    first = copies(engine)[0]
    assert first, "before anything is measured a swap is tried"
    add(engine, "c", 8, 16)
    add(engine, "d", 8, 12)
    run(engine)
    assert (copies(engine)[0] > first) == swaps_again


def test_a_preempted_request_goes_on_from_its_cached_blocks() -> None:
    engine = make_engine(num_blocks=6, preempt="RECOMPUTE")
    add(engine, "a", 8, 10)
    add(engine, "b", 8, 8)
    events = run(engine)
    assert engine.scheduler.preemptions
    resumed = [s for plan in executor_of(engine).plans[1:] for s in plan.starts if s.id == "b"]
    starts = {plan.step: [w.start for w in plan.work if w.id == "b"] for plan in executor_of(engine).plans}
    restart = next(p for p in executor_of(engine).plans if resumed and resumed[0] in p.starts)
    assert starts[restart.step][0] > 0
    assert tokens_of(events, "b") == continuation(prompt_of(8, ord("b")), SamplingParams(max_tokens=8))[0]


def test_a_step_that_preempts_admits_nobody() -> None:
    """What it freed is for those that run; a newcomer would be the next to go."""
    engine = make_engine(num_blocks=6, policy="priority", prefix_caching=False)
    add(engine, "a", 8, 16, priority=0)
    add(engine, "b", 8, 12, priority=5)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.pool.available == 0 and not engine.scheduler.preemptions
    add(engine, "c", 3, 2, priority=1)
    engine.step()
    assert engine.scheduler.preemptions == 1 and engine.scheduler.pool.available == 2
    assert works(engine) == [("a", 12, 1)]
    run(engine)


def test_the_first_request_is_never_preempted_while_others_could_be() -> None:
    engine = make_engine(num_blocks=8, prefix_caching=False)
    for name in "abcd":
        add(engine, name, 7, 20)
    events = run(engine)
    first = [plan for plan in executor_of(engine).plans if any(w.id == "a" for w in plan.work)]
    assert len(first) == 20, "one token a step from the first step on"
    assert engine.scheduler.preemptions
    assert sorted(e.request.id for e in events if e.finish_reason) == list("abcd")


def test_totals_of_prompt_tokens_do_not_grow_with_preemptions() -> None:
    engine, _ = squeeze(preempt="RECOMPUTE", prefix_caching=False)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (16, 0, 28)


# The prefix cache


def test_equal_prefixes_share_blocks_and_say_so() -> None:
    engine = make_engine()
    add(engine, "a", 10, 30, salt=1)
    engine.step()
    add(engine, "b", 10, 4, salt=1)
    engine.step()
    a, b = engine.scheduler.requests["a"], engine.scheduler.requests["b"]
    assert a.blocks[:2] == b.blocks[:2] and b.cached_tokens == 8 and a.cached_tokens == 0
    assert works(engine)[-1] == ("b", 8, 2)
    run(engine)


def test_the_newest_position_is_always_computed() -> None:
    engine = make_engine()
    add(engine, "a", 8, 2, salt=1)
    run(engine)
    add(engine, "b", 8, 2, salt=1)
    engine.step()
    assert engine.scheduler.requests["b"].cached_tokens == 4
    run(engine)


def test_a_finished_request_leaves_its_blocks_to_the_next_turn_of_a_conversation() -> None:
    engine = make_engine(num_blocks=16)
    prompt = prompt_of(9)
    engine.add_request("a", prompt, SamplingParams(max_tokens=8))
    answer = tokens_of(run(engine), "a")
    engine.add_request("b", [*prompt, *answer, 5], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.scheduler.requests["b"].cached_tokens == 16
    run(engine)


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    engine = make_engine(prefix_caching=False)
    add(engine, "a", 10, 4, salt=1)
    run(engine)
    assert engine.stats().cached_blocks == 0
    for name in "bc":  # not even while both run
        add(engine, name, 10, 4, salt=1)
        engine.step()
        assert engine.scheduler.requests[name].cached_tokens == 0
    run(engine)


def test_cached_tokens_count_prompt_positions_only() -> None:
    engine = make_engine()
    prompt = prompt_of(6)
    engine.add_request("a", prompt, SamplingParams(max_tokens=20))
    output = tokens_of([e for _ in range(14) for e in engine.step()], "a")
    engine.abort("a")
    request = engine.add_request("a", prompt, SamplingParams(max_tokens=20), epoch=(1, 0), output=output)
    engine.step()
    assert request.computed > len(prompt) and request.cached_tokens == 6


def test_evicted_prefixes_come_back_from_the_host() -> None:
    """prompt_cache_enable_swap."""

    def cached(keep: bool) -> tuple[int, int]:
        engine = make_engine(num_blocks=8, host_slots=32, keep_evicted=keep)
        add(engine, "a", 17, 2, salt=1)
        run(engine)
        add(engine, "b", 30, 2, salt=2)  # pushes the blocks of a out
        run(engine)
        add(engine, "c", 17, 2, salt=1)
        engine.step()
        found = engine.scheduler.requests["c"].cached_tokens
        run(engine)
        return found, copies(engine)[1]

    assert cached(keep=True) == (16, 4)
    assert cached(keep=False) == (0, 0)


# Moving


def move(source: Engine, destination: Engine, name: str) -> None:
    """All stages at once."""
    record = source.hold(name)
    request = source.scheduler.requests[name]
    computed, needed = request.computed, source.scheduler.pool.blocks_for(request.computed)
    destination.reserve(name, needed)
    destination.write_reserved(name, 0, source.export(name, 0, needed))
    destination.adopt(record, (request.epoch[0], request.epoch[1] + 1), computed, name)
    source.abort(name)


def test_a_moved_request_goes_on_without_computing_again() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 9, 12)
    events = [e for _ in range(5) for e in source.step()]
    move(source, destination, "a")
    assert not source.scheduler.requests and not source.has_work
    events += run(destination)
    assert tokens_of(events, "a") == continuation(prompt_of(9, 97), SamplingParams(max_tokens=12))[0]
    assert [e.index for e in events] == list(range(12))
    assert events[-1].request.epoch == (0, 1)
    assert all(plan.num_tokens == 1 for plan in executor_of(destination).plans)
    assert destination.stats().prompt_tokens == 0, "it was counted where it was admitted"


def test_a_moved_request_is_the_youngest_where_it_arrives() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 9, 12)
    source.step()
    add(destination, "b", 9, 12)
    destination.step()
    move(source, destination, "a")
    assert [r.id for r in destination.scheduler.running] == ["b", "a"]


def test_a_request_may_move_in_the_middle_of_its_prompt() -> None:
    source, destination = make_engine(max_num_batched_tokens=8), make_engine()
    add(source, "a", 21, 3)
    source.step()
    move(source, destination, "a")
    assert tokens_of(run(destination), "a") == continuation(prompt_of(21, 97), SamplingParams(max_tokens=3))[0]
    assert works(destination)[0][0] == "a" and executor_of(destination).plans[0].work[0].start == 8


def test_moved_blocks_join_both_prefix_caches() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 9, 12)
    source.step()
    move(source, destination, "a")
    for engine in (source, destination):
        add(engine, "b", 9, 2, salt=97)
        engine.step()
        assert engine.scheduler.requests["b"].cached_tokens == 8


def test_a_held_request_is_not_scheduled_until_unhold() -> None:
    engine = make_engine()
    add(engine, "a", 5, 4)
    engine.step()
    record = engine.hold("a")
    assert len(record["output"]) == 1 and record["id"] == "a"
    assert not engine.has_work and engine.step() == [] and engine.last_step_tokens == 0
    with pytest.raises(Refused):
        engine.hold("a")
    engine.unhold("a")
    assert len(run(engine)) == 3


def test_a_held_queued_request_is_not_the_head_of_the_queue() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=1)
    for name, length in (("a", 4), ("b", 12), ("c", 5)):
        add(engine, name, length)
        engine.step()
    assert engine.stats().head_blocks == 3
    engine.hold("b")
    assert engine.stats().head_blocks == 2
    engine.hold("c")
    assert engine.stats().head_blocks == 0
    engine.unhold("b")
    assert engine.stats().head_blocks == 3


def test_a_held_queued_request_is_not_admitted_until_unhold() -> None:
    engine = make_engine(max_queue_time_s=5.0)
    with pytest.raises(Refused):
        engine.hold("nobody")
    add(engine, "a", 5)
    add(engine, "b", 5)
    engine.hold("a")
    with pytest.raises(Refused):
        engine.hold("a")
    engine.step()
    a, b = (engine.scheduler.requests[name] for name in "ab")
    assert a.status is Status.HELD and b.status is Status.RUNNING, "those behind it go on"
    engine.clock.now += 10.0  # type: ignore[attr-defined]
    engine.step()
    assert "a" in engine.scheduler.requests, "what is on its way somewhere else is not ended here"
    engine.unhold("a")
    assert a.status is Status.WAITING
    engine.scheduler.check()
    engine.abort("a")
    engine.abort("b")
    add(engine, "c", 5)
    engine.hold("c")
    assert not engine.has_work
    engine.abort("c")
    engine.scheduler.check()


def test_held_requests_are_not_preempted() -> None:
    engine = make_engine(num_blocks=6, prefix_caching=False)
    add(engine, "a", 8, 16)
    add(engine, "b", 8, 12)
    engine.step()
    engine.hold("b")
    for _ in range(20):
        engine.step()
    b = engine.scheduler.requests["b"]
    assert b.status is Status.HELD and len(b.blocks) == 2
    assert engine.scheduler.requests["a"].status is Status.WAITING, "it had to give way itself"
    engine.unhold("b")
    assert len([e for e in run(engine) if e.finish_reason]) == 2


def test_a_reservation_is_refused_without_room_and_for_younger_than_the_waiting() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=2)
    with pytest.raises(Refused, match="7 blocks wanted, 6 available"):
        engine.reserve("x", 7)
    add(engine, "a", 16, 4)
    engine.step()
    with pytest.raises(Refused, match="available"):
        engine.reserve("x", 3)
    add(engine, "b", 3)
    with pytest.raises(Refused, match="waiting"):
        engine.reserve("x", 1)
    engine.scheduler.check()


def test_a_reservation_takes_a_seat() -> None:
    engine = make_engine(max_num_seqs=2)
    add(engine, "a", 3, 8)
    engine.step()
    engine.reserve("x", 1)
    with pytest.raises(Refused, match="seats"):
        engine.reserve("y", 1)
    with pytest.raises(Refused, match="seats"):
        engine.reserve("z", 0)
    add(engine, "b", 3)
    engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["b"], "the seat is promised"
    engine.cancel_reservation("x")
    engine.step()
    assert [r.id for r in engine.scheduler.running] == ["a", "b"]


def test_repeating_a_reservation_extends_it_in_blocks_and_time() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, reservation_s=10.0)
    first = engine.reserve("x", 2)
    clock.now += 8.0
    assert engine.reserve("x", 5)[:2] == first
    clock.now += 8.0
    assert engine.reserve("x", 1)[:2] == first, "a promise never shrinks"
    assert engine.stats().reserved_blocks == 5


def test_reservations_expire_even_on_an_idle_engine() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=6, clock=clock, reservation_s=10.0)
    engine.reserve("x", 6)
    assert engine.has_work, "somebody has to look at the clock"
    clock.now += 9.9
    engine.step()
    assert engine.stats().reserved_blocks == 6
    clock.now += 0.2
    engine.step()
    assert engine.stats().reserved_blocks == 0 and not engine.has_work
    engine.reserve("y", 6)
    clock.now += 11.0
    assert len(engine.reserve("z", 6)) == 6, "the room of an expired promise is given away at once"


def test_a_promise_made_anew_after_expiry_does_not_count_as_written() -> None:
    clock = Clock()
    source, destination = make_engine(clock=clock), make_engine(clock=clock)
    add(source, "a", 9, 12)
    source.step()
    destination.reserve("a", 2)
    destination.write_reserved("a", 0, source.export("a", 0, 2))
    clock.now += 11.0
    record = source.hold("a")
    destination.reserve("a", 3)
    destination.write_reserved("a", 2, source.export("a", 2, 1))
    with pytest.raises(Refused, match="not here"):
        destination.adopt(record, (0, 1), 9, "a")
    assert "a" not in destination.scheduler.requests
    destination.scheduler.check()


def test_slabs_are_written_only_into_what_is_reserved() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 9, 12)
    source.step()
    slabs = source.export("a", 0, 3)
    assert slabs.dtype == np.uint8 and slabs.shape == (3, 32)
    with pytest.raises(Refused):
        destination.write_reserved("a", 0, slabs)
    destination.reserve("a", 2)
    with pytest.raises(Refused):
        destination.write_reserved("a", 0, slabs)


def test_a_reservation_never_spoils_prefixes_on_the_host() -> None:
    """Reserved blocks are written between steps: copying what they held with the next plan would come too late."""
    source = make_engine()
    engine = make_engine(num_blocks=4, host_slots=8, keep_evicted=True)
    add(engine, "a", 13, 2, salt=1)
    run(engine)
    add(source, "m", 9, 12, salt=2)
    source.step()
    move(source, engine, "m")
    run(engine)
    add(engine, "b", 13, 2, salt=1)
    assert tokens_of(run(engine), "b") == continuation(prompt_of(13, 1), SamplingParams(max_tokens=2))[0]


def test_adopting_twice_is_one_adoption() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 9, 12)
    source.step()
    record = source.hold("a")
    destination.reserve("a", 3)
    destination.write_reserved("a", 0, source.export("a", 0, 3))
    adopted = destination.adopt(record, (0, 1), 9, "a")
    assert destination.adopt(record, (0, 1), 9, "a") is adopted
    assert destination.adopt(record, (0, 0), 9, "a") is adopted, "an older COMMIT is a repeat as well"
    assert len(destination.scheduler.running) == 1
    with pytest.raises(Refused, match="older epoch"):
        destination.adopt(record, (1, 0), 9, "a")
    destination.scheduler.check()


def test_blocks_reserved_beyond_need_are_given_back() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 5, 12)
    source.step()
    destination.reserve("a", 7)
    destination.write_reserved("a", 0, source.export("a", 0, 2))
    destination.adopt(source.hold("a"), (0, 1), 5, "a")
    destination.scheduler.check()
    assert destination.scheduler.pool.available == 14


def test_adopting_into_reserved_room_without_kv_computes_it_there() -> None:
    source, destination = make_engine(), make_engine()
    add(source, "a", 9, 4)
    record = source.scheduler.requests["a"].record()
    destination.reserve("a", 3)
    request = destination.adopt(record, (0, 1), 0, "a")
    assert request.status is Status.RUNNING and not destination.scheduler.reservations
    assert tokens_of(run(destination), "a") == continuation(prompt_of(9, 97), GREEDY)[0]


def test_blocks_that_are_here_already_are_part_of_a_promise() -> None:
    """Nobody sends them again, and they hold the KV the request had."""
    source, destination = make_engine(), make_engine()
    for engine in (source, destination):
        add(engine, "old", 9, 2, salt=97)
        run(engine)
    add(source, "a", 9, 6, salt=97)
    source.step()
    request = source.scheduler.requests["a"]
    blocks = destination.reserve("a", 4, "a", request.tokens)
    present = destination.scheduler.reservations.present("a")
    assert (len(blocks), present) == (4, 2)
    record = source.hold("a")
    destination.write_reserved("a", present, source.export("a", present, len(request.blocks) - present))
    destination.adopt(record, (0, 1), request.computed, "a")
    source.abort("a")
    assert tokens_of(run(destination), "a")[-5:] == continuation(prompt_of(9, 97), SamplingParams(max_tokens=6))[0][-5:]
    destination.scheduler.check()


def test_blocks_found_here_are_no_room_for_others() -> None:
    engine = make_engine(num_blocks=4)
    add(engine, "old", 9, 2, salt=97)
    run(engine)
    with pytest.raises(Refused):
        engine.reserve("x", 5, "x", prompt_of(9, 97))
    assert len(engine.reserve("x", 4, "x", prompt_of(9, 97))) == 4
    engine.scheduler.check()


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_promise_taken_back_while_it_is_written_keeps_its_blocks_until_then(how: str) -> None:
    engine = make_engine(num_blocks=4)
    engine.reserve("x", 3)
    reservations = engine.scheduler.reservations
    reservations.fill("x", 0, 2)
    if how == "cancelled":
        engine.cancel_reservation("x")
    else:
        engine.clock.now += 60.0  # type: ignore[attr-defined]
        engine.step()
        assert reservations.expired == 1
    assert engine.scheduler.pool.available == 1
    for refused in (lambda: engine.reserve("x", 4), lambda: reservations.fill("x", 0, 1)):
        with pytest.raises(Refused):
            refused()
    reservations.filled("x", 0, 2, engine.clock())
    assert engine.scheduler.pool.available == 4
    engine.scheduler.check()


@pytest.mark.parametrize("tokens, computed", [(48, 0), (60, 8), (9, 9), (9, 10), (9, -1)])
def test_an_adoption_that_can_never_run_is_refused(tokens: int, computed: int) -> None:
    source, destination = make_engine(num_blocks=32, max_model_len=128), make_engine(max_model_len=48)
    add(source, "a", tokens, 4)
    destination.reserve("a", 3)
    destination.write_reserved("a", 0, np.zeros((3, 32), np.uint8))
    with pytest.raises(Refused, match="tokens"):
        destination.adopt(source.scheduler.requests["a"].record(), (0, 1), computed, "a")
    assert not destination.scheduler.requests
    destination.scheduler.check()


def test_abort_with_an_epoch_spares_a_newer_life() -> None:
    engine = make_engine()
    engine.add_request("a", prompt_of(5), GREEDY, epoch=(1, 0))
    assert not engine.abort("a", (0, 7))
    assert not engine.abort("b")
    assert engine.abort("a", (1, 0))
    assert not engine.scheduler.requests


def test_a_resume_goes_on_behind_the_tokens_it_brings() -> None:
    prompt = prompt_of(5)
    expected, _ = continuation(prompt, SamplingParams(max_tokens=9))
    engine = make_engine()
    engine.add_request("a", prompt, SamplingParams(max_tokens=9), epoch=(1, 0), output=expected[:4])
    events = run(engine)
    assert [e.index for e in events] == [4, 5, 6, 7, 8] and tokens_of(events, "a") == expected[4:]


def test_unseeded_requests_get_a_seed_of_their_id_and_seeded_ones_keep_theirs() -> None:
    engine = make_engine()
    seeds = [
        engine.add_request(name, [1], SamplingParams(seed=seed)).seed
        for name, seed in (("a", None), ("b", None), ("c", 5))
    ]
    assert len(set(seeds)) == 3 and seeds[2] == 5
    assert make_engine().add_request("a", [1], SamplingParams()).seed == seeds[0]


def test_stats_describe_the_queue() -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=2)
    add(engine, "a", 9, 8)
    add(engine, "b", 5, 8)
    add(engine, "c", 13, 8)
    add(engine, "d", 2, 8)
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.held) == (2, 2, 0)
    assert (stats.total_blocks, stats.free_blocks) == (16, 16 - 3 - 2)
    assert (stats.head_blocks, stats.waiting_blocks) == (4, 5)
    assert stats.queued_prefill_tokens == 15
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (14, 2, 1)


# Sharing a step


def test_a_long_prompt_holds_up_neither_decodes_nor_short_prompts_behind_it() -> None:
    engine = make_engine(200, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=1000)
    add(engine, "long", 500, max_tokens=2)
    engine.step()
    add(engine, "short", 10, max_tokens=3)
    add(engine, "brief", 4, max_tokens=3)
    engine.step()
    assert works(engine)[0] == ("long", 32, 32 - 14)  # what the two behind it want
    assert [name for name, _, _ in works(engine)] == ["long", "short", "brief"]
    engine.step()
    assert works(engine) == [("long", 50, 30), ("short", 10, 1), ("brief", 4, 1)]
    run(engine)


def test_a_long_prompt_keeps_half_of_a_step_among_many() -> None:
    engine = make_engine(400, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=1000)
    for name in "abc":
        add(engine, name, 300, max_tokens=1)
    engine.step()
    engine.step()
    assert works(engine)[0] == ("a", 32, 16)
    run(engine)


def test_a_queue_that_finds_no_room_takes_nothing_from_those_who_run() -> None:
    engine = make_engine(40, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=1000)
    add(engine, "a", 120, max_tokens=1)
    engine.step()
    add(engine, "b", 155, max_tokens=1)  # fits only alone
    engine.step()
    assert works(engine) == [("a", 32, 16)]  # that it finds no room is not known yet
    engine.step()
    assert works(engine) == [("a", 48, 32)]
    run(engine)
