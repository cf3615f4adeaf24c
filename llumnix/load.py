"""How free an engine is: pure functions of a few aggregates.

Freeness F in decode steps (Llumnix, OSDI'24, section 4.4, there in blocks per request):

    F = (free blocks - virtual usage of requests that do not run yet) x block_size / batch size

With one token a request a step this is about how many steps the engine can go on before its memory is full. It is
finite and capped at the capacity in tokens; below 0 the engine owes more than it has. Whether an engine starts or
drains is its `state`, never an infinite F.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

PROTOCOL_VERSION = 1  # "v" of every message between processes

STARTING, READY, DRAINING = "starting", "ready", "draining"


@dataclass(frozen=True)
class LoadReport:
    """What an engine tells the manager; aggregates only. Newest wins by (incarnation, sequence)."""

    engine: str
    incarnation: float  # when the engine process began, seconds since the epoch
    sequence: int
    state: str = STARTING
    phase: str = ""  # what a starting engine is doing
    role: str = "mixed"
    compat_key: str = ""
    stalled_s: float = 0.0  # seconds the step under way has taken
    max_model_len: int = 0
    block_size: int = 16
    total_blocks: int = 0
    free_blocks: int = 0  # cached ones included
    cached_blocks: int = 0
    running: int = 0
    waiting: int = 0
    waiting_blocks: int = 0  # demand of all queued requests
    head_blocks: int = 0  # demand of the head of the queue
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_seconds: float = 0.0

    def to_message(self) -> dict[str, Any]:
        return {"v": PROTOCOL_VERSION, **asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> LoadReport:
        """Keys of newer versions are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in message.items() if k in known})

    @property
    def capacity(self) -> int:
        """Tokens the engine's KV cache holds."""
        return self.total_blocks * self.block_size


def freeness(report: LoadReport) -> float:
    """F for rescheduling: the head of the queue counts with its whole demand, those behind it not at all."""
    return _freeness(report, report.head_blocks, report.running)


def dispatch_freeness(report: LoadReport, booked_blocks: int = 0, booked: int = 0) -> float:
    """F for choosing where a new request goes: it would queue behind everything that waits or is on its way.

    Below 0 it is the tokens owed, not divided by the batch: a long queue must not look better for being long.
    """
    virtual = report.waiting_blocks + booked_blocks
    if virtual > report.free_blocks:
        return float((report.free_blocks - virtual) * report.block_size)
    return _freeness(report, virtual, report.running + report.waiting + booked)


def _freeness(report: LoadReport, virtual_blocks: int, batch: int) -> float:
    steps = (report.free_blocks - virtual_blocks) * report.block_size / max(1, batch)
    return min(steps, float(report.capacity))
