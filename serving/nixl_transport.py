"""KV slabs by NIXL: the destination reads them out of the source's pool into its own, without a copy on the way.

Optional: the extra `nixl`. A payload then names blocks instead of holding bytes. The destination pulls, because only it
knows that its promise still stands while the bytes arrive; if the source's blocks change hands meanwhile, the source
notices on its next look and the move ends before COMMIT. What goes with COMMIT is a copy.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import Any

from llumnix.transfer import NIXL
from serving.transport import Payload

BACKEND = "UCX"
POLL_S = 0.0002
FORGET_S = 3600.0  # longer than any transfer may take
MISSING = "the NIXL transport needs the package nixl: pip install 'ferry-serve[nixl]'"


class NixlTransport:
    """One engine's KV pool, registered once: `num_blocks` slabs of `block_bytes` from `address` on."""

    def __init__(self, name: str, address: int, num_blocks: int, block_bytes: int, device: str = "cpu"):
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError:
            raise ValueError(MISSING) from None
        self.address, self.block_bytes = address, block_bytes
        self.memory, self.index = ("DRAM", 0) if device == "cpu" else ("VRAM", int(device.partition(":")[2] or 0))
        self.agent: Any = nixl_agent(name, nixl_agent_config(backends=[BACKEND]))
        pool = self.agent.get_reg_descs([(address, num_blocks * block_bytes, self.index, "")], mem_type=self.memory)
        self.agent.register_memory(pool)
        self._lock = Lock()
        self._peers: dict[bytes, tuple[Any, float]] = {}  # metadata of another agent -> its name here, last used

    def pack(self, blocks: list[int]) -> Payload:
        """A payload that says where the blocks are."""
        return {
            "shape": [len(blocks), self.block_bytes],
            "kind": NIXL,
            "agent": self.agent.get_agent_metadata(),
            "rows": self._rows(blocks),
            "memory": self.memory,
        }

    def fetch(self, payload: Payload, blocks: list[int], limit_s: float) -> None:
        """Read the payload's blocks into `blocks`. Raises RuntimeError when that fails or takes longer than limit_s."""
        peer = self._peer(payload["agent"])
        here = self.agent.get_xfer_descs(self._rows(blocks), mem_type=self.memory)
        there = self.agent.get_xfer_descs([tuple(row) for row in payload["rows"]], mem_type=payload["memory"])
        transfer = self.agent.initialize_xfer("READ", here, there, peer)
        try:
            state = self.agent.transfer(transfer)
            until = time.monotonic() + limit_s
            while state != "DONE":
                if state == "ERR" or time.monotonic() > until:
                    raise RuntimeError(f"the NIXL transfer of {len(blocks)} blocks failed: state {state}")
                time.sleep(POLL_S)
                state = self.agent.check_xfer_state(transfer)
        finally:
            self.agent.release_xfer_handle(transfer)

    def _peer(self, metadata: bytes) -> Any:
        """The name of another agent; those not heard of for long are forgotten, their engines may be gone."""
        with self._lock:
            now = time.monotonic()
            known = self._peers.get(metadata)
            name = known[0] if known is not None else self.agent.add_remote_agent(metadata)
            self._peers[metadata] = name, now
            for old in [other for other, (_, used) in self._peers.items() if now - used > FORGET_S]:
                self.agent.remove_remote_agent(self._peers.pop(old)[0])
            return name

    def _rows(self, blocks: list[int]) -> list[tuple[int, int, int]]:
        return [(self.address + block * self.block_bytes, self.block_bytes, self.index) for block in blocks]
