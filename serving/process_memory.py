"""KV slabs between engines of one host: the destination reads them out of the source's pool into its own.

One copy, made by the destination alone, with process_vm_readv (Linux; "cross memory attach" in MPI and UCX). As with
NIXL a payload names blocks instead of holding bytes: if they change hands meanwhile, the source notices on its next
look and the move ends before COMMIT. Whether the source can be read is found out by trying, because containers on one
host may or may not see each other; a token tells the source from a stranger with the same process id.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from llumnix.transfer import PROCESS_MEMORY
from serving.transport import Payload

PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
IOV_MAX = 1024
TOKEN_BYTES = 16


class Unreadable(Exception):
    """This process cannot read that one's memory."""


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """One engine's KV pool in this process's memory: slabs of `block_bytes` from `address` on."""

    def __init__(self, address: int, block_bytes: int):
        self.address, self.block_bytes = address, block_bytes
        self._token = ctypes.create_string_buffer(os.urandom(TOKEN_BYTES), TOKEN_BYTES)
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._open = False

    def pack(self, blocks: list[int]) -> Payload:
        """A payload that says where the blocks are."""
        if not self._open:
            # Where Yama restricts it, processes of the same user may read this one's memory only if it says so.
            # Elsewhere the call fails, and is not needed.
            self._libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
            self._open = True
        return {
            "shape": [len(blocks), self.block_bytes],
            "kind": PROCESS_MEMORY,
            "pid": os.getpid(),
            "token": (ctypes.addressof(self._token), self._token.raw),
            "rows": self._rows(blocks),
        }

    def fetch(self, payload: Payload, blocks: list[int]) -> None:
        """Read the payload's blocks into `blocks`. Raises Unreadable, with blocks half filled perhaps."""
        where, expected = payload["token"]
        token = ctypes.create_string_buffer(len(expected))
        self._read(payload["pid"], [where], [ctypes.addressof(token)], len(expected))
        if token.raw != expected:
            raise Unreadable(f"process {payload['pid']} is another one here")
        here = self._rows(blocks)
        for first in range(0, len(here), IOV_MAX):
            part = slice(first, first + IOV_MAX)
            self._read(payload["pid"], payload["rows"][part], here[part], self.block_bytes)

    def _read(self, pid: int, sources: list[int], targets: list[int], length: int) -> None:
        count = len(sources)
        there, here = ((_Span * count)(*(_Span(at, length) for at in rows)) for rows in (sources, targets))
        read = self._libc.process_vm_readv
        read.restype = ctypes.c_ssize_t
        done = read(pid, here, ctypes.c_ulong(count), there, ctypes.c_ulong(count), ctypes.c_ulong(0))
        if done != count * length:
            reason = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {count * length} bytes"
            raise Unreadable(f"the memory of process {pid} cannot be read: {reason}")

    def _rows(self, blocks: list[int]) -> list[int]:
        return [self.address + block * self.block_bytes for block in blocks]
