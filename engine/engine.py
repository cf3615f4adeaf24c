"""One engine: a scheduler that plans and an executor that computes.

Single-threaded: whoever owns an Engine calls everything from one thread (the offline `LLM`, or the engine thread of an
engine actor). Between two `step` calls every request is at a step boundary, which is when requests may move.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from engine.executor import Executor
from engine.kv import BlockPool
from engine.kv_cache import Slabs
from engine.request import Epoch, Request, Status, seed_of
from engine.sampling.params import SamplingParams
from engine.scheduler import Event, Scheduler, SchedulerConfig
from engine.step import StepPlan, StepResult
from engine.verification import Verifier

EMA = 0.2  # weight of the newest measurement in the moving averages


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for load reports and metrics; counts are totals since the start."""

    total_blocks: int
    free_blocks: int  # available: free or cached
    cached_blocks: int
    running: int
    waiting: int
    seats: int  # sequences that may still join the batch
    held: int
    reserved_blocks: int
    waiting_blocks: int  # blocks all queued requests would need
    head_blocks: int  # blocks the head of the queue would need; one that is about to move is not the head
    high_running: int  # of `running`, those with a priority below 0: the high class
    reservations_expired: int
    queued_prefill_tokens: int  # positions still to be prefilled, running and waiting
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    evictions: int
    step_seconds: float  # moving average of a step
    prefill_tokens_per_s: float  # measured; 0 before the first prompt
    verified: int = 0  # requests that were run again in idle time (engine/verification.py)
    verify_mismatches: int = 0
    verify_skipped: int = 0


class Engine:
    """Requests in, token events out. `scheduler` and `executor` are joined here and nowhere else."""

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        seed: int = 0,
        compat_key: str = "",
        max_logprobs: int = 20,
        reproducible: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.executor = executor
        self.scheduler = Scheduler(config, pool, clock)
        self.clock = clock
        self.vocab_size = vocab_size
        self.seed = seed
        self.compat_key = compat_key
        self.max_logprobs = max_logprobs
        self.reproducible = reproducible  # equal requests have equal tokens, whatever their batches
        self.verifier = Verifier(self.scheduler, executor)
        self.steps = self.generated_tokens = 0
        self.step_seconds = 0.0
        self.last_step_tokens = 0  # 0: there was nothing that could run

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        client: str = "",
        priority: int = 0,
        epoch: Epoch = (0, 0),
        output: Sequence[int] = (),
    ) -> Request:
        """Queue a request; `output` holds what it emitted elsewhere before (a resume).

        Raises ValueError for what can never run and scheduler.QueueFull at the queue's limit.
        """
        try:
            prompt, output = [index(token) for token in prompt], [index(token) for token in output]
        except TypeError:
            raise ValueError("a token id is not an integer") from None
        for token in (*prompt, *output):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise ValueError(f"logprobs is {params.logprobs}, at most {self.max_logprobs} are given")
        seed = seed_of(self.seed, request_id, params.seed)
        request = Request(request_id, prompt, params, seed, client, priority, epoch, self.clock(), output=output)
        self.verifier.interrupt()
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str, epoch: Epoch | None = None) -> bool:
        """End a request without an event, or let go of one that another engine owns now; its full blocks stay as prefix
        cache. With an epoch, only one no newer than that."""
        request = self.scheduler.requests.get(request_id)
        if request is None or (epoch is not None and request.epoch > epoch):
            return False
        self.scheduler.abort(request_id)
        return True

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Event]:
        """Plan, compute and apply one step. An exception from the executor leaves the engine unusable."""
        plan, events = self.scheduler.schedule()
        self.last_step_tokens = plan.num_tokens
        if plan.work or plan.swap_out or plan.ended:
            result = self.executor.execute(plan)
            self._measure(plan, result)
            events += self.scheduler.update(plan, result)
        return events

    # -- moving -------------------------------------------------------------------------------------------------

    def hold(self, request_id: str) -> dict[str, Any]:
        """Stop a running request at this step boundary and return its record. Raises scheduler.Refused."""
        request = self.scheduler.hold(request_id)
        return {**request.record(), "age_s": self.clock() - request.arrival}

    def unhold(self, request_id: str) -> None:
        """Go on with a held request here: its move did not happen."""
        self.scheduler.unhold(request_id)

    def export(self, request_id: str, first: int, count: int) -> np.ndarray:
        """Slabs of blocks [first, first + count) of a request's table: uint8 [count, block_bytes].

        Full blocks never change again, so they may be exported while the request goes on decoding.
        """
        blocks = self.scheduler.requests[request_id].blocks[first : first + count]
        return self.executor.read_blocks(blocks)

    def reserve(self, key: str, num_blocks: int, request_id: str = "", tokens: Sequence[int] = ()) -> list[int]:
        """Promise blocks to a request on its way here; its prefix may be here in part. Raises scheduler.Refused."""
        self.verifier.interrupt()
        return self.scheduler.reserve(key, num_blocks, request_id, tokens)

    def write_reserved(self, key: str, first: int, data: Slabs) -> None:
        """Put slabs into reserved blocks [first, first + len(data)). Raises scheduler.Refused without that promise."""
        blocks = self.scheduler.reservations.fill(key, first, len(data))
        written = 0
        try:
            self.executor.write_blocks(blocks, data)
            written = len(data)
        finally:
            self.scheduler.reservations.filled(key, first, written, self.clock())

    def extend(self, key: str, num_blocks: int) -> list[int]:
        """Let a promise grow and last. Raises scheduler.Refused without one."""
        self.verifier.interrupt()
        return self.scheduler.extend(key, num_blocks)

    def cancel_reservation(self, key: str) -> None:
        self.scheduler.reservations.cancel(key)

    def adopt(self, record: dict[str, Any], epoch: Epoch, computed: int = 0, key: str | None = None) -> Request:
        """Own a request from elsewhere; idempotent for an epoch. Raises scheduler.Refused."""
        request = Request.from_record(record, arrival=self.clock() - record.get("age_s", 0.0))
        self.verifier.interrupt()
        return self.scheduler.adopt(request, epoch, computed, key)

    # -- numbers ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        prefill = scheduler.prefill_seconds_per_token
        waiting, head = scheduler.waiting, scheduler.head
        partial = sum(r.pending for r in scheduler.running if r.pending > 1)
        return EngineStats(
            total_blocks=pool.total,
            free_blocks=pool.available + len(scheduler.lent),
            cached_blocks=pool.cached,
            running=len(scheduler.running),
            waiting=len(waiting),
            seats=scheduler.seats,
            held=sum(r.status is Status.HELD for r in scheduler.running),
            reserved_blocks=scheduler.reservations.num_blocks,
            waiting_blocks=sum(pool.blocks_for(len(r.tokens)) for r in waiting),
            head_blocks=pool.blocks_for(len(head.tokens)) if head is not None else 0,
            high_running=sum(r.high for r in scheduler.running),
            reservations_expired=scheduler.reservations.expired,
            queued_prefill_tokens=partial + sum(len(r.tokens) for r in waiting),
            steps=self.steps,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=self.generated_tokens,
            evictions=pool.evictions,
            step_seconds=self.step_seconds,
            prefill_tokens_per_s=1 / prefill if prefill else 0.0,
            verified=self.verifier.verified,
            verify_mismatches=self.verifier.mismatches,
            verify_skipped=self.verifier.skipped,
        )

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        self.steps += 1
        self.generated_tokens += len(result.sampled)
        self.step_seconds = _average(self.step_seconds, result.seconds)
        copies = len(plan.swap_out) + len(plan.swap_in)
        if copies:
            per_block = result.copy_seconds / copies
            self.scheduler.swap_seconds_per_block = _average(self.scheduler.swap_seconds_per_block, per_block)
        if plan.num_tokens >= 4 * len(plan.work) > 0:  # mostly prefill
            per_token = (result.seconds - result.copy_seconds) / plan.num_tokens
            self.scheduler.prefill_seconds_per_token = _average(self.scheduler.prefill_seconds_per_token, per_token)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - EMA) * old + EMA * new
