"""The closed formulas against an engine that walks every step, and the books after every event."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from llumnix.simulator.device import Device, load_device
from llumnix.simulator.engine import PROMPTS, Engine
from llumnix.simulator.request import NEVER, Request

SMALL = replace(load_device("a10-llama-7b"), total_blocks=60, max_num_batched_tokens=500)
CHUNKED = replace(SMALL, chunked_prefill=True, max_num_batched_tokens=64)


@dataclass
class Walker:
    """The same engine in the plainest way: one step at a time, every length by itself; prompts have their own steps."""

    device: Device
    now: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preempted_at: dict[int, float] = field(default_factory=dict)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.device.block_size)

    @property
    def used(self) -> int:
        return sum(self.blocks(r.length - 1) for r in self.running)

    def step(self) -> None:
        device = self.device
        batch: list[Request] = []
        budget = device.max_num_batched_tokens
        used = self.used
        while self.waiting:
            head = self.waiting[0]
            spare = int(device.watermark_share * device.total_blocks) if self.running or batch else 0
            if device.total_blocks - used - self.blocks(head.length) < spare or (batch and head.length > budget):
                break
            used += self.blocks(head.length)
            budget -= head.length
            batch.append(self.waiting.pop(0))
            if budget <= 0:
                break
        if batch:
            self.now += device.prompt_base_s + sum(device.prompt_s(r.length) for r in batch)
            for request in batch:
                self.emit(request)
                if request.end < 0:
                    self.running.append(request)
        else:
            while sum(self.blocks(r.length) for r in self.running) > device.total_blocks:
                victim = max(self.running, key=lambda r: r.order)
                self.running.remove(victim)
                victim.preemptions += 1
                self.waiting = sorted([*self.waiting, victim], key=lambda r: r.order)
            self.now += device.step_s(len(self.running), sum(r.length for r in self.running))
            for request in list(self.running):
                self.emit(request)
                if request.end >= 0:
                    self.running.remove(request)
        self.running.sort(key=lambda r: r.order)

    def emit(self, request: Request) -> None:
        request.length += 1
        if request.first < 0:
            request.first = self.now
        if request.length - request.prompt >= request.output:
            request.end = self.now


def trace(rng: random.Random, count: int, gap: float) -> list[Request]:
    now, made = 0.0, []
    for i in range(count):
        now += rng.expovariate(1 / gap)
        made.append(Request(i, now, rng.choice([3, 16, 40, 200]), rng.choice([1, 2, 17, 90, 300])))
    return made


def walk(device: Device, requests: list[Request]) -> None:
    walker, left = Walker(device), list(requests)
    while left or walker.waiting or walker.running:
        if not walker.waiting and not walker.running:
            walker.now = max(walker.now, left[0].arrival)
        while left and left[0].arrival <= walker.now:
            request = left.pop(0)
            request.order = request.id
            walker.waiting.append(request)
        walker.step()


def jump(device: Device, requests: list[Request]) -> Engine:
    engine, left = Engine("e", device), list(requests)
    while left or engine.next < NEVER:
        if left and left[0].arrival <= engine.next:
            request = left.pop(0)
            engine.add(request, request.arrival)
        else:
            engine.fire(engine.next)
        engine.check()
    return engine


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("gap", [0.3, 1.5, 6.0])
def test_jumping_is_walking(seed: int, gap: float) -> None:
    one, two = trace(random.Random(seed), 60, gap), trace(random.Random(seed), 60, gap)
    walk(SMALL, one)
    engine = jump(SMALL, two)
    assert engine.empty and engine.used == 0
    for a, b in zip(one, two):
        assert b.first == pytest.approx(a.first, abs=1e-6) and b.end == pytest.approx(a.end, abs=1e-6), a.id
        assert a.preemptions == b.preemptions
    assert gap > 1 or sum(r.preemptions for r in two) > 0


@pytest.mark.parametrize("seed", range(8))
def test_chunked_prompts_share_steps_with_decoding(seed: int) -> None:
    requests = trace(random.Random(seed), 60, 1.0)
    engine = jump(CHUNKED, requests)
    assert engine.empty
    for request in requests:
        assert request.arrival < request.first <= request.end
        assert request.length == request.prompt + request.output


def test_a_chunked_prompt_delays_decoding_less() -> None:
    def longest_step(device: Device) -> float:
        """Of those with a prompt of 400 tokens, or a part of it, beside a request that decodes."""
        early, late = Request(0, 0.0, 10, 60), Request(1, 0.5, 400, 2)
        engine = Engine("e", device)
        engine.add(early, 0.0)
        while engine.next < 0.5:
            engine.fire(engine.next)
        engine.add(late, 0.5)
        longest = 0.0
        while late.first < 0:
            engine.fire(engine.next)
            if engine.mode == PROMPTS:
                longest = max(longest, engine.next - engine._start)
        assert early.end < 0
        return longest

    assert longest_step(SMALL) == pytest.approx(SMALL.prompt_base_s + SMALL.prompt_s(400))
    chunk = longest_step(replace(CHUNKED, max_num_batched_tokens=41))
    assert SMALL.step_base_s < chunk < SMALL.step_s(1, 100) + 1.2 * SMALL.prompt_s(40)


def test_the_load_is_that_of_the_moment() -> None:
    """Between events the report counts the steps that have ended."""
    engine = Engine("e", SMALL)
    request = Request(0, 0.0, 16, 200)
    engine.add(request, 0.0)
    engine.fire(0.0)
    engine.fire(engine.next)  # the prompt's step has ended: 17 tokens known, 16 of them in one block
    start, end = engine._start, engine.next
    assert engine.free_blocks(start) == 59
    step = SMALL.step_s(1, 17)
    assert engine.free_blocks(start + 1.01 * step) == 58
    assert engine.length(request, start + 1.01 * step) == 18
    for i in range(200):
        now = start + (end - start) * i / 200
        tokens = engine.length(request, now)
        assert engine.free_blocks(now) == 60 - -(-(tokens - 1) // 16)
    assert engine.report(start).running == 1


def test_a_move_makes_steps_longer() -> None:
    def ends(moves: int) -> float:
        engine = Engine("e", SMALL)
        engine.add(Request(0, 0.0, 16, 50), 0.0)
        for _ in range(moves):
            engine.begin_move(0.0)
        request = engine.waiting[0]
        while request.end < 0:
            engine.fire(engine.next)
        return request.end

    assert ends(1) == pytest.approx(ends(0) * 1.02)


def test_the_high_class_is_served_first_unless_the_engine_is_blind() -> None:
    for classes in (True, False):
        engine = Engine("e", replace(SMALL, max_num_seqs=1), classes)
        requests = [Request(0, 0.0, 16, 20), Request(1, 0.0, 16, 20), Request(2, 0.0, 16, 20, priority=-1)]
        for request in requests:
            engine.add(request, 0.0)
        engine.fire(0.0)
        while engine.next < NEVER:
            engine.fire(engine.next)
        first = min(requests, key=lambda r: r.first)
        assert first.id == (2 if classes else 0)


def test_reservations_are_refused_without_room_and_behind_a_queue() -> None:
    engine = Engine("e", SMALL)
    assert engine.reserve(60, 0.0)
    assert not engine.reserve(1, 0.0)
    engine.cancel(60, 0.0)
    engine.add(Request(0, 0.0, 900, 2), 0.0)
    assert not engine.reserve(1, 0.0), "it waits for the boundary: it is older"
    engine.fire(0.0)
    assert not engine.reserve(4, 0.0) and engine.reserve(3, 0.0)
    engine.cancel(3, 0.0)
    engine.check()
