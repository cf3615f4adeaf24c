"""Paged attention on CPU: pages are gathered into dense tensors, then dense kernels run.

One-token sequences run together, padded to the longest of their group. A group holds contexts within a factor of two
of each other, so one long sequence does not pad all others to its length. The others run one by one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.metadata import AttentionMetadata

GATHER_TOKENS = 65536  # most tokens a group of decodes gathers at once, padding included
QUERY_TILE = 256  # queries of a chunk that share one mask


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int = 0
) -> Tensor:
    out = _fast(q, k_cache, v_cache, meta, scale, window)
    # Dense kernels let a NaN through from positions a row does not see, and take a softmax of nothing but -inf for 0
    odd = ~out.isfinite().all(-1) | (out == 0).all(-1)
    if odd.any():
        for row in odd.any(1).nonzero().flatten().tolist():
            out[row] = _by_definition(q[row], row, k_cache, v_cache, meta, scale, window)
    return out


def _fast(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decodes = 0 if window else meta.num_decodes
    if decodes:
        for group in _groups(meta, k_cache.shape[2]):
            out[group.rows] = _decode(q[group.rows], k_cache, v_cache, group, scale)
    start = decodes
    for sequence in range(decodes, len(meta.query_lens)):
        end = start + meta.query_lens[sequence]
        out[start:end] = _chunk(q[start:end], k_cache, v_cache, meta, sequence, scale, window)
        start = end
    return out


def _by_definition(
    q: Tensor, row: int, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, scale: float, window: int
) -> Tensor:
    """One row [H, D] over the keys it sees and no others: [H, D]."""
    sequence = next(s for s, end in enumerate(accumulate(meta.query_lens)) if row < end)
    after = sum(meta.query_lens[: sequence + 1]) - row - 1  # tokens of the sequence that come after it
    end = meta.context_lens[sequence] - after
    blocks = meta.block_tables[sequence, : -(-end // meta.block_size)].long()
    seen = slice(max(0, end - window) if window else 0, end)
    keys, values = (cache[blocks].flatten(0, 1)[seen].transpose(0, 1).float() for cache in (k_cache, v_cache))
    rows = q.float().view(len(keys), -1, q.shape[1])  # [K, H / K, D]
    weights = (rows @ keys.transpose(1, 2) * scale).softmax(-1)
    return (weights @ values).view(q.shape).to(q.dtype)


@dataclass
class _Group:
    """Decodes computed together. The same for every layer of a step."""

    rows: slice | Tensor  # their rows of q
    pages: Tensor  # int64 [N * K * B]: (block, kv head) pairs, see _gather
    heads: Tensor  # int64 [N * K * B]
    mask: Tensor  # float32 [N, 1, 1, C]: -inf past the end of the context, else 0
    padding: Tensor  # int64: rows of [N * K * C] past the end of the context


_plans = threading.local()


def _groups(meta: AttentionMetadata, kv_heads: int) -> list[_Group]:
    """The groups of a step, made at its first layer and kept until the next step's metadata comes."""
    plan = getattr(_plans, "last", None)
    if plan is None or plan[0] is not meta or plan[1] != kv_heads:
        plan = (meta, kv_heads, _make_groups(meta, kv_heads))
        _plans.last = plan
    return plan[2]


def _make_groups(meta: AttentionMetadata, kv_heads: int) -> list[_Group]:
    lens = meta.context_lens[: meta.num_decodes]
    order = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
    members: list[list[int]] = []
    for row in order:
        longest = lens[members[-1][0]] if members else 0
        blocks = -(-longest // meta.block_size)
        fits = members and (len(members[-1]) + 1) * blocks * meta.block_size <= GATHER_TOKENS
        if fits and 2 * (-(-lens[row] // meta.block_size)) >= blocks:
            members[-1].append(row)
        else:
            members.append([row])
    return [_make_group(meta, sorted(rows), kv_heads) for rows in members]


def _make_group(meta: AttentionMetadata, rows: list[int], kv_heads: int) -> _Group:
    device = meta.block_tables.device
    index = torch.tensor(rows, device=device)
    lens = torch.tensor([meta.context_lens[row] for row in rows], device=device)
    blocks = -(-max(meta.context_lens[row] for row in rows) // meta.block_size)
    tables = meta.block_tables[index, :blocks].long()
    shape = (len(rows), kv_heads, blocks)
    positions = torch.arange(blocks * meta.block_size, device=device)
    hidden = positions >= lens[:, None]
    whole = len(rows) == rows[-1] - rows[0] + 1
    return _Group(
        rows=slice(rows[0], rows[-1] + 1) if whole else index,
        pages=tables[:, None, :].expand(shape).reshape(-1),
        heads=torch.arange(kv_heads, device=device)[None, :, None].expand(shape).reshape(-1),
        mask=torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[:, None, None, :],
        padding=hidden[:, None, :].expand(len(rows), kv_heads, -1).reshape(-1).nonzero().squeeze(-1),
    )


def _gather(cache: Tensor, pages: Tensor, heads: Tensor) -> Tensor:
    """The pages of (block, kv head) pairs, one after the other: [len(pages) * block_size, D], a copy.

    Inside a block memory is [kv_heads, block_size, D], so a page is one contiguous run.
    """
    block_size, head_dim = cache.shape[1], cache.shape[3]
    page = block_size * head_dim
    block_stride, token_stride, head_stride, _ = cache.stride()
    if token_stride == head_dim and block_stride % page == 0 and head_stride % page == 0:
        # Rows of one matrix over the whole slab: index_select copies each row with one memcpy.
        per_block, per_head = block_stride // page, head_stride // page
        num_rows = (cache.shape[0] - 1) * per_block + (cache.shape[2] - 1) * per_head + 1
        slab = cache.as_strided((num_rows, page), (page, 1))
        return slab.index_select(0, pages * per_block + heads * per_head).view(-1, head_dim)
    return cache.transpose(1, 2)[pages, heads].reshape(-1, head_dim)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _Group, scale: float) -> Tensor:
    """q [N, H, D] of a group, one token each: [N, H, D]. Heads that share a kv head run as its query rows."""
    count, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    keys, values = (_gather(cache, group.pages, group.heads) for cache in (k_cache, v_cache))
    for padded in (keys, values):
        padded.index_fill_(0, group.padding, 0)  # never written memory may hold NaN, which no mask hides
    keys, values = (padded.view(count, kv_heads, -1, dim) for padded in (keys, values))
    rows = q.reshape(count, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask.to(q.dtype), scale=scale)
    return out.reshape(count, heads, dim)


def _chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    sequence: int,
    scale: float,
    window: int,
) -> Tensor:
    """q [L, H, D], the last L tokens of one sequence: [L, H, D]."""
    queries, context = meta.query_lens[sequence], meta.context_lens[sequence]
    kv_heads, dim = k_cache.shape[2:]
    blocks = meta.block_tables[sequence, : -(-context // meta.block_size)].long()
    heads = torch.arange(kv_heads, device=q.device).repeat_interleave(len(blocks))
    pages = blocks.repeat(kv_heads)
    keys = _gather(k_cache, pages, heads).view(1, kv_heads, -1, dim)[:, :, :context]
    values = _gather(v_cache, pages, heads).view(1, kv_heads, -1, dim)[:, :, :context]
    wide = q.transpose(0, 1).unsqueeze(0)
    gqa = q.shape[1] != kv_heads
    if queries == context and not window:
        out = F.scaled_dot_product_attention(wide, keys, values, is_causal=True, scale=scale, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    tiles = []
    positions = torch.arange(context, device=q.device)
    for start in range(0, queries, QUERY_TILE):
        end = min(start + QUERY_TILE, queries)
        visible = context - queries + end
        rows = positions[visible - (end - start) : visible, None]
        mask = positions[:visible] <= rows
        if window:
            mask &= positions[:visible] > rows - window
        tile = F.scaled_dot_product_attention(
            *(wide[:, :, start:end], keys[:, :, :visible], values[:, :, :visible]),
            attn_mask=mask,
            scale=scale,
            enable_gqa=gqa,
        )
        tiles.append(tile[0].transpose(0, 1))
    return torch.cat(tiles)
