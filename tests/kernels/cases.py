"""What tests of kernels share: kernels for every instruction set of this machine, and ragged batches of attention."""

from __future__ import annotations

import platform
import random
import shutil
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

TARGETS = ["native", "x86-64-v3", "x86-64-v2"]  # what this machine has (AVX-512, say), AVX2, neither
NEEDS = {"x86-64-v3": "avx2", "x86-64-v2": "sse4_2"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to outputs of size about 1: float32 sums of n terms in another order, and the rounding of the output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def compiled(target: str = "native") -> NativeOps:
    """The kernels for a target, or a skip where there is no compiler or no such processor; any other error counts."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C compiler is on the PATH")
    if target != "native":
        if platform.machine() not in ("x86_64", "AMD64"):
            pytest.skip(f"{target} is not a target of {platform.machine()}")
        if f" {NEEDS[target]} " not in Path("/proc/cpuinfo").read_text():
            pytest.skip(f"this processor has no {NEEDS[target]}")
    return NativeOps(target)


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
