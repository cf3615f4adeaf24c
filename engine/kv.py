"""Who owns which KV block: pure Python on ints.

A block is free, cached (free, but its contents are still known by hash) or referenced by one or more requests:

    free + cached + referenced == total        (`BlockPool.check` holds it)

Blocks are found again by chained content hashes, and their tokens are compared on a hit. One host tier, keyed by the
same hash, serves preemption by SWAP, evicted prefixes and resumes alike: all three are a prefix lookup.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

HASH_BYTES = 16

Hit = tuple[int | None, int | None]
"""(device block, host slot) of one block of a known prefix; one of the two is set."""


def root_hash(salt: str = "") -> bytes:
    """The start of a chain. Different salts (an adapter version, a private request) never share blocks."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Chained hash over the int32 little-endian ids of one full block; the same in every process."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def extend_chain(hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """`hashes`, the chain of the first blocks of `tokens`, extended to all its full blocks."""
    for i in range(len(hashes), len(tokens) // block_size):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(block_hash(parent, tokens[i * block_size : (i + 1) * block_size]))
    return hashes


@dataclass
class HostTier:
    """Block contents kept in host memory: hash -> slot, least recently used leaves first.

    Slots read by the plan being made are pinned: swap-outs of a plan run before its swap-ins.
    """

    capacity: int
    slots: OrderedDict[bytes, tuple[int, tuple[int, ...]]] = field(default_factory=OrderedDict)
    pinned: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free = list(range(self.capacity - 1, -1, -1))

    def get(self, digest: bytes, tokens: tuple[int, ...]) -> int | None:
        entry = self.slots.get(digest)
        return entry[0] if entry is not None and entry[1] == tokens else None

    def pin(self, digest: bytes) -> None:
        self.slots.move_to_end(digest)
        self.pinned.add(digest)

    def put(self, digest: bytes, tokens: tuple[int, ...]) -> int | None:
        """A slot to copy the block to; None when it is there already or nothing can leave."""
        if digest in self.slots:
            self.slots.move_to_end(digest)
            return None
        if not self._free:
            victim = next((h for h in self.slots if h not in self.pinned), None)
            if victim is None:
                return None
            self._free.append(self.slots.pop(victim)[0])
        slot = self._free.pop()
        self.slots[digest] = (slot, tokens)
        return slot


class BlockPool:
    """The device's KV blocks: allocation, reference counts and the prefix cache.

    Freed blocks with a hash join the tail of the free queue (least recently used is evicted first), those without one
    join the head (reused first). Freeing a request in reverse order evicts tails before heads.
    """

    def __init__(self, num_blocks: int, block_size: int, host: HostTier | None = None, keep_evicted: bool = False):
        self.total = num_blocks
        self.block_size = block_size
        self.host = host if host is not None else HostTier(0)
        self.keep_evicted = keep_evicted  # evicted prefix blocks go to the host tier
        self.swap_out: list[tuple[int, int]] = []  # (block, slot) copies the next plan must do first
        self.swap_in: list[tuple[int, int]] = []  # (slot, block) copies it must do after those
        self.evictions = 0
        self.cached = 0  # blocks nobody references whose contents can still be hit
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._known: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block -> (hash, tokens), oldest use first
        self._by_hash: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that may be allocated now: free ones and cached ones."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, hashes: Sequence[bytes], tokens: Sequence[int]) -> list[Hit]:
        """The longest known prefix of a chain, one hit a block. Changes nothing."""
        found: list[Hit] = []
        size = self.block_size
        for i, digest in enumerate(hashes):
            ids = tuple(tokens[i * size : (i + 1) * size])
            block = self._by_hash.get(digest)
            if block is not None and self._known[block][1] == ids:
                found.append((block, None))
                continue
            slot = self.host.get(digest, ids)
            if slot is None:
                break
            found.append((None, slot))
        return found

    def take(self, found: list[Hit], hashes: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """Reference what `find` returned, in order. Host hits get a new block and a swap-in; the room must be there."""
        # Device hits first: a new block for a host hit must not evict a block of this same chain.
        for block, _ in found:
            if block is not None:
                self._reference(block)
        for (_, slot), digest in zip(found, hashes, strict=False):
            if slot is not None:
                self.host.pin(digest)
        blocks: list[int] = []
        for i, (block, slot) in enumerate(found):
            if block is None and slot is not None:
                block = self.allocate(1)[0]
                self.swap_in.append((slot, block))
                self.register(block, hashes[i], tokens[i * self.block_size : (i + 1) * self.block_size])
            assert block is not None
            blocks.append(block)
        return blocks

    def room_for(self, found: list[Hit], num_tokens: int) -> int:
        """Blocks left after a request of num_tokens with these hits is fully placed; negative: it does not fit."""
        resting = sum(1 for block, _ in found if block is not None and not self._refs[block])
        device_hits = sum(1 for block, _ in found if block is not None)
        return self.available - resting - (self.blocks_for(num_tokens) - device_hits)

    def allocate(self, count: int, spill: bool = True) -> list[int]:
        """Blocks with one reference each. Raises RuntimeError when fewer than count are available.

        Without `spill` no evicted contents go to the host tier: for blocks that are written before the next plan, which
        would copy them too late.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks wanted, {len(self._free)} available")
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block, spill)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int], forget: bool = False) -> None:
        """Drop one reference of each, last block first; `forget` also drops their names."""
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if forget and block in self._known:
                    del self._by_hash[self._known.pop(block)[0]]
                self._free[block] = None
                if block in self._known:
                    self.cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes, tokens: Sequence[int]) -> None:
        """Make a full, written block findable. The first block with a given content keeps the name."""
        if block not in self._known and digest not in self._by_hash:
            self._known[block] = (digest, tuple(tokens))
            self._by_hash[digest] = block

    def recent(self, limit: int) -> list[bytes]:
        """Hashes of up to `limit` blocks that can be found, the most recently made or hit first."""
        return [digest for digest, _ in islice(reversed(self._known.values()), limit)]

    def keep_on_host(self, blocks: Sequence[int], hashes: Sequence[bytes], tokens: Sequence[int]) -> int:
        """Copy full blocks to the host tier (preemption by SWAP); returns how many will be copied."""
        copied = 0
        # A chain is found from its start: with too little room, its first blocks are the ones worth keeping.
        for i, (block, digest) in enumerate(list(zip(blocks, hashes, strict=False))[: self.host.capacity]):
            slot = self.host.put(digest, tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
            if slot is not None:
                self.swap_out.append((block, slot))
                copied += 1
        return copied

    def drain_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(swap_out, swap_in) gathered since the last call; the plan that carries them must be executed."""
        copies = self.swap_out, self.swap_in
        self.swap_out, self.swap_in = [], []
        self.host.pinned.clear()
        return copies

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless free + cached + referenced == total and references equal owners' tables."""
        refs = [0] * self.total
        for table in owned:
            for block in table:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        referenced = sum(1 for count in refs if count)
        assert len(self._free) + referenced == self.total, "a block is neither free nor referenced"
        assert all(not self._refs[block] for block in self._free), "a referenced block is in the free queue"
        assert len(self._by_hash) == len(self._known), "the hash index and the blocks differ"
        resting = sum(1 for block in self._known if not self._refs[block])
        assert resting == self.cached, "the count of cached blocks is off"

    def _reference(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._free[block]
            self.cached -= 1
        self._refs[block] += 1
        self._known[block] = self._known.pop(block)  # the newest now

    def _forget(self, block: int, spill: bool) -> None:
        known = self._known.pop(block, None)
        if known is None:
            return
        digest, tokens = known
        del self._by_hash[digest]
        self.cached -= 1
        self.evictions += 1
        if self.keep_evicted and spill:
            slot = self.host.put(digest, tokens)
            if slot is not None:
                self.swap_out.append((block, slot))
