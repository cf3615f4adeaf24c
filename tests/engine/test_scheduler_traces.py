"""Random lives of requests on two engines: whatever happens to a request, its tokens are those of a quiet run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import Status
from engine.sampling.params import SamplingParams
from engine.scheduler import QueueFull, Refused
from tests.fakes import Clock, continuation, make_engine

OPS = (
    *(
        "step",
        "step",
        "step",
        "step",
        "step",
        "step",
        "arrive",
        "arrive",
        "arrive",
        "arrive",
        "abort",
        "hold",
        "unhold",
    ),
    *("wait", "long_wait", "reserve", "reserve", "commit", "commit", "give_up", "move_waiting", "resume"),
    *("stray_reserve", "stray_cancel"),
)


@dataclass
class Life:
    """One request as its client sees it."""

    id: str
    prompt: list[int]
    params: SamplingParams
    expected: tuple[list[int], str]
    home: int
    got: list[int] = field(default_factory=list)
    ended: str | None = None
    waited: float = 0.0  # seconds in queues


@dataclass
class Move:
    """A move under way: full blocks copied to the destination so far."""

    source: int
    key: str
    copied: int


class World:
    def __init__(self, setup: dict[str, Any]):
        self.clock = Clock()
        self.by_priority = setup["policy"] == "priority"
        self.engines: list[Engine] = [make_engine(clock=self.clock, **setup) for _ in range(2)]
        self.lives: dict[str, Life] = {}
        self.moves: dict[str, Move] = {}
        self.left_behind: list[tuple[int, str]] = []  # adopted elsewhere, still held at the source
        self.tallied = self.clock.now

    def run(self, ops: list[tuple[str, int, int]]) -> None:
        for op, a, b in ops:
            getattr(self, op)(a, b)
            self.tally()
            self.check()
        self.finish()

    # -- operations ---------------------------------------------------------------------------------------------

    def arrive(self, a: int, b: int) -> None:
        for extra in range(1 + a % 3):
            self.arrive_one(a + 5 * extra, b + extra)

    def arrive_one(self, a: int, b: int) -> None:
        at = a % 2
        engine = self.engines[at]
        config = engine.scheduler.config
        length = 1 + b % min(14, engine.scheduler.max_length - 1)
        prompt = [(a // 2 % 3 + i // 4) % 5 for i in range(length)]  # many share a prefix
        max_tokens = None if a % 7 == 0 else 1 + (a * 5 + b) % 30
        stops = (b % 11, 50 + a) if a % 3 == 0 else ()
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, ignore_eos=b % 2 == 0)
        expected = continuation(prompt, params, config.eos_token_ids, engine.scheduler.max_length)
        life = Life(f"r{len(self.lives)}", prompt, params, expected, at)
        try:
            engine.add_request(life.id, prompt, params, priority=a % 3 - 1)
        except QueueFull:
            assert len(engine.scheduler.waiting) >= config.max_num_queued
            return
        self.lives[life.id] = life

    def step(self, a: int, b: int) -> None:
        for _ in range(1 + b % 8):
            self.step_once(a % 2)

    def step_once(self, at: int) -> None:
        engine = self.engines[at]
        scheduler = engine.scheduler
        undisturbed = not scheduler.reservations and all(r.status is Status.RUNNING for r in scheduler.running)
        first = scheduler.running[0] if undisturbed and scheduler.running else None
        before = (first.computed, len(first.output)) if first is not None else (0, 0)
        self.tally()
        lifts = self.lifts(at)
        queue = sorted(
            (r for r in scheduler.waiting if r.id in lifts),
            key=lambda r: (r.priority - lifts[r.id] if self.by_priority else 0, r.order),
        )
        queue_head = queue[0] if undisturbed and not scheduler.running and queue else None
        preempted = {r.id: r.preemptions for r in scheduler.running if r.high}
        for event in engine.step():
            self.take(at, event)
        if any(r.preemptions > preempted.get(r.id, r.preemptions) for r in scheduler.waiting):
            assert all(r.high or r.status is Status.HELD for r in scheduler.running), "the high class was not spared"
        for request in queue:
            if request.id in scheduler.requests:
                assert request.lift == lifts[request.id], "a lift came too early or too late"
        self.tally()
        if first is not None:
            assert (first.computed, len(first.output)) > before or first.status is Status.FINISHED, "no progress"
        if queue_head is not None:
            assert queue_head.status is not Status.WAITING, "an empty engine did not admit its first request"
        if engine.last_step_tokens == 0:
            self.clock.now += 0.05

    def take(self, at: int, event: Any) -> None:
        life = self.lives[event.request.id]
        assert life.ended is None, "an event after the end"
        assert life.home == at, "an event from an engine that does not own the request"
        assert event.index == len(life.got)
        if event.token is not None:
            life.got.append(event.token)
        if event.error is not None:
            assert event.error == "queue_timeout" and event.token is None and event.finish_reason is None
            life.ended = event.error
        elif event.finish_reason is not None:
            life.ended = event.finish_reason
            assert (life.got, life.ended) == life.expected
        else:
            assert len(life.got) < len(life.expected[0])

    def abort(self, a: int, b: int) -> None:
        life = self.pick(a)
        if life is not None:
            self.cancel_move(life.id)
            assert self.engines[life.home].abort(life.id)
            life.ended = "aborted"

    def hold(self, a: int, b: int) -> None:
        life = self.pick(a)
        if life is not None:
            try:
                record = self.engines[life.home].hold(life.id)
            except Refused:
                assert self.request(life).status is not Status.RUNNING
            else:
                assert record["output"] == life.got

    def unhold(self, a: int, b: int) -> None:
        life = self.pick(a)
        if life is not None:
            self.engines[life.home].unhold(life.id)

    def wait(self, a: int, b: int) -> None:
        self.clock.now += 0.02 * b

    def long_wait(self, a: int, b: int) -> None:
        self.clock.now += 11.0  # reservations expire

    def stray_reserve(self, a: int, b: int) -> None:
        engine = self.engines[a % 2]
        try:
            blocks = engine.reserve(f"stray{b % 2}", b % 5)
        except Refused:
            return
        assert len(blocks) >= b % 5 and len(set(blocks)) == len(blocks)

    def stray_cancel(self, a: int, b: int) -> None:
        self.engines[a % 2].cancel_reservation(f"stray{b % 2}")

    def reserve(self, a: int, b: int) -> None:
        """The first stage of a move: full blocks are copied while the source goes on decoding."""
        life = self.pick(a)
        if life is None or life.id in self.moves or self.request(life).status is not Status.RUNNING:
            return
        source, destination = self.engines[life.home], self.engines[1 - life.home]
        computed, size = self.request(life).computed, source.scheduler.pool.block_size
        key = f"{life.id}#{b}"
        try:
            destination.reserve(key, source.scheduler.pool.blocks_for(computed))
        except Refused:
            return
        full = computed // size
        destination.write_reserved(key, 0, source.export(life.id, 0, full))
        self.moves[life.id] = Move(life.home, key, full)

    def commit(self, a: int, b: int) -> None:
        """The last stage: hold, copy the rest, adopt there, let go here. Any refusal leaves the request here."""
        if not self.moves:
            return
        life = self.lives[sorted(self.moves)[a % len(self.moves)]]
        move = self.moves.pop(life.id)
        source, destination = self.engines[move.source], self.engines[1 - move.source]
        request = self.request(life) if life.ended is None and life.home == move.source else None
        if request is None or request.status not in (Status.RUNNING, Status.HELD):
            destination.cancel_reservation(move.key)
            return
        source.unhold(life.id)
        record = source.hold(life.id)
        computed, epoch = request.computed, (request.epoch[0], request.epoch[1] + 1)
        needed = source.scheduler.pool.blocks_for(computed)
        try:
            destination.reserve(move.key, needed)
            first = min(move.copied, computed // source.scheduler.pool.block_size)
            destination.write_reserved(move.key, first, source.export(life.id, first, needed - first))
            adopted = destination.adopt(record, epoch, computed, move.key)
        except Refused:
            destination.cancel_reservation(move.key)
            source.unhold(life.id)
            return
        assert destination.adopt(record, epoch, computed, move.key) is adopted  # COMMIT may come twice
        life.home = 1 - move.source
        if b % 2:
            source.abort(life.id)
        else:
            self.left_behind.append((move.source, life.id))

    def give_up(self, a: int, b: int) -> None:
        if self.left_behind:
            at, request_id = self.left_behind.pop(a % len(self.left_behind))
            self.engines[at].abort(request_id)

    def move_waiting(self, a: int, b: int) -> None:
        life = self.pick(a)
        if life is None or self.request(life).status is not Status.WAITING or self.is_left_behind(life):
            return
        request = self.request(life)
        epoch = (request.epoch[0], request.epoch[1] + 1)
        self.cancel_move(life.id)
        record = self.engines[life.home].hold(life.id)
        self.engines[1 - life.home].adopt(record, epoch)
        self.engines[life.home].abort(life.id)
        life.home = 1 - life.home

    def resume(self, a: int, b: int) -> None:
        """The ingress starts a request again, here or there, with the tokens it has."""
        life = self.pick(a)
        if life is None or self.is_left_behind(life):
            return
        self.cancel_move(life.id)
        epoch = self.request(life).epoch
        self.engines[life.home].abort(life.id)
        life.home, life.waited = (life.home + b) % 2, 0.0
        try:
            self.engines[life.home].add_request(
                life.id, life.prompt, life.params, priority=a % 3 - 1, epoch=(epoch[0] + 1, epoch[1]), output=life.got
            )
        except QueueFull:
            life.ended = "refused"

    # -- inside -------------------------------------------------------------------------------------------------

    def tally(self) -> None:
        """Count the time in queues: a step takes requests from the queue, and puts them back, when it begins."""
        elapsed, self.tallied = self.clock.now - self.tallied, self.clock.now
        for life in self.lives.values():
            if life.ended is None and not self.request(life).blocks:
                life.waited += elapsed

    def lifts(self, at: int) -> dict[str, int]:
        """Steps of priority that an engine's queued requests have gained."""
        scheduler = self.engines[at].scheduler
        lift_s = scheduler.config.max_queue_time_s / 4
        mine = [self.lives[r.id] for r in scheduler.waiting if self.lives[r.id].home == at]
        return {life.id: int(life.waited / lift_s) if self.by_priority else 0 for life in mine}

    def pick(self, a: int) -> Life | None:
        alive = [life for life in self.lives.values() if life.ended is None]
        return alive[a % len(alive)] if alive else None

    def request(self, life: Life) -> Any:
        return self.engines[life.home].scheduler.requests[life.id]

    def is_left_behind(self, life: Life) -> bool:
        return any(request_id == life.id for _, request_id in self.left_behind)

    def cancel_move(self, request_id: str) -> None:
        move = self.moves.pop(request_id, None)
        if move is not None:
            self.engines[1 - move.source].cancel_reservation(move.key)

    def check(self) -> None:
        for at, engine in enumerate(self.engines):
            engine.scheduler.check()
            stats = engine.stats()
            assert stats.free_blocks + sum(engine_references(engine)) == stats.total_blocks
            owned = {life.id for life in self.lives.values() if life.ended is None and life.home == at}
            left = {request_id for where, request_id in self.left_behind if where == at}
            assert set(engine.scheduler.requests) == owned | left

    def finish(self) -> None:
        """Nothing is disturbed any more: every request ends, and every block is free again."""
        for at, request_id in self.left_behind:
            self.engines[at].abort(request_id)
        for request_id in list(self.moves):
            self.cancel_move(request_id)
        self.left_behind = []
        for engine in self.engines:
            for request_id in list(engine.scheduler.requests):
                engine.unhold(request_id)
        self.clock.now += 11.0
        for at, engine in enumerate(self.engines):
            for _ in range(2000):
                if not engine.has_work:
                    break
                self.step_once(at)
            self.check()
            assert not engine.scheduler.requests, "requests were left"
            engine.reserve("all", engine.scheduler.pool.total)
            engine.cancel_reservation("all")
            assert engine.scheduler.pool.available == engine.scheduler.pool.total
        assert all(life.ended is not None for life in self.lives.values())


def engine_references(engine: Engine) -> list[int]:
    """1 for every block that a request or a reservation holds."""
    scheduler = engine.scheduler
    tables = [r.blocks for r in scheduler.running] + [r.blocks for r in scheduler.reservations.held.values()]
    return [1] * len({block for table in tables for block in table})


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from([1, 2, 4]))
    blocks = draw(st.integers(4, 14))
    seats = draw(st.integers(1, 5))
    prefix_caching = draw(st.booleans())
    chunked = draw(st.booleans())
    longest = draw(st.integers(blocks * size // 2 + 1, blocks * size))
    return {
        "num_blocks": blocks,
        "block_size": size,
        "host_slots": draw(st.sampled_from([0, 2, 5, 40])),
        "keep_evicted": prefix_caching and draw(st.booleans()),
        "seconds_per_token": 0.01,
        "seconds_per_copy": draw(st.sampled_from([0.001, 0.1])),
        "max_num_seqs": seats,
        "max_num_batched_tokens": draw(st.integers(seats, seats + 8)) if chunked else longest + seats,
        "max_model_len": longest,
        "max_num_queued": draw(st.sampled_from([3, 50])),
        # The clock goes in milliseconds: no lift comes within an error of rounding
        "max_queue_time_s": draw(st.sampled_from([5000.0000123, 5000.0000123, 20.0000123])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "preempt": draw(st.sampled_from(["RECOMPUTE", "SWAP", "AUTO"])),
        "prefix_caching": prefix_caching,
        "chunked_prefill": chunked,
        "delay_factor": draw(st.sampled_from([0.0, 0.5])),
        "eos_token_ids": draw(st.sampled_from([(), (3, 5, 8, 13, 21, 34)])),
    }


traces = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 41), st.integers(0, 41)), min_size=30, max_size=150)


@settings(max_examples=400, deadline=None)
@given(setup=setups(), ops=traces)
def test_every_request_ends_once_with_the_tokens_of_a_quiet_run(
    setup: dict[str, Any], ops: list[tuple[str, int, int]]
) -> None:
    World(setup).run(ops)
