"""Who goes first: in the queue, and in the batch.

    queue   by arrival; under the priority policy by (priority - lift, arrival)
    batch   the high class (priority below 0) before all others, each in the order of the queue

Requests of the batch get their share of a step in this order, and its last one is preempted when blocks run out. So
the high class is spared under every policy, and the first of the batch always progresses.

Under the priority policy every quarter of max_queue_time that a request has spent in queues, whichever engine's and
also after a preemption, lifts it by one step of priority: what has been preempted is not overtaken for ever, and what
never ran starts or hears its timeout. A request keeps its lift when it runs, or those it overtook would take its blocks
at once. No lift makes a request one of the high class, for which engines keep room: that is what it was sent with.
"""

from __future__ import annotations

import bisect
import math

from engine.request import Request

LIFTS = 4  # in max_queue_time


class Order:
    """Keeps the scheduler's two lists sorted. Between two lifts that are due a look at the queue costs nothing."""

    def __init__(self, by_priority: bool, max_queue_time_s: float):
        self.by_priority = by_priority
        self.lift_s = max_queue_time_s / LIFTS
        self._next_lift = math.inf

    def in_queue(self, request: Request) -> tuple[int, int]:
        return (request.priority - request.lift if self.by_priority else 0, request.order)

    def in_batch(self, request: Request) -> tuple[bool, int, int]:
        return (not request.high, *self.in_queue(request))

    def enqueue(self, waiting: list[Request], request: Request, now: float) -> None:
        request.queued_at = now
        self._lift(request, now)
        bisect.insort(waiting, request, key=self.in_queue)

    def join(self, running: list[Request], request: Request, now: float) -> None:
        self.book(request, now)
        request.queued_at = None
        self._lift(request, now)
        bisect.insort(running, request, key=self.in_batch)

    def book(self, request: Request, now: float) -> None:
        """Count the time in the queue so far."""
        if request.queued_at is not None:
            request.waited_s += now - request.queued_at
            request.queued_at = now

    def lift(self, waiting: list[Request], now: float) -> None:
        """Give the queue the order it has at this moment."""
        if now >= self._next_lift:
            self._next_lift = math.inf
            for request in waiting:
                self._lift(request, now)
            waiting.sort(key=self.in_queue)

    def _lift(self, request: Request, now: float) -> None:
        if not self.by_priority:
            return
        waited = request.waited_s
        if request.queued_at is not None:
            waited += now - request.queued_at
            self._next_lift = min(self._next_lift, now + self.lift_s - waited % self.lift_s)
        request.lift = int(waited / self.lift_s)
