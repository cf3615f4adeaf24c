"""Who owns which block: the pool, its prefix cache and the host tier."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv import BlockPool, HostTier, block_hash, root_hash

SIZE = 4
TOKENS = list(range(100, 100 + 10 * SIZE))


def chain(tokens: list[int], salt: str = "", size: int = SIZE) -> list[bytes]:
    hashes, parent = [], root_hash(salt)
    for i in range(len(tokens) // size):
        parent = block_hash(parent, tokens[i * size : (i + 1) * size])
        hashes.append(parent)
    return hashes


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Allocate and register the blocks of a sequence, as if its KV had been computed."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    for i, digest in enumerate(chain(tokens, salt)):
        pool.register(blocks[i], digest, tokens[i * SIZE : (i + 1) * SIZE])
    return blocks


# Hashes


def test_block_hashes_are_the_same_in_every_process_and_version() -> None:
    """Other processes, and other releases, must find the same blocks."""
    assert root_hash().hex() == "cae66941d9efbd404e4d88758ea67670"
    assert block_hash(root_hash(), [1, 2, 3, 4]).hex() == "359274c7a740fd9a03f21c0e12306fe5"


def test_a_hash_covers_everything_before_it_and_the_salt() -> None:
    assert chain([1] * 8)[1] != chain([2] * 4 + [1] * 4)[1]
    assert chain([1] * 8)[0] != chain([1] * 8)[1]
    assert chain([1] * 8, "adapter") != chain([1] * 8)
    assert len({len(h) for h in chain(TOKENS)}) == 1


# Allocation


def test_blocks_are_given_once_and_only_while_there_are_some() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and pool.available == 1
    with pytest.raises(RuntimeError, match="2 KV blocks wanted, 1 available"):
        pool.allocate(2)
    assert pool.available == 1
    pool.check([blocks])
    pool.release(blocks)
    assert pool.available == 4
    pool.check([])


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, SIZE).blocks_for(tokens) == blocks


def test_check_finds_a_lost_a_doubled_and_a_foreign_reference() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    pool.check([blocks])
    for wrong in ([], [blocks, blocks], [[*blocks, 3]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)


# The prefix cache


def test_released_blocks_are_found_again_and_shared() -> None:
    pool = BlockPool(8, SIZE)
    mine = fill(pool, TOKENS[:12])
    pool.release(mine)
    assert (pool.available, pool.cached) == (8, 3)
    found = pool.find(chain(TOKENS[:16]), TOKENS[:16])
    assert found == [(mine[0], None), (mine[1], None), (mine[2], None)]
    one = pool.take(found, chain(TOKENS[:12]), TOKENS)
    two = pool.take(found, chain(TOKENS[:12]), TOKENS)
    assert one == two == mine and pool.cached == 0 and pool.available == 5
    pool.release(one)
    assert pool.cached == 0, "the other one still uses them"
    pool.check([two])
    pool.release(two)
    assert pool.cached == 3


def test_find_changes_nothing() -> None:
    pool = BlockPool(4, SIZE, HostTier(4))
    pool.release(fill(pool, TOKENS[:8]))
    before = (list(pool._free), pool.cached, list(pool.host.slots))
    assert pool.find(chain(TOKENS), TOKENS) == pool.find(chain(TOKENS), TOKENS)
    assert (list(pool._free), pool.cached, list(pool.host.slots)) == before


def test_a_hit_compares_tokens_not_only_hashes() -> None:
    pool = BlockPool(4, SIZE, HostTier(4))
    block = pool.allocate(1)
    digest = chain(TOKENS)[0]
    pool.register(block[0], digest, TOKENS[:4])
    assert pool.find([digest], [9, 9, 9, 9]) == []
    pool.host.put(digest, tuple(TOKENS[:4]))
    assert pool.host.get(digest, (9, 9, 9, 9)) is None


def test_the_longest_prefix_ends_at_the_first_gap() -> None:
    pool = BlockPool(8, SIZE)
    hashes = chain(TOKENS[:12])
    blocks = pool.allocate(3)
    for i in (0, 2):
        pool.register(blocks[i], hashes[i], TOKENS[i * SIZE : (i + 1) * SIZE])
    assert pool.find(hashes, TOKENS) == [(blocks[0], None)]


def test_the_first_block_with_a_content_keeps_the_name() -> None:
    pool = BlockPool(8, SIZE)
    first, second = fill(pool, TOKENS[:4]), fill(pool, TOKENS[:4])
    assert pool.find(chain(TOKENS[:4]), TOKENS) == [(first[0], None)]
    pool.release(second)
    assert pool.cached == 0 and pool.available == 7
    pool.release(first)
    assert pool.cached == 1
    pool.check([])


def test_blocks_without_contents_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, SIZE)
    known, plain = fill(pool, TOKENS[:8]), pool.allocate(2)
    pool.release(known)
    pool.release(plain)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.evictions == 0


def test_the_least_recently_released_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(6, SIZE)
    old, new = fill(pool, TOKENS[:12]), fill(pool, TOKENS[:12], salt="other")
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == [old[2], old[1], old[0], new[2]]
    assert pool.evictions == 4


def test_a_hit_makes_a_block_recent() -> None:
    pool = BlockPool(4, SIZE)
    a, b = fill(pool, TOKENS[:8]), fill(pool, TOKENS[:8], salt="b")
    pool.release(a)
    pool.release(b)
    pool.release(pool.take(pool.find(chain(TOKENS[:8]), TOKENS), chain(TOKENS[:8]), TOKENS))
    assert pool.allocate(2) == [b[1], b[0]]


def test_recent_blocks_are_those_used_last() -> None:
    pool = BlockPool(64, SIZE)
    pool.release(fill(pool, TOKENS[:8]))
    prefix = chain(TOKENS[:8])
    for salt in "abcdefghi":
        blocks = pool.take(pool.find(prefix, TOKENS), prefix, TOKENS)
        pool.release([*blocks, *fill(pool, TOKENS[:8], salt=salt)])
    assert set(pool.recent(4)) >= set(prefix), "what every request hits"


def test_forgotten_blocks_are_free_not_cached() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(fill(pool, TOKENS[:8]), forget=True)
    assert pool.cached == 0 and pool.find(chain(TOKENS[:8]), TOKENS) == []
    pool.check([])


def test_room_counts_hits_once_and_does_not_promise_a_hit_block_twice() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(fill(pool, TOKENS[:8]))
    hit = pool.find(chain(TOKENS[:8]), TOKENS)
    assert pool.room_for(hit, 16) == 0  # two hits and the two others
    assert pool.room_for(hit, 17) == -1
    assert pool.room_for([], 16) == 0
    mine = pool.take(hit, chain(TOKENS[:8]), TOKENS)
    assert pool.room_for(hit, 16) == 0, "blocks in use by another request cost nothing"
    pool.release(mine)


# The host tier


def test_host_slots_are_reused_least_recently_used_first() -> None:
    tier = HostTier(2)
    a, b, c = (bytes([i]) for i in range(3))
    assert {tier.put(a, (1,)), tier.put(b, (2,))} == {0, 1}
    assert tier.put(a, (1,)) is None, "it is there already"
    slot = tier.put(c, (3,))  # b was used least recently
    assert tier.get(b, (2,)) is None and tier.get(c, (3,)) == slot
    assert tier.get(a, (1,)) is not None


def test_pinned_slots_stay() -> None:
    tier = HostTier(2)
    a, b, c = (bytes([i]) for i in range(3))
    tier.put(a, (1,))
    tier.put(b, (2,))
    tier.pin(a)
    tier.put(c, (3,))
    assert tier.get(a, (1,)) is not None and tier.get(b, (2,)) is None
    tier.pin(c)
    assert tier.put(b, (2,)) is None, "nothing can leave"


def test_a_tier_without_room_takes_nothing() -> None:
    assert HostTier(0).put(b"a", (1,)) is None


def test_evicted_contents_go_to_the_host_and_come_back() -> None:
    pool = BlockPool(2, SIZE, HostTier(4), keep_evicted=True)
    blocks = fill(pool, TOKENS[:8])
    pool.release(blocks)
    taken = pool.allocate(2)
    out, back = pool.drain_copies()
    assert [block for block, _ in out] == [blocks[1], blocks[0]] and back == []
    pool.release(taken)
    hashes = chain(TOKENS[:8])
    found = pool.find(hashes, TOKENS)
    assert [block for block, _ in found] == [None, None]
    mine = pool.take(found, hashes, TOKENS)
    out, back = pool.drain_copies()
    assert out == [] and back == [(found[0][1], mine[0]), (found[1][1], mine[1])]
    assert pool.find(hashes, TOKENS) == [(mine[0], None), (mine[1], None)]
    pool.check([mine])


def test_without_spill_or_keep_evicted_nothing_is_copied() -> None:
    for keep, spill in ((True, False), (False, True)):
        pool = BlockPool(2, SIZE, HostTier(4), keep_evicted=keep)
        pool.release(fill(pool, TOKENS[:8]))
        pool.allocate(2, spill=spill)
        assert pool.drain_copies() == ([], []) and pool.find(chain(TOKENS[:8]), TOKENS) == []


def test_taking_a_chain_never_evicts_a_block_of_the_same_chain() -> None:
    """Block 1 is on the host only, block 0 and 2 rest on the device, and nothing else is free."""
    pool = BlockPool(3, SIZE, HostTier(1), keep_evicted=True)
    hashes = chain(TOKENS[:12])
    blocks = fill(pool, TOKENS[:12])
    pool.host.put(hashes[1], tuple(TOKENS[4:8]))
    pool.release([blocks[1]], forget=True)
    pool.release([blocks[0], blocks[2]])
    found = pool.find(hashes, TOKENS)
    assert [block for block, _ in found] == [blocks[0], None, blocks[2]]
    mine = pool.take(found, hashes, TOKENS)
    assert len(set(mine)) == 3 and mine[0] == blocks[0] and mine[2] == blocks[2]
    pool.check([mine])


def test_swapping_out_more_than_the_host_holds_keeps_the_start_of_the_chain() -> None:
    pool = BlockPool(4, SIZE, HostTier(2))
    blocks, hashes = fill(pool, TOKENS[:16]), chain(TOKENS[:16])
    assert pool.keep_on_host(blocks, hashes, TOKENS) == 2
    assert [block for block, _ in pool.drain_copies()[0]] == blocks[:2]
    assert pool.keep_on_host(blocks, hashes, TOKENS) == 0, "they are there already"


def test_pins_last_until_the_copies_are_handed_out() -> None:
    pool = BlockPool(4, SIZE, HostTier(1))
    digest = chain(TOKENS)[0]
    pool.host.put(digest, tuple(TOKENS[:4]))
    pool.take(pool.find([digest], TOKENS), [digest], TOKENS)
    assert pool.host.put(b"other", (1,)) is None
    pool.drain_copies()
    assert pool.host.put(b"other", (1,)) is not None


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 12), st.sampled_from([0, 2, 30]), st.booleans())
def test_any_use_keeps_the_books_balanced(seed: int, total: int, slots: int, keep: bool) -> None:
    """Contents are modelled beside the pool: what `find` names holds the tokens it says."""
    rng = random.Random(seed)
    pool = BlockPool(total, SIZE, HostTier(slots), keep_evicted=keep)
    device: dict[int, list[int]] = {}
    host: dict[int, list[int]] = {}
    owners: list[list[int]] = []
    for _ in range(80):
        if owners and rng.random() < 0.4:
            pool.release(owners.pop(rng.randrange(len(owners))), forget=rng.random() < 0.2 and not owners)
        else:
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 4))]
            hashes = chain(tokens)
            found = pool.find(hashes, tokens)
            if pool.room_for(found, len(tokens)) < 0:
                continue
            blocks = pool.take(found, hashes, tokens)
            blocks += pool.allocate(pool.blocks_for(len(tokens)) - len(blocks))
            for copied, slot in pool.swap_out:
                host[slot] = list(device[copied])
            for slot, copied in pool.swap_in:
                device[copied] = list(host[slot])
            pool.drain_copies()
            for i, block in enumerate(blocks):
                content = tokens[: (i + 1) * SIZE]
                if i < len(found):
                    assert device[block] == content, "a hit holds another content"
                device[block] = content
                pool.register(block, hashes[i], tokens[i * SIZE : (i + 1) * SIZE])
            owners.append(blocks)
        pool.check(owners)
        assert len(pool.host.slots) <= slots
