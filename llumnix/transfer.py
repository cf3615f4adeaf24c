"""How the KV of a moving request travels: the keys of `kv_transfer_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.options.option import ConfigError
from llumnix.settings import coerce, setting, strict, tolerant

ASYNC, SYNC = "async", "sync"
NONE, ZLIB = "none", "zlib"
COMPRESSIONS = (NONE, ZLIB)
AUTO, OBJECT_STORE, PROCESS_MEMORY, NIXL = "auto", "object_store", "process_memory", "nixl"
BATCH_BYTES = 4 << 20  # of one transfer where batch_size says nothing
READ_BATCH_BYTES = 32 << 20  # likewise where the destination reads the source's memory: only the call costs the source


@dataclass(frozen=True, kw_only=True)
class KVTransfer:
    """Values. Construction checks them; raises ConfigError, one line. Whether KV is copied at all, or computed again
    where that is cheaper, is decided by measured cost and not here."""

    transfer_mode: str = setting(
        "str",
        ASYNC,
        "async: blocks are copied while the request goes on, the last ones while it is held; sync: it is held first",
        choices=(ASYNC, SYNC),
    )
    compression: str = setting("str", NONE, "of the blocks on their way", choices=COMPRESSIONS)
    batch_size: int = setting("int", 0, "KV blocks in one transfer; 0: as many as 4 MiB hold", low=0, high=1 << 20)

    transport: str = setting(
        "str",
        AUTO,
        "auto: between CPU engines of one host the destination reads the source's memory, else object_store; "
        "object_store: Ray's, everywhere; nixl: the destination reads from the source's memory (needs the extra nixl)",
        choices=(AUTO, OBJECT_STORE, NIXL),
    )

    def __post_init__(self) -> None:
        coerce(self, "kv_transfer_config")
        if self.transport == NIXL and self.compression != NONE:
            raise ConfigError(f"--kv_transfer_config.compression is {self.compression!r}, must be none with nixl")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVTransfer:
        """From what a user gave. Raises ConfigError for unknown keys, wrong types and values out of range."""
        return strict(cls, values, "kv_transfer_config")

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> KVTransfer:
        """Values another process checked, see `llumnix.settings.tolerant`."""
        return tolerant(cls, message)

    def to_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def batch_bytes(self, block_bytes: int, read: bool = False) -> int:
        """Bytes of one transfer of blocks of this size. `read`: by the destination out of the source's memory."""
        return self.batch_size * block_bytes or max(READ_BATCH_BYTES if read else BATCH_BYTES, block_bytes)

    def last_blocks(self, most: int) -> int:
        """Full blocks left for the hold, so that they and the unfinished one are one transfer; at most `most`."""
        return min(most, self.batch_size - 1) if self.batch_size else most
