"""Kernels of single rows, native ones for several instruction sets and torch's, against the plain definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import dispatch, reference
from kernels.cpu.native_ops import NativeOps
from tests.kernels.cases import DTYPES, TOLERANCE, Case, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), *((5, size) for size in (8, 16, 24, 64, 100, 576)), (40, 1032)])
def test_row_kernels(ops: Any, rows: int, size: int, dtype: torch.dtype) -> None:
    """One token; sizes with and without whole vectors; enough work that threads share it."""
    tolerance = {"rtol": 2 * TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype]}
    x, weight, residual = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1), randn(rows, size, seed=2)
    wide = (x.float(), weight.float())
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).float(), reference.rms_norm(*wide, 1e-5), **tolerance)
    strided = randn(rows, 3 * size, dtype=dtype)[:, size : 2 * size]
    expected = reference.rms_norm(strided.float(), weight.float(), 1e-5)
    torch.testing.assert_close(ops.rms_norm(strided, weight, 1e-5).float(), expected, **tolerance)
    expected, total = reference.add_rms_norm(x.float(), residual, weight.float(), 1e-5)
    out, summed = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(out.float(), expected, **tolerance)
    assert torch.equal(summed, total)
    gates = 8 * randn(rows, 2 * size, dtype=dtype)
    torch.testing.assert_close(
        ops.silu_mul(gates).float(), reference.silu_mul(gates.float()), rtol=2 * TOLERANCE[dtype], atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight, residual = randn(50, 100, dtype=dtype), randn(100, dtype=dtype, seed=1), torch.zeros(50, 100)
    exact = reference.rms_norm(x.double().float(), weight.float(), 1e-5)
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), exact.to(dtype))
    assert torch.equal(reference.add_rms_norm(x, residual, weight, 1e-5)[0], exact.to(dtype))


def test_tensors_of_another_type_or_size_are_refused(every_native: NativeOps) -> None:
    """Their addresses would be read as if they were right."""
    x, weight, half = randn(3, 32), randn(32), randn(3, 8)
    q, k, v = (randn(3, 1, 16) for _ in range(3))
    caches = torch.zeros(2, 2, 16, 1, 16)
    slots = torch.arange(3)
    for bad in (weight[:16], randn(64)[::2]):
        with pytest.raises(TypeError, match="32 dense torch.float32 on the CPU"):
            every_native.rms_norm(x, bad, 1e-5)
        with pytest.raises(TypeError):
            every_native.add_rms_norm(x, torch.zeros(3, 32), bad, 1e-5)
    with pytest.raises(TypeError):
        every_native.add_rms_norm(x, torch.zeros(2, 32), weight, 1e-5)
    for cos, sin, where in ((half.double(), half, slots), (half, half[:2], slots), (half, half, slots.int())):
        with pytest.raises(TypeError):
            every_native.rope_and_cache(q, k, v, cos, sin, *caches, where)
    case = Case([1], [20], 2, 1, 16)
    case.meta.block_tables = case.meta.block_tables.long()
    with pytest.raises(TypeError, match="torch.int32"):
        every_native.attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale)
    with pytest.raises(TypeError):
        every_native.head_argmax(randn(2, 9), randn(1, 4), randn(9, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 128, 184, 256])
def test_rope_and_cache(ops: Any, head_dim: int, transposed: bool, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads = 7, 6, 2
    fused = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype).unflatten(1, (-1, head_dim))
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    cos, sin = randn(tokens, head_dim // 2, seed=1), randn(tokens, head_dim // 2, seed=2)
    slots = torch.tensor([3, 17, -1, 16, 40, 0, -1])
    case = Case([1], [40], heads, kv_heads, head_dim, dtype=dtype, transposed=transposed)
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    expected_q = reference.rope_and_cache(q.clone(), k, v, cos, sin, *caches, slots)
    out = ops.rope_and_cache(q.clone(), k, v, cos, sin, case.k_cache, case.v_cache, slots)
    close = {"rtol": 2 * TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype], "equal_nan": True}
    torch.testing.assert_close(out, expected_q, **close)
    torch.testing.assert_close(case.k_cache, caches[0], **close)
    assert torch.equal(case.v_cache.nan_to_num(7), caches[1].nan_to_num(7))


@pytest.mark.parametrize("slot", [0, 15, 16])
def test_rope_and_cache_of_one_token(ops: Any, slot: int) -> None:
    """At both sides of a block's border; nothing else is touched."""
    q, k, v = (randn(1, heads, 24, seed=heads) for heads in (4, 2, 2))
    cos, sin = randn(1, 12, seed=5), randn(1, 12, seed=6)
    caches = [torch.zeros(2, 24, 2, 16).permute(0, 3, 2, 1), torch.zeros(2, 16, 2, 24)]
    expected = [cache.clone() for cache in caches]
    expected_q = reference.rope_and_cache(q.clone(), k, v, cos, sin, *expected, torch.tensor([slot]))
    out = ops.rope_and_cache(q.clone(), k, v, cos, sin, *caches, torch.tensor([slot]))
    torch.testing.assert_close([out, *caches], [expected_q, *expected], rtol=1e-6, atol=1e-6)
    assert torch.equal(caches[0] != 0, expected[0] != 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_first_of_the_largest(ops: Any, dtype: torch.dtype) -> None:
    logits = randn(9, 1003, dtype=dtype)
    logits[2, 5] = logits[2, 900] = 50
    logits[3, 1002] = 60
    logits[4] = -torch.inf
    logits[4, 77] = -5
    logits[5], logits[6, 3] = torch.nan, torch.inf
    logits[7] = -torch.inf
    found = ops.argmax(logits)
    assert torch.equal(found, reference.argmax(logits))
    assert torch.equal(ops.argmax(logits[3:4]), found[3:4])
    assert found[2:8].tolist() == [5, 1002, 77, -1, -1, -1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_are_told_apart_by_their_products(every_native: NativeOps, dtype: torch.dtype) -> None:
    hidden, weight = randn(6, 40, dtype=dtype), randn(500, 40, dtype=dtype, seed=1)
    logits = (hidden.float() @ weight.float().T / 4).round().to(dtype)  # coarse, so that many are equal
    logits[5] = torch.nan
    found = every_native.head_argmax(logits, hidden, weight)
    assert torch.equal(found, reference.head_argmax(logits, hidden, weight))
    assert any((logits[i] == logits[i].max()).sum() > 1 for i in range(5))


def test_extremes_stay_finite(every_native: NativeOps) -> None:
    """Large scores and gates neither overflow nor divide by zero."""
    case = Case([1, 4], [20, 20], 2, 1, 16, magnitude=1e4)
    assert case.check(every_native).isfinite().all()
    gates = torch.tensor([[2.0**99, -(2.0**99), 100.0, -100.0, 1.0, 1.0, 1.0, 1.0]])
    assert every_native.silu_mul(gates).tolist() == [[2.0**99, 0.0, 100.0, 0.0]]


def test_rope_and_cache_of_padding_only(ops: Any) -> None:
    caches = torch.zeros(2, 2, 16, 1, 8)
    q, cos, sin = randn(2, 2, 8), randn(2, 4), randn(2, 4)
    ops.rope_and_cache(q, randn(2, 1, 8), randn(2, 1, 8), cos, sin, *caches, torch.tensor([-1, -1]))
    assert not caches.any()


def test_devices_without_kernels_use_the_definitions() -> None:
    assert dispatch.backend(torch.device("meta")) is reference
