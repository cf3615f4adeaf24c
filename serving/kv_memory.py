"""An engine's KV pool, for transports that read blocks where they lie."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from engine.executor import Executor
from serving.nixl_transport import NixlTransport
from serving.process_memory import ProcessMemory


class KVMemory:
    """The pool of the engine `name`, in slabs of `block_bytes`.

    `process` is for engines on the same host; None where the pool is on a device, or not in this process.
    """

    def __init__(self, name: str, executor: Executor, block_bytes: int):
        self.name, self.executor, self.block_bytes = name, executor, block_bytes
        self.process: ProcessMemory | None = None
        with suppress(ValueError):
            address, _, device = executor.pool_memory()
            if device == "cpu":
                self.process = ProcessMemory(address, block_bytes)
        self._lock = Lock()
        self._nixl: NixlTransport | None = None

    def nixl(self) -> NixlTransport:
        """The pool as NIXL knows it. Raises ValueError without the package. The first call registers the whole pool,
        which takes a while: on any thread but the loop's."""
        with self._lock:
            if self._nixl is None:
                address, blocks, device = self.executor.pool_memory()
                self._nixl = NixlTransport(self.name, address, blocks, self.block_bytes, device)
            return self._nixl
