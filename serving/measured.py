"""How fast moves have been lately, for the choice between copying KV and computing it again."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_BYTES = 32 << 20  # a transfer counts for 1/e of its weight once so many more bytes have been sent
CALL_WEIGHT = 0.2  # of the newest call


@dataclass
class Measured:
    """Moving averages of what was answered. A call that timed out says nothing of how long calls take."""

    call_s: float = 0.0  # of a call without blocks; 0: not known yet
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes by the seconds they took, so that a transfer weighs as much as it carries: the one block at the end of
        a move does not make the way look slow. 0: not known yet."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def transferred(self, size: int, seconds: float) -> None:
        kept = math.exp(-size / MEMORY_BYTES)
        self._bytes = kept * self._bytes + size
        self._seconds = kept * self._seconds + seconds

    def called(self, seconds: float) -> None:
        self.call_s = seconds if self.call_s == 0.0 else (1 - CALL_WEIGHT) * self.call_s + CALL_WEIGHT * seconds
