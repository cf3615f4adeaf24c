"""What runs in the next step: pure Python on ints, no torch, an injected clock.

One token budget a step, shared by every kind of work, because all work is the same subtraction `tokens - computed`:
first the running requests in order, then the waiting ones while there is room. What the orders are is said in
engine/order.py; a request keeps its place when it is preempted. If blocks run out, the last running request is
preempted, so the first one always progresses.

Ownership of blocks, from the scheduler's side:

    waiting   no blocks (a preempted request finds its own again by hash)
    running   request.blocks, one reference each
    held      the same, but not scheduled: it is about to move
    reserved  blocks promised to a request that is on its way here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.event import NOT_FINITE, QUEUE_TIMEOUT, Event
from engine.kv import BlockPool, extend_chain
from engine.order import Order
from engine.request import Epoch, Request, Status
from engine.reservations import Refused, Reservations
from engine.step import SequenceStart, StepPlan, StepResult, Work

RECOMPUTE, SWAP, AUTO = "RECOMPUTE", "SWAP", "AUTO"


class QueueFull(Exception):
    """The waiting queue is at its limit; try another replica or later."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 2048
    max_num_queued: int = 512
    max_queue_time_s: float = 3600.0
    policy: str = "fcfs"  # or "priority"
    preempt: str = AUTO
    prefix_caching: bool = True
    chunked_prefill: bool = True
    delay_factor: float = 0.0
    reservation_s: float = 10.0
    eos_token_ids: tuple[int, ...] = ()


class Scheduler:
    """Owns every request of the engine and the block pool. Not thread safe: one thread steps and mutates it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, clock: Callable[[], float]):
        self.config = config
        self.pool = pool
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # both sorted by `order`
        self.order = Order(config.policy == "priority", config.max_queue_time_s)
        self.reservations = Reservations(pool, config.reservation_s)
        self.lent: list[int] = []  # blocks used in idle time, back as soon as anybody comes (engine/verification.py)
        self.preemptions = 0
        self.prompt_tokens = self.cached_tokens = 0  # totals, counted when a request is first admitted
        self.swap_seconds_per_block = 0.0  # measured; 0 until the first swap, which makes SWAP the first guess
        self.prefill_seconds_per_token = 0.0
        self._orders = 0
        self._step = 0
        self._ended: list[str] = []
        self._next_expiry = 0.0
        self._placed: set[str] = set()  # ids whose state the runner has
        self._now = 0.0
        self._head_blocked = False  # the head of the queue found no room in the last step
        self._prompt_started: float | None = None  # when the last step with a prompt was planned
        self._prompt_latency = 0.0

    # -- requests in and out ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull at the limit and ValueError for what can never run.

        The limit is for new requests: one that brings output was let in before, and its client has begun to read.
        """
        if request.id in self.requests:
            raise ValueError(f"request {request.id} is already here")
        limit = self.max_length
        if not request.tokens:
            raise ValueError("the prompt is empty")
        if len(request.tokens) >= limit:
            what = "prompt and the tokens so far have" if request.output else "prompt has"
            raise ValueError(f"the {what} {len(request.tokens)} tokens, at most {limit - 1} fit")
        if not isinstance(request.priority, int):
            raise ValueError(f"priority is {request.priority!r}, must be an integer")
        if self.queue_full and not request.output:
            raise QueueFull(f"{len(self.waiting)} requests are queued, the limit is {self.config.max_num_queued}")
        self._orders += 1
        request.order = self._orders
        request.arrival = request.arrival or self.clock()
        self._enqueue(request)
        self.requests[request.id] = request

    def abort(self, request_id: str) -> Request | None:
        """Drop a request and free its blocks at once; None if it is not here."""
        request = self.requests.get(request_id)
        if request is not None:
            self._remove(request)
        return request

    @property
    def max_length(self) -> int:
        """Tokens the longest sequence may have: prompt and output."""
        return min(self.config.max_model_len, self.pool.total * self.pool.block_size)

    @property
    def queue_full(self) -> bool:
        """A new request is refused. Those that the next step has a seat for do not count as queued."""
        return len(self.waiting) - self.seats >= self.config.max_num_queued

    @property
    def has_work(self) -> bool:
        """Steps are needed: something can run, waits for room, or is reserved and may expire."""
        return bool(self.head is not None or self.reservations or any(r.status is Status.RUNNING for r in self.running))

    @property
    def idle(self) -> bool:
        """Nobody is here, and nobody has room promised."""
        return not self.requests and not self.reservations

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[StepPlan, list[Event]]:
        """The next plan, and the requests that ended without running (queued for too long)."""
        now = self.clock()
        self.reservations.expire(now)
        events = self._expire_waiting(now)
        self.order.lift(self.waiting, now)
        if self._prompt_started is not None:
            self._prompt_latency = now - self._prompt_started
            self._prompt_started = None
        self._now = now
        budget = self.config.max_num_batched_tokens
        work: list[Work] = []
        starts: list[SequenceStart] = []
        preempted = False
        later, wanted = self._demand()
        for request in list(self.running):
            if budget == 0:
                break
            if request.status is not Status.RUNNING:
                continue  # held, or preempted earlier in this loop
            later, wanted = later - 1, wanted - request.pending
            count = min(request.pending, budget)
            if self.config.chunked_prefill and count > 1:
                # A long prompt leaves to those behind it what they want, up to half of the step and one position each.
                spare = max(later, min(wanted, self.config.max_num_batched_tokens // 2))
                count = min(count, max(1, budget - spare))
            new, victims = self._grow(request, request.computed + count)
            preempted = preempted or victims
            if new is None:
                break  # it was its own victim
            self._place(request, count, new, starts, work)
            budget -= count
        if not preempted:
            self._admit(budget, now, starts, work)
        return self.plan(starts, work), events

    def plan(self, starts: list[SequenceStart], work: list[Work]) -> StepPlan:
        """The next plan, with the copies and ends that have gathered. It must be executed."""
        swap_out, swap_in = self.pool.drain_copies()
        ended, self._ended = self._ended, []
        self._step += 1
        return StepPlan(self._step, starts, work, ended, swap_out, swap_in)

    def drop(self, sequence_id: str) -> None:
        """The executor forgets a sequence with the next plan."""
        self._ended.append(sequence_id)

    def update(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Apply a result: advance, append tokens, end what is done."""
        for work in plan.work:
            request = self.requests[work.id]
            request.computed = work.start + work.count
            self._register(request)
        events = []
        for sampled in result.sampled:
            request = self.requests[sampled.id]
            index = len(request.output)
            if sampled.token < 0:
                self._remove(request)
                events.append(Event(request, index, error=NOT_FINITE))
                continue
            request.append(sampled.token)
            reason = self._finish_reason(request, sampled.token)
            if reason is not None:
                self._remove(request)
            events.append(Event(request, index, sampled.token, sampled.logprobs, reason))
        return events

    # -- moving -------------------------------------------------------------------------------------------------

    def hold(self, request_id: str) -> Request:
        """Stop scheduling a request, between steps. Its KV is complete up to `computed`; a queued one has none."""
        request = self.requests.get(request_id)
        if request is None or request.status not in (Status.RUNNING, Status.WAITING):
            raise Refused(f"request {request_id} is not running here")
        self.order.book(request, self.clock())
        request.status = Status.HELD
        return request

    def unhold(self, request_id: str) -> None:
        """Go on with a held request whose move did not happen."""
        request = self.requests.get(request_id)
        if request is not None and request.status is Status.HELD:
            request.status = Status.RUNNING if request.blocks else Status.WAITING

    def reserve(self, key: str, num_blocks: int, request_id: str = "", tokens: Sequence[int] = ()) -> list[int]:
        """Promise blocks to a request on its way here, for reservation_s. Repeating a key extends the promise.

        With the request's `tokens` the blocks of its prefix that are here already are part of the promise, written.
        Raises Refused when there is no room or a request waits here already (it is older and goes first).
        """
        now = self.clock()
        self.reservations.expire(now)
        if key in self.reservations.held:
            return self.extend(key, num_blocks)
        if self.waiting:
            raise Refused(f"{len(self.waiting)} older requests are waiting")
        if not self.seats:
            raise Refused(f"all {self.config.max_num_seqs} seats are taken")
        hashes = self._chain(request_id, tokens, [])[: (len(tokens) - 1) // self.pool.block_size]
        # What only the host tier has would have to be copied: the source sends it as well
        found = list(takewhile(lambda hit: hit[0] is not None, self.pool.find(hashes, tokens)))[:num_blocks]
        room = self.pool.room_for(found, num_blocks * self.pool.block_size)
        if room < (self.pool.total // 100 if self.running else 0):
            raise Refused(f"{num_blocks} blocks wanted, {self.pool.available} available")
        return self.reservations.promise(key, num_blocks - len(found), now, self.pool.take(found, hashes, tokens))

    def extend(self, key: str, num_blocks: int) -> list[int]:
        """Let a promise grow to num_blocks at least and last for reservation_s more. Raises Refused without one."""
        now = self.clock()
        self.reservations.expire(now)
        missing = self.reservations.missing(key, num_blocks)
        if missing and self.waiting:
            raise Refused(f"{len(self.waiting)} older requests are waiting")
        if missing > self.pool.available:
            raise Refused(f"{missing} blocks wanted, {self.pool.available} available")
        return self.reservations.promise(key, missing, now)

    def adopt(self, record: Request, epoch: Epoch, computed: int, key: str | None = None) -> Request:
        """Own a request that was elsewhere. With a reservation its blocks hold the KV of `computed` positions and it
        joins the running batch; without one it queues and its KV is found by hash or computed again.

        Repeating an adoption returns the request that is here. Raises Refused when the reservation is gone or short.
        """
        here = self.requests.get(record.id)
        if here is not None:
            if here.epoch >= epoch:
                return here
            raise Refused(f"request {record.id} is here with the older epoch {here.epoch}")
        if not 0 <= computed < len(record.tokens) < self.max_length:
            raise Refused(
                f"request {record.id} has {len(record.tokens)} tokens, {computed} of them computed; fewer than "
                f"{self.max_length} fit"
            )
        if key is None:
            self._take_in(record, epoch)
            self._enqueue(record)
            return record
        needed = self.pool.blocks_for(len(record.tokens))
        blocks = self.reservations.take(key, self.pool.blocks_for(computed), needed)
        self._take_in(record, epoch)
        record.blocks = blocks
        record.computed = computed
        record.status = Status.RUNNING
        record.started = True
        self.order.join(self.running, record, self.clock())
        self._register(record)
        return record

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def seats(self) -> int:
        """Sequences that may still join the batch; a reservation has its seat already."""
        return max(0, self.config.max_num_seqs - len(self.running) - len(self.reservations))

    @property
    def head(self) -> Request | None:
        """The first request in the queue that is not about to move."""
        return next((request for request in self.waiting if request.status is Status.WAITING), None)

    def _take_in(self, request: Request, epoch: Epoch) -> None:
        self._orders += 1
        request.order, request.epoch, request.last_moved = self._orders, epoch, self.clock()
        self.requests[request.id] = request

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        self.order.enqueue(self.waiting, request, self.clock())

    def _admit(self, budget: int, now: float, starts: list[SequenceStart], work: list[Work]) -> None:
        """Move waiting requests to running while budget, seats and blocks last; strictly in order."""
        size = self.pool.block_size
        while budget > 0 and self.seats and (request := self.head) is not None and self._prompt_due(now):
            # The newest position is always computed: its logits are what the step is for.
            hashes = self._hashes(request)[: (len(request.tokens) - 1) // size]
            found = self.pool.find(hashes, request.tokens)
            # The whole known sequence must fit, or it would be preempted right after its prefill.
            reserve = self.pool.total // 100 if self.running else 0
            self._head_blocked = self.pool.room_for(found, len(request.tokens)) < reserve
            if self._head_blocked:
                return
            count = len(request.tokens) - len(found) * size
            if count > budget:
                if not self.config.chunked_prefill:
                    return
                count = budget
            self.waiting.remove(request)
            request.blocks = self.pool.take(found, hashes, request.tokens)
            request.computed = len(found) * size
            request.registered = len(found)
            if not request.started:
                request.started = True
                request.cached_tokens = min(request.computed, len(request.prompt))
                self.prompt_tokens += len(request.prompt)
                self.cached_tokens += request.cached_tokens
            request.status = Status.RUNNING
            self.order.join(self.running, request, now)
            new = self._extend(request, request.computed + count)
            self._place(request, count, new, starts, work)
            budget -= count

    def _demand(self) -> tuple[int, int]:
        """(running requests, positions they want), with those the queue would want if it is let in."""
        running = [request.pending for request in self.running if request.status is Status.RUNNING]
        queued = 0 if self._head_blocked else sum(len(request.tokens) for request in self.waiting[: self.seats])
        return len(running), sum(running) + queued

    def _prompt_due(self, now: float) -> bool:
        """The scheduler_delay_factor rule: let prompts gather for a share of the last prompt's latency."""
        if self.config.delay_factor == 0.0 or not self.running:
            return True
        earliest = min(request.arrival for request in self.waiting)
        return now - earliest >= self.config.delay_factor * self._prompt_latency

    def _grow(self, request: Request, length: int) -> tuple[list[int] | None, bool]:
        """Blocks for `length` positions, preempting from the tail while there is no room.

        Returns (new blocks, or None if the request itself had to go; whether anything was preempted).
        """
        preempted = False
        missing = self.pool.blocks_for(length) - len(request.blocks)
        while missing > self.pool.available:
            victim = next(r for r in reversed(self.running) if r.status is Status.RUNNING)
            self._preempt(victim)
            preempted = True
            if victim is request:
                return None, True
        return self._extend(request, length), preempted

    def _extend(self, request: Request, length: int) -> list[int]:
        new = self.pool.allocate(max(0, self.pool.blocks_for(length) - len(request.blocks)))
        request.blocks.extend(new)
        return new

    def _place(
        self, request: Request, count: int, new: list[int], starts: list[SequenceStart], work: list[Work]
    ) -> None:
        """Put `count` positions of a running request into the plan, with all its state if the runner lacks it."""
        if request.id not in self._placed:
            self._placed.add(request.id)
            tokens, blocks = list(request.tokens), list(request.blocks)
            starts.append(SequenceStart(request.id, tokens, len(request.prompt), blocks, request.params, request.seed))
            new = []
        if request.computed < len(request.prompt):
            self._prompt_started = self._now
        sample = request.computed + count == len(request.tokens)
        work.append(Work(request.id, request.computed, count, tuple(new), sample))

    def _preempt(self, request: Request) -> None:
        """Give a running request's blocks away; by SWAP its full blocks are copied to the host tier first."""
        full = request.computed // self.pool.block_size
        hashes = self._hashes(request)[:full]
        if self._should_swap(hashes):
            self.pool.keep_on_host(request.blocks[:full], hashes, request.tokens)
        self.preemptions += 1
        request.preemptions += 1
        self.running.remove(request)
        self._vacate(request)
        self._enqueue(request)

    def _should_swap(self, hashes: list[bytes]) -> bool:
        if self.config.preempt != AUTO:
            return self.config.preempt == SWAP
        if not hashes or self.pool.host.capacity < len(hashes):
            return False
        copies = 2 * len(hashes) - sum(1 for digest in hashes if digest in self.pool.host.slots)
        recompute = len(hashes) * self.pool.block_size * self.prefill_seconds_per_token
        return copies * self.swap_seconds_per_block <= recompute

    def _vacate(self, request: Request, forget: bool = False) -> None:
        self.pool.release(request.blocks, forget=forget)
        request.blocks = []
        request.computed = request.registered = 0
        if request.id in self._placed:
            self._placed.discard(request.id)
            self.drop(request.id)

    def _remove(self, request: Request) -> None:
        (self.running if request.blocks else self.waiting).remove(request)
        # Without prefix caching the chain is salted with the request's id: nobody can hit these blocks again.
        self._vacate(request, forget=not self.config.prefix_caching)
        request.status = Status.FINISHED
        del self.requests[request.id]

    def _hashes(self, request: Request) -> list[bytes]:
        return self._chain(request.id, request.tokens, request.hashes)

    def _chain(self, request_id: str, tokens: Sequence[int], hashes: list[bytes]) -> list[bytes]:
        return extend_chain(hashes, tokens, self.pool.block_size, "" if self.config.prefix_caching else request_id)

    def _register(self, request: Request) -> None:
        """Make the full blocks whose KV is written findable."""
        size = self.pool.block_size
        full = request.computed // size
        if full > request.registered:
            hashes = self._hashes(request)
            for i in range(request.registered, full):
                self.pool.register(request.blocks[i], hashes[i], request.tokens[i * size : (i + 1) * size])
            request.registered = full

    def _finish_reason(self, request: Request, token: int) -> str | None:
        params = request.params
        if token in params.stop_token_ids or (token in self.config.eos_token_ids and not params.ignore_eos):
            return "stop"
        if params.max_tokens is not None and len(request.output) >= params.max_tokens:
            return "length"
        return "length" if len(request.tokens) >= self.max_length else None

    def _expire_waiting(self, now: float) -> list[Event]:
        """End requests that never started within max_queue_time."""
        if now < self._next_expiry:
            return []
        self._next_expiry = now + min(0.25, self.config.max_queue_time_s / 4)
        queued = [r for r in self.waiting if r.status is Status.WAITING]
        late = [r for r in queued if not r.started and now - r.arrival > self.config.max_queue_time_s]
        for request in late:
            self._remove(request)
        return [Event(request, len(request.output), error=QUEUE_TIMEOUT) for request in late]

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold; for tests and for idle time."""
        owned = [r.blocks for r in self.running] + [r.blocks for r in self.reservations.held.values()]
        self.pool.check([*owned, self.lent])
        assert all(not r.blocks for r in self.waiting)
        assert len(self.running) + len(self.reservations) <= self.config.max_num_seqs
        assert set(self.requests) == {r.id for r in self.running + self.waiting}
        assert self.waiting == sorted(self.waiting, key=self.order.in_queue)
        assert self.running == sorted(self.running, key=self.order.in_batch)
