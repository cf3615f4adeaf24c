"""The CPU kernels, native ones for several instruction sets and torch's, against the plain definitions."""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import torch_ops
from kernels.cpu.compile import COMPILERS
from kernels.cpu.native_ops import NativeOps
from kernels.metadata import AttentionMetadata

TARGETS = ["native", "x86-64-v3", "x86-64"]  # what this machine has (AVX-512, say), AVX2, neither
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to outputs of size about 1: float32 sums of n terms in another order, and the rounding of the output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def compiled(target: str = "native") -> NativeOps:
    """The kernels for a target, or a skip where there is no compiler or no such processor; any other error counts."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C compiler is on the PATH")
    if target != "native" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{target} is not a target of {platform.machine()}")
    if target == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    return NativeOps(target)


@pytest.fixture(params=[*TARGETS, "torch"])
def ops(request: pytest.FixtureRequest) -> Any:
    return torch_ops if request.param == "torch" else compiled(request.param)


@pytest.fixture(params=TARGETS)
def every_native(request: pytest.FixtureRequest) -> NativeOps:
    return compiled(request.param)


@pytest.fixture
def native() -> NativeOps:
    return compiled()


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """A ragged batch over scattered blocks of a slab that holds three layers, its never written parts NaN.

    Numbers depend on the arguments only, not on the layout, so the slow reference is computed once for all kernels.
    """

    expected: ClassVar[dict[tuple[object, ...], Tensor]] = {}

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        transposed: bool = True,
        seed: int = 0,
        magnitude: float = 1.0,
    ):
        lens = tuple(query_lens), tuple(context_lens)
        self.numbers = (*lens, heads, kv_heads, head_dim, block_size, dtype, seed, magnitude)
        num_blocks = sum(-(-context // block_size) for context in context_lens) + 3
        order = list(range(num_blocks))
        random.Random(seed).shuffle(order)
        part = kv_heads * block_size * head_dim
        slab = torch.full((num_blocks, 6 * part), float("nan"), dtype=dtype)
        shape = (num_blocks, block_size, kv_heads, head_dim)
        plain = (6 * part, head_dim, block_size * head_dim, 1)
        keys = (6 * part, 1, block_size * head_dim, block_size) if transposed else plain
        self.k_cache, self.v_cache = slab.as_strided(shape, keys, 2 * part), slab.as_strided(shape, plain, 3 * part)
        tables = [[order.pop() for _ in range(-(-context // block_size))] for context in context_lens]
        slots = [
            table[i // block_size] * block_size + i % block_size
            for table, context in zip(tables, context_lens, strict=True)
            for i in range(context)
        ]
        k, v = (randn(len(slots), kv_heads, head_dim, dtype=dtype, seed=seed + i) for i in (1, 2))
        block, offset = torch.tensor(slots) // block_size, torch.tensor(slots) % block_size
        self.k_cache[block, offset], self.v_cache[block, offset] = k, v
        widest = max(map(len, tables))
        self.meta = AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=sum(n == 1 for n in query_lens),
            block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
            block_size=block_size,
        )
        fused = randn(sum(query_lens), (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=seed + 3)
        self.q = fused[:, : heads * head_dim].unflatten(1, (heads, head_dim))  # a part of a fused projection
        self.q = self.q * magnitude if magnitude != 1.0 else self.q
        self.scale = head_dim**-0.5

    def reference(self, window: int) -> Tensor:
        key = (*self.numbers, window)
        if key not in Case.expected:
            wide = (self.q.float(), self.k_cache.float(), self.v_cache.float())
            Case.expected[key] = reference.attention(*wide, self.meta, self.scale, window)
        return Case.expected[key]

    def check(self, ops: Any, window: int = 0) -> Tensor:
        out = ops.attention(self.q, self.k_cache, self.v_cache, self.meta, self.scale, window)
        expected = self.reference(window)
        assert out.dtype == self.q.dtype
        error = (out.float() - expected).abs() / expected.abs().clamp(min=1.0)
        # torch also rounds the softmax's weights to the type
        twice = ops is torch_ops and self.q.dtype != torch.float32
        assert error.max() <= TOLERANCE[self.q.dtype] * (2 if twice else 1)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_attention_head_sizes_and_types(ops: Any, head_dim: int, dtype: torch.dtype) -> None:
    for transposed in (True, False):
        Case([1, 1, 6], [5, 34, 18], 4, 2, head_dim, dtype=dtype, transposed=transposed).check(ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(1, 10))
def test_attention_shares_kv_heads(ops: Any, group: int, dtype: torch.dtype) -> None:
    for head_dim in (24, 64):
        Case([1, 1, 5], [7, 33, 20], 2 * group, 2, head_dim, dtype=dtype).check(ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_attention_at_block_borders(ops: Any, block_size: int, dtype: torch.dtype) -> None:
    for context in (
        1,
        2,
        block_size - 1,
        block_size,
        block_size + 1,
        2 * block_size,
        2 * block_size + 1,
        255,
        256,
        257,
    ):
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


def test_attention_bits_do_not_depend_on_tiling_threads_or_neighbours(native: NativeOps) -> None:
    """Every position of a prefill against the same position as a decode, alone and split over threads."""
    case = Case([700], [700], 6, 2, 40, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    whole = native.attention(case.q, case.k_cache, case.v_cache, case.meta, case.scale)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for position in (0, 1, 15, 16, 255, 256, 257, 511, 512, 640, 699):
            one = AttentionMetadata([1], [position + 1], 1, case.meta.block_tables, torch.zeros(1).long(), 16)
            row = native.attention(case.q[position : position + 1], case.k_cache, case.v_cache, one, case.scale)
            assert torch.equal(row[0], whole[position]), position
        chunk = AttentionMetadata([133], [600], 0, case.meta.block_tables, torch.zeros(133).long(), 16)
        rows = native.attention(case.q[467:600], case.k_cache, case.v_cache, chunk, case.scale)
        assert torch.equal(rows, whole[467:600])


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


def test_extremes_stay_finite(native: NativeOps) -> None:
    """Large scores and gates neither overflow nor divide by zero."""
    case = Case([1, 4], [20, 20], 2, 1, 16, magnitude=1e4)
    assert case.check(native).isfinite().all()
    gates = torch.tensor([[2.0**99, -(2.0**99), 100.0, -100.0, 1.0, 1.0, 1.0, 1.0]])
    assert native.silu_mul(gates).tolist() == [[2.0**99, 0.0, 100.0, 0.0]]


def test_without_a_compiler_torch_takes_over_with_one_line(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import logging, torch
        logging.basicConfig(format="%(message)s")
        from kernels import cpu, dispatch
        x = torch.randn(4, 32)
        for _ in range(3):
            dispatch.rms_norm(x, torch.ones(32), 1e-5)
        assert cpu.numerics(torch.bfloat16) == "torch"
        assert not dispatch.transposed_keys(x.device, torch.bfloat16)
    """)
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "kernels" in line]
    assert len(lines) == 1 and "no C compiler" in lines[0]


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = "from kernels.cpu.compile import load; load()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    compiled()
    running = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "ferry").glob("*.so"))) == 1
    assert not list((tmp_path / "ferry").glob("*.tmp"))
