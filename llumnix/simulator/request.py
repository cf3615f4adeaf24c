"""One simulated request: what it wants, where it is, what happened to it."""

from __future__ import annotations

NEVER = float("inf")


class Request:
    """`length` counts known tokens, prompt and output; while decoding it is `base` + the engine's step counter."""

    __slots__ = (
        *("id", "arrival", "prompt", "output", "priority", "order", "started", "length", "base", "finish", "decoding"),
        *("epoch", "moving", "last_moved", "stopped", "first", "end", "loss", "preemptions", "moves", "silence"),
    )

    def __init__(self, id: int, arrival: float, prompt: int, output: int, priority: int = 0):
        self.id = id
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.priority = priority
        self.order = 0  # place in its engine's queue
        self.started = 0  # rises with every admission of its engine
        self.length = prompt
        self.base = 0
        self.finish = 0  # value of the step counter at which it is done
        self.decoding = False
        self.epoch = 0  # rises when it leaves a batch unplanned, which ends a move under way
        self.moving = False
        self.last_moved = -NEVER
        self.stopped = -1.0  # when it was preempted or held; below 0: neither
        self.first = -1.0  # when its first token came
        self.end = -1.0
        self.loss = 0.0  # seconds lost to preemption
        self.preemptions = 0
        self.moves = 0
        self.silence: list[float] = []  # of each move, seconds between two tokens
