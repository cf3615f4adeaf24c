"""Bits of attention: a position has the same ones by prefill, in a chunk and by decode, alone, beside others and split
over threads, for every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from kernels.metadata import AttentionMetadata
from tests.kernels.cases import Case

LENGTH = 530  # states are merged at 256 and 512
POSITIONS = [0, 1, 15, 16, 100, 254, 255, 256, 257, 400, 511, 512, 529]


def attention(ops: NativeOps, case: Case, queries: list[range], window: int = 0) -> list[torch.Tensor]:
    """The outputs of some runs of positions of the case's sequence, computed in one call."""
    lens = [len(positions) for positions in queries]
    meta = AttentionMetadata(
        query_lens=lens,
        context_lens=[positions.stop for positions in queries],
        num_decodes=sum(n == 1 for n in lens),
        block_tables=case.meta.block_tables.expand(len(lens), -1),
        slot_mapping=torch.zeros(sum(lens), dtype=torch.int64),
        block_size=case.meta.block_size,
    )
    rows = torch.cat([case.q[positions.start : positions.stop] for positions in queries])
    return list(ops.attention(rows, case.k_cache, case.v_cache, meta, case.scale, window).split(lens))


def check(ops: NativeOps, case: Case, window: int = 0) -> None:
    torch.set_num_threads(1)
    (whole,) = attention(ops, case, [range(LENGTH)], window)
    assert whole.isfinite().all()
    decodes = [range(position, position + 1) for position in POSITIONS]
    runs = [[*decodes, range(430, 530)], [range(250, 270)], *([one] for one in decodes)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for run in runs:
            for positions, out in zip(run, attention(ops, case, run, window), strict=True):
                expected = whole[positions.start : positions.stop]
                assert torch.equal(out.view(torch.uint8), expected.contiguous().view(torch.uint8)), (positions, threads)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128])
def test_prefill_and_decode(every_native: NativeOps, head_dim: int, group: int, block_size: int) -> None:
    """Decodes of whole vectors and few heads read the cache directly, all others floats made of a tile."""
    check(every_native, Case([LENGTH], [LENGTH], 2 * group, 2, head_dim, block_size, torch.bfloat16, magnitude=6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(every_native: NativeOps, dtype: torch.dtype) -> None:
    check(every_native, Case([LENGTH], [LENGTH], 6, 2, 64, dtype=dtype))


@pytest.mark.parametrize("window", [40, 256, 300])
def test_sliding_windows(every_native: NativeOps, window: int) -> None:
    check(every_native, Case([LENGTH], [LENGTH], 6, 2, 64, dtype=torch.bfloat16), window)


def test_keys_in_rows(every_native: NativeOps) -> None:
    """K of a block as [block_size, head_dim], as engines without native kernels lay it out."""
    check(every_native, Case([LENGTH], [LENGTH], 6, 2, 64, dtype=torch.bfloat16, transposed=False))
