"""Blocks promised to requests on their way here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv import BlockPool


class Refused(Exception):
    """A reservation or an adoption that cannot be granted; the message says why."""


@dataclass(slots=True)
class Reservation:
    blocks: list[int]
    expires: float
    written: set[int] = field(default_factory=set)  # indices into blocks whose KV is here
    writing: int = 0  # copies under way, on whatever thread; their blocks must stay until they end
    over: bool = False  # cancelled while one was under way


class Reservations:
    """Promises by key, each with a time limit. A promise also takes one of the engine's seats."""

    def __init__(self, pool: BlockPool, seconds: float):
        self.pool = pool
        self.seconds = seconds
        self.held: dict[str, Reservation] = {}
        self.expired = 0  # promises nobody came for; a total

    def __len__(self) -> int:
        return len(self.held)

    @property
    def num_blocks(self) -> int:
        return sum(len(reservation.blocks) for reservation in self.held.values())

    def missing(self, key: str, num_blocks: int) -> int:
        """Blocks a promise lacks of num_blocks. Raises Refused without one."""
        reservation = self.held.get(key)
        if reservation is None:
            raise Refused(f"nothing is reserved for {key}")
        return max(0, num_blocks - len(reservation.blocks))

    def promise(self, key: str, more: int, now: float, present: Sequence[int] = ()) -> list[int]:
        """Promise `more` blocks beside those the key has, and extend its time. The room must be there.

        `present`: referenced blocks of a new promise that hold the first blocks of the KV already.
        """
        reservation = self.held.get(key)
        if reservation is None:
            reservation = self.held[key] = Reservation(list(present), now, set(range(len(present))))
        if reservation.over:
            raise Refused(f"the promise to {key} was taken back")
        # They are written before the next plan could save what they held.
        reservation.blocks += self.pool.allocate(more, spill=False)
        reservation.expires = now + self.seconds
        return list(reservation.blocks)

    def present(self, key: str) -> int:
        """How many leading blocks of a promise hold their KV."""
        reservation = self.held[key]
        return next(
            (i for i in range(len(reservation.blocks)) if i not in reservation.written), len(reservation.blocks)
        )

    def fill(self, key: str, first: int, count: int) -> list[int]:
        """Promised blocks [first, first + count), to be written now and then `filled`. Raises Refused without them."""
        reservation = self.held.get(key)
        if reservation is None or reservation.over or first + count > len(reservation.blocks):
            raise Refused(f"blocks [{first}, {first + count}) are not reserved for {key}")
        reservation.writing += 1
        return reservation.blocks[first : first + count]

    def filled(self, key: str, first: int, count: int, now: float) -> None:
        """The end of a `fill`, of which `count` blocks hold their KV now: 0 if it failed. A promise that was taken back
        meanwhile ends here."""
        reservation = self.held[key]
        reservation.writing -= 1
        reservation.written.update(range(first, first + count))
        reservation.expires = now + self.seconds
        if reservation.over:
            self.cancel(key)

    def take(self, key: str, written: int, keep: int) -> list[int]:
        """The first `keep` blocks of a promise, which ends. Raises Refused unless the first `written` hold their KV."""
        reservation = self.held.get(key)
        if reservation is None or reservation.over or reservation.writing:
            raise Refused(f"nothing is reserved for {key}")
        if not reservation.written.issuperset(range(written)):
            raise Refused(f"the KV of {key} is not here: {written} blocks must be reserved and written")
        del self.held[key]
        self.pool.release(reservation.blocks[keep:])
        return reservation.blocks[:keep]

    def cancel(self, key: str) -> None:
        reservation = self.held.get(key)
        if reservation is None:
            return
        if reservation.writing:
            reservation.over = True
            return
        del self.held[key]
        self.pool.release(reservation.blocks)

    def expire(self, now: float) -> None:
        for key, reservation in list(self.held.items()):
            if reservation.expires <= now and not reservation.over:
                self.expired += 1
                self.cancel(key)
