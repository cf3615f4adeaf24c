"""KV slabs in messages: payloads that hold them, as arguments of actor calls, which Ray puts into its object store.

    {"kind": "slabs" | "zlib", "shape": [count, block_bytes], "data": slabs | bytes}

Slabs may be views of the pool: the call copies each straight into the store, and a receiver on the same host reads that
memory without a copy. Payloads of other kinds name blocks: serving/process_memory.py, serving/nixl_transport.py.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from engine.kv_cache import Slabs
from llumnix.transfer import NONE, ZLIB

SLABS = "slabs"
ZLIB_LEVEL = 1  # KV of bfloat16 hardly compresses; what does, does at once

EMPTY = np.empty((0, 0), dtype=np.uint8)

Payload = dict[str, Any]


def encode(data: np.ndarray, compression: str = NONE) -> Payload:
    """A payload of slabs, uint8 [count, block_bytes]."""
    shape = list(data.shape)
    if compression == ZLIB:
        return {"kind": ZLIB, "shape": shape, "data": zlib.compress(data.tobytes(), ZLIB_LEVEL)}
    return {"kind": SLABS, "shape": shape, "data": data}


def encode_views(slabs: Slabs) -> Payload:
    """A payload of slabs that lie apart, each uint8 [block_bytes]; at least one."""
    return {"kind": SLABS, "shape": [len(slabs), slabs[0].nbytes], "data": list(slabs)}


def decode(payload: Payload) -> Slabs:
    """The slabs of a payload that holds them, perhaps read-only. Raises ValueError for others."""
    match payload["kind"]:
        case "slabs" if isinstance(payload["data"], list):
            return payload["data"]
        case "slabs":
            data = np.asarray(payload["data"])
        case "zlib":
            data = np.frombuffer(zlib.decompress(payload["data"]), dtype=np.uint8)
        case other:
            raise ValueError(f"the payload's kind is {other!r}, must be {SLABS} or {ZLIB}")
    return data.reshape(payload["shape"])


def num_bytes(payload: Payload) -> int:
    """Bytes that travel."""
    if payload["kind"] == ZLIB:
        return len(payload["data"])
    count, block_bytes = payload["shape"]
    return int(count * block_bytes)
