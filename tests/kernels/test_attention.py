"""Attention, the native one for several instruction sets and torch's, against its plain definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.cpu.native_ops import NativeOps
from kernels.metadata import AttentionMetadata
from tests.kernels.cases import DTYPES, Case, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_attention_head_sizes_and_types(ops: Any, head_dim: int, dtype: torch.dtype) -> None:
    for transposed in (True, False):
        Case([1, 1, 6], [5, 34, 18], 4, 2, head_dim, dtype=dtype, transposed=transposed).check(ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(1, 10))
def test_attention_shares_kv_heads(ops: Any, group: int, dtype: torch.dtype) -> None:
    for head_dim in (24, 64):
        Case([1, 1, 5], [7, 33, 20], 2 * group, 2, head_dim, dtype=dtype).check(ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128])
def test_attention_at_block_borders(ops: Any, block_size: int, dtype: torch.dtype) -> None:
    near = (block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1)
    for context in sorted({1, 2, *near, 255, 256, 257} - {0}):
        Case([1], [context], 3, 1, 16, block_size, dtype).check(ops)
        Case([min(context, 37)], [context], 3, 1, 16, block_size, dtype).check(ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 100, 256, 300, 1000])
def test_attention_sliding_window(ops: Any, window: int, dtype: torch.dtype) -> None:
    Case([1, 1, 1, 40, 7], [1, 30, 600, 90, 531], 4, 2, 32, dtype=dtype).check(ops, window)


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_of_five_thousand_tokens(ops: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    for dtype in DTYPES:
        Case([1], [5000], 9, 3, 64, dtype=dtype).check(ops)
        Case([1, 3], [5000, 5000], 2, 1, 24, dtype=dtype).check(ops)
        Case([1, 3], [5000, 5000], 2, 1, 24, dtype=dtype).check(ops, window=4097)


def test_ragged_decodes_and_chunks(ops: Any) -> None:
    for block_size in (4, 16):
        Case([1] * 6 + [3, 12, 2], [1, 40, 3, 4, 39, 17, 3, 20, 30], 4, 2, 16, block_size).check(ops)


def test_a_step_does_not_see_the_one_before(ops: Any) -> None:
    """What is kept between the layers of a step is that step's: other blocks, other lengths, other threads."""
    for seed in range(3):
        case = Case([1, 1], [300, 6], 4, 2, 16, seed=seed)
        case.check(ops)
        for threads in (2, 1):
            torch.set_num_threads(threads)
            for lens in ([299, 5], [300, 6]):
                case.meta = replace(case.meta, context_lens=lens)
                out = ops.attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale)
                expected = reference.attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale)
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_token_major_cache(ops: Any) -> None:
    """Only the last stride of V is promised."""
    case = Case([1, 1, 4], [9, 6, 7], 4, 2, 16, 4)
    case.k_cache, case.v_cache = case.k_cache.contiguous(), case.v_cache.contiguous()
    case.check(ops)


def test_blocks_beyond_two_gigabytes(ops: Any) -> None:
    """Offsets are 64-bit: a pool of untouched virtual memory, its last blocks used."""
    block = 16 * 2 * 64 * 30 * 2  # elements: 30 layers
    num_blocks = 5 * 2**30 // (2 * block)
    slab = torch.empty((num_blocks, block), dtype=torch.bfloat16)
    shape, part = (num_blocks, 16, 2, 64), 2 * 16 * 64
    k_cache = slab.as_strided(shape, (block, 1, 16 * 64, 16), 58 * part)
    v_cache = slab.as_strided(shape, (block, 64, 16 * 64, 1), 59 * part)
    table = [num_blocks - 1, num_blocks - 3]
    slots = torch.tensor([table[i // 16] * 16 + i % 16 for i in range(30)])
    q, k, v = (randn(30, heads, 64, dtype=torch.bfloat16, seed=heads) for heads in (4, 2, 2))
    cos, sin = randn(30, 32, seed=5), randn(30, 32, seed=6)
    small_k, small_v = (torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    expected_q = reference.rope_and_cache(q, k, v, cos, sin, small_k, small_v, torch.arange(30))
    rotated = ops.rope_and_cache(q.clone(), k, v, cos, sin, k_cache, v_cache, slots)
    torch.testing.assert_close(rotated, expected_q, rtol=2**-7, atol=2**-7)
    meta = AttentionMetadata([30], [30], 0, torch.tensor([table], dtype=torch.int32), slots, 16)
    out = ops.attention(rotated, k_cache, v_cache, meta, 0.125)
    near = AttentionMetadata([30], [30], 0, torch.tensor([[0, 1]], dtype=torch.int32), slots, 16)
    expected = reference.attention(expected_q.float(), small_k.float(), small_v.float(), near, 0.125)
    torch.testing.assert_close(out.float(), expected, rtol=2**-6, atol=2**-6)


def test_a_call_has_the_threads_of_now(every_native: NativeOps) -> None:
    case = Case([1], [20], 2, 1, 16)
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        call = every_native._call(case.q, case.k_cache, case.v_cache, case.meta, case.scale, 0)
        assert call.threads == threads
        assert every_native._call(case.q, case.k_cache, case.v_cache, case.meta, case.scale, 0) is call
