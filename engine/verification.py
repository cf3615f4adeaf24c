"""Requests that moved or were resumed, run again undisturbed in idle time and compared token by token.

Whatever happened to a request, its tokens are those of a quiet run from (prompt, parameters, seed). Here a sample of
those to which something happened proves it, where they finished. Such a run has nothing to do with the scheduler's
requests: it takes no seat, its KV is found by nobody, it finds nobody's (a wrong block in the cache must not confirm
itself), and it gives its blocks back as soon as any request wants to come here.

Only engines whose results do not depend on the batch can be held to this (`Engine.reproducible`).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.executor import Executor
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step import SequenceStart, Work

logger = logging.getLogger("ferry.engine")

MOST_QUEUED = 32
ATTEMPTS = 3  # a run that is interrupted this often is given up
CHUNK = 256  # prompt positions in one step: a request that arrives meanwhile waits for no more


def sampled(request_id: str, share: float) -> bool:
    """Whether a request is of the sample: the same answer everywhere."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclass(slots=True)
class Rerun:
    """A finished request, and how far it has been computed again."""

    request: Request
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    attempts: int = 0

    @property
    def id(self) -> str:
        """Its name at the executor; no request's."""
        return f"again/{self.request.id}"


class Verifier:
    """Runs one at a time, on the engine's thread, while the engine has nothing else."""

    def __init__(self, scheduler: Scheduler, executor: Executor):
        self.scheduler = scheduler
        self.executor = executor
        self.queue: deque[Rerun] = deque()
        self.running: Rerun | None = None
        self.verified = 0  # totals: compared, of those different, and those never compared to their end
        self.mismatches = 0
        self.skipped = 0

    def offer(self, request: Request) -> None:
        """Compare a finished request when there is time; its tokens must not change any more."""
        if len(self.queue) >= MOST_QUEUED:
            self.skipped += 1
        else:
            self.queue.append(Rerun(request))

    @property
    def has_work(self) -> bool:
        return self.scheduler.idle and bool(self.running or self.queue)

    def step(self) -> None:
        """One step of a run. An exception from the executor leaves the engine unusable, as in Engine.step."""
        run, starts = self.running, []
        if run is None:
            run = self._begin()
            starts = [
                SequenceStart(
                    run.id, list(run.tokens), len(run.tokens), run.blocks, run.request.params, run.request.seed
                )
            ]
        left = len(run.tokens) - run.computed
        count = min(left, CHUNK, self.scheduler.config.max_num_batched_tokens)
        plan = self.scheduler.plan(starts, [Work(run.id, run.computed, count, (), count == left)])
        result = self.executor.execute(plan)
        run.computed += count
        for found in result.sampled:
            self._compare(run, found.token)

    def interrupt(self) -> None:
        """Somebody wants to come: everything is free again. The run begins anew later, if it was not its last try."""
        run = self.running
        if run is None:
            return
        self._end(run)
        if run.attempts < ATTEMPTS:
            self.queue.append(run)
        else:
            self.skipped += 1

    # -- inside -------------------------------------------------------------------------------------------------

    def _begin(self) -> Rerun:
        run = self.running = self.queue.popleft()
        request, pool = run.request, self.scheduler.pool
        run.attempts += 1
        run.tokens, run.computed = list(request.prompt), 0
        run.blocks = pool.allocate(pool.blocks_for(len(request.tokens) - 1))
        self.scheduler.lent = run.blocks
        return run

    def _compare(self, run: Rerun, token: int) -> None:
        request = run.request
        index = len(run.tokens) - len(request.prompt)
        run.tokens.append(token)
        if token != request.output[index]:
            self.mismatches += 1
            logger.error(
                "request %s differs from its undisturbed run at token %d: it had %d, undisturbed it has %d",
                *(request.id, index, request.output[index], token),
            )
        elif index + 1 < len(request.output):
            return
        self.verified += 1
        self._end(run)

    def _end(self, run: Rerun) -> None:
        self.running = None
        self.scheduler.pool.release(run.blocks)
        self.scheduler.lent = []
        self.scheduler.drop(run.id)
