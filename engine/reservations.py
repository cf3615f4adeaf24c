"""Blocks promised to requests on their way here."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv import BlockPool


class Refused(Exception):
    """A reservation or an adoption that cannot be granted; the message says why."""


@dataclass(slots=True)
class Reservation:
    blocks: list[int]
    expires: float
    written: set[int] = field(default_factory=set)  # indices into blocks whose KV has arrived


class Reservations:
    """Promises by key, each with a time limit. A promise also takes one of the engine's seats."""

    def __init__(self, pool: BlockPool, seconds: float):
        self.pool = pool
        self.seconds = seconds
        self.held: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self.held)

    @property
    def num_blocks(self) -> int:
        return sum(len(reservation.blocks) for reservation in self.held.values())

    def missing(self, key: str, num_blocks: int) -> int | None:
        """Blocks a promise of num_blocks lacks; None without a promise."""
        reservation = self.held.get(key)
        return None if reservation is None else max(0, num_blocks - len(reservation.blocks))

    def promise(self, key: str, more: int, now: float) -> list[int]:
        """Promise `more` blocks beside those the key has, and extend its time. The room must be there."""
        reservation = self.held.setdefault(key, Reservation([], now))
        # They are written before the next plan could save what they held.
        reservation.blocks += self.pool.allocate(more, spill=False)
        reservation.expires = now + self.seconds
        return list(reservation.blocks)

    def fill(self, key: str, first: int, count: int) -> list[int]:
        """Promised blocks [first, first + count), whose KV is written now. Raises Refused without that promise."""
        reservation = self.held.get(key)
        if reservation is None or first + count > len(reservation.blocks):
            raise Refused(f"blocks [{first}, {first + count}) are not reserved for {key}")
        reservation.written.update(range(first, first + count))
        return reservation.blocks[first : first + count]

    def take(self, key: str, num_blocks: int) -> list[int]:
        """The first num_blocks of a promise, all written, which ends. Raises Refused when there is no such promise."""
        reservation = self.held.get(key)
        if reservation is None or not reservation.written.issuperset(range(num_blocks)):
            raise Refused(f"the KV of {key} is not here: {num_blocks} blocks must be reserved and written")
        del self.held[key]
        self.pool.release(reservation.blocks[num_blocks:])
        return reservation.blocks[:num_blocks]

    def cancel(self, key: str) -> None:
        reservation = self.held.pop(key, None)
        if reservation is not None:
            self.pool.release(reservation.blocks)

    def expire(self, now: float) -> None:
        for key in [key for key, reservation in self.held.items() if reservation.expires <= now]:
            self.cancel(key)
