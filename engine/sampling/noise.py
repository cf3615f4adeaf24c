"""The random number behind each sampled token: a hash of (seed, token index), nothing else.

No generator carries state, so a request keeps its tokens whatever runs beside it, wherever it runs or resumes.
"""

from __future__ import annotations

import hashlib
import struct

_MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & _MASK, index & _MASK), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
