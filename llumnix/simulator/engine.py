"""A simulated engine: queue, blocks, steps. Times come from a Device; tokens are only counted.

It is at a step boundary whenever `fire` runs. Between two boundaries where something changes there are either one step
with prompts or a run of decode steps, which is not walked: with B requests and step counter s

    a request's length is base + s, so the tokens of the batch are sum(base) + B x s,
    k steps take k x d + c x B x k (k - 1) / 2 seconds (d: the first step, c: seconds a token),
    a request takes a new block in the steps with (base + s) % 16 == 1, so 16 counters tell the blocks of any k steps.

`interrupt` shortens a run to the boundary that is next at that time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from math import ceil, sqrt

from llumnix.load import DRAINING, MIXED, READY, LoadReport, Movable
from llumnix.simulator.device import Device
from llumnix.simulator.request import NEVER, Request

IDLE, PROMPTS, DECODING = 0, 1, 2


class Engine:
    """`next` is the time of the next boundary that needs `fire`; NEVER while there is nothing to do."""

    def __init__(self, name: str, device: Device, classes: bool = True):
        self.name = name
        self.device = device
        self.classes = classes  # false: blind to priorities
        self.size = device.block_size
        self.total = device.total_blocks
        self.state = READY
        self.next = NEVER
        self.mode = IDLE
        self.waiting: list[Request] = []
        self.waiting_blocks = 0
        self.running: list[Request] = []  # decode, in the order of _key
        self.prompts: list[list] = []  # [request, tokens computed, tokens in this step]
        self.held: list[Request] = []  # stopped for the last stage of a move
        self.used = 0  # blocks of running, prompts and held, at the last boundary
        self.reserved = 0
        self.moves = 0  # under way, either end
        self.steps = 0  # the step counter
        self.finished: list[Request] = []  # since somebody last looked
        self.preemptions = 0
        self.quiet_until = 0.0  # no need to look for moves away from here before
        self.report_due = 0.0  # when the dispatcher hears of it again
        self.booked = (0, 0, 0)  # sent here since: blocks, tokens, requests
        self._run = 0  # decode steps of the run under way
        self._start = 0.0  # when it began
        self._slow = 1.0
        self._bases = 0
        self._phase = [0] * self.size  # requests of the batch by base % size
        self._orders = 0
        self._admitted = 0
        self._watermark = int(device.watermark_share * device.total_blocks)
        self._holds: list[tuple[Request, int, Callable[[float], None]]] = []
        self._joins: list[tuple[Request, float]] = []

    # -- requests in and out ------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request that is new here."""
        self._orders += 1
        request.order = self._orders
        self._enqueue(request)
        self.quiet_until = 0.0
        if self.waiting[0] is request and self.free_blocks(now) - self._watermark >= self._blocks_for(request.length):
            self.kick(now)
        elif self.mode == IDLE:
            self.next = now

    def take_waiting(self, request: Request, now: float) -> None:
        """A queued request leaves."""
        self.waiting.remove(request)
        self.waiting_blocks -= self._blocks_for(request.length)
        self.kick(now)

    def hold(self, request: Request, now: float, then: Callable[[float], None]) -> None:
        """Stop a decoding request at the next boundary, unless it has left the batch by then; then call then(time)."""
        self._holds.append((request, request.epoch, then))
        self.kick(now)

    def release(self, request: Request, now: float) -> None:
        """A held request is somewhere else now: free its blocks."""
        self.held.remove(request)
        self.used -= self._blocks_for(request.length - 1)
        self.kick(now)

    def reserve(self, blocks: int, now: float) -> bool:
        """Promise blocks to a request on its way here; refused without room or while others wait."""
        if self.waiting or self.state != READY or self.free_blocks(now) - self._watermark < blocks:
            return False
        self.reserved += blocks
        self.kick(now)
        return True

    def cancel(self, blocks: int, now: float) -> None:
        """Give up a promise."""
        self.reserved -= blocks
        self.kick(now)

    def adopt(self, request: Request, reserved: int, now: float) -> None:
        """A request whose KV fills `reserved` promised blocks joins the batch at the next boundary."""
        blocks = self._blocks_for(request.length - 1)
        self.reserved -= reserved
        self.used += blocks
        self._joins.append((request, now))
        self.kick(now)

    def begin_move(self, now: float) -> None:
        self.moves += 1
        self.kick(now)

    def end_move(self, now: float) -> None:
        self.moves -= 1
        self.kick(now)

    def kick(self, now: float) -> None:
        """Something has changed: plan anew at the next boundary."""
        self.quiet_until = 0.0
        if self.mode == IDLE:
            self.next = now
        elif self.mode == DECODING:
            run = max(self._whole_steps(now, ceil), 1)
            if run < self._run:
                self._run = run
                self.next = max(now, self._start + self._seconds(run))

    # -- time ---------------------------------------------------------------------------------------------------

    def fire(self, now: float) -> None:
        """The boundary at `next`."""
        if self.mode == DECODING:
            self._advance(self._run)
        elif self.mode == PROMPTS:
            self._end_prompts(now)
        self.mode = IDLE
        self.quiet_until = 0.0
        if self.running:
            self._finish(now)
        if self._holds:
            self._stop_held(now)
        if self._joins:
            for request, _ in self._joins:
                self._join(request, now)
            self._joins.clear()
        self._plan(now)

    def _plan(self, now: float) -> None:
        """Decide what runs from this boundary on."""
        device = self.device
        self._slow = 1.0 + device.move_slowdown if self.moves else 1.0
        self._start = now
        self._admit()
        if self.prompts:
            decoding = device.chunked_prefill and bool(self.running)
            if decoding:
                self._make_room(now)
            self.next = now + self._slow * self._prompt_seconds(decoding)
            self.mode = PROMPTS
            return
        preempted = self._make_room(now)
        if not self.running:
            self.next = now if preempted and not self.reserved else NEVER
            return
        run = min(request.finish for request in self.running) - self.steps
        self._run = 1 if preempted else min(run, self._steps_until_full())
        self.next = now + self._seconds(self._run)
        self.mode = DECODING

    def _admit(self) -> None:
        """Queued requests become prompts of this step, strictly in order, while tokens, seats and blocks last."""
        device = self.device
        budget = device.max_num_batched_tokens
        if device.chunked_prefill:
            budget -= len(self.running)
            for entry in self.prompts:
                entry[2] = min(entry[0].length - entry[1], max(budget, 0))
                budget -= entry[2]
        seats = device.max_num_seqs - len(self.running) - len(self.prompts) - len(self.held) - len(self._joins)
        while self.waiting and budget > 0 and seats > 0:
            request = self.waiting[0]
            blocks = self._blocks_for(request.length)
            spare = self._watermark if self.running or self.prompts or self.held else 0
            if self.total - self.used - self.reserved - blocks < spare:
                return
            if not device.chunked_prefill and request.length > budget and self.prompts:
                return
            self.waiting.pop(0)
            self.waiting_blocks -= blocks
            self.used += blocks
            self._admitted += 1
            request.started = self._admitted
            count = min(request.length, budget) if device.chunked_prefill else request.length
            self.prompts.append([request, 0, count])
            budget -= count
            seats -= 1

    def _prompt_seconds(self, decoding: bool) -> float:
        device = self.device
        seconds = 0.0
        for _, computed, count in self.prompts:
            seconds += device.prompt_s(computed + count) - device.prompt_s(computed)
        if not decoding:
            return seconds + device.prompt_base_s
        return seconds + device.step_s(len(self.running), self._bases + len(self.running) * self.steps)

    def _end_prompts(self, now: float) -> None:
        if self.device.chunked_prefill and self.running:
            self._advance(1)
        left = []
        for entry in self.prompts:
            entry[1] += entry[2]
            request = entry[0]
            if entry[1] < request.length:
                left.append(entry)
                continue
            request.length += 1
            if request.first < 0:
                request.first = now
            self._join(request, now)
        self.prompts = left

    def _join(self, request: Request, now: float) -> None:
        """Into the decode batch; its newest token has just come, or it comes from another engine."""
        if request.stopped >= 0:
            lost = now - request.stopped
            step = self.device.step_s(len(self.running) + 1, self._tokens + request.length)
            if request.moving:
                request.silence.append(lost + step)
                request.moving = False
            else:
                request.loss += max(0.0, lost - step)
            request.stopped = -1.0
        request.base = request.length - self.steps
        request.finish = self.steps + request.output - (request.length - request.prompt)
        request.decoding = True
        insort(self.running, request, key=self._key)
        self._bases += request.base
        self._phase[request.base % self.size] += 1
        if request.finish <= self.steps:
            self._end(request, now)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._bases -= request.base
        self._phase[request.base % self.size] -= 1
        request.length = request.base + self.steps
        request.decoding = False

    def _finish(self, now: float) -> None:
        steps = self.steps
        for request in [request for request in self.running if request.finish <= steps]:
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        self._leave(request)
        self.used -= self._blocks_for(request.length - 1)
        request.epoch += 1
        request.end = now
        self.finished.append(request)

    def _stop_held(self, now: float) -> None:
        holds, self._holds = self._holds, []
        for request, epoch, then in holds:
            if request.epoch == epoch and request.decoding:
                self._leave(request)
                self.held.append(request)
                request.stopped = now
            then(now)

    def _make_room(self, now: float) -> bool:
        """Preempt from the tail until the next decode step fits; whether anything was preempted."""
        preempted = False
        while self.running and self._phase[(1 - self.steps) % self.size] > self.total - self.used - self.reserved:
            request = self.running[-1]
            self._leave(request)
            self.used -= self._blocks_for(request.length - 1)
            request.epoch += 1
            request.preemptions += 1
            request.moving = False
            request.stopped = now
            self._enqueue(request)
            self.preemptions += 1
            preempted = True
        return preempted

    # -- runs of decode steps -----------------------------------------------------------------------------------

    @property
    def _tokens(self) -> int:
        return self._bases + len(self.running) * self.steps

    def _seconds(self, steps: int) -> float:
        """Seconds of the next `steps` decode steps."""
        batch = len(self.running)
        first = self.device.step_s(batch, self._tokens)
        return self._slow * steps * (first + self.device.step_token_s * batch * (steps - 1) / 2)

    def _whole_steps(self, now: float, whole: Callable[[float], int] = int) -> int:
        """Steps of the run that have ended by `now`; with ceil, those that end at or after it."""
        batch = len(self.running)
        first = self.device.step_s(batch, self._tokens)
        slope = self.device.step_token_s * batch
        left = first - slope / 2
        time = (now - self._start) / self._slow
        steps = (sqrt(left * left + 2 * slope * time) - left) / slope if slope > 0 else time / first
        return max(0, whole(steps - 1e-6 if whole is ceil else steps + 1e-6))

    def _advance(self, steps: int) -> None:
        self.used += self._growth(steps)
        self.steps += steps

    def _growth(self, steps: int) -> int:
        """Blocks that the next `steps` decode steps take."""
        cycles, rest = divmod(steps, self.size)
        blocks = cycles * len(self.running)
        for i in range(1 - self.steps - rest + 1, 2 - self.steps):
            blocks += self._phase[i % self.size]
        return blocks

    def _steps_until_full(self) -> int:
        """Decode steps that fit; at least one does."""
        free = self.total - self.used - self.reserved
        cycles, free = divmod(free, len(self.running))
        steps = cycles * self.size
        for i in range(self.size):
            free -= self._phase[(1 - self.steps - i) % self.size]
            if free < 0:
                return steps + i
        return steps + self.size

    # -- load ---------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return not (self.running or self.waiting or self.prompts or self.held or self._joins or self.reserved)

    def free_blocks(self, now: float) -> int:
        """Free blocks at a time before `next`."""
        free = self.total - self.used - self.reserved
        if self.mode == DECODING:
            free -= self._growth(min(self._whole_steps(now), self._run))
        return free

    def report(self, now: float, movable: tuple[Movable, ...] = ()) -> LoadReport:
        """The load report that a live engine would send at this time."""
        high = 0
        if self.classes:
            high = sum(r.priority < 0 for r in self.running) + sum(e[0].priority < 0 for e in self.prompts)
        prefill = self.device.prompt_token_s
        return LoadReport(
            self.name,
            0.0,
            0,
            state=self.state,
            role=MIXED,
            block_size=self.size,
            total_blocks=self.total,
            free_blocks=self.free_blocks(now),
            reserved_blocks=self.reserved,
            running=self.batch,
            waiting=len(self.waiting),
            waiting_blocks=self.waiting_blocks,
            head_blocks=self.head_blocks,
            high_running=high,
            movable=movable,
            queued_prefill_tokens=sum(r.length for r in self.waiting),
            prefill_tokens_per_s=1 / prefill if prefill else 0.0,
        )

    @property
    def batch(self) -> int:
        return len(self.running) + len(self.prompts) + len(self.held) + len(self._joins)

    @property
    def head_blocks(self) -> int:
        return self._blocks_for(self.waiting[0].length) if self.waiting else 0

    def movable(self, now: float) -> list[Movable]:
        """Every request that could move: decoding ones and queued ones that no move has in hand."""
        steps = self.steps
        if self.mode == DECODING:
            steps += min(self._whole_steps(now), self._run)
        found = []
        for request in self.running:
            if not request.moving:
                tokens = request.base + steps
                found.append(self._movable(request, tokens, self._blocks_for(tokens), request.started))
        for request in self.waiting:
            if not request.moving:
                found.append(self._movable(request, request.length, self._blocks_for(request.length), request.order))
        return found

    def _movable(self, request: Request, tokens: int, blocks: int, order: int) -> Movable:
        priority = request.priority if self.classes else 0
        waiting = not request.decoding
        return Movable(str(request.id), priority, tokens, blocks, waiting, order, request.last_moved)

    def length(self, request: Request, now: float) -> int:
        """Known tokens of a decoding request at a time before `next`."""
        steps = min(self._whole_steps(now), self._run) if self.mode == DECODING else 0
        return request.base + self.steps + steps

    # -- inside -------------------------------------------------------------------------------------------------

    def _key(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.classes else 0, request.order)

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=self._key)
        self.waiting_blocks += self._blocks_for(request.length)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree; at a boundary."""
        used = sum(self._blocks_for(r.base + self.steps - 1) for r in self.running)
        used += sum(self._blocks_for(entry[0].length) for entry in self.prompts)
        used += sum(self._blocks_for(r.length - 1) for r in (*self.held, *(r for r, _ in self._joins)))
        assert used == self.used, (self.name, used, self.used)
        assert 0 <= self.used + self.reserved <= self.total
        assert self._bases == sum(r.base for r in self.running)
        assert self.waiting_blocks == sum(self._blocks_for(r.length) for r in self.waiting)
        assert self.state in (READY, DRAINING) or self.empty
