"""How free an engine is: pure functions of a few aggregates.

Freeness F in decode steps (Llumnix, OSDI'24, section 4.4, there in blocks per request):

    F = (free blocks - virtual usage that is not physical) x block_size / batch size

With one token a request a step this is about how many steps the engine can go on before its memory is full. Virtual
usage (Algorithm 1 there) beyond the blocks that are held:

    head of the queue       its whole demand, which makes an engine with a prompt that does not fit look overloaded
    others in the queue     nothing
    the high class          once per engine that runs a request of it: what lies above the load at which decoding is
                            still at its fastest

F is finite and capped at the capacity in tokens. Below 0 it is the tokens owed, not divided by the batch: a long queue
must not look better for being long. Whether an engine starts or drains is its `state`, never an infinite F.
"""

from __future__ import annotations

from base64 import b85decode, b85encode
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from llumnix.settings import DEFAULTS, LlumnixSettings

PROTOCOL_VERSION = 1  # "v" of every message between processes

STARTING, READY, DRAINING = "starting", "ready", "draining"
MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"  # roles

LONG_AGO = -1e9  # seconds; finite, as everything in a message

HASH_BYTES = 4  # of a block's hash in a prefix summary
SUMMARY_BYTES = 4096  # of the text; 5 characters hold one hash


class Movable(NamedTuple):
    """A request that its engine could give away."""

    id: str
    priority: int  # lower is earlier; below 0 is the high class
    tokens: int  # prompt and output so far
    blocks: int  # what the destination needs for it now
    waiting: bool  # queued: it moves without KV
    started_order: int  # rises with every request that starts; of a waiting one its place in the queue
    last_moved: float = LONG_AGO  # on the engine's clock


@dataclass(frozen=True)
class LoadReport:
    """What an engine tells the manager; aggregates only. Newest wins by (incarnation, sequence)."""

    engine: str
    incarnation: float  # when the engine process began, seconds since the epoch
    sequence: int
    state: str = STARTING
    phase: str = ""  # what a starting engine is doing
    role: str = MIXED
    compat_key: str = ""
    stalled_s: float = 0.0  # seconds the step under way has taken
    max_model_len: int = 0
    block_size: int = 16
    total_blocks: int = 0
    free_blocks: int = 0  # cached ones included, reserved ones not
    cached_blocks: int = 0
    reserved_blocks: int = 0  # promised to requests on their way here
    running: int = 0
    waiting: int = 0
    waiting_blocks: int = 0  # demand of all queued requests
    head_blocks: int = 0  # demand of the head of the queue
    seats: int = 1 << 30  # sequences that may still join the batch
    high_running: int = 0  # of `running`, the high class
    movable: tuple[Movable, ...] = ()  # the cheapest ones; empty: none, or the engine does not say
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_seconds: float = 0.0
    prefix: str = ""  # of its cached blocks, see summarise

    def to_message(self) -> dict[str, Any]:
        message = {name: getattr(self, name) for name in _NAMES}
        message["v"] = PROTOCOL_VERSION
        message["movable"] = [tuple(movable) for movable in self.movable]
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> LoadReport:
        """Keys and columns of newer versions are ignored."""
        values = {name: message[name] for name in _NAMES if name in message}
        movable = values.get("movable")
        if movable:
            values["movable"] = tuple([Movable(*row[:_COLUMNS]) for row in movable])
        else:
            values["movable"] = ()
        return cls(**values)

    @property
    def capacity(self) -> int:
        """Tokens the engine's KV cache holds."""
        return self.total_blocks * self.block_size

    @cached_property
    def prefix_hashes(self) -> frozenset[int]:
        """The truncated hashes of `prefix`."""
        data = b85decode(self.prefix)
        return frozenset(int.from_bytes(data[i : i + HASH_BYTES], "little") for i in range(0, len(data), HASH_BYTES))


_NAMES = tuple(f.name for f in fields(LoadReport))
_COLUMNS = len(Movable._fields)


def truncated(block_hash: bytes) -> int:
    """A block's hash as a prefix summary holds it."""
    return int.from_bytes(block_hash[:HASH_BYTES], "little")


def summarise(block_hashes: Iterable[bytes]) -> str:
    """A text of at most SUMMARY_BYTES with the first hashes, truncated: give the most recently used blocks first.

    A hash names a block together with everything before it, so a longer prefix needs only its last block here.
    """
    kept: list[bytes] = []
    for digest in block_hashes:
        if len(kept) == SUMMARY_BYTES // 5:
            break
        kept.append(digest[:HASH_BYTES])
    return b85encode(b"".join(kept)).decode()


def headroom_blocks(report: LoadReport, settings: LlumnixSettings = DEFAULTS) -> int:
    """Blocks that an engine keeps free for the high class while it runs requests of it."""
    if not settings.high_headroom or report.high_running == 0:
        return 0
    return report.total_blocks - round(settings.high_target_share * report.total_blocks)


def freeness(report: LoadReport, settings: LlumnixSettings = DEFAULTS, headroom: bool = True) -> float:
    """F for rescheduling: the head of the queue counts with its whole demand, those behind it not at all.

    Without headroom it is the F of the normal class, for scaling: a reserve is not demand.
    """
    virtual = report.head_blocks + (headroom_blocks(report, settings) if headroom else 0)
    return steps_left(report.free_blocks - virtual, report.running, report.block_size, report.capacity)


def steps_left(blocks: int, batch: int, block_size: int, capacity: int) -> float:
    """Decode steps until `blocks` are used up by `batch` requests; blocks owed (below 0) as tokens."""
    if blocks <= 0:
        return float(blocks * block_size)
    return min(blocks * block_size / max(1, batch), float(capacity))
