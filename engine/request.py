"""One sequence on its way through the engine.

Two lengths explain everything: `len(tokens)` positions are known, `computed` of them have their KV in the cache.
A step raises `computed` towards `len(tokens)`; prefill, a chunk, decode and resuming are all that one subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

from engine.sampling.params import SamplingParams

Epoch = tuple[int, int]
"""(resume, move), compared as a pair. Only the ingress raises resume, only the owning engine raises move."""


class Status(Enum):
    WAITING = "queued"
    RUNNING = "running"
    HELD = "moving"  # at a step boundary, not scheduled, KV complete up to `computed`
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request as the scheduler sees it. Token ids only; text belongs to the front end."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    client: str = ""  # the ingress that is to receive the tokens
    priority: int = 0  # lower is earlier; below 0 is the high class
    epoch: Epoch = (0, 0)
    arrival: float = 0.0  # engine clock, seconds
    order: int = 0  # arrival number in this engine; ties are impossible
    output: list[int] = field(default_factory=list)

    tokens: list[int] = field(init=False)
    computed: int = 0
    cached_tokens: int = 0  # prompt positions found in a cache at first admission
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # one per full block of `tokens`, filled lazily
    registered: int = 0  # leading blocks already offered to the prefix cache
    status: Status = Status.WAITING
    preemptions: int = 0
    started: bool = False  # was admitted at least once
    last_moved: float = float("-inf")  # engine clock, seconds: when it came here, or tried to leave
    queued_at: float | None = None  # engine clock, seconds: in the queue, with the time since then not yet in waited_s
    waited_s: float = 0.0  # time spent in queues, of all engines
    lift: int = 0  # steps of priority it has gained by that (engine/order.py)

    def __post_init__(self) -> None:
        self.tokens = self.prompt + self.output

    @property
    def high(self) -> bool:
        """Of the high class, for which engines keep room."""
        return self.priority < 0

    @property
    def pending(self) -> int:
        """Positions whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        self.output.append(token)
        self.tokens.append(token)

    def record(self) -> dict[str, Any]:
        """Everything another engine needs to go on with this request, as a message."""
        return {
            "id": self.id,
            "prompt": list(self.prompt),
            "output": list(self.output),
            "params": self.params.to_dict(),
            "seed": self.seed,
            "client": self.client,
            "priority": self.priority,
            "epoch": list(self.epoch),
            "cached_tokens": self.cached_tokens,
            "started": self.started,
            "waited_s": self.waited_s,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any], *, arrival: float) -> Request:
        request = cls(
            id=record["id"],
            prompt=list(record["prompt"]),
            params=SamplingParams.from_dict(record["params"]),
            seed=record["seed"],
            client=record.get("client", ""),
            priority=record.get("priority", 0),
            epoch=(record["epoch"][0], record["epoch"][1]),
            arrival=arrival,
            output=list(record["output"]),
        )
        request.cached_tokens = record.get("cached_tokens", 0)
        request.started = record.get("started", False)
        request.waited_s = record.get("waited_s", 0.0)
        return request


def seed_of(engine_seed: int, request_id: str, seed: int | None) -> int:
    """The noise seed of a request: its own, else one derived from (engine seed, request id)."""
    if seed is not None:
        return seed & (2**64 - 1)
    digest = blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
