"""CPU kernels, called as the engine calls them, against their plain definitions: torch's and the native ones."""

import importlib
import random
from dataclasses import replace

import pytest
import torch

from kernels import cpu, dispatch, reference
from kernels.cpu import torch_ops
from kernels.cpu.compile import Unavailable
from kernels.cpu.native_ops import NativeOps
from kernels.metadata import AttentionMetadata

attention_module = importlib.import_module("kernels.cpu.torch_attention")  # the package's name for it is the function
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture(autouse=True, params=["torch", "native"])
def implementation(request, monkeypatch):
    try:
        chosen = torch_ops if request.param == "torch" else NativeOps()
    except Unavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cpu, "ops", lambda: chosen)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache(num_blocks, block_size, kv_heads, head_dim, dtype=torch.float32, layers=3, layer=1, fill=float("nan")):
    """K and V of one layer inside block slabs that hold several."""
    part = kv_heads * block_size * head_dim
    slab = torch.full((num_blocks, 2 * layers * part), fill, dtype=dtype)
    shape, strides = (num_blocks, block_size, kv_heads, head_dim), (slab.stride(0), head_dim, block_size * head_dim, 1)
    return tuple(slab.as_strided(shape, strides, (2 * layer + value) * part) for value in (0, 1)), slab


def batch(query_lens, context_lens, block_size, num_blocks, seed=0):
    """Metadata of sequences in scattered blocks, and slots of their whole contexts."""
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(-(-context // block_size))] for context in context_lens]
    slot = lambda table, i: table[i // block_size] * block_size + i % block_size  # noqa: E731
    slots = [[slot(table, i) for i in range(context)] for table, context in zip(tables, context_lens)]
    widest = max(map(len, tables))
    meta = AttentionMetadata(
        query_lens=list(query_lens),
        context_lens=list(context_lens),
        num_decodes=sum(q == 1 for q in query_lens),
        block_tables=torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.tensor([s for own, q in zip(slots, query_lens) for s in own[len(own) - q :]]),
        block_size=block_size,
    )
    return meta, torch.tensor([s for own in slots for s in own])


def check_attention(query_lens, context_lens, heads, kv_heads, head_dim, block_size, dtype=torch.float32):
    num_blocks = sum(-(-c // block_size) for c in context_lens) + 2
    meta, slots = batch(query_lens, context_lens, block_size, num_blocks)
    (k_cache, v_cache), _ = cache(num_blocks, block_size, kv_heads, head_dim, dtype)
    k = randn(len(slots), kv_heads, head_dim, dtype=dtype, seed=1)
    v = randn(len(slots), kv_heads, head_dim, dtype=dtype, seed=2)
    dispatch.write_kv(k, v, k_cache, v_cache, slots)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype, seed=3)
    out = dispatch.attention(q, k_cache, v_cache, meta, head_dim**-0.5)
    expected = reference.attention(q, k_cache, v_cache, meta, head_dim**-0.5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("group", range(1, 10))
def test_attention_shares_kv_heads(group):
    check_attention([1, 1, 5], [7, 12, 9], 2 * group, 2, 16, 4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
def test_attention_head_sizes(head_dim, dtype):
    check_attention([1, 1, 6], [5, 18, 18], 4, 2, head_dim, 8, dtype)


@pytest.mark.parametrize("context", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_attention_at_block_borders(context, block_size):
    check_attention([1], [context], 3, 1, 16, block_size)
    if context > 1:
        check_attention([context], [context], 3, 1, 16, block_size)
        check_attention([context], [context + 3], 3, 1, 16, block_size)


def test_attention_of_ragged_decodes_and_chunks():
    check_attention([1] * 6 + [3, 12, 2], [1, 40, 3, 4, 39, 17, 3, 20, 30], 4, 2, 16, 4)


def test_attention_tiles_long_chunks(monkeypatch):
    monkeypatch.setattr(attention_module, "QUERY_TILE", 5)
    check_attention([17], [23], 4, 2, 16, 4)


def test_decodes_are_grouped_by_length(monkeypatch):
    meta, _ = batch([1] * 5, [4, 64, 60, 5, 17], 4, 60)
    groups = attention_module._make_groups(meta, 2)
    assert [torch.arange(5)[group.rows].tolist() for group in groups] == [[1, 2], [4], [0, 3]]
    monkeypatch.setattr(attention_module, "GATHER_TOKENS", 64)
    assert len(attention_module._make_groups(meta, 2)) == 4
    check_attention([1] * 5, [4, 64, 60, 5, 17], 4, 2, 16, 4)


def test_groups_follow_the_metadata():
    """Two steps of one thread: the second must not see the first one's block tables."""
    for seed in range(3):
        meta, slots = batch([1, 1], [9, 6], 4, 12, seed)
        (k_cache, v_cache), _ = cache(12, 4, 2, 16)
        kv = randn(len(slots), 2, 16)
        dispatch.write_kv(kv, kv, k_cache, v_cache, slots)
        q = randn(2, 4, 16)
        for step in (meta, replace(meta, context_lens=[8, 5])):
            out = dispatch.attention(q, k_cache, v_cache, step, 0.25)
            torch.testing.assert_close(out, reference.attention(q, k_cache, v_cache, step, 0.25), rtol=1e-4, atol=1e-5)


def test_attention_on_a_token_major_cache():
    """Only the last stride is promised; other orders take the general way."""
    meta, slots = batch([1, 1, 4], [9, 6, 7], 4, 10)
    k_cache, v_cache = torch.full((2, 10, 4, 2, 16), float("nan"))
    kv = randn(len(slots), 2, 16)
    dispatch.write_kv(kv, kv, k_cache, v_cache, slots)
    q = randn(6, 4, 16)
    expected = reference.attention(q, k_cache, v_cache, meta, 0.25)
    torch.testing.assert_close(dispatch.attention(q, k_cache, v_cache, meta, 0.25), expected, rtol=1e-4, atol=1e-5)


def test_write_kv_touches_only_its_slots():
    slots = torch.tensor([5, -1, 0, 11, -1])
    k, v = randn(5, 2, 8), randn(5, 2, 8, seed=1)
    (k_cache, v_cache), slab = cache(3, 4, 2, 8, fill=0.0)
    (k_plain, v_plain), plain = cache(3, 4, 2, 8, fill=0.0)
    dispatch.write_kv(k, v, k_cache, v_cache, slots)
    reference.write_kv(k, v, k_plain, v_plain, slots)
    assert torch.equal(slab, plain)
    assert torch.equal(k_cache[1, 1], k[0])
    assert torch.equal(v_cache[2, 3], v[3])
    assert int((slab != 0).sum()) == 3 * 2 * 2 * 8


def test_write_kv_of_padding_only():
    (k_cache, v_cache), slab = cache(2, 4, 1, 8, fill=0.0)
    dispatch.write_kv(randn(2, 1, 8), randn(2, 1, 8), k_cache, v_cache, torch.tensor([-1, -1]))
    assert not slab.any()


def test_offsets_beyond_two_to_the_31():
    """A slab of 2.25 billion elements, of which a few pages are touched."""
    part, layers = 8 * 16, 2**15
    slab = torch.empty((270, 2 * layers * part), dtype=torch.bfloat16)
    shape, strides = (270, 8, 1, 16), (slab.stride(0), 16, part, 1)
    k_cache, v_cache = (slab.as_strided(shape, strides, offset) for offset in (0, part))
    meta, slots = batch([1], [8], 8, 270)
    meta.block_tables[0, 0] = 268
    slots = torch.arange(8) + 268 * 8
    kv = randn(8, 1, 16, dtype=torch.bfloat16)
    dispatch.write_kv(kv, kv, k_cache, v_cache, slots)
    q = randn(1, 2, 16, dtype=torch.bfloat16)
    out = dispatch.attention(q, k_cache, v_cache, meta, 0.25)
    expected = reference.attention(q, k_cache, v_cache, meta, 0.25)
    torch.testing.assert_close(out, expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_elementwise(dtype):
    x, residual, weight = randn(7, 48, dtype=dtype), randn(7, 48, seed=1), randn(48, dtype=dtype, seed=2)
    same = lambda a, b: torch.testing.assert_close(a, b, **TOLERANCE[dtype])  # noqa: E731
    same(dispatch.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    plain_pair = reference.add_rms_norm(x, residual, weight, 1e-5)
    for ours, plain in zip(dispatch.add_rms_norm(x, residual.clone(), weight, 1e-5), plain_pair):
        torch.testing.assert_close(ours, plain, **TOLERANCE[dtype])
    same(dispatch.silu_mul(x), reference.silu_mul(x))
    angles = randn(7, 8) * 100
    inputs = (randn(7, 6, 16, dtype=dtype), randn(7, 2, 16, dtype=dtype), angles.cos(), angles.sin())
    for ours, plain in zip(dispatch.rope(*inputs), reference.rope(*inputs)):
        same(ours, plain)
        assert ours.dtype == dtype


def test_devices_without_kernels_use_the_definitions():
    assert dispatch.backend(torch.device("meta")) is reference
