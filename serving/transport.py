"""How KV slabs travel: numpy arrays as arguments of actor calls, which Ray puts into its object store.

A slab payload is {"shape": [count, block_bytes], "compression": name, "data": slabs or bytes}. Uncompressed slabs may
be views of the pool: the call copies each straight into the store, and a receiver on the same host reads that memory
without a copy.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from engine.kv_cache import Slabs
from llumnix.transfer import COMPRESSIONS, NONE, ZLIB

ZLIB_LEVEL = 1  # KV of bfloat16 hardly compresses; what does, does at once

Payload = dict[str, Any]


def encode(data: np.ndarray, compression: str = NONE) -> Payload:
    """A payload of slabs, uint8 [count, block_bytes]."""
    body = zlib.compress(data.tobytes(), ZLIB_LEVEL) if compression == ZLIB else data
    return {"shape": list(data.shape), "compression": compression, "data": body}


def encode_views(slabs: Slabs) -> Payload:
    """An uncompressed payload of slabs that lie apart, each uint8 [block_bytes]; at least one."""
    return {"shape": [len(slabs), slabs[0].nbytes], "compression": NONE, "data": list(slabs)}


def decode(payload: Payload) -> Slabs:
    """The slabs of a payload, perhaps read-only. Raises ValueError for what nobody encodes."""
    match payload["compression"]:
        case "none" if isinstance(payload["data"], list):
            return payload["data"]
        case "none":
            data = np.asarray(payload["data"])
        case "zlib":
            data = np.frombuffer(zlib.decompress(payload["data"]), dtype=np.uint8)
        case other:
            raise ValueError(f"compression is {other!r}, must be one of {', '.join(COMPRESSIONS)}")
    return data.reshape(payload["shape"])


def num_bytes(payload: Payload) -> int:
    """Bytes that travel."""
    if "data" not in payload:  # it names blocks
        count, block_bytes = payload["shape"]
        return int(count * block_bytes)
    body = payload["data"]
    if isinstance(body, list):
        return sum(slab.nbytes for slab in body)
    return body.nbytes if isinstance(body, np.ndarray) else len(body)
